"""What a mutant is, how one is written, and how it is put on the engine.

A mutant is a function that stands in for one of the product's.  It is named after its fault, its
docstring is the one sentence that says what goes wrong, and it is handed the function that it
replaces, so that most are a line or two:

    @mutant("optimized.addressing.tail_start", bug="own", killed_by=("provenance",))
    def tail_one_short(original, geometry, length):
        '''An extend keeps one key too few in the tail ring.'''
        return original(geometry, length) + 1

The product knows nothing of it: the function is found by its dotted name and patched from
outside.  A mutant must be well behaved.  It raises nothing of its own, and a wrong address that
it makes up still lies in the buffer, since only an oracle's verdict counts as a kill.
"""

from __future__ import annotations

import difflib
import functools
import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal
from unittest.mock import patch

from fuzz.targets.setup import Payload, Pin

Body = Callable[..., Any]
MODULES = (
    "head_pages",
    "addresses",
    "plans",
    "pooling",
    "rows",
    "selection",
    "sharing",
    "states",
    "hisparse",
    "host_rows",
    "hot_pages",
    "restoring",
    "drain",
    "transfer",
    "shm",
    "public_compute",
    "public_memory",
    "public_drafts",
    "public_reads",
    "public_drain",
)
"""Files of this package that hold mutants, in the order of the report."""


PROTOCOL = ("optimized.transfer.drain.", "optimized.transfer.ranks.")
"""How the names of the drain protocol's functions begin."""


class UnknownMutant(ValueError):
    """No mutant has that name; the message says where they are listed."""


class UnknownFunction(ValueError):
    """A fault stands in for a function that is not there; the message says for which."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    """One planted fault.

    Fields:
        bug: id of the public report that it re-creates, or "own".
        sentence: what the faulty engine does.
        patches: dotted names of the functions that it replaces, each with its stand-in.
        killed_by: the oracles that may find it first.
        target: the fuzz target that should find it; "drain" is the exhaustive search.
        payload: the kind of run in which it shows.
        bounds: of the exhaustive search, by its name in `fuzz.explore.bounds`.
        needs: "address" where it shows only at addresses beyond any pool's size: then it is
            killed by comparing addresses, without memory (`fuzz.mutants.report`).
        equivalence: the test that proves that it cannot matter; None for those to be killed.
    """

    name: str
    bug: str
    sentence: str
    patches: Mapping[str, Body]
    killed_by: tuple[str, ...]
    target: str
    payload: Payload
    bounds: str
    needs: Literal["address"] | None
    equivalence: str | None

    @property
    def pin(self) -> Pin:
        """Choices that a search for it takes out of the tape's hands."""
        return Pin(payload=self.payload)

    @property
    def of_protocol(self) -> bool:
        """Whether it is a fault of the drain protocol, and shows where there is no engine."""
        return any(name.startswith(PROTOCOL) for name in self.patches)

    def applied(self) -> AbstractContextManager[None]:
        """Inside, engines have the fault: those that exist and those that are built."""
        return planted(self.patches)


@contextmanager
def planted(patches: Mapping[str, Body]) -> Iterator[None]:
    """Inside, each function of a dotted name has its stand-in, which is handed the original.

    Raises:
        UnknownFunction: where there is none of that name.
    """
    with ExitStack() as stack:
        for name, body in patches.items():
            holder, attribute, original = _resolved(name)
            stack.enter_context(patch.object(holder, attribute, _standing_in(original, body)))
        yield


def _resolved(name: str) -> tuple[Any, str, Body]:
    """What holds the function of a dotted name, what it is called there, and the function."""
    owner, _, attribute = name.rpartition(".")
    try:
        holder = pkgutil.resolve_name(owner)
        return holder, attribute, getattr(holder, attribute)
    except (AttributeError, ImportError, ValueError) as cause:
        raise UnknownFunction(
            f"A fault stands in for {name!r}, which cannot be found ({cause}): correct that name "
            "where the fault is registered."
        ) from cause


def _standing_in(original: Body, body: Body) -> Body:
    @functools.wraps(original)
    def faulty(*args: Any, **kwargs: Any) -> Any:
        return body(original, *args, **kwargs)

    return faulty


_REGISTERED: dict[str, Mutant] = {}


def mutant(
    *where: str,
    bug: str,
    killed_by: tuple[str, ...],
    also: Mapping[str, Body] = MappingProxyType({}),
    target: str = "prefix_split",
    payload: Payload = "stamped",
    bounds: str = "",
    needs: Literal["address"] | None = None,
    equivalence: str | None = None,
) -> Callable[[Body], Body]:
    """Register the decorated function as a mutant of the functions called `where`; `also` are
    stand-ins for further ones."""

    def register(body: Body) -> Body:
        name = body.__name__
        assert name not in _REGISTERED, f"two mutants are called {name}"
        assert body.__doc__, f"mutant {name} says nothing of its fault"
        _REGISTERED[name] = Mutant(
            name=name,
            bug=bug,
            sentence=" ".join(body.__doc__.split()),
            patches={**dict.fromkeys(where, body), **also},
            killed_by=killed_by,
            target=target,
            payload=payload,
            bounds=bounds,
            needs=needs,
            equivalence=equivalence,
        )
        return body

    return register


@functools.cache
def registered() -> dict[str, Mutant]:
    """All mutants by name, in the order of the report."""
    for module in MODULES:
        importlib.import_module(f"fuzz.mutants.{module}")
    return _REGISTERED


def names() -> tuple[str, ...]:
    """The names that `find` takes."""
    return tuple(registered())


def find(name: str) -> Mutant:
    """The mutant called `name`.

    Raises:
        UnknownMutant: with one sentence that names the one spelt most like it.
    """
    if name not in registered():
        (alike,) = difflib.get_close_matches(name, registered(), n=1, cutoff=0.0)
        raise UnknownMutant(
            f"There is no mutant {name!r}: choose one of docs/mutants.md, {alike!r} for example."
        )
    return registered()[name]
