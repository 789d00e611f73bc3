"""An engine's own account of device pages, host pages and logical pages under HiSparse."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from fuzz.step import World
from reference.addressing import locs
from reference.contract import (
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
    yield from _host_pages(options, after, hot)
    for request in after.requests.keys() & hot.buffers.keys():
        yield from _tables(world, request, after.requests[request], hot)
    yield from _occupancy(world, options, after, hot)


def _device_pages(world: World, options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """Each is free or in one hot buffer, and every running request has a whole one."""
    for request in after.requests.keys() | hot.buffers.keys():
        should = world.hot_pages if request in after.requests else 0
        is_ = len(hot.buffers[request].pages) if request in hot.buffers else 0
        if is_ != should:
            yield "device pages", f"request {request} should have {should} of them; it has {is_}."
    owners = {f"request {request}": view.pages for request, view in hot.buffers.items()}
    for sentence in _owners("device page", owners, hot.free_device, options.device_pages):
        yield "device pages", sentence


def _host_pages(options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """One stands behind every logical page that is not free, and the others are free."""
    for page in sorted(after.ref_counts.keys() ^ hot.backing.keys()):
        used = page in after.ref_counts
        should, is_ = "a" if used else "no", hot.backing.get(page, "none")
        yield "backing", f"logical page {page} should have {should} host page; it has {is_}."
    owners = {f"logical page {page}": (host,) for page, host in hot.backing.items()}
    for sentence in _owners("host page", owners, hot.free_host, options.host_pages):
        yield "host pages", sentence


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
    backing = [hot.backing.get(page, 0) for page in view.pages]
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
    the first of the last page."""
    size, pages = world.geometry.physical_page_size, buffer.pages
    rows = [page * size + i for page in pages[:-1] for i in range(size)]
    return rows[: world.geometry.device_buffer_size] + [page * size for page in pages[-1:]]


def _occupancy(world: World, options: HiSparse, after: Snapshot, hot: HotSnapshot) -> Said:
    """The tokens of all three memories are conserved, and are those of the pages."""
    device, logical = world.geometry.physical_page_size, world.geometry.logical_page_size
    each = world.hot_pages * device
    for sentence in judge_occupancy(hot.occupancy, running=len(after.requests), rows_each=each):
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
