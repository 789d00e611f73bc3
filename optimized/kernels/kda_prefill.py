"""The gated delta rule over whole prompts, chunk by chunk (Kimi Linear, arXiv 2510.26692).

With a_t the decay and S_t the state, S_t = (I - beta_t k_t k_t^T) diag(a_t) S_{t-1} + beta_t k_t
v_t^T and o_t = S_t^T q_t.  One kernel computes, for all chunks of C steps at once, what a chunk
does whatever the state before it is; another walks through each sequence, with two products a
chunk on the way from one state to the next.  kda_chunks.py derives both.

Chunks end at positions of the request that are multiples of C, wherever a pass begins: a prompt
taken in parts that end there gives the same bits as the whole.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from optimized.kernels.backends import BackendError, use_triton
from optimized.kernels.kda_chunks import chunk_kernel, walk_kernel
from optimized.kernels.kda_decode import step

CHUNKS = (16, 32, 64)
NEAR = {"tf32x3": (8, 2.0**-25), "tf32": (8, 2.0**-25), "bf16": (16, 2.0**-12.5)}
"""For each precision NEAR and LEAST: LEAST ** (NEAR / 2), what a block fades by at most on one
side of its middle, is 2**-100, and leaves entries of q and k a range of 2**26 below 1."""
PART = 32
REGISTERS = 128
"""A program of `chunk_kernel` has PART key channels of its chunk in registers at once, so that
with 8 warps of at most 128 registers a thread two programs share a multiprocessor: while one
waits at a barrier, the other computes."""
LEAST_DOT = 16
"""Rows and columns that a matrix product has at least."""
WIDEST_SPLIT = {torch.float32: 64, torch.bfloat16: 128}
"""Value channels of a program of `walk_kernel` at most, by the memory's type: beside the chunk at
hand and the next, shared memory holds the state for the products."""
PROGRAMS = 128
"""About one for each of an H200's 132 multiprocessors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workspace:
    """What the chunks of a pass hand to the walk through them; the names are those of kda_chunks.

    Fields (float32, or bfloat16 for precision "bf16"; C rows a chunk, those without a token 0):
        w: [chunks, heads, C, key], W.
        u: [chunks, heads, C, value], (I + L)^-1 (beta V).
        k: [chunks, heads, key, C], d(t, C) k_t.
        q: [chunks, heads, C, key], d(0, t) q_t.
        p: [chunks, heads, C, C], q_t . d(s, t) k_s for s <= t, else 0.
        d: [chunks, heads, key] float32, d(0, C).
        precision: of the matrix products' factors, whose sums are float32 always.  "tf32x3":
            about 20 bits; "tf32": 11 bits; "bf16": 8 bits, in this memory too.
    """

    w: Tensor
    u: Tensor
    k: Tensor
    q: Tensor
    p: Tensor
    d: Tensor
    precision: str

    @property
    def chunk(self) -> int:
        """Steps in a chunk."""
        return self.p.shape[-1]


