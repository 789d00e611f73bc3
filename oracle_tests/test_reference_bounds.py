"""The audit accepts an honest float32 engine, and names each kind of damage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from reference.bounds import Audit, Stored, audit
from reference.contract import RequestId, StepOutput, Weights
from reference.geometry import Geometry, ModelShape, RowFormat
from reference.model import forward
from reference.quant import f32_bytes
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
LENGTH = 151


def geometry(kpool: int, row_format: RowFormat, round_scale: bool = True) -> Geometry:
    return Geometry(
        kpool=kpool,
        physical_page_size=4,
        topk=16,
        mamba_track_interval=16,
        row_format=row_format,
        round_scale=round_scale,
    )


def renumbered(weights: Weights, shape: ModelShape, seed: int) -> Weights:
    """The same model with its hidden and q_lora channels in another order: the same meaning,
    other roundings."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randperm(shape.hidden, generator=generator)
    lora = torch.randperm(shape.q_lora, generator=generator)
    result = {}
    for name, value in weights.items():
        short = name.rsplit(".", 1)[-1]
        if short in ("norm", "final_norm", "wo"):
            value = value[hidden]
        elif short in ("q_norm", "wqa"):
            value = value[lora]
        elif short in ("wqb", "wiq"):
            value = value[:, lora]
        if value.ndim == 2 and value.shape[1] == shape.hidden and short != "wo":
            value = value[:, hidden]
        result[name] = value.contiguous()
    return result


@dataclass(frozen=True)
class Run:
    """What a float32 engine made of one request."""

    weights: Weights
    geometry: Geometry
    tokens: list[int]
    stored: Stored
    output: StepOutput

    def judge(self, shape: ModelShape = SHAPE) -> Audit:
        return audit(self.weights, shape, self.geometry, self.tokens, self.stored, [self.output])


def run(geo: Geometry, seed: int, shape: ModelShape = SHAPE, length: int = LENGTH) -> Run:
    weights = random_weights(shape, geo, seed)
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, shape.vocab, (length,), generator=generator).tolist()
    result = forward(
        renumbered(weights, shape, seed),
        shape,
        geo,
        tokens,
        outputs_from=0,
        state_at=(length,),
        dtype=torch.float32,
    )
    closed = length // geo.kpool * geo.kpool
    stored = Stored(
        kv=result.kv,
        index=result.index,
        tail=[rows[closed:] for rows in result.tail],
        state=[f32_bytes(state)[None] for state in result.states[length]],
    )
    output = StepOutput(
        request=RequestId(1), start=0, selected=result.selected, logits=result.logits
    )
    return Run(weights, geo, tokens, stored, output)


@pytest.fixture(scope="module")
def clean() -> Run:
    return run(geometry(4, RowFormat.BF16), seed=0)


@pytest.mark.parametrize("kpool", [1, 2, 4])
@pytest.mark.parametrize("row_format", RowFormat)
@pytest.mark.parametrize("round_scale", [False, True])
def test_an_honest_engine_passes_with_room(
    kpool: int, row_format: RowFormat, round_scale: bool
) -> None:
    result = run(geometry(kpool, row_format, round_scale), seed=kpool).judge()
    assert result.violations == []
    assert set(result.max_ratio) == {
        "kv",
        "index",
        "tail",
        "state",
        "selection",
        "logits",
        "rmse",
    }
    # the rmse rule alone compares two runs of rounding luck
    assert max(result.max_ratio.values()) < 0.75
    assert result.max_ratio["logits"] < 0.25


def test_the_bound_stays_tight_in_a_deep_model() -> None:
    shape = replace(SHAPE, layers=9, dsa_period=4)  # ends with a KDA layer
    deep = run(geometry(2, RowFormat.FP8_PACKED), seed=3, shape=shape)
    result = deep.judge(shape)
    assert result.violations == []
    assert 0.005 < result.max_ratio["logits"] < 0.25
    logits = deep.output.logits.clone()
    logits[70, 5] += 1e-3
    assert replace(deep, output=replace(deep.output, logits=logits)).judge(shape).violations


@pytest.mark.parametrize("length", [1, 3, 4])
def test_a_request_of_less_than_a_group_is_judged(length: int) -> None:
    short = run(geometry(4, RowFormat.BF16), seed=length, length=length)
    assert short.judge().violations == []
    logits = short.output.logits.clone()
    logits[-1, 0] += 1e-2
    assert replace(short, output=replace(short.output, logits=logits)).judge().violations


def test_outputs_may_have_gaps_and_any_order(clean: Run) -> None:
    full = clean.output
    parts = [
        StepOutput(
            request=full.request,
            start=start,
            selected=full.selected[:, start:stop],
            logits=full.logits[start:stop],
        )
        for start, stop in ((90, 151), (0, 90))
    ]
    args = (clean.weights, SHAPE, clean.geometry, clean.tokens, clean.stored)
    assert audit(*args, parts).violations == []
    with pytest.raises(ValueError, match="pass the outputs of all positions"):
        audit(*args, parts[:1])
    with pytest.raises(ValueError, match="once"):
        audit(*args, [*parts, parts[0]])
    single = run(clean.geometry, seed=1, shape=replace(SHAPE, dsa_period=4))
    last = StepOutput(
        request=full.request,
        start=150,
        selected=single.output.selected[:, 150:],
        logits=single.output.logits[150:],
    )
    shape = replace(SHAPE, dsa_period=4)
    assert replace(single, output=last).judge(shape).violations == []


