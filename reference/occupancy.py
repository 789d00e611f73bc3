"""Whose rows and tokens there are under HiSparse, and that none is lost or owned twice.

Device rows, host rows and logical tokens are three memories, reported and conserved apart at
every quiescent point (SGLang 0.5.23 mixes the first with the third).  The `judge_*` functions
return sentences; no sentence means no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from reference.addressing import pages_for
from reference.contract import InvalidCall, Occupancy
from reference.geometry import Geometry


def hot_rows(size: int, page_size: int) -> int:
    """Device rows that a request takes and gives back, whatever its length: `size` rounded up
    to pages of `page_size` rows, and one page whose first row is the newest."""
    return (-(-size // page_size) + 1) * page_size


def admits(
    occupancy: Occupancy, length: int, geometry: Geometry, *, page_size: int, shared: int = 0
) -> bool:
    """Whether a prompt of `length` may be admitted directly: a whole hot buffer on the device,
    and host rows for its whole logical pages but the first `shared` positions, which it reads
    from a cached prefix.

    Raises:
        InvalidCall: the geometry has no hot buffer.
    """
    if geometry.device_buffer_size is None:
        raise InvalidCall("this geometry has no hot buffer: set device_buffer_size.")
    host = pages_for(length, geometry) * geometry.logical_page_size - shared
    device = hot_rows(geometry.device_buffer_size, page_size)
    return device <= occupancy.device_free and host <= occupancy.host_free


def judge_occupancy(occupancy: Occupancy, *, running: int, rows_each: int) -> list[str]:
    """Conservation of device, host and logical tokens, with `running` admitted requests that
    take `rows_each` device rows each (`hot_rows`)."""
    o = occupancy
    found = [
        f"{what} tokens should add up to {total}; {' + '.join(map(str, parts))} are reported."
        for what, parts, total in (
            ("device", (o.device_free, o.device_hot), o.device_total),
            ("host", (o.host_free, o.host_held), o.host_total),
            ("logical", (o.logical_free, o.logical_owned, o.logical_cached), o.logical_total),
        )
        if sum(parts) != total or min(parts) < 0
    ]
    if o.device_hot != running * rows_each:
        found.append(
            f"{running} hot buffers should take {running * rows_each} device tokens; "
            f"{o.device_hot} are reported."
        )
    return found


def judge_owners(
    what: str,
    owners: Mapping[str, Collection[int]],
    free: Collection[int],
    rows: range,
    *,
    shared: Collection[int] = (),
) -> list[str]:
    """Each of `rows` is free once, or owned once; those in `shared` (a cached prefix's, on the
    host) may have any number of owners but are not free.  `what` names a row: "device row"."""
    held = Counter(row for owned in owners.values() for row in owned)
    spare = Counter(free)
    common = frozenset(shared)
    found: list[str] = []
    for row in sorted(held.keys() | spare.keys() | common | set(rows)):
        names = [name for name, owned in owners.items() if row in owned]
        if row not in rows:
            found.append(f"{what} {row} lies outside {rows.start} to {rows.stop - 1}.")
        elif spare[row] and (held[row] or row in common):
            found.append(f"{what} {row} should belong to {names or 'the cache'}; it is free too.")
        elif spare[row] > 1:
            found.append(f"{what} {row} should be free once; it is free {spare[row]} times.")
        elif held[row] > 1 and row not in common:
            found.append(f"{what} {row} should have one owner; it has {names}, {held[row]} times.")
        elif not spare[row] and not held[row] and row not in common:
            found.append(f"{what} {row} should be free or owned; it is leaked.")
    return found
