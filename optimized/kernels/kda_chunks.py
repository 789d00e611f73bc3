"""The gated delta rule in chunks: the kernels of kda_prefill.py, and why they compute it.

Within a chunk of C steps let d(s, t) = a_{s+1} ... a_t, channel by channel, and S_0 the state
before it.  Then, with u_t what step t writes beside k_t,

    S_t = diag(d(0, t)) S_0 + sum_{s <= t} (d(s, t) k_s) u_s^T
    u_t = beta_t (v_t - (d(0, t) k_t)^T S_0 - sum_{s < t} (k_t . d(s, t) k_s) u_s)

so that with L_ts = beta_t (k_t . d(s, t) k_s) below the diagonal, U = (I + L)^-1 (beta V) - W S_0
and W = (I + L)^-1 (beta_t d(0, t) k_t): `chunk_kernel` computes all that does not depend on S_0.

No decay may be divided by one that vanished.  A pair s < t meets at the border b between the
halves of the smallest aligned block that holds both, and d(s, t) = d(s, b) d(b, t), of which
neither exceeds 1: a level takes all pairs that meet in the middle of blocks of one size.  The
smallest levels are taken at once, in blocks of NEAR rows around their middle b, where a pair on
one side of it has d(s, t) = d(b, t) / d(b, s) or d(s, b) / d(t, b).  That no quotient overflows, a
decay below LEAST counts as LEAST, which is less than a product's factors are rounded by.  The same
blocks, doubled, give the inverse without cancellation: below the diagonal of that of
[[X, 0], [L, Y]] stands -Y^-1 L X^-1.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def product(x, y, PRECISION: tl.constexpr):
    """x @ y, summed in float32."""
    if PRECISION == "bf16":
        x, y = x.to(tl.bfloat16), y.to(tl.bfloat16)
    return tl.dot(x, y, input_precision="tf32" if PRECISION == "bf16" else PRECISION)


@triton.jit
def own_chunk(begin, sequence, CHUNK: tl.constexpr):
    """The first chunk of memory of a sequence whose tokens begin at `begin`.  One of n tokens
    touches at most n // CHUNK + 2 aligned chunks, and that many lie before the next one's."""
    return begin // CHUNK + 2 * sequence


@triton.jit
def fade_further(before, after, HALF: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr):
    """From blocks of HALF rows to blocks of twice as many: for row t of the block from b to e,
    d(b, t), its own decay included, and d(t, e)."""
    row = tl.arange(0, CHUNK)
    upper = ((row & HALF) != 0)[:, None]
    # what all of the other half fades by stands in its last row
    last = (row | (HALF - 1)) ^ HALF
    other = tl.gather(before, tl.broadcast_to(last[:, None], (CHUNK, PART)), 0)
    return tl.where(upper, before * other, before), tl.where(upper, after, after * other)


@triton.jit
def join_halves(inverse, links, HALF: tl.constexpr, CHUNK: tl.constexpr, PRECISION: tl.constexpr):
    """(I + L)^-1 of blocks of twice HALF rows, from that of blocks of HALF rows."""
    between = tl.where(meet(HALF, CHUNK), links, 0.0)
    if HALF > 1:  # that of blocks of one row is the identity
        between = product(inverse, product(between, inverse, PRECISION), PRECISION)
    return inverse - between


@triton.jit
def meet(HALF: tl.constexpr, CHUNK: tl.constexpr):
    """[CHUNK, CHUNK]: whether row t is in the upper and column s in the lower half of one block
    of twice HALF rows."""
    row = tl.arange(0, CHUNK)
    upper = (row & HALF) != 0
    together = (row[:, None] ^ row[None, :]) < 2 * HALF
    return together & upper[:, None] & ~upper[None, :]


@triton.jit
def locate(cu_seqlens, starts, chunk, sequences, SEQUENCES: tl.constexpr, CHUNK: tl.constexpr):
    """Where the sequence with `chunk` of memory begins and ends among the tokens, and the token
    of the chunk's first row, which may lie outside; none has a chunk behind its end."""
    n = tl.arange(0, SEQUENCES)
    first = tl.load(cu_seqlens + n, mask=n < sequences, other=0)
    reached = (own_chunk(first, n, CHUNK) <= chunk) & (n < sequences)
    sequence = tl.sum(reached.to(tl.int32), axis=0) - 1
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    lead = tl.load(starts + sequence) % CHUNK
    origin = begin - lead + (chunk - own_chunk(begin, sequence, CHUNK)) * CHUNK
    return begin, end, origin


