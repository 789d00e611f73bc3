"""One recurrent step of KDA: the gated delta rule with per-channel decay.

Kimi Linear (arXiv 2510.26692), as in docs/model.md, "KDA layer".
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from optimized.kernels.backends import use_triton

BLOCK_VALUES = 64
"""Value channels of a program, whose part of the state stays in registers.  On an H200 48 requests
took 28.5 us with 64 and 2 warps, 30.1 with 32; 8 requests 7.0, 6.7, and 5.8 with 16 and one warp,
which takes 37.7 at 48 (docs/evidence/2026-11-30-h200-kernels.md).  One number for all batches,
since the order of the sums depends on it."""
WARPS = 2


def kda_decode(
    state: Tensor,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    *,
    out: Tensor | None = None,
    backend: str,
) -> Tensor:
    """[batch, heads, value] float32: each request's output; its state is updated in place.

    Args:
        state: [slots, heads, key, value] float32; slot 0 is padding.
        slots: [batch] int64.
        q, k, a: [batch, heads, key] float32, `a` the decay.
        v: [batch, heads, value] float32.
        beta: [batch, heads] float32.
        out: [batch, heads, value] float32, contiguous: where to write the output; new if None.
            With it, and contiguous inputs, the Triton path allocates nothing.
    """
    if use_triton(backend, kda_decode_kernel, state):
        if out is None:
            out = torch.empty_like(v, memory_format=torch.contiguous_format)
        heads, key, value = state.shape[1:]
        # the first axis runs fastest: the programs that share a head's memory run together
        kda_decode_kernel[(triton.cdiv(value, BLOCK_VALUES), heads, len(slots))](
            state,
            slots,
            *(x.contiguous() for x in (q, k, v, a, beta)),
            out,
            state.stride(0),
            heads,
            KEY=key,
            VALUE=value,
            KEYS=triton.next_power_of_2(key),
            VALUES=BLOCK_VALUES,
            num_warps=WARPS,
        )
        return out
    running = state.index_select(0, slots)
    result = step(running, q, k, v, a, beta)
    state.index_copy_(0, slots, running)
    return result if out is None else out.copy_(result)


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
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
):
    """One program for VALUES value channels of one head of a request: the columns of the state
    never mix.  It reads its part of the state once, and writes it once."""
    head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    row = batch * heads + head
    i = tl.arange(0, KEYS)
    j = tl.program_id(0) * VALUES + tl.arange(0, VALUES)
    # all other loads start while the slot, on which the state's address waits, is on its way
    slot = tl.load(slots + batch)
    query = tl.load(q + row * KEY + i, mask=i < KEY, other=0.0)
    ki = tl.load(k + row * KEY + i, mask=i < KEY, other=0.0)
    decay = tl.load(a + row * KEY + i, mask=i < KEY, other=0.0)
    vj = tl.load(v + row * VALUE + j, mask=j < VALUE, other=0.0)
    strength = tl.load(beta + row)
    at = state + slot * slot_stride + head * (KEY * VALUE) + i[:, None] * VALUE + j
    inside = (i < KEY)[:, None] & (j < VALUE)[None, :]
    # no step comes back to a state before all other layers' states went through the cache
    matrix = tl.load(at, mask=inside, other=0.0, eviction_policy="evict_first") * decay[:, None]
    # both sums over the faded state, so that neither waits for the other: what the step adds to
    # the output is error * (k . q)
    found = tl.sum(matrix * ki[:, None], axis=0)
    read = tl.sum(matrix * query[:, None], axis=0)
    error = (vj - found) * strength
    matrix += ki[:, None] * error[None, :]
    tl.store(at, matrix, mask=inside, eviction_policy="evict_first")
    tl.store(out + row * VALUE + j, read + error * tl.sum(ki * query), mask=j < VALUE)
