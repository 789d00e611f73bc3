"""One recurrent step of KDA: the gated delta rule with per-channel decay.

Kimi Linear (arXiv 2510.26692), as in docs/model.md, "KDA layer".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.backends import use_triton

BLOCK_VALUES = 32


def kda_decode(
    state: Tensor,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    *,
    backend: str,
) -> Tensor:
    """[batch, heads, value] float32: each request's output; its state is updated in place.

    Args:
        state: [slots, heads, key, value] float32; slot 0 is padding.
        slots: [batch] int64.
        q, k, a: [batch, heads, key] float32, `a` the decay.
        v: [batch, heads, value] float32.
        beta: [batch, heads] float32.
    """
    if use_triton(backend, kda_decode_kernel, state):
        heads, key, value = state.shape[1:]
        out = torch.empty_like(v)
        kda_decode_kernel[(len(slots), heads, triton.cdiv(value, BLOCK_VALUES))](
            state,
            slots,
            *(x.contiguous() for x in (q, k, v, a, beta)),
            out,
            state.stride(0),
            heads,
            key,
            value,
            KEYS=triton.next_power_of_2(key),
            VALUES=BLOCK_VALUES,
        )
        return out
    running = state.index_select(0, slots)
    out = step(running, q, k, v, a, beta)
    state.index_copy_(0, slots, running)
    return out


def step(state: Tensor, q: Tensor, k: Tensor, v: Tensor, a: Tensor, beta: Tensor) -> Tensor:
    """[batch, heads, value] float32: one step over `state` [batch, heads, key, value], contiguous
    and changed in place; the other arguments as for `kda_decode`."""
    batch, heads, key, value = state.shape
    # one product of fixed shape for each head of each request: no batch changes its order
    matrix = state.view(-1, key, value).mul_(a.reshape(-1, key, 1))
    k = k.reshape(-1, 1, key)
    error = v.reshape(-1, 1, value) - torch.bmm(k, matrix)
    matrix.baddbmm_(k.mT, error.mul_(beta.reshape(-1, 1, 1)))
    return torch.bmm(q.reshape(-1, 1, key), matrix).view(batch, heads, value)


@triton.jit
def kda_decode_kernel(
    state,
    slots,
    q,
    k,
    v,
    a,
    beta,
    out,
    slot_stride,
    heads,
    key,
    value,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program for one head of a request and VALUES of its value channels: the columns of the
    state never mix."""
    batch = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    row = batch * heads + head
    i = tl.arange(0, KEYS)
    j = tl.program_id(2) * VALUES + tl.arange(0, VALUES)
    inside = (i < key)[:, None] & (j < value)[None, :]
    matrix_at = state + tl.load(slots + batch) * slot_stride + head * key * value
    at = matrix_at + i[:, None] * value + j
    query = tl.load(q + row * key + i, mask=i < key, other=0.0)[:, None]
    ki = tl.load(k + row * key + i, mask=i < key, other=0.0)[:, None]
    decay = tl.load(a + row * key + i, mask=i < key, other=0.0)[:, None]
    vj = tl.load(v + row * value + j, mask=j < value, other=0.0)
    matrix = tl.load(at, mask=inside, other=0.0) * decay
    error = (vj - tl.sum(matrix * ki, axis=0)) * tl.load(beta + row)
    matrix += ki * error[None, :]
    tl.store(at, matrix, mask=inside)
    tl.store(out + row * value + j, tl.sum(matrix * query, axis=0), mask=j < value)
