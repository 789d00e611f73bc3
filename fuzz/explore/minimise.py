"""A bad run made short: events are left out as long as the same clause still breaks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

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
    size = max(1, len(best.events) // 2)
    while size:
        shorter = _without(court, best, size, clause)
        if shorter is None:
            size //= 2
        else:
            best = shorter
    return best


def _without(court: Court, run: Run, size: int, clause: str) -> Run | None:
    """A shorter run, with `size` events in a row left out."""
    for at in range(len(run.events) - size, -1, -1):
        tried = replay(court, run.events[:at] + run.events[at + size :], to_rest=clause in LIVENESS)
        if breaks(tried, clause) and len(tried.events) < len(run.events):
            return tried
    return None


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
    kept, done = symmetry.least(real), []
    for event in run:
        try:
            kept = symmetry.least(court.happen(kept, event))
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
            elif symmetry.least(after)[:-1] == kept[:-1]:
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
