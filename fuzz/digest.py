"""What two runs of one tape must have in common, in few bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from hashlib import blake2b
from typing import Any

import msgspec
from torch import Tensor

from reference.contract import Capability, Component, Engine, EngineOptions, components
from reference.geometry import ModelShape

BYTES = 16


class Digest:
    """A digest in two tiers.  *Exact*: choices, verdict, accounts, selections, and stamped
    bytes, which are the same on every machine.  *Full*: with what a model run computed in floats,
    which is the same wherever its sums are taken in the same order, at one version of torch."""

    def __init__(self) -> None:
        self._exact, self._floats = blake2b(digest_size=BYTES), blake2b(digest_size=BYTES)

    def add(self, *values: Any) -> None:
        """Plain data and structs, in the exact tier."""
        self._exact.update(msgspec.msgpack.encode(values))

    def add_tensor(self, values: Tensor, *, exact: bool) -> None:
        """The bytes of a tensor in either tier."""
        (self._exact if exact else self._floats).update(values.numpy().tobytes())

    @property
    def exact(self) -> str:
        return self._exact.hexdigest()

    @property
    def full(self) -> str:
        return combined((self.exact, self._floats.hexdigest()))


def buffers(engine: Engine, shape: ModelShape, options: EngineOptions) -> Iterator[Tensor]:
    """All memory of an engine that shows it, as it stands."""
    if Capability.RAW not in engine.capabilities:
        return
    for component in components(options):
        layers = shape.kda_layers if component is Component.STATE else shape.dsa_layers
        yield from (engine.raw(component, layer) for layer in range(len(layers)))


def combined(digests: Iterable[str]) -> str:
    """One digest of several."""
    return blake2b("".join(digests).encode(), digest_size=BYTES).hexdigest()
