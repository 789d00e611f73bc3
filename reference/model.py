"""The hybrid model of docs/model.md, from tokens alone: no cache, float64.

Everything that an engine stores or returns for a request can be read off one `forward` over
its tokens: KV rows, index rows, tail rows, KDA states, selections and logits.  With float32
instead it is the naive low-precision evaluation that an engine's error is measured against.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reference import index, kda, mla
from reference.contract import Weights
from reference.geometry import Geometry, ModelShape
from reference.norms import rms
from reference.pooling import pooled_rows, tail_rows
from reference.quant import decode_key, decode_row, encode_row


@dataclass(frozen=True, slots=True, kw_only=True)
class Forward:
    """What n tokens give.  Lists have one entry for each DSA layer.

    Fields:
        start: first position with outputs.
        selected: [dsa_layers, n - start, selection_width] int64.
        logits: [n - start, vocab].
        kv: [n, row bytes] uint8.
        index: [n // kpool, index_dim + 4] uint8.
        tail: [n, 4 * index_dim] uint8, a row for every position, not only the open ones.
        states: prefix length to [kda_layers, state_width].
    """

    start: int
    selected: Tensor
    logits: Tensor
    kv: list[Tensor]
    index: list[Tensor]
    tail: list[Tensor]
    states: dict[int, Tensor]


def layer_weights(weights: Weights, layer: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """The weights of one layer under their short names, in `dtype`."""
    prefix = f"layers.{layer}."
    return {k[len(prefix) :]: v.to(dtype) for k, v in weights.items() if k.startswith(prefix)}


def forward(
    weights: Weights,
    shape: ModelShape,
    geometry: Geometry,
    tokens: Sequence[int],
    *,
    outputs_from: int | None = None,
    state_at: Collection[int] = (),
    dtype: torch.dtype = torch.float64,
) -> Forward:
    """Run the model over the tokens of one request.

    Arguments: outputs_from, first position whose selection and logits are wanted (None: the
    last position alone); state_at, prefix lengths whose KDA state is wanted.
    """
    ids = torch.as_tensor(tokens, dtype=torch.int64)
    start = max(0, len(ids) - 1) if outputs_from is None else outputs_from
    x = weights["embed"][ids].to(dtype)
    dsa: list[_Dsa] = []
    states: dict[int, list[Tensor]] = {length: [] for length in state_at}
    for layer in range(shape.layers):
        w = layer_weights(weights, layer, dtype)
        y = rms(x, w["norm"])
        if layer in shape.dsa_layers:
            # outputs of a last layer matter only where logits are asked for
            first = start if layer == shape.layers - 1 else 0
            dsa.append(_dsa_layer(y, w, shape, geometry, first))
            x = x[first:] + dsa[-1].mix
        else:
            mix, kept = kda.kda(y, w, shape, state_at)
            x = x + mix
            for length, state in kept.items():
                states[length].append(state)
    final = rms(x[len(x) - (len(ids) - start) :], weights["final_norm"].to(dtype))
    logits = final @ weights["unembed"].to(dtype).T * weights["logit_scale"].to(dtype)
    width = geometry.selection_width
    selected = [part.selected[len(part.selected) - len(logits) :] for part in dsa]
    return Forward(
        start=start,
        selected=torch.stack(selected) if dsa else torch.empty(0, len(logits), width).long(),
        logits=logits,
        kv=[part.kv for part in dsa],
        index=[part.index for part in dsa],
        tail=[part.tail for part in dsa],
        states={
            n: torch.stack(s) if s else torch.empty(0, shape.state_width) for n, s in states.items()
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Dsa:
    mix: Tensor
    selected: Tensor
    kv: Tensor
    index: Tensor
    tail: Tensor


def _dsa_layer(
    y: Tensor, w: dict[str, Tensor], shape: ModelShape, geometry: Geometry, first: int
) -> _Dsa:
    """One DSA layer over all positions; attention for positions `first` on."""
    kv = encode_row(mla.latent_row(y, w), geometry.row_format)
    key, gate = index.key_and_gate(y, w)
    pooled = pooled_rows(key, gate, w["ape"], geometry)
    asked = y[first:]
    c_q = mla.compressed_query(asked, w)
    keys, scales = decode_key(pooled)
    selected = index.selections(
        index.index_query(c_q, asked, w, shape, geometry),
        (keys.to(y.dtype), scales.to(y.dtype)),
        torch.arange(first, len(y)),
        geometry,
    )
    rows = decode_row(kv, geometry.row_format, shape.latent).to(y.dtype)
    out = mla.attend(mla.attention_query(c_q, w, shape), rows, selected)
    return _Dsa(
        mix=out.flatten(1) @ w["wo"].T,
        selected=selected,
        kv=kv,
        index=pooled,
        tail=tail_rows(key, gate),
    )
