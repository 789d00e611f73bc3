"""What HiSparse means: which positions of a request lie on the device, and who may lose a row.

The KV rows of a request live on the host.  On the device it has a *hot buffer*: slots
0 .. size-1, found by tag (the position that a slot holds) and given up in LRU order, and slot
`size` for the newest position alone.  Up to `size` positions all are there; beyond, a step
swaps in the selected ones that are missing.  Tags and LRU order belong to a layer that selects;
a layer that shares its index replays the misses.  Specifies SGLang 0.5.23's HiSparse with the
tail of #42178 selected by position.

Rows are symbols here: a position stands for its bytes.  The `judge_*` functions take an engine's
own rows, bytes or symbols, and return sentences; no sentence means no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from reference.contract import InvalidCall

Row = TypeVar("Row", bound=Hashable)

EMPTY = -1
"""The tag of a slot that holds nothing, and the slot of a cell that names nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SwapIn:
    """What one selection row did to a hot buffer.

    Fields:
        slots: the slot of each of the W cells; `size` is the newest row, -1 a cell that is void
            (not a position of the request) or absent.
        misses: (position, slot) of each row copied from the host, in the order of selection.
        absent: distinct positions that missed and have no host row either, in that order; none
            on a correct engine.
    """

    slots: tuple[int, ...]
    misses: tuple[tuple[int, int], ...] = ()
    absent: tuple[int, ...] = ()


