"""Engines that a campaign can run, by name, behind `reference.contract`."""

from __future__ import annotations

from importlib import import_module
from importlib.metadata import version
from types import ModuleType

from reference.contract import Capability, EngineFactory, System

_OWN = frozenset({Capability.STAMPED, Capability.MODEL, Capability.VERIFY})
# A system's module is imported when it is asked for: a foreign engine may need what is not here.
_KNOWN: dict[str, tuple[str, frozenset[Capability]]] = {
    "reference": ("reference.engine", _OWN),
    "optimized": ("optimized.engine", frozenset(Capability)),
}


class UnknownSystem(ValueError):
    """No system has that name; the message lists those that there are."""


def names() -> tuple[str, ...]:
    """The names that `load` takes."""
    return tuple(_KNOWN)


def load(name: str) -> System:
    """The system called `name`, whose module must offer `factory`, an EngineFactory.

    Raises:
        UnknownSystem: with one sentence that lists the known names.
    """
    if name not in _KNOWN:
        raise UnknownSystem(f"There is no system {name!r}: choose one of {', '.join(_KNOWN)}.")
    module, capabilities = _KNOWN[name]
    factory: EngineFactory = import_module(module).factory
    return System(
        name=name, version=version("kvoracle"), factory=factory, capabilities=capabilities
    )


def load_ranks() -> ModuleType:
    """The drain protocol of the optimized engine: DecodeRank and PrefillRank, values whose
    methods return the next value and actions of `reference.protocol`, and what reduces the
    contributions of a round."""
    return import_module("optimized.transfer.ranks")


def load_transfer() -> ModuleType:
    """Instances of the optimized engine that hand requests over, and the network between them."""
    return import_module("systems.transfer")


def load_sharing() -> ModuleType:
    """The optimized engine's shared memory between such instances."""
    return import_module("systems.shared_memory")
