"""A bad run made short: events are left out as long as the same clause still breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from fuzz.explore.choices import events
from fuzz.explore.judged import Court
from fuzz.explore.schedule import Run, replay
from fuzz.explore.symmetry import Symmetry, renamed
from fuzz.explore.words import Event
from reference.drain import Violation

LIVENESS = {"L1", "L2", "L5"}


def minimised(court: Court, run: Sequence[Event], clause: str) -> Run:
    """A short run that breaks `clause`, and from which no single event can be left out.

    Raises:
        ValueError: where `run` itself does not break it.
    """
    best = replay(court, run, to_rest=clause in LIVENESS)
    if not breaks(best, clause):
        raise ValueError(f"The run does not break {clause}: minimise one that does.")
    lively = clause in LIVENESS
    return fewest(
        lambda events: replay(court, events, to_rest=lively), best, lambda r: breaks(r, clause)
    )


class Replayed(Protocol):
    """A run, as far as its events were possible."""

    @property
    def events(self) -> Sequence[Event]: ...


R = TypeVar("R", bound=Replayed)


def fewest(again: Callable[[Sequence[Event]], R], run: R, bad: Callable[[R], bool]) -> R:
    """A bad run from which no single event can be left out; `again` replays some."""
    size = max(1, len(run.events) // 2)
    while True:
        shorter = _without(again, run, size, bad)
        if size == 1 and len(shorter.events) == len(run.events):
            return shorter
        run, size = shorter, max(1, size // 2)


def _without(
    again: Callable[[Sequence[Event]], R], run: R, size: int, bad: Callable[[R], bool]
) -> R:
    """The run without each `size` events in a row that it does not need, the last ones first."""
    at = len(run.events) - size
    while at >= 0:
        tried = again([*run.events[:at], *run.events[at + size :]])
        if bad(tried) and len(tried.events) < len(run.events):
            run = tried
        at = min(at, len(run.events)) - size
    return run


def breaks(run: Run, clause: str) -> bool:
    """Whether a run breaks `clause`.  L1, L2 and L5 are one: which of them is named depends on who
    is looked at first among those that are left waiting."""
    if run.violation is None:
        return False
    found = run.violation.clause.value
    return found == clause or {found, clause} <= LIVENESS


def followed(court: Court, symmetry: Symmetry, run: Sequence[Event]) -> tuple[Event, ...]:
    """A run of a search that kept one state of each class, with the names of one real run."""
    real = court.start()
    kept, done = symmetry.least_of(real), []
    for event in run:
        try:
            kept = symmetry.least_of(court.happen(kept, event))
        except Violation:
            kept = None
        for other in _renamings(symmetry, event):
            if other not in events(court.world, real[:-1]):
                continue
            try:
                after = court.happen(real, other)
            except Violation:
                after = None
            if after is None or kept is None:
                if after is kept:
                    return (*done, other)
            elif symmetry.least_of(after)[:-1] == kept[:-1]:
                done.append(other)
                real = after
                break
        else:
            raise AssertionError(f"{event} has no counterpart in a real run")
    return tuple(done)


def _renamings(symmetry: Symmetry, event: Event) -> Iterator[Event]:
    """The event with all names that its ranks may have."""
    yield event
    for to in symmetry.renamings:
        what = renamed(event.what, to)
        yield event._replace(what=what)
        yield event._replace(rank=to[event.rank], what=what)
