"""Named bounds of a search, and those that a command line asks for."""

from __future__ import annotations

from fuzz.explore.words import Bounds
from reference.protocol import Completion, Topology


def bounds(
    *,
    ranks: int = 2,
    requests: int = 2,
    reuse: int = 1,
    components: int = 2,
    parts: int = 2,
    faults: int = 1,
    aborts: int = 1,
    completion: Completion = Completion.STATUS,
    writers: tuple[tuple[int, ...], ...] | None = None,
    quarantine_limit: int = 2,
) -> Bounds:
    """Bounds of a search.

    Args:
        ranks: of P and of D; rank r of P writes to rank r of D, unless `writers` says otherwise.
        reuse: so many of the `requests` take the destination and the room of an earlier one.
        components: pieces that a writer sends, the aux row among them.

    Raises:
        ValueError: for bounds in which nothing could happen, with a sentence that says which.
    """
    if reuse >= requests:
        raise ValueError(
            f"{reuse} of {requests} requests cannot take an earlier one's destination: set reuse "
            "below requests."
        )
    least = {"ranks": (ranks, 1), "components": (components, 2), "parts": (parts, 1)}
    least |= {"reuse": (reuse, 0), "faults": (faults, 0), "aborts": (aborts, 0)}
    for name, (value, minimum) in least.items():
        if value < minimum:
            raise ValueError(f"{name} is {value}: set it to at least {minimum}.")
    slots = requests - reuse
    return Bounds(
        topology=Topology(
            pieces=components - 1,
            writers=writers or tuple((rank,) for rank in range(ranks)),
            quarantine_limit=quarantine_limit,
        ),
        completion=completion,
        rooms=tuple(request % slots for request in range(requests)),
        slots=slots,
        parts=parts,
        faults=faults,
        aborts=aborts,
    )


NAMED = {
    "small": bounds(requests=1, reuse=0),
    "notify": bounds(requests=1, reuse=0, components=3, completion=Completion.NOTIFY, ranks=1),
    "reuse": bounds(ranks=1),
    "fan_in": bounds(requests=1, reuse=0, writers=((0, 1),)),
    "fan_in_notes": bounds(
        requests=1,
        reuse=0,
        components=3,
        parts=1,
        faults=0,
        aborts=0,
        completion=Completion.NOTIFY,
        writers=((0, 1),),
    ),
    "fan_out": bounds(requests=1, reuse=0, writers=((0,), (0,))),
    "crowded": bounds(requests=3, reuse=1, ranks=2, quarantine_limit=1),
}
"""Bounds in which the mutants of `fuzz.mutants.drain` are looked for."""
