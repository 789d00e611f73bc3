"""Which behaviours a run has shown, as features: short strings of a bounded vocabulary.

A feature is an operation with the class of each thing that decides what the engine has to do: on
which boundary a length ends, how the request shares its prefix, which memory ran short, where a
transfer stands and what is on its way.  Pairs of operations that follow one another are features
too, and so is how often an event was seen, in powers of two (as AFL counts branches).  Guidance
(`fuzz.guidance`) keeps the tapes that show rare ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from fuzz.step import Step, World
from reference.geometry import Geometry
from reference.protocol import (
    Delivered,
    Moved,
    Observation,
    Peer,
    Phase,
    Sent,
    Settled,
    TransferKey,
)

MOST_COUNTED = 4
"""Bits of a count: 8 times and more are one class."""
SEVERAL = 3
"""So many and more are one class."""


class Coverage:
    """The features of one run, gathered as it goes.

    Fields:
        features: each with how much of the tape was read when it was first shown.
    """

    def __init__(self, read: Callable[[], int]) -> None:
        self.features: dict[str, int] = {}
        self._read = read
        self._before = "start"
        self._counts: dict[str, int] = {}
        self._ranks: dict[TransferKey, dict[Peer, Phase]] = {}
        self._standing: dict[int, str] = {}
        """The phases that the ranks have given to the newest transfer of a room."""

    def operation(self, kind: str, *classes: str) -> None:
        """Note an operation and the classes that it falls into, and that it follows another."""
        name = " ".join((kind, *classes))
        self._show(name)
        self._show(f"{self._before} > {name}")
        self._before = kind

    def step(self, step: Step, world: World) -> None:
        """Note a step of an engine."""
        if not step.idle:
            self.operation(step.text.partition(" ")[0], *_classes(step, world))

    def standing(self, room: int) -> str:
        """Where the newest transfer of a room stands, on all ranks of D together."""
        return self._standing.get(room, "unknown")

    def observe(self, observations: Iterable[Observation]) -> None:
        """Note what became of transfers, each beside where it stood then."""
        for seen in observations:
            about = seen.message if isinstance(seen, Sent | Delivered) else seen
            key = getattr(about, "key", None)
            if key is None:
                continue
            what = type(seen).__name__
            if about is not seen:
                what += " " + type(about).__name__
            elif isinstance(seen, Settled):
                what += " " + seen.outcome.name
            elif isinstance(seen, Moved):
                what += " to " + seen.phase.name
            self._show(f"{what} where {self.standing(key.room)}")
            if isinstance(seen, Moved):
                ranks = self._ranks.setdefault(key, {})
                ranks[seen.at] = seen.phase
                names = sorted(phase.name for phase in ranks.values())
                self._standing[key.room] = " and ".join(names)

    def count(self, events: Mapping[str, int]) -> None:
        """Note what was seen how often so far."""
        for name, count in events.items():
            bits = min(count.bit_length(), MOST_COUNTED)
            if bits > self._counts.get(name, 0):
                self._counts[name] = bits
                self._show(f"{name} x{1 << bits - 1}")

    def _show(self, feature: str) -> None:
        self.features.setdefault(feature, self._read())


def several(count: int) -> str:
    """The class of a small count."""
    return str(count) if count < SEVERAL else f"{SEVERAL}+"


def boundary(length: int, geometry: Geometry) -> str:
    """Where a length ends: at the end of the largest unit that it reaches, one before or behind
    it, or inside a group."""
    units = (
        ("interval", geometry.mamba_track_interval),
        ("page", geometry.logical_page_size),
        ("physical page", geometry.physical_page_size),
        ("group", geometry.kpool),
    )
    for off, where in ((0, "at"), (1, "behind"), (-1, "before")):
        for name, size in units:
            if (length - off) % size == 0:
                return f"{where} {name}"
    return "inside"


def _classes(step: Step, world: World) -> Iterator[str]:
    """What a step of an engine falls into."""
    before, after = step.before, step.after
    if step.submitted is not None:
        yield _hit(step, world.geometry)
    elif step.tier is not None:
        yield "failed" if step.tier.raised else f"returned {step.tier.returned is not None}"
    else:
        yield from _requests(step, world)
    if step.refused is not None:
        yield "refused"
    if after.evicted_pages > before.evicted_pages:
        yield "evicting"
    if after.reused_pages > before.reused_pages:
        yield "reusing"


def _hit(step: Step, geometry: Geometry) -> str:
    """How much of what was shared a request found, and where the rest of it ends."""
    found = "hit" if step.hit else "miss"
    return f"{found}, shared {boundary(step.shared, geometry)}" if step.shared else found


def _requests(step: Step, world: World) -> Iterator[str]:
    """Of the requests that an operation concerns: how many, where the first of them ends, and
    whether it reads pages of others."""
    yield several(len(step.calls))
    request = min(step.calls, default=None)
    if request is None:
        return
    client = world.clients[request]
    yield boundary(client.length, world.geometry)
    view = step.after.requests.get(request) or step.before.requests.get(request)
    if view is not None and view.shared:
        counts = step.before.ref_counts
        read = any(counts.get(page, 0) > 2 for page in view.pages[: view.shared])
        yield "shared by running" if read else "shared"
