"""Engines that a campaign can run, by name, behind `reference.contract`."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from types import ModuleType

from reference.contract import Capability, EngineFactory, System

_OWN = frozenset(
    {
        Capability.STAMPED,
        Capability.MODEL,
        Capability.VERIFY,
        Capability.ANY_DRAFTS,
        Capability.CHUNKS,
        Capability.ANY_CHUNK,
    }
)
# A system's module is imported when it is asked for: a foreign engine may need what is not here.
_KNOWN: dict[str, tuple[str, frozenset[Capability]]] = {
    "reference": ("reference.engine", _OWN),
    "optimized": ("optimized.engine", frozenset(Capability)),
}
_FOREIGN = {"sglang": ("sglang==VERSION", "sglang@PATH")}
"""Packages of this one that offer `system`, and what the names of their systems look like."""


class UnknownSystem(ValueError):
    """No system has that name; the message lists those that there are."""


class CannotLoad(RuntimeError):
    """There is such a system, but not here, or not so; the message names the cure."""


def load(name: str) -> System:
    """The system called `name`, whose module must offer `factory`, an EngineFactory.

    Raises:
        UnknownSystem: with one sentence that lists the known names.
        CannotLoad: what it needs cannot be had.
    """
    if package := foreign(name):
        found: System = import_module(f"systems.{package}").system(name)
        return found
    if name not in _KNOWN:
        known = [*_KNOWN, *(form for forms in _FOREIGN.values() for form in forms)]
        raise UnknownSystem(f"There is no system {name!r}: choose one of {', '.join(known)}.")
    module, capabilities = _KNOWN[name]
    factory: EngineFactory = import_module(module).factory
    return System(
        name=name, version=version("kvoracle"), factory=factory, capabilities=capabilities
    )


def foreign(name: str) -> str | None:
    """The package that the system called `name` is of, if it is somebody else's."""
    package = re.split("==|@", name, maxsplit=1)[0]
    return package if package in _FOREIGN and package != name else None


def is_checkout(name: str) -> bool:
    """Whether a foreign system's name says in which folder its code lies."""
    package = foreign(name)
    return package is not None and name.startswith(f"{package}@")


def releases(package: str) -> list[str]:
    """The versions of a foreign package that are known here, the oldest first."""
    return list(import_module(f"systems.{package}").RELEASES)


def unpacked(package: str, version: str) -> Path:
    """The folder PATH of a foreign package's release, for which `package@PATH` is a system.

    Raises:
        CannotLoad: it can neither be found nor fetched.
    """
    folder: Path = import_module(f"systems.{package}.wheels").unpacked(version)
    return folder


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
