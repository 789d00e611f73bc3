"""Request traces in Mooncake's format: a reader, the tokens behind the hashes, and a
generator of traces with the statistics of the published one.

A trace is JSON lines, one request each: `timestamp` (ms), `input_length` and
`output_length` (tokens), and `hash_ids`, one for each block of 512 prompt tokens, the last
block cut to the length.  Equal ids mean equal prefixes.  Source: Mooncake (FAST '25),
release of its conversation trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated

import msgspec
import numpy as np
from numpy.typing import NDArray

BLOCK = 512
"""Prompt tokens behind one hash id."""

MAX_LINE_BYTES = 1 << 20
MAX_TOKENS = 1 << 22


class TraceError(ValueError):
    """A trace that cannot be used; the message names the line and the cure."""


Length = Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)]
HashId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 48)]


class TraceRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One request: arrival in ms, lengths in tokens, one hash id for each 512-token block."""

    timestamp: Annotated[int, msgspec.Meta(ge=0)]
    input_length: Length
    output_length: Length
    hash_ids: tuple[HashId, ...]


def read_trace(path: Path) -> list[TraceRequest]:
    """All requests of a trace file, in its order.

    Raises:
        TraceError: with one sentence, for a file that cannot be read, a malformed line, or a
            line whose hash ids do not cover its prompt.
    """
    try:
        if path.exists() and not path.is_file():
            raise TraceError(
                f"{path} is no regular file: save the trace as one, since it is read several times."
            )
        with path.open("rb") as file:
            lines = iter(lambda: file.readline(MAX_LINE_BYTES + 1), b"")
            requests = list(_parse(path.name, lines))
    except OSError as error:
        raise TraceError(
            f"{path} cannot be read ({error.strerror}): pass a readable file in Mooncake's format."
        ) from error
    if not requests:
        raise TraceError(f"{path.name} holds no request: pass a file of at least one JSON line.")
    return requests


def write_trace(path: Path, requests: Sequence[TraceRequest]) -> None:
    """Write requests as `read_trace` reads them."""
    path.write_bytes(msgspec.json.Encoder().encode_lines(requests))