def workspace(
    *,
    tokens: int,
    sequences: int,
    heads: int,
    key: int,
    value: int,
    chunk: int = 64,
    precision: str = "tf32",
    device: torch.device | str,
) -> Workspace:
    """Memory for passes of at most so many tokens in so many sequences.

    Raises:
        BackendError: for a chunk or precision that there is not.
    """
    if chunk not in CHUNKS or precision not in NEAR:
        raise BackendError(
            f"KDA prefill cannot run with chunk {chunk} and precision {precision!r}: choose from "
            f"{', '.join(map(str, CHUNKS))} and {', '.join(NEAR)}."
        )
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    keys, values = _padded(key), _padded(value)
    # each sequence wastes at most a chunk at either end, see kda_chunks.own_chunk
    tiles = (tokens // chunk + 2 * sequences, heads)

    def empty(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.empty(*tiles, *shape, dtype=dtype, device=device)

    return Workspace(
        w=empty(chunk, keys),
        u=empty(chunk, values),
        k=empty(keys, chunk),
        q=empty(chunk, keys),
        p=empty(chunk, chunk),
        d=empty(keys, dtype=torch.float32),
        precision=precision,
    )


def kda_prefill(
    state: Tensor,
    slots: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    beta: Tensor,
    cu_seqlens: Tensor,
    starts: Tensor,
    *,
    out: Tensor,
    memory: Workspace,
    checkpoints: Tensor | None = None,
    interval: int = 0,
    backend: str,
) -> Tensor:
    """Advance each sequence's state over its tokens; returns `out`.  Nothing is allocated.

    Args:
        state: [slots, heads, key, value] float32, a sequence's own matrices contiguous; slot 0
            is padding.  Read as the state before the pass, and left as the one after it.
        slots: [sequences] int64, no two alike but for padding.
        q, k, a: [tokens, heads, key], `a` the decay; v: [tokens, heads, value]; beta: [tokens,
            heads]; float32 or bfloat16, contiguous, the sequences' tokens one after another.
        cu_seqlens: [sequences + 1] int32 or int64, where each sequence begins, then the end.
        starts: [sequences] int64, position in its request of each sequence's first token.
        out: [tokens, heads, value] float32 or bfloat16, contiguous.
        memory: at least as large as the pass; not used by torch.
        checkpoints: [sequences, n] int64: slot for the state of the prefix of (starts // interval
            + 1 + j) * interval tokens, if the pass reaches its end; 0: not wanted, and so are
            all behind the n-th.
        interval: tokens between checkpoints, a multiple of the chunk.
        backend: "torch", step by step, or "triton".

    Raises:
        BackendError: for an interval that the chunks do not meet, memory that is too small, or
            bfloat16 products under Triton's interpreter, which multiplies their bits.
    """
    if checkpoints is not None and (interval <= 0 or interval % memory.chunk):
        raise BackendError(
            f"States every {interval} tokens do not lie between chunks of {memory.chunk}: choose "
            "an interval that is a multiple of the chunk."
        )
    sequences = len(slots)
    if not use_triton(backend, walk_kernel, state):
        inputs = (q, k, v, a, beta)
        _recurrent(state, slots, inputs, cu_seqlens, starts, out, checkpoints, interval)
        return out
    if memory.precision == "bf16" and not isinstance(walk_kernel, triton.JITFunction):
        raise BackendError(
            "Triton's interpreter cannot multiply bfloat16 matrices: choose another precision."
        )
    tiles = len(q) // memory.chunk + 2 * sequences
    if tiles > len(memory.p):
        raise BackendError(
            f"This pass needs {tiles} chunks of memory and there are {len(memory.p)}: ask "
            "`workspace` for more tokens or sequences."
        )
    heads, key, value = state.shape[1:]
    chunk, keys, values = memory.chunk, memory.w.shape[-1], memory.u.shape[-1]
    sizes = {"KEY": key, "VALUE": value, "KEYS": keys, "VALUES": values, "CHUNK": chunk}
    parts = (memory.w, memory.u, memory.k, memory.q, memory.p, memory.d)
    near, least = NEAR[memory.precision]
    chunk_kernel[(heads, tiles)](
        *(q, k, v, a, beta, cu_seqlens, starts, *parts, sequences, heads),
        LEAST=least,
        NEAR=near,
        FAR=(chunk // near).bit_length() - 1,
        LEVELS=chunk.bit_length() - 1,
        PART=min(keys, PART),
        SEQUENCES=triton.next_power_of_2(sequences),
        PRECISION=memory.precision,
        **sizes,
        num_warps=8,
        maxnreg=REGISTERS,
    )
    split = _split(sequences * heads, values, WIDEST_SPLIT[memory.w.dtype])
    walk_kernel[(values // split, heads, sequences)](
        *(state, slots, cu_seqlens, starts, *parts, out),
        # without checkpoints no slot of any is read
        slots if checkpoints is None else checkpoints,
        state.stride(0),
        heads,
        0 if checkpoints is None else checkpoints.shape[1],
        interval,
        CHECKPOINTS=checkpoints is not None,
        SPLIT=split,
        # the next chunk is on its way meanwhile, if shared memory holds two: 227 KiB
        STAGES=1 if chunk * memory.p.itemsize > 128 else 2,
        PRECISION=memory.precision,
        **sizes,
        num_warps=8 if split > 32 else 4,
    )
    return out


def _padded(channels: int) -> int:
    return max(LEAST_DOT, triton.next_power_of_2(channels))


def _split(states: int, values: int, widest: int) -> int:
    """Value channels of a program of the walk: as many as leave work for every multiprocessor,
    since each program reads the chunks' keys and queries again."""
    split = min(values, widest)
    while split > LEAST_DOT and states * (values // split) < PROGRAMS:
        split //= 2
    return split


def _recurrent(
    state: Tensor,
    slots: Tensor,
    inputs: tuple[Tensor, ...],
    cu_seqlens: Tensor,
    starts: Tensor,
    out: Tensor,
    checkpoints: Tensor | None,
    interval: int,
) -> None:
    """`kda_prefill` as its definition says it."""
    borders = cu_seqlens.tolist()
    for sequence, (slot, start) in enumerate(zip(slots.tolist(), starts.tolist(), strict=True)):
        running = state[slot : slot + 1].clone()
        for position, token in enumerate(range(*borders[sequence : sequence + 2]), start + 1):
            out[token] = step(running, *(x[token : token + 1].float() for x in inputs))[0]
            if checkpoints is not None and position % interval == 0:
                which = position // interval - start // interval - 1
                if which < checkpoints.shape[1] and checkpoints[sequence, which]:
                    state[checkpoints[sequence, which]] = running[0]
        state[slot] = running[0]
