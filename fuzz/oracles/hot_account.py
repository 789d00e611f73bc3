"""An engine's own account of device pages, host pages and logical pages under HiSparse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fuzz.step import World
from reference.addressing import locs, pages_for
from reference.contract import (
    Capability,
    HiSparse,
    HotBufferView,
    HotSnapshot,
    Occupancy,
    RequestId,
    RequestView,
    Snapshot,
)
from reference.occupancy import judge_occupancy, judge_owners

Said = Iterator[tuple[str, ...]]
"""What is wrong: the component, the sentence, and where one row shows it the place, what it should
hold and what it holds."""


def judge_account(world: World, after: Snapshot) -> Said:
    """What is wrong in a snapshot by itself."""
    hot, options = after.hot, world.options.hisparse
    if hot is None or options is None:
        yield "occupancy", "An engine with HiSparse should account for it; this one does not."
        return
    yield from _device_pages(world, options, after, hot)
    yield from _host_pages(world, options, after, hot)
    for request in after.requests.keys() & hot.buffers.keys():
        yield from _tables(world, request, after.requests[request], hot)
    yield from _occupancy(world, options, after, hot)
    if Capability.PREFIX_SHARING not in world.engine.capabilities:
        # otherwise the exact oracle says whose they are
        pages = {f"request {request}": view.pages for request, view in after.requests.items()}
        for sentence in _owners("logical page", pages, after.free_pages, world.options.pages):
            yield "logical pages", sentence


def _device_pages(world: World, options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """Each is free or in one hot buffer, and every running request has a whole one, or as much of
    one as it needs."""
    for request in after.requests.keys() | hot.buffers.keys():
        should = _hot_pages(world, after.requests.get(request))
        is_ = len(hot.buffers[request].pages) if request in hot.buffers else 0
        if is_ != should:
            yield "device pages", f"request {request} should have {should} of them; it has {is_}."
    owners = {f"request {request}": view.pages for request, view in hot.buffers.items()}
    for sentence in _owners("device page", owners, hot.free_device, options.device_pages):
        yield "device pages", sentence


def _ahead(world: World) -> bool:
    return Capability.HOT_AHEAD in world.engine.capabilities


def _hot_pages(world: World, view: RequestView | None) -> int:
    """How many device pages a request should have: none if it does not run, and without
    `HOT_AHEAD` those of its positions, until they fill the hot buffer."""
    if view is None:
        return 0
    page = world.geometry.physical_page_size
    pages = -(-view.length // page)
    whole = _ahead(world) or pages * page >= (world.geometry.device_buffer_size or 0)
    return world.hot_pages if whole else pages


def _host_pages(world: World, options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """One stands behind every logical page that is not free, or in which something is saved, and
    the others are free."""
    bare = set() if _ahead(world) else _unsaved(world, after, hot)
    for page in sorted((after.ref_counts.keys() ^ hot.backing.keys()) - bare):
        used = page in after.ref_counts
        should, is_ = "a" if used else "no", hot.backing.get(page, "none")
        yield "backing", f"logical page {page} should have {should} host page; it has {is_}."
    owners = {f"logical page {page}": (host,) for page, host in hot.backing.items()}
    for sentence in _owners("host page", owners, hot.free_host, options.host_pages):
        yield "host pages", sentence


def _unsaved(world: World, after: Snapshot, hot: HotSnapshot) -> set[int]:
    """Logical pages of requests that have nothing in them on the host."""
    return {
        page
        for request, buffer in hot.buffers.items()
        if (view := after.requests.get(request))
        for page in view.pages[pages_for(buffer.saved, world.geometry) :]
    }


def _owners(
    what: str, owners: Mapping[str, Sequence[int]], free: Collection[int], pages: int
) -> list[str]:
    """Each of the pages behind the padding is free once or owned once."""
    held = [page for owned in owners.values() for page in owned]
    if sorted([*free, *held]) == list(range(1, pages)):
        return []
    return judge_owners(what, owners, free, range(1, pages))


def _tables(world: World, request: RequestId, view: RequestView, hot: HotSnapshot) -> Said:
    """Where a request looks for device rows and host rows follows from its pages."""
    geometry, buffer = world.geometry, hot.buffers[request]
    backed = [page for page in view.pages if _ahead(world) or page in hot.backing]
    backing = [hot.backing.get(page, 0) for page in backed]
    positions = len(backing) * geometry.logical_page_size
    for component, what, is_, should in (
        ("device pages", "the row of slot", buffer.rows, _slots(world, buffer)),
        (
            "backing",
            "the host row of position",
            buffer.host_rows,
            locs(backing, 0, positions, geometry).tolist(),
        ),
    ):
        if list(is_) == should:
            continue
        if len(is_) != len(should):
            sentence = f"{what} should be known for {len(should)}; it is for {len(is_)}."
        else:
            i = next(i for i, row in enumerate(should) if is_[i] != row)
            sentence = f"{what} {i} should be {should[i]}; it is {is_[i]}."
        yield component, f"request {request}: {sentence}"


def _slots(world: World, buffer: HotBufferView) -> list[int]:
    """Device rows of all slots, packed into all pages but the last, and of the newest position,
    the first of the last page; one that is still to grow has not got that page."""
    size, pages = world.geometry.physical_page_size, buffer.pages
    packed = len(pages) - (_ahead(world) or len(pages) == world.hot_pages)
    rows = [page * size + i for page in pages[:packed] for i in range(size)]
    return rows[: world.geometry.device_buffer_size] + [page * size for page in pages[packed:]]


def _occupancy(world: World, options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """The tokens of all three memories are conserved, and are those of the pages."""
    device, logical = world.geometry.physical_page_size, world.geometry.logical_page_size
    running, each = len(after.requests), world.hot_pages * device
    if not _ahead(world):
        # not all of them are whole
        running, each = sum(len(buffer.pages) for buffer in hot.buffers.values()), device
    for sentence in judge_occupancy(hot.occupancy, running=running, rows_each=each):
        yield "occupancy", sentence
    cached = sum(len(node.pages) for node in after.cached)
    should = Occupancy(
        device_free=len(hot.free_device) * device,
        device_hot=sum(len(buffer.pages) for buffer in hot.buffers.values()) * device,
        device_total=(options.device_pages - 1) * device,
        host_free=len(hot.free_host) * logical,
        host_held=len(hot.backing) * logical,
        host_total=(options.host_pages - 1) * logical,
        logical_free=len(after.free_pages) * logical,
        logical_owned=(len(after.ref_counts) - cached) * logical,
        logical_cached=cached * logical,
        logical_total=(world.options.pages - 1) * logical,
    )
    if hot.occupancy != should:
        yield "occupancy", f"The pages add up to {should}; {hot.occupancy} is reported."
