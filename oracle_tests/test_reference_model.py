"""The whole model: what a prefix gives does not depend on what follows, or on chunks."""

from __future__ import annotations

import pytest
import torch

from reference.geometry import Geometry, ModelShape, RowFormat
from reference.model import forward
from reference.weights import random_weights

SHAPE = ModelShape(
    layers=4,
    dsa_period=2,
    vocab=61,
    hidden=32,
    heads=2,
    latent=16,
    q_lora=24,
    index_heads=2,
    index_dim=16,
    kda_heads=2,
    kda_key_dim=8,
    kda_value_dim=8,
)
TOKENS = torch.randint(0, 61, (75,), generator=torch.Generator().manual_seed(0)).tolist()


def geometry(kpool: int = 2, row_format: RowFormat = RowFormat.BF16) -> Geometry:
    return Geometry(
        kpool=kpool,
        physical_page_size=4,
        topk=8,
        mamba_track_interval=16,
        row_format=row_format,
    )


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("row_format", RowFormat)
def test_a_prefix_alone_gives_the_same_rows_and_selection(
    kpool: int, row_format: RowFormat
) -> None:
    geo = geometry(kpool, row_format)
    weights = random_weights(SHAPE, geo, 1)
    whole = forward(weights, SHAPE, geo, TOKENS, outputs_from=0, state_at=(33, 75))
    part = forward(weights, SHAPE, geo, TOKENS[:33], outputs_from=0, state_at=(33,))
    torch.testing.assert_close(part.logits, whole.logits[:33], rtol=1e-10, atol=1e-10)
    assert torch.equal(part.selected, whole.selected[:, :33])
    torch.testing.assert_close(part.states[33], whole.states[33], rtol=1e-10, atol=1e-10)
    for layer in range(2):
        assert torch.equal(part.kv[layer], whole.kv[layer][:33])
        assert torch.equal(part.index[layer], whole.index[layer][: 33 // kpool])
        assert torch.equal(part.tail[layer], whole.tail[layer][:33])


def test_outputs_from_only_chooses_outputs() -> None:
    geo = geometry()
    weights = random_weights(SHAPE, geo, 2)
    whole = forward(weights, SHAPE, geo, TOKENS, outputs_from=0)
    for start in (0, 40, None):
        part = forward(weights, SHAPE, geo, TOKENS, outputs_from=start)
        assert len(part.logits) == 75 - part.start
        torch.testing.assert_close(part.logits, whole.logits[part.start :])
        assert torch.equal(part.selected, whole.selected[:, part.start :])


def test_every_part_of_the_model_reaches_the_logits() -> None:
    geo = geometry(4)
    weights = dict(random_weights(SHAPE, geo, 3))
    whole = forward(weights, SHAPE, geo, TOKENS, outputs_from=30).logits
    for name, value in weights.items():
        generator = torch.Generator().manual_seed(5)
        changed = weights | {name: value + 0.5 * torch.randn(value.shape, generator=generator)}
        logits = forward(changed, SHAPE, geo, TOKENS, outputs_from=30).logits
        assert not torch.equal(logits, whole), name


def test_float32_is_near_and_no_dsa_layer_is_fine() -> None:
    geo = geometry()
    weights = random_weights(SHAPE, geo, 4)
    exact = forward(weights, SHAPE, geo, TOKENS, outputs_from=0).logits
    naive = forward(weights, SHAPE, geo, TOKENS, outputs_from=0, dtype=torch.float32).logits
    torch.testing.assert_close(naive.double(), exact, rtol=0, atol=1e-3)
    shape = ModelShape(layers=1, dsa_period=2, vocab=61, hidden=32, kda_heads=2, kda_key_dim=8)
    result = forward(random_weights(shape, geo, 0), shape, geo, TOKENS, outputs_from=70)
    assert result.selected.shape == (0, 5, geo.selection_width)
    assert result.kv == []
