"""Stamps: exact in every row format, equal to the reference's storage, and telling."""

from __future__ import annotations

import numpy as np
import pytest

from fuzz.stamps import Registry, Stamper, StampError
from reference.contract import Component
from reference.geometry import Geometry, ModelShape, RowFormat
from reference.pooling import pooled_rows, tail_rows
from reference.quant import encode_row

TOKENS = 64


def geometry_of(kpool: int, **changes) -> Geometry:
    return Geometry(
        **{
            "kpool": kpool,
            "physical_page_size": 8,
            "topk": 64,
            "mamba_track_interval": 64,
        }
        | changes
    )


def shape_of(*, latent: int = 16, index_dim: int = 16, layers: int = 4) -> ModelShape:
    return ModelShape(
        layers=layers, dsa_period=2, latent=latent, index_dim=index_dim, kda_heads=1,
        kda_key_dim=2, kda_value_dim=4, conv_width=2,
    )  # fmt: skip


def chain_of(stamper: Stamper, seed: int = 0) -> np.ndarray:
    return stamper.chain(np.random.default_rng(seed).integers(0, 2**40, TOKENS))


@pytest.mark.parametrize("row_format", RowFormat)
@pytest.mark.parametrize("latent", [16, 40, 160])
def test_kv_rows_are_stored_exactly(row_format, latent):
    geometry = geometry_of(4, row_format=row_format)
    stamper = Stamper(geometry, shape_of(latent=latent))
    chain = chain_of(stamper)
    rows = stamper.extend_rows(chain, 8, TOKENS)
    for layer in range(2):
        stored = encode_row(rows.kv[layer], row_format).numpy()
        assert np.array_equal(stored, stamper.expected_kv(chain, 8, TOKENS, layer))


