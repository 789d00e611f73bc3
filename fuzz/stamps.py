"""Provenance stamps: rows whose payload says who wrote them.

A stamped run stores, instead of a model's keys and states, rows that are a function of the
token chain alone (all tokens up to and including the position), the layer, the component and a
generation.  Whatever an engine reads back is thus either the one right row or names its writer.

A chain value is a polynomial rolling hash, a prefix sum of token * base**position mod 2**64; a
mixer makes 64 even bits of it, and one xor and one odd product per 8 bytes of payload make it
differ by layer and component.

All payloads survive their storage format exactly:

- KV rows carry integers that bf16 (0..255) or e4m3 (-6..7) represent.  In a raw FP8 row the two
  outermost values lie beyond +-448 and are stored saturated.  In a packed row 14 is the largest
  in every block; each block is multiplied by a power of two that its first byte names, so that
  its scale is exactly 14 / 448 = 1 / 32 times that power, or the least scale for a tiny block.
- Keys are +-1 in every channel.  Gates are multiples of 64 * kpool and position weights (`ape`)
  distinct multiples of 64 below that, so that the softmax over a group is one-hot in float32:
  each channel of a pooled key is the sign of the one token that won it, by its gate, or by its
  ape where the gates tie.  A wrong key, gate, ape or slot each changes the pooled row, and the
  signs come back out of the FP8 row by the inverse Hadamard transform.
- States carry integers 0..255 in float32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reference.contract import Component, Rows
from reference.geometry import PACKED_BLOCK, Geometry, ModelShape, RowFormat

U64 = npt.NDArray[np.uint64]
Bytes = npt.NDArray[np.uint8]

BASE = 0x9E3779B97F4A7C15
LEAST_CHANNELS = 16
"""Channels that hold a whole stamp in the narrowest format."""
E4M3_MAX = 448.0
BEYOND = 1000.0
"""A value that FP8 saturates."""
FACTORS = np.array([1, 2, 4, 64, 1 / 2, 1 / 8, 2**12, 2**-18], dtype=np.float32)
"""Of packed blocks: the last makes all values tiny, the one before makes all large."""
SCALES = np.maximum(14 * FACTORS, np.float32(1e-4)) / np.float32(E4M3_MAX)
"""The scale of a block for each of FACTORS, whose largest value is 14 times the factor."""
GAP = 64.0
"""Distance of two logits whose softmax is exactly one-hot in float32 (and in float64)."""


class StampError(ValueError):
    """A shape whose rows cannot carry a stamp; the message names the cure."""


def _powers(count: int) -> U64:
    """BASE**0 .. BASE**(count - 1) mod 2**64; the table doubles as it grows."""
    return _power_table(1 << max(10, (count - 1).bit_length()))


@lru_cache(maxsize=4)
def _power_table(count: int) -> U64:
    steps = np.full(count, BASE, dtype=np.uint64)
    steps[0] = 1
    return np.cumprod(steps, dtype=np.uint64)


# made once: numpy takes longer to make a scalar than to use it
FIRST, SECOND, LAST = np.uint64(30), np.uint64(27), np.uint64(31)
ODD, ALSO_ODD = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(x: U64) -> U64:
    """Even bits of chain values, [...] uint64 each, by a bijection: the finaliser of splitmix64
    (Steele et al., OOPSLA 2014)."""
    x = (x ^ (x >> FIRST)) * ODD
    x = (x ^ (x >> SECOND)) * ALSO_ODD
    return x ^ (x >> LAST)


def _bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """bf16 bit patterns of float32 values that bf16 represents exactly."""
    return (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)


def _e4m3_bits(values: npt.NDArray[np.float32]) -> Bytes:
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@lru_cache(maxsize=8)
def hadamard(dim: int) -> npt.NDArray[np.float32]:
    """Sylvester's Hadamard matrix of +-1, [dim, dim]."""
    h = np.ones((1, 1), dtype=np.float32)
    while len(h) < dim:
        h = np.block([[h, h], [h, -h]])
    return h


