"""Copies into a peer's mapped memory: each under a ticket, on a thread of their own.

Source: the tickets and the order of event, fence and notification that SGLang's reviewers asked of
the shared-memory path between P and D.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from optimized.transfer.hello import Hello
from optimized.transfer.shared_pool import Segment
from optimized.transfer.shm_hello import has_left, offer_of
from optimized.transfer.transport import Refused, Region, Write
from reference.protocol import Outcome, Peer, TransferKey

Runs = NDArray[np.int64]
"""[n, 4] int64, each (region, first item here, first item there, items)."""
Ticket = tuple[TransferKey, int]
"""A key and a piece of it: what one write may touch."""


class Tickets:
    """The writes that one peer's memory is open to; each is checked before a byte is copied, as
    nothing else keeps it to its own rows.

    Fields:
        to: the peer, in the life for which the memory was mapped.
        here, there: [regions] int64, items of each region at either end; 0 where it is not shared.
    """

    def __init__(self, to: Peer, *, here: Sequence[int], there: Sequence[int]) -> None:
        self.to = to
        self.here = np.asarray(here, dtype=np.int64)
        self.there = np.asarray(there, dtype=np.int64)
        # items of all regions counted through, so that one comparison finds any overlap
        self._base = np.cumsum(self.there) - self.there
        self._spans: dict[Ticket, Runs] = {}

    def __len__(self) -> int:
        """Writes that may still touch the memory."""
        return len(self._spans)

    def open(self, ticket: Ticket, runs: Runs) -> None:
        """Take up a write.

        Raises:
            Refused: where it is for another life of the peer, is open already, reaches out of a
                region, or shares an item with itself or with another open write.
        """
        key, piece = ticket
        if key.incarnation != self.to.incarnation:
            raise Refused(
                f"piece {piece} of {key} is meant for another life of rank {self.to.rank} than "
                f"{self.to.incarnation}: send what that life advertised."
            )
        if ticket in self._spans:
            raise Refused(f"piece {piece} of {key} is being written: post each piece once.")
        region, source, target, items = runs.T
        # counted from the end, since a hostile first item plus items may overflow
        outside = (items < 1) | (source < 0) | (target < 0)
        outside |= (items > self.here[region] - source) | (items > self.there[region] - target)
        if outside.any():
            raise Refused(
                f"piece {piece} of {key} reaches out of a region with its run "
                f"{runs[outside][0].tolist()}: give (region, first item here, first item there, "
                "items) within both pools."
            )
        first = self._base[region] + target
        spans = np.stack([first, first + items], axis=1)
        everything = np.concatenate([*self._spans.values(), spans])
        everything = everything[everything[:, 0].argsort()]
        if (everything[1:, 0] < everything[:-1, 1]).any():
            raise Refused(
                f"piece {piece} of {key} writes an item twice, or one that another open write "
                "has: free a page only once it is drained."
            )
        self._spans[ticket] = spans

    def close(self, ticket: Ticket) -> None:
        """The write is over: it can touch nothing any more."""
        del self._spans[ticket]


class Share:
    """A peer's pool as it is mapped here.

    Fields:
        rows: for each region in it, its [items, item bytes] uint8 there.
    """

    def __init__(
        self, mine: Hello, theirs: Hello, segment: Segment, connection: socket.socket
    ) -> None:
        self._segment = segment
        self._connection = connection
        self.rows: dict[int, Tensor] = {}
        here, there = [0] * len(mine.regions), [0] * len(mine.regions)
        for region, offset in ((p.region, p.offset) for p in offer_of(theirs).places):
            layout = theirs.regions[region]
            memory = segment.memory[offset : offset + layout.total_bytes]
            self.rows[region] = memory.view(layout.items, layout.item_bytes)
            here[region], there[region] = mine.regions[region].items, layout.items
        self.tickets = Tickets(theirs.peer, here=here, there=there)

    def chunks_of(self, row: Tensor) -> list[slice]:
        """The parts of a row of mapped bytes that one copy each may write."""
        return self._segment.chunks_of(row)

    def has_left(self) -> bool:
        """Whether the owner ended, or takes its offer back."""
        return has_left(self._connection)

    def close(self) -> None:
        """Unmap, and then tell the owner by closing the connection.  No write may be open."""
        assert not self.tickets, "memory is unmapped only once every write to it is over"
        self.rows.clear()
        self._segment.close()
        self._connection.close()


class Copy(NamedTuple):
    """The shared part of a write, and the write that is left to follow it."""

    share: Share
    runs: Runs
    left: Write
    ready: torch.cuda.Event | None

    @property
    def ticket(self) -> Ticket:
        """The ticket under which it copies."""
        return self.left.key, self.left.piece


class Copier:
    """Copies rows on a thread of its own, one write after the other.

    With a device, whose memory the source is, the copies run on a stream that first waits for what
    the poster's stream had to do when it posted; the thread waits for the stream.  Handing a
    finished copy over by a queue is also the release fence between its bytes and its note.
    """

    def __init__(self, regions: Sequence[Region]) -> None:
        self._sources = [region.memory for region in regions]
        devices = {memory.device for memory in self._sources if memory.is_cuda}
        self._stream = torch.cuda.Stream(devices.pop()) if devices else None
        self._asked: queue.SimpleQueue[Copy | None] = queue.SimpleQueue()
        self._ended: queue.SimpleQueue[tuple[Copy, Outcome]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="shm-copier", daemon=True)
        self._thread.start()

    def submit(self, share: Share, runs: Runs, left: Write) -> None:
        """Copy `runs` once their source is there."""
        ready = None
        if self._stream is not None:
            ready = torch.cuda.current_stream(self._stream.device).record_event()
        self._asked.put(Copy(share, runs, left, ready))

    def ended(self) -> list[tuple[Copy, Outcome]]:
        """Copies that are over since the last call, and how they ended."""
        return [self._ended.get() for _ in range(self._ended.qsize())]

    def close(self) -> None:
        """Finish what was asked for, stop, and look at no memory any more."""
        self._asked.put(None)
        self._thread.join()
        self._sources.clear()

    def _work(self) -> None:
        while (copy := self._asked.get()) is not None:
            try:
                self._perform(copy)
                outcome = Outcome.LANDED
            except RuntimeError:
                # the device failed; its copies may be anywhere
                outcome = Outcome.UNKNOWN
            self._ended.put((copy, outcome))

    def _perform(self, copy: Copy) -> None:
        if self._stream is None or copy.ready is None:
            copy_rows(copy.share, self._sources, copy.runs)
            return
        with torch.cuda.stream(self._stream):
            self._stream.wait_event(copy.ready)
            copy_rows(copy.share, self._sources, copy.runs)
        self._stream.synchronize()


def copy_rows(share: Share, here: Sequence[Tensor], runs: Runs) -> None:
    """Copy each run from the regions here to the peer's; on a device, on its current stream."""
    for region, source, target, items in runs.tolist():
        there = share.rows[region][target : target + items].view(-1)
        row = here[region][source : source + items].view(-1)
        for chunk in share.chunks_of(there):
            there[chunk].copy_(row[chunk], non_blocking=True)