def _parse(name: str, lines: Iterator[bytes]) -> Iterator[TraceRequest]:
    decoder = msgspec.json.Decoder(TraceRequest)
    for number, line in enumerate(lines, start=1):
        where = f"{name}, line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(f"{where} is over {MAX_LINE_BYTES} bytes: split or drop the request.")
        try:
            request = decoder.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise TraceError(
                f"{where} is no request ({str(error).rstrip('.')}): write a JSON object with "
                "timestamp, input_length, output_length and hash_ids there, or drop the line."
            ) from error
        blocks = -(-request.input_length // BLOCK)
        if len(request.hash_ids) != blocks:
            raise TraceError(
                f"{where} has {len(request.hash_ids)} hash ids for {request.input_length} prompt "
                f"tokens: give it {blocks}, one for each block of {BLOCK} tokens."
            )
        yield request


def prompt_tokens(request: TraceRequest, *, vocab: int) -> NDArray[np.int64]:
    """[input_length] int64 in [0, vocab), so that equal ids give equal blocks.

    A trace says which whole blocks two prompts share, not where inside the next one they part.
    That place is drawn here from the hash of the last block they share: the blocks that follow
    it open alike, and end as their own ids say.  So prefixes end anywhere in a logical page.
    """
    ids = np.array(request.hash_ids, np.uint64)[:, None]
    parts_at = np.zeros_like(ids)
    parts_at[1:] = _mix(ids[:-1]) % np.uint64(BLOCK - OWN_TOKENS)
    follows = np.zeros_like(ids)
    follows[1:] = ids[:-1] + FOLLOWERS
    source = np.where(parts_at > OFFSETS, follows, ids)
    return _tokens(source, vocab)[: request.input_length]


def output_tokens(number: int, length: int, *, vocab: int) -> NDArray[np.int64]:
    """[length] int64 in [0, vocab): what request `number` of a trace generates."""
    first = number * (MAX_TOKENS // BLOCK)
    ids = np.arange(first, first + -(-length // BLOCK), dtype=np.uint64)
    return _tokens(ids[:, None] + ANSWERS, vocab)[:length]


OWN_TOKENS = 32
"""The last tokens of a block are always its own, so that blocks differ wherever ids do."""
OFFSETS = np.arange(BLOCK, dtype=np.uint64)
# Sources of tokens beside the hash ids, all of which are below 2**48.
FOLLOWERS = np.uint64(1 << 48)
ANSWERS = np.uint64(1 << 49)


def _tokens(source: NDArray[np.uint64], vocab: int) -> NDArray[np.int64]:
    """Tokens of blocks whose every token has a source: [blocks, 1 or BLOCK] to [tokens]."""
    hashed = _mix(source * np.uint64(BLOCK) + OFFSETS) % np.uint64(vocab)
    return hashed.reshape(-1).astype(np.int64)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """splitmix64 (Steele et al., OOPSLA 2014): neighbours become unlike."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


# Quantiles of the published conversation trace (12,031 requests), at these shares.
SHARES = (0, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99, 1)
# fmt: off
OPENING_TOKENS = (891, 895, 897, 905, 1092, 1756, 3913, 5264, 7418, 10770, 15871, 25559, 38493,
                  67125, 89867, 126195)
OUTPUT_TOKENS = (1, 3, 10, 24, 100, 213, 291, 350, 399, 447, 504, 597, 698, 891, 1118, 2000)
# What a continuation adds beyond the earlier answer; negative where the answer was trimmed.
MESSAGE_TOKENS = (-1291, -110, -21, -4, 7, 11, 16, 26, 51, 171, 694, 4194, 6921, 11726, 16705,
                  91467)
LAG_REQUESTS = (5, 60, 95, 138, 200, 253, 323, 423, 555, 771, 1087, 1642, 2090, 3378, 5063, 10514)
BRANCH_BLOCKS = (2, 2, 2, 2, 3, 3, 4, 6, 8, 12, 17, 27, 46, 69, 145, 145)
# fmt: on
BRANCH_SHARE = 0.125
"""Above the measured 699 of 8,072: a short origin has nothing to branch from."""
CONTINUED = (0.29, 0.43, 0.53, 0.60, 0.64, 0.69, 0.74)
"""Chance that a request of this turn is continued; the last entry holds for later turns.
Above the measured shares, which the trace's end cuts short."""
SHORTEST = 891
LONGEST = 126_195
REQUESTS_PER_TICK = 10.2
TICK_MS = 3000


def generate_trace(requests: int, *, seed: int) -> list[TraceRequest]:
    """A trace with the statistics of Mooncake's conversation trace, from a seed.

    Every prompt opens with the same block.  A request opens a conversation, continues an
    earlier one (its prompt is the earlier prompt, the answer and a message, sharing all whole
    blocks of the earlier prompt), or branches off (the same length, sharing a part).

    Matched, published against generated (12,031 requests, mean of seeds 0 to 4):
        prompt tokens, 10 % of them below    964 against 995
                       50 %                6,909 against 6,496
                       90 %               27,367 against 28,785
                       99 %               85,400 against 92,003
        answer tokens, 10 % of them below     24 against 23
                       50 %                  350 against 350
                       99 %                1,118 against 1,141
        prompts that continue one         32.9 % against 33.3 %
        prompts that branch off one        5.8 % against 5.3 %
        blocks seen before                36.6 % against 38.9 %
        requests between turns, median       422 against 370
    Not matched: correlation of lengths with arrival time, and documents shared by dozens of
    conversations.
    """
    return _Generator(seed).run(requests)


class _Generator:
    """Draws requests in arrival order; a continuation is booked for the arrival it falls on."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.next_id = 1

    def run(self, count: int) -> list[TraceRequest]:
        made: list[TraceRequest] = []
        turns: list[int] = []
        booked: dict[int, int] = {}
        for number in range(count):
            earlier = booked.pop(number, None)
            turn = 0 if earlier is None else turns[earlier] + 1
            if earlier is not None:
                made.append(self._continue(number, made[earlier]))
            elif made and self.rng.random() < BRANCH_SHARE:
                made.append(self._branch(number, made))
            else:
                made.append(self._request(number, self._draw(OPENING_TOKENS), (0,)))
            turns.append(turn)
            if self.rng.random() < CONTINUED[min(turn, len(CONTINUED) - 1)]:
                arrival = number + self._draw(LAG_REQUESTS)
                while arrival in booked:
                    arrival += 1
                booked[arrival] = number
        return made

    def _draw(self, quantiles: Sequence[int]) -> int:
        # asinh is a logarithm that admits negative values: the tails are convex in it
        scaled = np.interp(self.rng.random(), SHARES, np.arcsinh(quantiles))
        return round(float(np.sinh(scaled)))

    def _continue(self, number: int, earlier: TraceRequest) -> TraceRequest:
        length = earlier.input_length + earlier.output_length + self._draw(MESSAGE_TOKENS)
        whole = earlier.input_length // BLOCK
        # at least one token beyond what it shares, since the prompt is a new one
        return self._request(number, max(length, whole * BLOCK + 1), earlier.hash_ids[:whole])

    def _branch(self, number: int, made: list[TraceRequest]) -> TraceRequest:
        origin = made[max(0, number - self._draw(LAG_REQUESTS))]
        shared = min(self._draw(BRANCH_BLOCKS), origin.input_length // BLOCK)
        return self._request(number, origin.input_length, origin.hash_ids[:shared])

    def _request(self, number: int, length: int, shared: tuple[int, ...]) -> TraceRequest:
        length = min(max(length, SHORTEST), LONGEST)
        blocks = -(-length // BLOCK)
        ids = shared[:blocks] + tuple(
            range(self.next_id, self.next_id + max(0, blocks - len(shared)))
        )
        self.next_id += len(ids) - len(shared[:blocks])
        return TraceRequest(
            timestamp=int(number / REQUESTS_PER_TICK) * TICK_MS,
            input_length=length,
            output_length=self._draw(OUTPUT_TOKENS),
            hash_ids=ids,
        )
