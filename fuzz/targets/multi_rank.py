"""Ranks of P and D that hand requests over while everything around them goes wrong.

No engine: the drain protocol alone, in a world of up to four processes a side, with more requests
than destinations, rooms that are used again, writes in parts, and faults and restarts at any
time.  The tape draws the bounds of the world, and then one thing after the other that happens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from fuzz.explore.words import Bounds
from fuzz.tape import Tape
from fuzz.targets import Target
from reference.protocol import Completion, Topology

TOPOLOGIES: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((0,),),
    ((0,), (1,)),
    ((0,), (1,), (2,)),
    ((0, 1),),
    ((0,), (0,)),
    ((0, 1), (2, 3)),
    ((0, 1, 2),),
)
"""Who writes to each rank of D: in pairs, fanned in, fanned out."""
MOST_REQUESTS = 5
FREE = {1: MOST_REQUESTS - 1, 13: 3, 14: 3, 15: 2}
"""Places in a setup of the requests beyond one, the faults, the aborts and the restarts, and the
most that is drawn there."""

MULTI_RANK = Target(
    name="multi_rank",
    required=frozenset(
        {
            "abort_with_one_rank_drained",
            "ack_before_arm",
            "drained_late",
            "late_write_after_abort",
            "live",
            "quarantined",
            "restarted",
            "restarted_with_write_in_flight",
            "reuse_after_drain",
            "room_reused_with_chunk_in_flight",
            "write_of_former_life",
        }
    ),
    operations=400,
)


def draw_bounds(tape: Tape) -> Bounds:
    """The bounds of a world; the number of draws is always the same, and 0 the plainest."""
    with tape.span("setup"):
        writers = TOPOLOGIES[tape.draw(len(TOPOLOGIES))]
        requests = 1 + tape.draw(MOST_REQUESTS, favour=(1, 2, 3, 4))
        rooms = [0]
        for request in range(1, MOST_REQUESTS):
            earlier = tape.draw(request + 1)
            rooms.append(rooms[earlier - 1] if earlier else request)
        return Bounds(
            topology=Topology(
                pieces=1 + tape.draw(2), writers=writers, quarantine_limit=2 - tape.draw(2)
            ),
            completion=(Completion.STATUS, Completion.NOTIFY)[tape.draw(2)],
            rooms=tuple(rooms[:requests]),
            slots=3 - tape.draw(3, favour=(1, 2)),
            parts=1 + tape.draw(3, favour=(1, 2)),
            advertise_apart=bool(tape.draw(2)),
            settle_apart=bool(tape.draw(2)),
            faults=tape.draw(4, favour=(1, 2, 3)),
            aborts=tape.draw(4),
            restarts=tape.draw(3, favour=(1, 2)),
        )


def plainer(setup: Sequence[int]) -> Iterator[list[int]]:
    """Draws of the worlds that are no less plain than that of `setup`, the plainest first.

    What counts is how many processes beyond two there are, requests beyond one, whatever room they
    have, and things that may go wrong; they stand in for one another.  All else counts by its
    value, and is no higher than in `setup`.
    """
    rooms = slice(2, 1 + MOST_REQUESTS)
    most = [FREE.get(place, value) for place, value in enumerate(setup)]
    del most[rooms], most[0]
    for weight in range(_processes(setup[0]) + sum(setup[1:]) - sum(setup[rooms]) + 1):
        for topology in range(len(TOPOLOGIES)):
            for requests, *rest in _summing(most, weight - _processes(topology)):
                faults, _, restarts = rest[-3:]
                if restarts > faults:  # only the dead start again
                    continue
                for taken in product(*(range(request + 1) for request in range(1, requests + 1))):
                    unused = [0] * (MOST_REQUESTS - 1 - requests)
                    yield [topology, requests, *taken, *unused, *rest]


def _processes(topology: int) -> int:
    """Those beyond one on each side."""
    writers = TOPOLOGIES[topology]
    return len(writers) + len(set().union(*writers)) - 2


def _summing(most: Sequence[int], total: int) -> Iterator[tuple[int, ...]]:
    """Values up to `most` with that sum, the first ones least."""
    if not most and total == 0:
        yield ()
    if not 0 <= total <= sum(most):
        return
    for first in range(min(most[0], total) + 1) if most else ():
        yield from ((first, *rest) for rest in _summing(most[1:], total - first))


def described(bounds: Bounds) -> str:
    """Bounds in words."""
    topology = bounds.topology
    writers = ", ".join("P" + "+P".join(map(str, ranks)) for ranks in topology.writers)
    return (
        f"ranks of D written to by {writers}; rooms {list(bounds.rooms)} for {bounds.slots} slots, "
        f"{topology.pieces} pieces and an aux row, pieces in {bounds.parts} parts, "
        f"{bounds.completion.name.lower()} completion, quarantine limit "
        f"{topology.quarantine_limit}, advertised {_apart(bounds.advertise_apart)}, settled "
        f"{_apart(bounds.settle_apart)}; faults {bounds.faults}, aborts {bounds.aborts}, restarts "
        f"{bounds.restarts}"
    )


def _apart(apart: bool) -> str:
    return "later" if apart else "at once"
