"""The numeric tier: is what an engine stored and returned within a derived error bound?

The audit follows a request through the model with its rounding errors (rounding.py,
bounded.py), but takes the engine's own stored rows wherever a later step reads rows.  So each
stage is judged by itself: the quantiser of KV and index rows, the tail, the KDA state, the
selection, and the logits.  An engine is right iff every value lies within its bound, and its
logits' RMSE is at most twice that of a naive float32 evaluation, plus 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from reference import bounded, kda, margin, mla, rounding
from reference.contract import StepOutput, Weights
from reference.geometry import PACKED_BLOCK, Geometry, ModelShape, RowFormat
from reference.index import SCORE_BLOCK, select
from reference.model import layer_weights
from reference.norms import EPSILON, rms
from reference.quant import (
    bf16_values,
    decode_key,
    decode_row,
    e4m3_values,
    f32_values,
    gap_bf16,
    gap_e4m3,
    packed_scales,
)
from reference.rounding import Approx, U

NAMED = 4
"""Rows that are named one by one for each stage and layer; the others are counted."""


Name = Callable[[int], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """What an engine stored for a request of n tokens, as `Engine.read` returns it.

    Fields:
        kv: for each DSA layer, [n, row bytes] uint8.
        index: for each DSA layer, [n // kpool, index_dim + 4] uint8.
        tail: for each DSA layer, [n % kpool, 4 * index_dim] uint8; empty: not judged.
        state: for each KDA layer, [1, 4 * state_width] uint8; empty: not judged.
    """

    kv: Sequence[Tensor]
    index: Sequence[Tensor]
    tail: Sequence[Tensor] = ()
    state: Sequence[Tensor] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audit:
    """`violations`: sentences.  `max_ratio`: for each stage the largest error / bound, so at
    most 1 in an engine that is right."""

    violations: list[str] = field(default_factory=list)
    max_ratio: dict[str, float] = field(default_factory=dict)

    def judge(self, stage: str, where: str, error: Tensor, bound: Tensor, name: Name) -> None:
        """Record error <= bound, each [rows, entries]; `name` says what row i is."""
        bad = ~(error <= bound)
        ratio = torch.where(error == 0, 0.0, error / bound).nan_to_num(nan=torch.inf)
        self.note(stage, float(ratio.max()) if ratio.numel() else 0.0)
        rows = bad.any(1).nonzero()[:, 0].tolist()
        for i in rows[:NAMED]:
            j = int(ratio[i].argmax())
            self.violations.append(
                f"{stage}: {where}{name(i)} is off in {int(bad[i].sum())} of {bad.shape[1]} "
                f"entries; entry {j} by {error[i, j]:.3g}, where at most {bound[i, j]:.3g} is "
                "explained by rounding."
            )
        if len(rows) > NAMED:
            self.violations.append(f"{stage}: {where}{len(rows) - NAMED} more rows are off.")

    def note(self, stage: str, ratio: float) -> None:
        self.max_ratio[stage] = max(self.max_ratio.get(stage, 0.0), ratio)


@dataclass(frozen=True, slots=True)
class _Asked:
    """The engine's outputs, by position, ascending."""

    positions: Tensor
    selected: Tensor
    logits: Tensor


def audit(
    weights: Weights,
    shape: ModelShape,
    geometry: Geometry,
    tokens: Sequence[int],
    stored: Stored,
    outputs: Sequence[StepOutput],
) -> Audit:
    """Judge a model run of one request.

    Arguments: tokens, all that is stored; outputs, the request's steps, each position at most
    once.  A DSA layer with a layer above it needs the selection of every position past topk
    (`outputs_from` 0 in the chunks): its attention feeds rows that are judged later.
    Raises: ValueError where such an output is missing or a shape does not fit.
    """
    asked = _collect(outputs, len(tokens))
    result = Audit()
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    x = Approx.exact(weights["embed"][ids].to(torch.float64))
    rows = [decode_row(data, geometry.row_format, shape.latent) for data in stored.kv]
    chosen: list[Tensor] = []
    for layer in range(shape.layers):
        w = layer_weights(weights, layer, torch.float64)
        y = rounding.rms(x, w["norm"], EPSILON)
        if layer in shape.dsa_layers:
            number = len(chosen)
            last = layer == shape.layers - 1
            positions = asked.positions if last else torch.arange(len(ids))
            _judge_rows(result, y, w, stored, number, shape, geometry)
            query = _Query.of(y[positions], w, shape, geometry)
            chosen.append(
                _judge_selection(
                    result, query, stored.index[number], number, positions, asked, geometry
                )
            )
            x = rounding.add(x[positions], _mix(query, w, rows[number], chosen[-1]))
        else:
            mix, states = bounded.kda(y, w, shape, (len(ids),) if stored.state else ())
            if stored.state:
                number = shape.kda_layers.index(layer)
                _judge_state(result, stored.state[number], number, states[len(ids)])
            x = rounding.add(x, mix)
    if shape.layers - 1 not in shape.dsa_layers:
        x = x[asked.positions]
    naive = _naive_logits(weights, shape, ids, rows, chosen, asked.positions)
    _judge_logits(result, weights, x, naive, asked)
    return result


def _collect(outputs: Sequence[StepOutput], length: int) -> _Asked:
    ordered = sorted(outputs, key=lambda step: step.start)
    positions = torch.cat([torch.arange(s.start, s.start + len(s.logits)) for s in ordered])
    if len(positions) and (int(positions[-1]) >= length or bool((positions.diff() < 1).any())):
        raise ValueError(
            f"outputs stand for positions beyond the {length} tokens, or twice for one: give each "
            "position once and leave rejected drafts out."
        )
    return _Asked(
        positions,
        torch.cat([step.selected for step in ordered], 1),
        torch.cat([step.logits for step in ordered]).to(torch.float64),
    )


def _judge_rows(
    result: Audit,
    y: Approx,
    w: dict[str, Tensor],
    stored: Stored,
    number: int,
    shape: ModelShape,
    geometry: Geometry,
) -> None:
    """The quantiser: stored KV rows, index rows and tail rows against the reference's."""
    where = f"DSA layer {number}, "
    row, data = bounded.latent_row(y, w), stored.kv[number]
    if geometry.row_format is RowFormat.BF16:
        error, bound = gap_bf16(row.mid, bf16_values(data)), row.bound
    elif geometry.row_format is RowFormat.FP8_RAW:
        error, bound = gap_e4m3(row.mid, e4m3_values(data)), row.bound
    else:
        codes, scales = data[:, : shape.latent], packed_scales(data, shape.latent)
        parts = [
            _fp8_error(row[:, at], codes[:, at], scales[:, i], False)
            for i in range(scales.shape[1])
            for at in [slice(i * PACKED_BLOCK, (i + 1) * PACKED_BLOCK)]
        ]
        error, bound = (torch.cat(side, 1) for side in zip(*parts, strict=True))
    result.judge("kv", where, error, bound, lambda i: f"KV row of position {i}")
    key, gate = bounded.key_and_gate(y, w)
    pooled = bounded.pooled(key, gate, w["ape"])
    codes, scales = stored.index[number][:, :-4], f32_values(stored.index[number][:, -4:])[:, 0]
    error, bound = _fp8_error(pooled, codes, scales, geometry.round_scale)
    result.judge("index", where, error, bound, lambda i: f"index row of group {i}")
    if stored.tail:
        first = len(pooled.mid) * geometry.kpool
        both = rounding.concat([key[first:], gate[first:]], dim=1)
        error = gap_bf16(both.mid, bf16_values(stored.tail[number]))
        result.judge(
            "tail", where, error, both.bound, lambda i: f"tail row of position {first + i}"
        )


def _fp8_error(
    x: Approx, codes: Tensor, scales: Tensor, round_scale: bool
) -> tuple[Tensor, Tensor]:
    """(error, bound) [rows, dim + 1] of stored codes, and in the last column of the scale."""
    low, high = bounded.fp8_scale_range(x, round_scale=round_scale)
    off = torch.maximum(low - scales, scales - high).clamp(min=0)
    divided = x.mid / scales[:, None]
    error = gap_e4m3(divided, e4m3_values(codes))
    bound = x.bound / scales[:, None]
    if not round_scale:
        bound = bound + 2 * U * divided.abs()
    return torch.cat([error, off[:, None]], 1), torch.cat([bound, torch.zeros(len(off), 1)], 1)


def _judge_state(result: Audit, data: Tensor, number: int, state: bounded.State) -> None:
    """The matrix (a row for each head) and the convolution window, entry by entry."""
    matrix, window = state.matrix.flatten(), state.window
    values, where = f32_values(data)[0], f"KDA layer {number}, "
    split = matrix.mid.numel()
    error = (values[:split].view_as(matrix.mid) - matrix.mid).abs()
    bound = matrix.bound + U * matrix.mid.abs()
    result.judge("state", where, error, bound, lambda i: f"the state of head {i}")
    error = (values[split:].view_as(window.mid) - window.mid).abs()
    bound = window.bound
    result.judge("state", where, error, bound, lambda i: f"convolution input {i} of the window")


@dataclass(frozen=True, slots=True)
class _Query:
    """Queries of a DSA layer: for the index (with its head weights) and for the attention."""

    index: Approx
    weight: Approx
    attention: Approx

    @classmethod
    def of(cls, y: Approx, w: dict[str, Tensor], shape: ModelShape, geometry: Geometry) -> _Query:
        c_q = bounded.compressed_query(y, w)
        index, weight = bounded.index_query(c_q, y, w, shape, geometry)
        attention = rounding.linear(c_q, w["wqb"]).view(-1, shape.heads, shape.latent)
        return cls(index, weight, attention)


def _judge_selection(
    result: Audit,
    query: _Query,
    stored: Tensor,
    number: int,
    positions: Tensor,
    asked: _Asked,
    geometry: Geometry,
) -> Tensor:
    """Judge a DSA layer's selection rows, and return those to attend over, [positions, width]:
    the engine's where they are well formed, the reference's where there are none."""
    keys, scales = decode_key(stored)
    given = torch.isin(positions, asked.positions)
    theirs = torch.full((len(positions), geometry.selection_width), -1, dtype=torch.int64)
    theirs[given] = asked.selected[number]
    block = max(1, SCORE_BLOCK // max(1, query.weight.mid.shape[1] * len(keys)))
    parts: list[Tensor] = []
    for at in torch.split(torch.arange(len(positions)), block):
        p = positions[at]
        score = bounded.scores(query.index[at], query.weight[at], keys, scales)
        ours = select(score.mid, p, geometry)
        mine, _ = margin.chosen_groups(ours, p, len(keys), geometry)
        open_ = margin.contested(score, mine, p, geometry) & ~given[at]
        if bool(open_.any()):
            raise ValueError(
                f"the selection of position {int(p[open_][0])} in DSA layer {number} is within "
                "rounding of another one: pass the outputs of all positions."
            )
        chosen, formed = margin.chosen_groups(theirs[at], p, len(keys), geometry)
        use = formed & given[at]
        _name_malformed(result, number, p, theirs[at], given[at] & ~formed, geometry)
        found = margin.excess(score, chosen, p, geometry)
        _name_misfits(result, number, p, use, found)
        parts.append(torch.where(use[:, None], theirs[at], ours))
    return torch.cat(parts)


def _name_malformed(
    result: Audit, number: int, p: Tensor, rows: Tensor, bad: Tensor, geometry: Geometry
) -> None:
    for i in bad.nonzero()[:NAMED, 0].tolist():
        fault = margin.malformation(rows[i], int(p[i]), geometry)
        result.violations.append(
            f"selection: DSA layer {number}, the query at position {int(p[i])} {fault}."
        )
    if bool(bad.any()):
        result.note("selection", torch.inf)


def _name_misfits(
    result: Audit, number: int, p: Tensor, use: Tensor, found: tuple[Tensor, Tensor, Tensor]
) -> None:
    ratio, kept, dropped = found
    ratio = ratio.masked_fill(~use, 0)
    result.note("selection", float(ratio.max()) if len(ratio) else 0.0)
    for i in (ratio > 1).nonzero()[:NAMED, 0].tolist():
        result.violations.append(
            f"selection: DSA layer {number}, the query at position {int(p[i])} should select "
            f"group {int(dropped[i])} before group {int(kept[i])}; their scores differ by "
            f"{float(ratio[i]):.3g} times what rounding explains."
        )


def _mix(query: _Query, w: dict[str, Tensor], rows: Tensor, selected: Tensor) -> Approx:
    """The DSA layer's output [n, hidden] over dequantised stored rows [positions, latent]."""
    width = max(1, int((selected >= 0).sum(1).max())) if len(selected) else 1
    block = max(
        1,
        mla.GATHER_BLOCK
        // (rows.shape[1] * max(width, query.attention.mid.shape[1] * rows.shape[1])),
    )
    parts = [
        bounded.attend(query.attention[at], rows[chosen.clamp(min=0)], chosen >= 0)
        for at in torch.split(torch.arange(len(selected)), block)
        for chosen in [selected[at, :width]]
    ]
    return rounding.linear(rounding.concat(parts).flatten(), w["wo"])


def _naive_logits(
    weights: Weights,
    shape: ModelShape,
    ids: Tensor,
    rows: Sequence[Tensor],
    chosen: Sequence[Tensor],
    positions: Tensor,
) -> Tensor:
    """Logits of `positions` by a plain float32 evaluation over the same rows and selections."""
    x = weights["embed"][ids].to(torch.float32)
    for layer in range(shape.layers):
        w = layer_weights(weights, layer, torch.float32)
        y = rms(x, w["norm"])
        if layer in shape.dsa_layers:
            number = shape.dsa_layers.index(layer)
            at = positions if layer == shape.layers - 1 else torch.arange(len(ids))
            q = mla.attention_query(mla.compressed_query(y[at], w), w, shape)
            out = mla.attend(q, rows[number].to(torch.float32), chosen[number])
            x = x[at] + out.flatten(1) @ w["wo"].T
        else:
            x = x + kda.kda(y, w, shape)[0]
    if shape.layers - 1 not in shape.dsa_layers:
        x = x[positions]
    return (rms(x, weights["final_norm"]) @ weights["unembed"].T) * weights["logit_scale"]


def _judge_logits(result: Audit, weights: Weights, x: Approx, naive: Tensor, asked: _Asked) -> None:
    """Every logit within its bound, NaN and infinities in their places, and the RMSE rule."""
    final = rounding.rms(x, weights["final_norm"].to(torch.float64), EPSILON)
    unembed = weights["unembed"].to(torch.float64)
    logits = rounding.scale(rounding.linear(final, unembed), float(weights["logit_scale"]))
    mid, bound = logits.mid, logits.bound
    same = (asked.logits == mid) | (asked.logits.isnan() & mid.isnan())
    error = (asked.logits - mid).abs().masked_fill(same, 0)

    def name(i: int) -> str:
        return f"the logits of position {int(asked.positions[i])}"

    result.judge("logits", "", error, bound, name)
    ulp = 2 * U * mid.abs().amax(-1)
    ours, theirs = (e.square().mean(-1).sqrt() for e in (naive.to(torch.float64) - mid, error))
    result.judge("rmse", "", theirs[:, None], (2 * ours + 2 * ulp)[:, None], name)
