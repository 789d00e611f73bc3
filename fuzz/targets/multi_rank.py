"""Ranks of P and D that hand requests over while everything around them goes wrong.

No engine: the drain protocol alone, in a world of up to four processes a side, with more requests
than destinations, rooms that are used again, writes in parts, and faults and restarts at any
time.  The tape draws the bounds of the world, and then one thing after the other that happens.
"""

from __future__ import annotations

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