@pytest.mark.parametrize("kpool", [1, 2, 4, 8])
@pytest.mark.parametrize("index_dim", [16, 64, 128])
@pytest.mark.parametrize("round_scale", [True, False])
def test_pooled_keys_and_tails_are_the_references(kpool, index_dim, round_scale):
    geometry = geometry_of(kpool, round_scale=round_scale)
    stamper = Stamper(geometry, shape_of(index_dim=index_dim))
    chain = chain_of(stamper)
    rows = stamper.extend_rows(chain, 8, TOKENS)
    for layer in range(2):
        key, gate = rows.key[layer], rows.gate[layer]
        stored = pooled_rows(key, gate, stamper.ape[layer], geometry).numpy()
        ours = stamper.expected_index(chain, 8 // kpool, TOKENS // kpool, layer)
        assert np.array_equal(stored, ours)
        tails = tail_rows(key, gate).numpy()
        assert np.array_equal(tails, stamper.expected_tail(chain, 8, TOKENS, layer))


def test_states_are_kept_at_checkpoints_and_at_the_end():
    stamper = Stamper(geometry_of(2, mamba_track_interval=16), shape_of())
    chain = chain_of(stamper)
    rows = stamper.extend_rows(chain, 5, 40)
    stored = rows.state.numpy()
    assert stored.shape == (3, 2, 16)
    for layer in range(2):
        expected = stamper.expected_state(chain, np.array([16, 32, 40]), layer)
        ours = np.ascontiguousarray(stored[:, layer]).view(np.uint8)
        assert np.array_equal(ours, expected)


def test_a_decoded_row_is_the_extended_one():
    stamper = Stamper(geometry_of(4), shape_of())
    tokens = np.arange(TOKENS, dtype=np.int64)
    chain = stamper.chain(tokens)
    last = stamper.append(chain[[6, 30]], np.array([7, 31]), tokens[[7, 31]])
    assert np.array_equal(last, chain[[7, 31]])
    rows, whole = stamper.step_rows(last), stamper.extend_rows(chain, 0, TOKENS)
    for ours, theirs in ((rows.kv, whole.kv), (rows.key, whole.key), (rows.gate, whole.gate)):
        assert (ours == theirs[:, [7, 31]]).all()


@pytest.mark.parametrize("kpool", [2, 4])
def test_every_ingredient_of_a_pooled_key_shows(kpool):
    """Another key, gate, ape or order of slots each changes almost every pooled row."""
    geometry = geometry_of(kpool)
    stamper = Stamper(geometry, shape_of(index_dim=64))
    chain = chain_of(stamper)
    rows = stamper.extend_rows(chain, 0, TOKENS)
    key, gate, ape = rows.key[0], rows.gate[0], stamper.ape[0]
    expected = stamper.expected_index(chain, 0, TOKENS // kpool, 0)
    for name, (k, g, a) in {
        "stale key": (key.roll(kpool, 0), gate, ape),
        "stale gate": (key, gate.roll(kpool, 0), ape),
        "no ape": (key, gate, ape * 0),
        "ape of another slot": (key, gate, ape.roll(1, 0)),
        "slots in reverse": (key.flip(0), gate.flip(0), ape),
    }.items():
        wrong = pooled_rows(k, g, a, geometry).numpy()
        assert (wrong != expected).any(axis=1).mean() > 0.9, name


def test_chains_differ_from_the_first_different_token_on():
    stamper = Stamper(geometry_of(4), shape_of())
    tokens = np.arange(TOKENS)
    other = tokens.copy()
    other[20] += 1
    a, b = stamper.chain(tokens), stamper.chain(other)
    assert (a[:20] == b[:20]).all()
    assert (a[20:] != b[20:]).all()
    assert len(set(a.tolist())) == TOKENS


def test_layers_components_and_generations_have_their_own_stamps():
    geometry, shape = geometry_of(4), shape_of()
    first, second = Stamper(geometry, shape), Stamper(geometry, shape, generation=1)
    chain = chain_of(first)
    rows = [s.expected_kv(chain, 0, TOKENS, layer) for s in (first, second) for layer in (0, 1)]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            assert (a != b).any(axis=1).all()


def test_the_registry_names_writers():
    stamper = Stamper(geometry_of(2), shape_of(layers=2))
    mine, theirs = chain_of(stamper, 1), chain_of(stamper, 2)
    registry = Registry(stamper, {"request 0": mine, "request 1": theirs})
    kv = stamper.expected_kv(theirs, 9, 10, 0)[0]
    assert registry.writer(Component.KV, kv) == "request 1's position 9"
    group = stamper.expected_index(theirs, 4, 5, 0)[0]
    assert registry.writer(Component.INDEX, group) == "request 1's group 4 (positions 8..9)"
    tail = stamper.expected_tail(mine, 3, 4, 0)[0]
    assert registry.writer(Component.TAIL, tail) == "request 0's position 3"
    state = stamper.expected_state(mine, np.array([6]), 0)[0]
    assert registry.writer(Component.STATE, state) == "request 0's state after 6 tokens"
    assert "poison" in registry.writer(Component.KV, np.full_like(kv, 0xFF))
    assert registry.writer(Component.KV, np.zeros_like(kv)) == "zeros"
    assert registry.writer(Component.KV, kv[::-1].copy()) == "a row that no request wrote"


def test_a_mixture_is_told_by_its_nearest_group():
    geometry = geometry_of(4)
    stamper = Stamper(geometry, shape_of(layers=2, index_dim=64))
    mine, theirs = chain_of(stamper, 1), chain_of(stamper, 2)
    mixed = stamper.extend_rows(mine, 0, 4)
    mixed.key[0, 3] = stamper.extend_rows(theirs, 0, 4).key[0, 3]
    row = pooled_rows(mixed.key[0], mixed.gate[0], stamper.ape[0], geometry).numpy()[0]
    said = Registry(stamper, {"A": mine, "B": theirs}).writer(Component.INDEX, row)
    assert said.startswith("a mixture, nearest to A's group 0")


@pytest.mark.parametrize("name", ["latent", "index_dim"])
def test_a_shape_too_narrow_is_refused(name):
    with pytest.raises(StampError, match=f"{name} is 8, too narrow .* at least 16"):
        Stamper(geometry_of(4), shape_of(**{name: 8}))