@lru_cache(maxsize=8)
def _index_tables(dim: int, round_scale: bool) -> tuple[Bytes, Bytes]:
    """How a pooled row of signs is stored, by the sums k of its Hadamard transform.

    Returns codes [dim + 1, 2 * dim + 1], by the row's largest |k| and by k (a negative k counts
    from the end), and the scales' bytes [dim + 1, 4], by the largest |k|."""
    sums = torch.cat([torch.arange(dim + 1), torch.arange(-dim, 0)])
    rotated = (sums.float() * dim**-0.5).bfloat16().float()
    scale = rotated[: dim + 1].clamp_min(1e-4) / 448
    if round_scale:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (rotated / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.view(torch.uint8).numpy(), scale.numpy().view(np.uint8).reshape(-1, 4)


class _Payload:
    """The 64-bit words of one component in each of its layers, from the mixed chain."""

    def __init__(
        self, component: Component, *, layers: int, words: int, generation: int, fixed: int = 0
    ) -> None:
        first = list(Component).index(component) * 0x10000 + generation * 0x1000000
        ids = first + np.arange(layers * words, dtype=np.uint64).reshape(layers, 1, words)
        self.salt = mix(ids * np.uint64(2) + np.uint64(1))
        self.odd = mix(ids * np.uint64(2)) | np.uint64(1)
        self.fixed = np.uint64(fixed)  # bits that are set in every word

    def of(self, mixed: U64, layer: int | slice = slice(None)) -> Bytes:
        """Payload bytes of n positions: [n, 8 * words], or [layers, n, 8 * words]."""
        words = (mixed[:, None] ^ self.salt[layer]) * self.odd[layer] | self.fixed
        return words.view(np.uint8)


def _kv_tables(row_format: RowFormat) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.uint16]]:
    """For each payload byte the channel values [256, 1 or 2] and their stored code(s) [256]; of a
    packed row the codes [factors, 256], by the block's factor."""
    byte = np.arange(256)
    if row_format is RowFormat.BF16:
        values = byte.astype(np.float32)[:, None]
        return values, _bf16_bits(values)[:, 0]
    packed = row_format is RowFormat.FP8_PACKED
    low, high = (-7.0, 14.0) if packed else (-BEYOND, BEYOND)
    digits = np.array([low, *range(-6, 8), high], dtype=np.float32)
    values = digits[np.stack([byte & 15, byte >> 4], axis=1)]
    stored = values * FACTORS[:, None, None] / SCALES[:, None, None] if packed else values
    codes = np.ascontiguousarray(_e4m3_bits(stored.clip(-E4M3_MAX, E4M3_MAX)))
    return values, codes.view(np.uint16)[..., 0]