class HotBuffer:
    """Tags and LRU order of one request in one layer.

    Fields:
        tags: the position in each of `size` slots, or EMPTY.
        lru: the slots, least recently used first.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.release()

    def release(self) -> None:
        """Forget everything: no tags, slots in their own order."""
        self.tags = [EMPTY] * self.size
        self.lru = list(range(self.size))

    def admit(self, length: int) -> None:
        """Start with the first positions of a prompt of `length`, as many as there are slots."""
        self.release()
        for position in range(min(length, self.size)):
            self.tags[position] = position

    def grow(self, length: int) -> int:
        """Make room for the newest of now `length` positions; returns its slot."""
        slot = newest_slot(length, self.size)
        if slot < self.size:
            self.tags[slot] = length - 1
        return slot

    def resident(self, length: int) -> dict[int, int]:
        """The slot of every position on the device, the newest included."""
        slots = {tag: slot for slot, tag in enumerate(self.tags) if tag != EMPTY}
        if length > 0:
            slots[length - 1] = newest_slot(length, self.size)
        return slots

    def swap_in(
        self, selection: Sequence[int], length: int, host_present: Container[int]
    ) -> SwapIn:
        """Bring one row of selected positions to the device, over the slots least recently
        used that are not selected themselves.

        `selection` may repeat positions and hold cells that are none (-1, or not below
        `length`); `host_present` holds the positions that have a host row.  Afterwards the LRU
        order is: slots untouched, slots just loaded, slots hit.

        Raises:
            InvalidCall: more positions than slots; see the bound in `Geometry`.
        """
        cells = [p if 0 <= p < length else EMPTY for p in selection]
        if length <= self.size:
            return SwapIn(slots=tuple(cells))
        where = self.resident(length)
        wanted = [p for p in dict.fromkeys(cells) if p != EMPTY]
        hits = {where[p] for p in wanted if p in where}
        missing = [p for p in wanted if p not in where]
        loadable = [p for p in missing if p in host_present]
        evictable = [slot for slot in self.lru if slot not in hits]
        if len(loadable) > len(evictable):
            raise InvalidCall(
                f"{len(loadable)} selected positions are to be loaded, but only {len(evictable)} "
                f"of {self.size} slots hold none: enlarge the hot buffer to topk plus the tail "
                "less one."
            )
        misses = tuple(zip(loadable, evictable, strict=False))
        for position, slot in misses:
            self.tags[slot], where[position] = position, slot
        loaded = [slot for _, slot in misses]
        self.lru = evictable[len(loaded) :] + loaded + [slot for slot in self.lru if slot in hits]
        return SwapIn(
            slots=tuple(where.get(p, EMPTY) for p in cells),
            misses=misses,
            absent=tuple(p for p in missing if p not in host_present),
        )


class Residency:
    """A request over all layers: its hot buffers, and what its host rows hold.

    One step is `start_backup`, `finish_backup`, `append`, then for each layer `swap_in`, or
    `replay` where the layer uses another's index.

    Fields:
        length: positions, the newest being length - 1.
        backed_up: positions whose host rows hold all layers; all below the newest, always.
        in_flight: the position whose backup has started and not finished, if any.
        buffers: the hot buffer of each layer that selects.
        held: for each layer, the position whose row is in each of slots 0 .. size.
        behind: layers that have yet to replay the last selection.
    """

    def __init__(self, size: int, leaders: Sequence[int]) -> None:
        """`leaders`: for each layer the layer whose index it uses, most often its own."""
        self.size = size
        self.leaders = tuple(leaders)
        self._clear()

    def _clear(self) -> None:
        self.length = 0
        self.backed_up: set[int] = set()
        self.in_flight: int | None = None
        self.buffers = {leader: HotBuffer(self.size) for leader in set(self.leaders)}
        self.held = [[EMPTY] * (self.size + 1) for _ in self.leaders]
        self.behind: set[int] = set()
        self._plans: dict[int, SwapIn] = {}

    def admit(self, length: int) -> None:
        """Direct admission: the whole prompt is on the host, its first positions and the newest
        are preloaded."""
        self._clear()
        self.length = length
        self.backed_up.update(range(length))
        for buffer in self.buffers.values():
            buffer.admit(length)
        for rows, leader in zip(self.held, self.leaders, strict=True):
            for position, slot in self.buffers[leader].resident(length).items():
                rows[slot] = position

    def start_backup(self) -> None:
        """Begin to copy the newest position to the host, unless it is there."""
        if self._newest_unsaved():
            self.in_flight = self.length - 1

    def finish_backup(self) -> None:
        """The copy has ended."""
        if self.in_flight is not None:
            self.backed_up.add(self.in_flight)
            self.in_flight = None

    def append(self) -> int:
        """Add a position and write its row in every layer; returns its slot.

        Raises:
            InvalidCall: the present newest position is not backed up, or a layer is behind.
        """
        if self._newest_unsaved():
            raise InvalidCall(
                f"position {self.length - 1} has no host copy yet and its row is to be written "
                "again: finish its backup first."
            )
        self._require_replayed()
        self.length += 1
        slot = newest_slot(self.length, self.size)
        for buffer in self.buffers.values():
            buffer.grow(self.length)
        for rows in self.held:
            rows[slot] = self.length - 1
        return slot

    def swap_in(self, layer: int, selection: Sequence[int]) -> SwapIn:
        """Swap in what a layer with its own index selected.

        Raises:
            InvalidCall: the layer uses another's index, or a layer is behind.
        """
        if self.leaders[layer] != layer:
            raise InvalidCall(
                f"layer {layer} uses the index of layer {self.leaders[layer]}: replay it."
            )
        self._require_replayed(layer)
        plan = self.buffers[layer].swap_in(selection, self.length, self.backed_up)
        self._plans[layer] = plan
        self.behind.update(i for i, leader in enumerate(self.leaders) if leader == layer != i)
        self._copy(layer, plan)
        return plan

    def replay(self, layer: int) -> SwapIn:
        """Copy this layer's rows of its leader's last misses, once.

        Raises:
            InvalidCall: there is nothing that this layer has yet to replay.
        """
        if layer not in self.behind:
            raise InvalidCall(f"layer {layer} has nothing to replay: swap in its leader first.")
        self.behind.remove(layer)
        plan = self._plans[self.leaders[layer]]
        self._copy(layer, plan)
        return plan

    def release(self) -> None:
        """End the request.

        Raises:
            InvalidCall: a backup still reads its rows.
        """
        if self.in_flight is not None:
            raise InvalidCall(
                f"the backup of position {self.in_flight} still reads its row: finish it first."
            )
        self._clear()

    def _newest_unsaved(self) -> bool:
        return self.length > 0 and self.length - 1 not in self.backed_up

    def _copy(self, layer: int, plan: SwapIn) -> None:
        for position, slot in plan.misses:
            self.held[layer][slot] = position

    def _require_replayed(self, leader: int | None = None) -> None:
        late = [i for i in sorted(self.behind) if leader in (None, self.leaders[i])]
        if late:
            raise InvalidCall(f"layers {late} have not replayed the last misses: replay first.")


def newest_slot(length: int, size: int) -> int:
    """The slot of the newest of `length` positions: its own, or the row behind the slots."""
    return min(length - 1, size)


def judge_buffer(tags: Sequence[int], lru: Sequence[int], length: int) -> list[str]:
    """Tags and LRU order of one layer between two steps of a request of `length` positions;
    length 0 means that it was released."""
    size = len(tags)
    found: list[str] = []
    if sorted(lru) != list(range(size)):
        found.append(f"the LRU order should hold each of {size} slots once; it is {list(lru)}.")
    if length <= size:
        should = [*range(length), *[EMPTY] * (size - length)]
        if list(tags) != should:
            found.append(f"with {length} positions the tags should be {should}; they are {tags}.")
        if list(lru) != list(range(size)):
            found.append(f"with {length} positions nothing was evicted; LRU is {list(lru)}.")
        return found
    for tag, count in Counter(tags).items():
        if not 0 <= tag < length - 1:
            found.append(f"tags should lie in 0 to {length - 2}; one is {tag}.")
        elif count > 1:
            found.append(f"position {tag} should be in one slot; it is in {count}.")
    return found


def judge_resident(
    resident: Mapping[int, int], device: Sequence[Row], truth: Sequence[Row]
) -> list[str]:
    """The rows of one layer: each resident position's slot (`HotBuffer.resident`) holds its row.
    device: [size + 1] by slot; truth: [length] by position."""
    whose = {row: position for position, row in enumerate(truth)}
    return [
        f"slot {slot} should hold position {position}; it holds "
        f"{whose.get(device[slot], 'no position of this request')}."
        for position, slot in resident.items()
        if device[slot] != truth[position]
    ]


def judge_backup(host: Mapping[int, Row], truth: Sequence[Row]) -> list[str]:
    """The host is complete between two steps: of the `truth` (one layer's rows by position)
    all but the newest have a host row that equals it; whichever else are there are right."""
    found = [
        f"position {position} should be backed up; it has no host row."
        for position in range(len(truth) - 1)
        if position not in host
    ]
    found += [
        f"the host row of position {position} differs from the row that was written."
        for position, row in host.items()
        if row != truth[position]
    ]
    return found


@dataclass(frozen=True, slots=True)
class Wrote:
    """The device row of `slot` now holds `position`, by a decode or a swap-in."""

    slot: int
    position: int


@dataclass(frozen=True, slots=True)
class Saved:
    """The copy of `position` to the host has ended."""

    position: int


def judge_overwrites(events: Iterable[Wrote | Saved]) -> list[str]:
    """One request and layer since its admission, in the order in which it happened: a device
    row may be written again only after the position that it held was saved.  What the host
    had at admission counts as saved first."""
    found: list[str] = []
    holds: dict[int, int] = {}
    saved: set[int] = set()
    for event in events:
        if isinstance(event, Saved):
            saved.add(event.position)
            continue
        lost = holds.get(event.slot, event.position)
        if lost != event.position and lost not in saved:
            found.append(
                f"slot {event.slot} should keep position {lost} until it is backed up; it was "
                f"overwritten with position {event.position}."
            )
        holds[event.slot] = event.position
    return found
