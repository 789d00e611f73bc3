"""The public bugs, and how each is encoded.

A row names a report and, in one sentence, its mechanism.  It is encoded by mutants (`fuzz.mutants`)
or by scenarios that have the very same mechanism, or else says what is missing:

    bug("sglang#24527", "Pages are freed while a peer still writes them.", by=("timeout_frees",))
    bug("sglang-jax#1", "An adapter's name is not hashed.", missing="Requests have no adapters.")

A scenario is a scene that is fixed, where a mutant is found by a search.  It is handed nothing, and
returns what an oracle finds wrong; its faults are stand-ins as a mutant's are:

    @scenario(faults={"optimized.addressing.tail_start": one_short}, caught_by=("exact",))
    def tail_of_one_token() -> list[Violation]:
        '''A prompt of one token keeps its key in the tail.'''
"""

from __future__ import annotations

import difflib
import functools
import importlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from fuzz import mutants
from fuzz.mutants.registry import Body, Mutant, planted
from fuzz.step import Violation

Play = Callable[[], list[Violation]]
MODULES: tuple[str, ...] = (
    "stories",
    "addresses",
    "aborts",
    "identity",
    "boundaries",
    "restores",
    "drift",
    "notices",
    "ranks",
    "lifetimes",
    "replays",
    "pages",
    "unwritten",
    "startup",
)
"""Files of this package that hold rows and scenarios, in the order of the table."""


class UnknownBug(ValueError):
    """No row has that id; the message names the one spelt most like it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A fixed scene, which goes wrong with its faults and does not without.

    Fields:
        sentence: what the scene shows.
        faults: dotted names of the functions that it replaces, each with its stand-in.
        caught_by: the oracles that may find it.
        play: plays the scene; returns what is wrong with it.
    """

    name: str
    sentence: str
    faults: Mapping[str, Body]
    caught_by: tuple[str, ...]
    play: Play

    def applied(self) -> AbstractContextManager[None]:
        """Inside, the product has the faults."""
        return planted(self.faults)


@dataclass(frozen=True, slots=True, kw_only=True)
class Bug:
    """One public report.

    Fields:
        id: repository and number of the issue or pull request.
        sentence: its mechanism.
        by: the mutants and scenarios that have it; none where something is missing.
        missing: what the contract would need to express it.
    """

    id: str
    sentence: str
    by: tuple[str, ...]
    missing: str


_BUGS: dict[str, Bug] = {}
_SCENARIOS: dict[str, Scenario] = {}


def bug(name: str, sentence: str, *, by: tuple[str, ...] = (), missing: str = "") -> None:
    """Enter the report called `name`: what has its mechanism, or what that would take."""
    assert name not in _BUGS, f"{name} is entered twice"
    assert bool(by) != bool(missing), f"{name} is either encoded or not"
    _BUGS[name] = Bug(id=name, sentence=sentence, by=by, missing=missing)


def scenario(*, faults: Mapping[str, Body], caught_by: tuple[str, ...]) -> Callable[[Play], Play]:
    """Register the decorated function as a scenario that its faults spoil."""

    def register(play: Play) -> Play:
        name = play.__name__
        assert name not in _SCENARIOS, f"two scenarios are called {name}"
        assert play.__doc__, f"scenario {name} says nothing of what it shows"
        _SCENARIOS[name] = Scenario(
            name=name,
            sentence=" ".join(play.__doc__.split()),
            faults=faults,
            caught_by=caught_by,
            play=play,
        )
        return play

    return register


@functools.cache
def registered() -> dict[str, Bug]:
    """All rows by id, in the order of the table."""
    for module in MODULES:
        importlib.import_module(f"fuzz.bugs.{module}")
    return _BUGS


def scenarios() -> dict[str, Scenario]:
    """All scenarios by name."""
    registered()
    return _SCENARIOS


def encoding(name: str) -> Mutant | Scenario:
    """The scenario of that name, else the mutant.

    Raises:
        UnknownMutant: where there is neither.
    """
    return scenarios().get(name) or mutants.find(name)


def find(name: str) -> Bug:
    """The row called `name`.

    Raises:
        UnknownBug: with one sentence that names the one spelt most like it.
    """
    if name not in registered():
        (alike,) = difflib.get_close_matches(name, registered(), n=1, cutoff=0.0)
        raise UnknownBug(
            f"There is no bug {name!r}: choose one of docs/bugs.md, {alike!r} for example."
        )
    return registered()[name]