def damage_bytes(part: str, layer: int, row: int, column: int, flip: int) -> Callable[[Run], Run]:
    def damage(base: Run) -> Run:
        rows = [data.clone() for data in getattr(base.stored, part)]
        rows[layer][row, column] ^= flip
        return replace(base, stored=replace(base.stored, **{part: rows}))

    return damage


def damage_logit(value: float) -> Callable[[Run], Run]:
    def damage(base: Run) -> Run:
        logits = base.output.logits.clone()
        logits[100, 7] += value
        return replace(base, output=replace(base.output, logits=logits))

    return damage


def damage_selection(change: Callable[[list[int]], list[int]]) -> Callable[[Run], Run]:
    def damage(base: Run) -> Run:
        selected = base.output.selected.clone()
        selected[1, 101] = torch.tensor(change(selected[1, 101].tolist()))
        return replace(base, output=replace(base.output, selected=selected))

    return damage


def other_group(row: list[int]) -> list[int]:
    """Swap the first selected group for one that was not selected."""
    free = next(j for j in range(25) if 4 * j not in row and 4 * j < row[4])
    return [*range(4 * free, 4 * free + 4), *row[4:]]


DAMAGES = {
    "kv low mantissa bit": (
        damage_bytes("kv", 1, 40, 6, 1),
        "kv: DSA layer 1, KV row of position 40",
    ),
    "kv exponent": (damage_bytes("kv", 0, 3, 1, 4), "kv: DSA layer 0, KV row of position 3"),
    "index key code": (
        damage_bytes("index", 0, 9, 2, 2),
        "index: DSA layer 0, index row of group 9",
    ),
    "index scale": (
        damage_bytes("index", 1, 9, 18, 128),
        "index: DSA layer 1, index row of group 9",
    ),
    "tail gate": (damage_bytes("tail", 0, 1, 40, 1), "tail: DSA layer 0, tail row of position 149"),
    "state matrix": (damage_bytes("state", 1, 0, 66, 8), "state: KDA layer 1, the state of head 0"),
    "state window": (damage_bytes("state", 0, 0, -2, 8), "convolution input 2"),
    "logit": (damage_logit(1e-3), "logits: the logits of position 100"),
    "logit is NaN": (damage_logit(torch.nan), "logits: the logits of position 100"),
    "logit is infinite": (damage_logit(-torch.inf), "logits: the logits of position 100"),
    "another group": (damage_selection(other_group), "position 101 should select group"),
    "a later position": (
        damage_selection(lambda row: [*row[:16], 102, *row[17:]]),
        "position 101 selects position 102, which is later",
    ),
    "a group twice": (
        damage_selection(lambda row: [*row[4:8], *row[4:]]),
        "position 101 selects position",
    ),
    "no tail": (
        damage_selection(lambda row: [*row[:16], -1, -1, -1]),
        "position 101 selects 16 positions and should select 18",
    ),
    "tail before groups": (
        damage_selection(lambda row: [*row[16:18], *row[:16], -1]),
        "should end with the tail [100, 101]",
    ),
    "groups out of order": (
        damage_selection(lambda row: [*row[4:8], *row[:4], *row[8:]]),
        "does not hold whole groups in ascending order",
    ),
    "wrong padding": (
        damage_selection(lambda row: [*row[:18], -2]),
        "padded with -1",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(clean: Run, name: str) -> None:
    damage, sentence = DAMAGES[name]
    result = damage(clean).judge()
    assert any(sentence in violation for violation in result.violations), result.violations
    assert max(result.max_ratio.values()) > 1
    assert len(result.violations) < 40


def test_equal_scores_keep_the_lower_group() -> None:
    """Groups with a score of exactly 0 tie without rounding, so their order is judged too."""
    shape = replace(SHAPE, layers=2, index_heads=1)
    tied = run(geometry(4, RowFormat.BF16), seed=0, shape=shape, length=41)
    zero = [data.clone() for data in tied.stored.index]
    zero[0][:, :-4] = 0  # all keys 0: judged as damaged rows, but a legal index to select from
    selected = tied.output.selected.clone()
    for p in range(41):
        groups = min(4, (p + 1) // 4)
        row = [*range(4 * groups), *range((p + 1) // 4 * 4, p + 1)]
        selected[0, p] = torch.tensor(row + [-1] * (19 - len(row)))
    lowest = replace(
        tied,
        stored=replace(tied.stored, index=zero),
        output=replace(tied.output, selected=selected),
    )
    assert not [v for v in lowest.judge(shape).violations if v.startswith("selection")]
    higher = selected.clone()
    higher[0, 40, :16] = torch.arange(4, 20)
    wrong = replace(lowest, output=replace(lowest.output, selected=higher))
    found = [v for v in wrong.judge(shape).violations if v.startswith("selection")]
    assert len(found) == 1
    assert "should select group 0 before group 4" in found[0]