@triton.jit
def pair_up(
    query,
    key,
    decay,
    links,
    mix,
    LEAST: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    LEVELS: tl.constexpr,
    CHUNK: tl.constexpr,
    PART: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """What PART channels add to k_t . d(s, t) k_s for s < t and to q_t . d(s, t) k_s for s <= t,
    and d(0, t) and d(t, C) of each row."""
    row = tl.arange(0, CHUNK)
    before = tl.maximum(decay, LEAST)
    after = tl.full((CHUNK, PART), 1.0, tl.float32)
    for level in tl.static_range(LEVELS - FAR - 1):
        before, after = fade_further(before, after, 1 << level, CHUNK, PART)
    # all pairs of a block meet in its middle: what lies on the same side of it as the other
    # is divided by what it should not have faded by
    upper = ((row & NEAR // 2) != 0)[:, None]
    fade = tl.where(upper, before, after)
    rise = 1.0 / fade
    near = tl.where(upper, fade, rise)
    columns = tl.trans(key * tl.where(upper, rise, fade))
    pairs = (row[:, None] > row[None, :]) & ((row[:, None] ^ row[None, :]) < NEAR)
    links += tl.where(pairs, product(key * near, columns, PRECISION), 0.0)
    mix += tl.where(pairs, product(query * near, columns, PRECISION), 0.0)
    before, after = fade_further(before, after, NEAR // 2, CHUNK, PART)
    for level in tl.static_range(LEVELS - FAR, LEVELS):
        # the later of a pair needs what faded since the border, the earlier one up to it
        faded = key * tl.where(((row & 1 << level) != 0)[:, None], before, after)
        columns = tl.trans(faded)
        pairs = meet(1 << level, CHUNK)
        links += tl.where(pairs, product(faded, columns, PRECISION), 0.0)
        mix += tl.where(pairs, product(query * before, columns, PRECISION), 0.0)
        before, after = fade_further(before, after, 1 << level, CHUNK, PART)
    diagonal = row[:, None] == row[None, :]
    mix += tl.where(diagonal, tl.sum(query * key, axis=1)[:, None], 0.0)
    return before, after, links, mix


@triton.jit
def chunk_kernel(
    q,
    k,
    v,
    a,
    beta,
    cu_seqlens,
    starts,
    w_out,
    u_out,
    k_out,
    q_out,
    p_out,
    d_out,
    sequences,
    heads,
    LEAST: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    LEVELS: tl.constexpr,
    PART: tl.constexpr,
    SEQUENCES: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for a head of a chunk: all of it that does not depend on the state."""
    # the first axis runs fastest, and the heads of a token lie side by side
    head = tl.program_id(0)
    chunk = tl.program_id(1)
    begin, end, origin = locate(cu_seqlens, starts, chunk, sequences, SEQUENCES, CHUNK)
    if origin >= end:
        return

    row = tl.arange(0, CHUNK)
    token = origin + row
    live = (token >= begin) & (token < end)
    strength = tl.load(beta + token * heads + head, mask=live, other=0.0).to(tl.float32)[:, None]
    tile = chunk.to(tl.int64) * heads + head
    links = tl.zeros((CHUNK, CHUNK), tl.float32)
    mix = tl.zeros((CHUNK, CHUNK), tl.float32)
    for part in tl.range(0, KEYS // PART, num_stages=1):
        i = part * PART + tl.arange(0, PART)
        at = (token * heads + head)[:, None] * KEY + i
        inside = live[:, None] & (i < KEY)[None, :]
        # a row without a token neither fades the state nor writes to it
        key = tl.load(k + at, mask=inside, other=0.0).to(tl.float32)
        query = tl.load(q + at, mask=inside, other=0.0).to(tl.float32)
        decay = tl.load(a + at, mask=inside, other=1.0).to(tl.float32)
        before, after, links, mix = pair_up(
            query,
            key,
            decay,
            links,
            mix,
            LEAST=LEAST,
            NEAR=NEAR,
            FAR=FAR,
            LEVELS=LEVELS,
            CHUNK=CHUNK,
            PART=PART,
            PRECISION=PRECISION,
        )
        tall = tile * (CHUNK * KEYS) + row[:, None] * KEYS + i
        tl.store(q_out + tall, query * before)
        tl.store(w_out + tall, key * before * strength)
        # turned over in memory: the walk needs it with its rows along the channels
        turned = tile * (KEYS * CHUNK) + i[:, None] * CHUNK + row
        tl.store(k_out + turned, tl.trans(key * after))
        whole = tl.sum(tl.where(row[:, None] == CHUNK - 1, before, 0.0), axis=0)
        tl.store(d_out + tile * KEYS + i, whole)
    tl.store(p_out + tile * (CHUNK * CHUNK) + row[:, None] * CHUNK + row, mix)

    inverse = tl.where(row[:, None] == row[None, :], 1.0, 0.0)
    for level in tl.static_range(LEVELS):
        inverse = join_halves(inverse, links * strength, 1 << level, CHUNK, PRECISION)
    tall = tile * (CHUNK * KEYS) + row[:, None] * KEYS + tl.arange(0, KEYS)
    # the threads of a program read here what others of them wrote, and then write over it
    tl.debug_barrier()
    reading = tl.load(w_out + tall).to(tl.float32)
    tl.debug_barrier()
    tl.store(w_out + tall, product(inverse, reading, PRECISION))
    j = tl.arange(0, VALUES)
    written_at = (token * heads + head)[:, None] * VALUE + j
    written = live[:, None] & (j < VALUE)[None, :]
    value = tl.load(v + written_at, mask=written, other=0.0).to(tl.float32)
    u = product(inverse, value * strength, PRECISION)
    tl.store(u_out + tile * (CHUNK * VALUES) + row[:, None] * VALUES + j, u)


@triton.jit
def walk_kernel(
    state,
    slots,
    cu_seqlens,
    starts,
    w,
    u,
    k,
    q,
    p,
    d,
    out,
    checkpoints,
    slot_stride,
    heads,
    checkpoint_count,
    interval,
    CHECKPOINTS: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
    KEY: tl.constexpr,
    VALUE: tl.constexpr,
    KEYS: tl.constexpr,
    VALUES: tl.constexpr,
    CHUNK: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One program for SPLIT value channels of a head of a sequence, whose part of the state stays
    in registers from the first chunk to the last."""
    head = tl.program_id(1)
    sequence = tl.program_id(2)
    begin = tl.load(cu_seqlens + sequence).to(tl.int64)
    end = tl.load(cu_seqlens + sequence + 1).to(tl.int64)
    start = tl.load(starts + sequence)
    lead = start % CHUNK
    count = tl.where(end > begin, (lead + end - begin + CHUNK - 1) // CHUNK, 0).to(tl.int32)
    first = own_chunk(begin, sequence, CHUNK)

    row = tl.arange(0, CHUNK)
    i = tl.arange(0, KEYS)
    j = tl.program_id(0) * SPLIT + tl.arange(0, SPLIT)
    at = head * (KEY * VALUE) + i[:, None] * VALUE + j
    inside = (i < KEY)[:, None] & (j < VALUE)[None, :]
    slot = tl.load(slots + sequence)
    matrix = tl.load(state + slot * slot_stride + at, mask=inside, other=0.0)
    tall = row[:, None] * KEYS + i
    for index in tl.range(0, count, num_stages=STAGES):
        tile = (first + index) * heads + head
        w_part = tl.load(w + tile * (CHUNK * KEYS) + tall)
        q_part = tl.load(q + tile * (CHUNK * KEYS) + tall)
        p_part = tl.load(p + tile * (CHUNK * CHUNK) + row[:, None] * CHUNK + row)
        k_part = tl.load(k + tile * (KEYS * CHUNK) + i[:, None] * CHUNK + row)
        u_part = tl.load(u + tile * (CHUNK * VALUES) + row[:, None] * VALUES + j).to(tl.float32)
        fade = tl.load(d + tile * KEYS + i)
        fresh = u_part - product(w_part, matrix, PRECISION)
        read = product(q_part, matrix, PRECISION) + product(p_part, fresh, PRECISION)
        matrix = matrix * fade[:, None] + product(k_part, fresh, PRECISION)
        token = begin - lead + index * CHUNK + row
        live = (token >= begin) & (token < end)
        written = live[:, None] & (j < VALUE)[None, :]
        tl.store(out + (token * heads + head)[:, None] * VALUE + j, read, mask=written)
        if CHECKPOINTS:
            position = start - lead + (index + 1) * CHUNK
            if (position % interval == 0) & (position <= start + end - begin):
                which = position // interval - start // interval - 1
                wanted = which < checkpoint_count
                at_slot = checkpoints + sequence * checkpoint_count + which
                target = tl.load(at_slot, mask=wanted, other=0)
                if target > 0:
                    tl.store(state + target * slot_stride + at, matrix, mask=inside)
    tl.store(state + slot * slot_stride + at, matrix, mask=inside)
