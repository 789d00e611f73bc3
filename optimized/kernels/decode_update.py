"""Decode's index step: one new key a request into its tail ring, and the group it may close."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels import casts, pooled_key
from optimized.kernels.backends import use_triton


def decode_update(
    index_pool: Tensor,
    ring_key: Tensor,
    ring_gate: Tensor,
    key: Tensor,
    gate: Tensor,
    ring_slot: Tensor,
    position: Tensor,
    index_slot: Tensor,
    ape: Tensor,
    *,
    kpool: int,
    index_page_size: int,
    round_scale: bool,
    backend: str,
) -> None:
    """Store the new key and gate at ring row position % ring_size; where a group closes, pool
    the last kpool positions and store its index row.

    Args:
        index_pool: [pages, index_page_size * (index_dim + 4)] uint8.
        ring_key, ring_gate: [ring slots, ring_size, index_dim] bf16, of equal strides, a row's
            channels side by side and the rows evenly spaced.
        key, gate: [batch, index_dim] bf16.
        ring_slot, position: [batch] int64.
        index_slot: [batch] int64, 0 where the position closes no group.
        ape: [kpool, index_dim] float32.
    """
    if use_triton(backend, decode_update_kernel, index_pool):
        decode_update_kernel[(triton.cdiv(len(position), pooled_key.BLOCK_ROWS),)](
            index_pool,
            *(rows.view(torch.int16) for rows in (ring_key, ring_gate, key, gate)),
            ring_slot,
            position,
            index_slot,
            ape,
            len(position),
            ring_key.shape[1],
            ring_key.stride(1),
            index_pool.shape[1],
            KPOOL=kpool,
            PAGE=index_page_size,
            ROWS=pooled_key.BLOCK_ROWS,
            DIM=key.shape[1],
            ROUND_SCALE=round_scale,
        )
        return
    ring_size, dim = ring_key.shape[1:]
    back = torch.arange(1 - kpool, 1, device=position.device)[:, None]
    order = (position + back).remainder_(ring_size).add_(ring_slot * ring_size)
    keys, gates = ring_key.view(-1, dim), ring_gate.view(-1, dim)
    keys.index_copy_(0, order[-1], key)
    gates.index_copy_(0, order[-1], gate)
    if not index_slot.any():
        return
    # a request that closes no group is pooled too, into the padding slot
    order = order.view(-1)
    shape = (kpool, len(position), dim)
    pooled_key.store_groups(
        index_pool,
        index_slot,
        keys.index_select(0, order).view(shape),
        gates.index_select(0, order).view(shape),
        ape,
        index_page_size=index_page_size,
        round_scale=round_scale,
    )


@triton.jit
def decode_update_kernel(
    index_pool,
    ring_key,
    ring_gate,
    key,
    gate,
    ring_slot,
    position,
    index_slot,
    ape,
    batch,
    ring_size,
    ring_stride,
    page_bytes,
    KPOOL: tl.constexpr,
    PAGE: tl.constexpr,
    ROWS: tl.constexpr,
    DIM: tl.constexpr,
    ROUND_SCALE: tl.constexpr,
):
    """One program for ROWS requests.  The newest key is pooled from registers: the ring row that
    this program has just written may not be visible to its other threads."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    live = row < batch
    channel = tl.arange(0, DIM)
    newest = tl.load(position + row, mask=live, other=0)
    slot = tl.load(index_slot + row, mask=live, other=0)
    ring = tl.load(ring_slot + row, mask=live, other=0) * ring_size
    at = row.to(tl.int64)[:, None] * DIM + channel
    new_key = tl.load(key + at, mask=live[:, None], other=0)
    new_gate = tl.load(gate + at, mask=live[:, None], other=0)
    into = (ring + newest % ring_size)[:, None] * ring_stride + channel
    tl.store(ring_key + into, new_key, mask=live[:, None])
    tl.store(ring_gate + into, new_gate, mask=live[:, None])

    closes = slot > 0
    top = casts.bf16_value(new_gate) + tl.load(ape + (KPOOL - 1) * DIM + channel)
    normaliser = tl.full((ROWS, DIM), 1.0, tl.float32)
    total = casts.bf16_value(new_key)
    for back in tl.static_range(1, KPOOL):
        waiting = (ring + (newest - back) % ring_size)[:, None] * ring_stride + channel
        gate_bits = tl.load(ring_gate + waiting, mask=closes[:, None], other=0)
        key_bits = tl.load(ring_key + waiting, mask=closes[:, None], other=0)
        score = casts.bf16_value(gate_bits) + tl.load(ape + (KPOOL - 1 - back) * DIM + channel)
        old_key = casts.bf16_value(key_bits)
        top, normaliser, total = pooled_key.fold(top, normaliser, total, score, old_key)
    pooled_key.store_rows(
        index_pool, slot, closes, normaliser, total, page_bytes, PAGE, ROWS, DIM, ROUND_SCALE
    )
