"""Random weights are lively, and the closed-form ones retrieve through the index."""

from __future__ import annotations

import pytest
import torch

from reference import kda
from reference.geometry import Geometry, ModelShape
from reference.model import forward, layer_weights
from reference.norms import rms
from reference.weights import random_weights, retrieval_weights, weight_shapes

LOGIT_SCALE = 8.0


def test_random_weights_are_reproducible_and_have_their_shapes() -> None:
    shape = ModelShape(
        layers=4, vocab=61, hidden=32, heads=2, latent=16, q_lora=24, index_heads=2, kda_heads=2
    )
    one, two, other = (random_weights(shape, Geometry(), seed) for seed in (1, 1, 2))
    shapes = weight_shapes(shape, Geometry())
    assert {name: tuple(w.shape) for name, w in one.items()} == shapes
    assert all(w.dtype == torch.float32 for w in one.values())
    assert all(torch.equal(one[name], two[name]) for name in shapes)
    assert not torch.equal(one["embed"], other["embed"])


def test_random_weights_are_lively() -> None:
    shape = ModelShape(
        layers=2,
        dsa_period=2,
        vocab=97,
        hidden=64,
        heads=2,
        latent=32,
        q_lora=32,
        index_heads=4,
        index_dim=32,
        kda_heads=4,
        kda_key_dim=16,
        kda_value_dim=16,
    )
    geometry = Geometry(kpool=4, physical_page_size=4, topk=32, mamba_track_interval=16)
    weights = random_weights(shape, geometry, 0)
    tokens = torch.randint(0, 97, (400,), generator=torch.Generator().manual_seed(0))
    w = layer_weights(weights, 0, torch.float64)
    y = rms(weights["embed"][tokens].double(), w["norm"])
    steps = kda.steps(kda.convolution_inputs(y, w), y, w, shape)
    assert 0.5 < float(steps.a.min()) < 0.75 < 0.9 < float(steps.a.max()) < 1
    assert float(steps.beta.min()) < 0.3 < 0.7 < float(steps.beta.max())
    result = forward(weights, shape, geometry, tokens.tolist(), outputs_from=300)
    assert 2 < float(result.logits.std()) < 5
    groups = result.selected[0][:, :32:4] // 4
    # neither the first, nor the last, nor the same groups for all queries
    assert len(groups.unique()) > 60
    assert float((groups >= 60).double().mean()) < 0.7


def ask(length: int, topk: int, seed: int) -> tuple[bool, float]:
    """Plant one (key, value) pair, ask for the key at the end: (found, logprob)."""
    generator = torch.Generator().manual_seed(seed)
    geometry = Geometry(topk=topk)
    shape, weights = retrieval_weights(geometry, seed, LOGIT_SCALE)
    tokens = torch.randint(1, shape.vocab, (length,), generator=generator)
    depth = int(torch.randint(0, length - 8, (1,), generator=generator))
    tokens[depth] = tokens[-1] = 0  # token 0 is the key, and stands nowhere else
    value = int(tokens[depth + 1])
    logits = forward(weights, shape, geometry, tokens.tolist()).logits[-1]
    return int(logits.argmax()) == value, float(logits.log_softmax(-1)[value])


@pytest.mark.parametrize("seed", range(6))
def test_a_needle_is_found_among_many_groups(seed: int) -> None:
    found, logprob = ask(length=2048, topk=128, seed=seed)
    assert found
    assert -0.5 < logprob < -0.1


def test_a_needle_is_found_in_16k_tokens() -> None:
    found, logprob = ask(length=16384, topk=512, seed=20)
    assert found
    assert -0.5 < logprob < -0.1


def test_a_span_is_copied() -> None:
    geometry = Geometry(topk=128)
    shape, weights = retrieval_weights(geometry, 3, LOGIT_SCALE)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(64, shape.vocab, (1024,), generator=generator).tolist()
    span = torch.randperm(64, generator=generator)[:32].tolist()
    tokens[301:333] = span
    logits = forward(weights, shape, geometry, tokens + span, outputs_from=1024).logits
    logprobs = logits[:-1].log_softmax(-1).gather(1, torch.tensor(span[1:])[:, None])
    assert -0.5 < float(logprobs.mean()) < -0.1
    assert float(logprobs.min()) > -1