def _factors(payload: Bytes) -> npt.NDArray[np.uint8]:
    """[..., blocks]: which of FACTORS each block of packed payload bytes is multiplied by."""
    factors: npt.NDArray[np.uint8] = payload[..., :: PACKED_BLOCK // 2] >> 4 & 7
    return factors


class Stamper:
    """Makes the rows of a stamped run, and says what every stored row must be.

    Chains are uint64 arrays over the positions of a request (see `chain`); only numpy, no
    engine and no reference code, computes expectations.

    Raises:
        StampError: where `latent`, `index_dim` or `state_width` is too narrow for a stamp.
    """

    def __init__(self, geometry: Geometry, shape: ModelShape, *, generation: int = 0) -> None:
        for name in ("latent", "index_dim", "state_width"):
            if getattr(shape, name) < LEAST_CHANNELS:
                raise StampError(
                    f"{name} is {getattr(shape, name)}, too narrow for a stamp: set it to at "
                    f"least {LEAST_CHANNELS}."
                )
        self.geometry, self.shape, self.generation = geometry, shape, generation
        dsa, dim, kpool = len(shape.dsa_layers), shape.index_dim, geometry.kpool
        self._values, self._codes = _kv_tables(geometry.row_format)
        per_word = 8 * self._values.shape[1]

        def payload(component: Component, layers: int, words: int, fixed: int = 0) -> _Payload:
            return _Payload(
                component, layers=layers, words=words, generation=generation, fixed=fixed
            )

        # A word's low nibble, 15, stands for the largest FP8 value: see `_kv_tables`.
        self._kv = payload(Component.KV, dsa, -(-shape.latent // per_word), fixed=0xF)
        # One bit a channel for the key and two for the gate.
        self._index = payload(Component.INDEX, dsa, -(-dim * 3 // 64))
        self._state = payload(Component.STATE, len(shape.kda_layers), -(-shape.state_width // 8))
        byte = np.arange(256)[:, None]
        self._signs = (1.0 - 2.0 * (byte >> np.arange(8) & 1)).astype(np.float32)
        self._levels = (GAP * kpool * (byte >> np.arange(0, 8, 2) & 3)).astype(np.float32)
        slot, channel = np.arange(kpool)[:, None], np.arange(dim)
        rank = (slot + channel + np.arange(dsa)[:, None, None]) % kpool
        self._ape = (GAP * rank).astype(np.float32)
        self._stored = {
            Component.KV: self._kv_rows,
            Component.INDEX: self._index_rows,
            Component.TAIL: self._tail_rows,
            Component.STATE: self._state_rows,
        }
        self._hadamard = hadamard(dim)
        self._index_codes, self._index_scales = _index_tables(dim, geometry.round_scale)
        self.ape: Tensor = torch.from_numpy(self._ape)

    def chain(self, tokens: Sequence[int] | npt.NDArray[np.int64]) -> U64:
        """[n] uint64: at each position the hash of all tokens up to and including it."""
        ids = np.asarray(tokens, dtype=np.int64).view(np.uint64) + np.uint64(1)
        return np.cumsum(ids * _powers(len(ids))[: len(ids)], dtype=np.uint64)

    def append(
        self, chain: U64, positions: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]
    ) -> U64:
        """Chains [B] at `positions` [B] that hold `tokens` [B], from the `chain` values [B] one
        position before each."""
        powers = _powers(int(positions.max()) + 1)[positions]
        return chain + (tokens.view(np.uint64) + np.uint64(1)) * powers

    def extend_rows(self, chain: U64, start: int, stop: int) -> Rows:
        """Rows of an extend over positions start .. stop - 1 of the request with `chain`."""
        marks = np.array(self.geometry.state_positions(start, stop), dtype=np.int64)
        mixed = mix(chain[start:stop])
        return self._rows(mixed, mixed[marks - 1 - start])

    def step_rows(self, chain: U64) -> Rows:
        """Rows of n positions with a state after each: a decode of n requests, whose chains at
        their new positions these are, or a verify of n drafts."""
        mixed = mix(chain)
        return self._rows(mixed, mixed)

    def expected(self, component: Component, mixed: U64, layer: int) -> Bytes:
        """[rows, row bytes] uint8: stored rows of a component, one for each of these chain
        values (or kpool of them, of an index row), which `mix` has mixed."""
        return self._stored[component](mixed, layer)

    def expected_kv(self, chain: U64, start: int, stop: int, layer: int) -> Bytes:
        """[stop - start, row bytes] uint8: stored KV rows of a DSA layer."""
        return self._kv_rows(mix(chain[start:stop]), layer)

    def expected_index(self, chain: U64, first: int, last: int, layer: int) -> Bytes:
        """[last - first, index_dim + 4] uint8: stored rows of closed groups first .. last - 1."""
        kpool = self.geometry.kpool
        return self._index_rows(mix(chain[first * kpool : last * kpool]), layer)

    def expected_tail(self, chain: U64, start: int, stop: int, layer: int) -> Bytes:
        """[stop - start, 4 * index_dim] uint8: tail rows, a bf16 key and then a bf16 gate."""
        return self._tail_rows(mix(chain[start:stop]), layer)

    def expected_state(self, chain: U64, lengths: npt.NDArray[np.int64], layer: int) -> Bytes:
        """[m, 4 * state_width] uint8: states of a KDA layer after the prefixes of `lengths`
        (each 1 or more)."""
        return self._state_rows(mix(chain[lengths - 1]), layer)

    def _kv_rows(self, mixed: U64, layer: int) -> Bytes:
        payload = self._kv.of(mixed, layer)
        latent, row_format = self.shape.latent, self.geometry.row_format
        if row_format is not RowFormat.FP8_PACKED:
            return self._codes[payload].view(np.uint8)[:, : row_format.row_bytes(latent)]
        factors = _factors(payload)
        of_byte = factors.repeat(PACKED_BLOCK // 2, axis=1)[:, : payload.shape[1]]
        codes = self._codes[of_byte, payload].view(np.uint8)
        return np.hstack([codes[:, :latent], SCALES[factors].view(np.uint8)])

    def _index_rows(self, mixed: U64, layer: int) -> Bytes:
        kpool, dim = self.geometry.kpool, self.shape.index_dim
        key, gate = self._key_and_gate(self._index.of(mixed, layer))
        # The winning logit's key: logits are multiples of GAP, so keys of +-1 do not reorder them.
        logits = (gate + key).reshape(-1, kpool, dim) + self._ape[layer]
        pooled = (np.maximum.reduce(logits, axis=1) + 1) % GAP - 1
        spread = (pooled @ self._hadamard).astype(np.int64)
        largest = np.maximum.reduce(np.abs(spread), axis=1)
        codes = self._index_codes[largest[:, None], spread]
        return np.concatenate([codes, self._index_scales[largest]], axis=1)

    def _tail_rows(self, mixed: U64, layer: int) -> Bytes:
        rows = np.concatenate(self._key_and_gate(self._index.of(mixed, layer)), axis=1)
        return _bf16_bits(rows).view(np.uint8)

    def _state_rows(self, mixed: U64, layer: int) -> Bytes:
        payload = self._state.of(mixed, layer)
        return payload[:, : self.shape.state_width].astype(np.float32).view(np.uint8)

    def pooled_signs(self, rows: Bytes) -> npt.NDArray[np.int8]:
        """[g, index_dim]: the winning tokens' signs, decoded from stored index rows whatever
        their scale; 0 where a row holds NaN."""
        dim = self.shape.index_dim
        codes = torch.from_numpy(rows[:, :dim].copy()).view(torch.float8_e4m3fn)
        return np.sign(np.nan_to_num(codes.float().numpy() @ hadamard(dim))).astype(np.int8)

    def _key_and_gate(
        self, payload: Bytes
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """[..., index_dim] keys and gates of payload bytes [..., 8 * words]."""
        dim = self.shape.index_dim
        shape = (*payload.shape[:-1], dim)
        key = self._signs[payload[..., : dim // 8]]
        gate = self._levels[payload[..., dim // 8 : dim // 8 * 3]]
        return key.reshape(shape), gate.reshape(shape)

    def _rows(self, mixed: U64, mixed_states: U64) -> Rows:
        shape = self.shape
        payload = self._kv.of(mixed)
        kv = self._values[payload].reshape(*payload.shape[:2], -1)[..., : shape.latent]
        if self.geometry.row_format is RowFormat.FP8_PACKED:
            factors = FACTORS[_factors(payload)].repeat(PACKED_BLOCK, axis=2)
            kv = kv * factors[..., : shape.latent]
        key, gate = self._key_and_gate(self._index.of(mixed))
        state = self._state.of(mixed_states)[..., : shape.state_width].astype(np.float32)
        return Rows(
            kv=torch.from_numpy(kv),
            key=torch.from_numpy(key),
            gate=torch.from_numpy(gate),
            state=torch.from_numpy(state.swapaxes(0, 1)),
        )


@lru_cache(maxsize=256)
def stamper_of(geometry: Geometry, shape: ModelShape) -> Stamper:
    """The stamper of a geometry; made once, since its tables cost more than a short run."""
    return Stamper(geometry, shape)


def unit_of(component: Component, at: int, kpool: int) -> str:
    """What row `at` of a request is, in words: its position, group or length."""
    if component is Component.INDEX:
        return f"group {at} (positions {at * kpool}..{(at + 1) * kpool - 1})"
    return f"state after {at} tokens" if component is Component.STATE else f"position {at}"


class Registry:
    """Who wrote a row: a dictionary from payloads to sentences, built when a failure needs it.

    chains: for each writer's name (for example "request 3") the chain of all its tokens.
    """

    def __init__(self, stamper: Stamper, chains: Mapping[str, U64]) -> None:
        self._stamper = stamper
        self._chains = dict(chains)

    def writer(self, component: Component, row: Bytes) -> str:
        """Names the writer of stored bytes [row bytes], or says what they look like."""
        if (row == 0xFF).all():
            return "poison (memory that is fresh or freed)"
        if not row.any():
            return "zeros"
        known = dict(self._known(component))
        found = known.get(row.tobytes())
        if found is None and component is Component.INDEX:
            return self._nearest_group(row)
        return found or "a row that no request wrote"

    def _known(self, component: Component) -> Iterable[tuple[bytes, str]]:
        stamper, kpool = self._stamper, self._stamper.geometry.kpool
        states = component is Component.STATE
        layers = stamper.shape.kda_layers if states else stamper.shape.dsa_layers
        for layer in range(len(layers)):
            where = f" of layer {layers[layer]}" if len(layers) > 1 else ""
            for name, chain in self._chains.items():
                whole = len(chain) // kpool * kpool if component is Component.INDEX else len(chain)
                for i, row in enumerate(stamper.expected(component, mix(chain[:whole]), layer)):
                    at = i + 1 if states else i
                    yield row.tobytes(), f"{name}'s {unit_of(component, at, kpool)}{where}"

    def _nearest_group(self, row: Bytes) -> str:
        """A pooled key mixed from several writers: the group whose signs it shares most."""
        known = list(self._known(Component.INDEX))
        if not known:
            return "a row that no request wrote"
        rows = np.frombuffer(b"".join(bytes_ for bytes_, _ in known), dtype=np.uint8)
        ours = self._stamper.pooled_signs(row[None])
        same = (self._stamper.pooled_signs(rows.reshape(len(known), -1)) == ours).sum(axis=1)
        best = int(same.argmax())
        return f"a mixture, nearest to {known[best][1]} ({same[best]} of {ours.size} channels)"
