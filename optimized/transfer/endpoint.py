"""One NIXL agent with this process's regions, and what it knows of its peers' agents.

What NIXL 1.5.1 does over UCX, by experiment, decides what is done here:

- Indices into a prepared list that follow each other at both ends become one descriptor, so that
  a run of items is one, and a list is prepared once a peer, not once a write.
- A killed writer's bytes still land, out of the sockets' buffers, whenever the target polls, and
  deregistering the target's memory does not stop them.  Destroying its agent does.
- Without a progress thread nothing moves but inside a call, so that over sockets nothing lands
  behind the back of the thread that owns the protocol.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config, nixl_prepped_dlist_handle, nixl_xfer_handle
from numpy.typing import NDArray

from optimized.transfer.hello import Hello, Natural
from optimized.transfer.transport import Refused, Region

REACH = "nixl"
"""Under which name a hello says how an agent is reached."""

MAX_ITEMS = 2**31 - 1
"""Items of one kind of memory on one side: NIXL's indices are int32."""


class Place(msgspec.Struct, frozen=True, array_like=True):
    """Where a region lies: its first byte's address, on a GPU or (`device` -1) on the host."""

    address: Natural
    device: int

    @property
    def segment(self) -> str:
        """NIXL's name for this kind of memory; a descriptor list is of one kind."""
        return "DRAM" if self.device < 0 else "VRAM"


class Reach(msgspec.Struct, frozen=True):
    """How an agent is reached: NIXL's own metadata, and the places of its regions in order."""

    metadata: bytes
    places: tuple[Place, ...]


class Items(NamedTuple):
    """All items of all regions on one side as NIXL's prepared lists, one a kind of memory.

    Fields:
        segments: [regions], the kind of memory of each.
        first: [regions] int64, the index of each region's item 0 in the list of its kind.
        sizes: [regions] int64, items of each.
    """

    lists: dict[str, nixl_prepped_dlist_handle]
    segments: NDArray[np.str_]
    first: NDArray[np.int64]
    sizes: NDArray[np.int64]

    def hold(
        self, regions: NDArray[np.int64], start: NDArray[np.int64], n: NDArray[np.int64]
    ) -> bool:
        """Whether items start .. start + n - 1 of the regions, all [runs], are all there."""
        if not np.all((regions >= 0) & (regions < len(self.sizes))):
            return False
        return bool(np.all((start >= 0) & (n > 0) & (start <= self.sizes[regions] - n)))

    def release(self) -> None:
        """Give the lists back, and the references to the agent that they hold."""
        for prepared in self.lists.values():
            prepared.release()
        self.lists.clear()


class Remote(NamedTuple):
    """A peer's agent, as far as this one knows it."""

    name: str
    items: Items


class Endpoint:
    """One NIXL agent, with the regions registered; `destroy` ends all writes into them."""

    def __init__(self, name: str, regions: Sequence[Region]) -> None:
        self.agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False))
        self.item_bytes = [memory.shape[1] for _, memory in regions]
        self.places = tuple(Place(memory.data_ptr(), memory.get_device()) for _, memory in regions)
        self._registered = [self.agent.register_memory(memory) for _, memory in regions]
        self.items = self._prepare("", self.places, [len(memory) for _, memory in regions])

    def reach(self) -> bytes:
        """What `add` of another endpoint needs."""
        return msgspec.msgpack.encode(Reach(self.agent.get_agent_metadata(), self.places))

    def add(self, name: str, hello: Hello) -> Remote:
        """Get to know the agent `name` of a hello that was checked.

        Raises:
            Refused: where the hello says nothing about NIXL, or NIXL does not take it.
        """
        cure = "hand over its hello() unchanged, while it runs, with one NIXL release on both ends"
        try:
            reach = msgspec.msgpack.decode(hello.reach.get(REACH, b""), type=Reach)
        except msgspec.DecodeError as error:
            raise Refused(f"the peer is not reached over NIXL ({error}): {cure}.") from error
        sizes = [region.items for region in hello.regions]
        if len(reach.places) != len(sizes):
            raise Refused(f"{len(sizes)} regions lie at {len(reach.places)} places: {cure}.")
        if sum(sizes) > MAX_ITEMS:
            raise Refused(
                f"the peer has {sum(sizes)} items: NIXL counts to {MAX_ITEMS}, so give it larger "
                "or fewer items."
            )
        added, fault = None, ""
        try:
            added = self.agent.add_remote_agent(reach.metadata).decode()
            if added == name:
                return Remote(name, self._prepare(name, reach.places, sizes))
            fault = f"it calls itself {added}"
        # NIXL's errors share no base but Exception; all mean that the peer sent something wrong
        except Exception as error:
            fault = str(error)
        if added is not None:
            self.agent.remove_remote_agent(added)
        # raised out here, or whoever keeps the exception would keep the agent: see `destroy`
        raise Refused(f"NIXL does not take the agent {name} ({fault}): {cure}.")

    def remove(self, remote: Remote) -> None:
        """Forget an agent.  A write to it that has not ended would run on unseen."""
        remote.items.release()
        self.agent.remove_remote_agent(remote.name)

    def make(self, runs: NDArray[np.int64], remote: Remote, note: bytes) -> list[nixl_xfer_handle]:
        """The transfers of `runs` (as in Write, within the regions at both ends), one for each pair
        of kinds of memory; `note` goes along with an only one."""
        region, here, there, n = runs.T
        ours, theirs = self.items, remote.items
        kinds = np.char.add(ours.segments[region], theirs.segments[region])
        groups = [np.flatnonzero(kinds == kind) for kind in np.unique(kinds)]
        return [
            self.agent.make_prepped_xfer(
                "WRITE",
                ours.lists[ours.segments[region[group[0]]]],
                _spread(ours.first[region[group]] + here[group], n[group]),
                theirs.lists[theirs.segments[region[group[0]]]],
                _spread(theirs.first[region[group]] + there[group], n[group]),
                note if len(groups) == 1 else b"",
            )
            for group in groups
        ]

    def deregister(self) -> None:
        """Give the registrations back.  It stops no write in flight: see `destroy`."""
        for registered in self._registered:
            self.agent.deregister_memory(registered)
        self._registered.clear()

    def destroy(self) -> None:
        """Give the registrations and the agent back.  No write to this endpoint can change memory
        afterwards, whoever posted it.

        Raises:
            RuntimeError: where something still holds the agent, so that nothing is proved.
        """
        self.items.release()
        self.deregister()
        agent = weakref.ref(self.agent.agent)
        del self.agent
        if agent() is not None:
            gc.collect()  # tracebacks are cyclic, and refer to the agent if it raised
        if agent() is not None:
            raise RuntimeError(
                "the NIXL agent is still referred to, so it was not destroyed and writes may still "
                "land: drop every handle before the endpoint."
            )

    def _prepare(self, name: str, places: Sequence[Place], sizes: Sequence[int]) -> Items:
        """Prepared lists of all items of agent `name` ("": this one) with regions as given."""
        segments = np.array([place.segment for place in places], dtype=np.str_)
        first = np.zeros(len(places), dtype=np.int64)
        lists = {}
        for segment in set(segments.tolist()):
            of_kind = np.flatnonzero(segments == segment)
            counts = np.array(sizes, dtype=np.int64)[of_kind]
            first[of_kind] = np.cumsum(counts) - counts
            strided = np.array(
                [
                    (address, self.item_bytes[i], max(device, 0), self.item_bytes[i], sizes[i])
                    for i in of_kind
                    for address, device in [msgspec.structs.astuple(places[i])]
                ],
                dtype=np.uint64,
            )
            lists[segment] = self.agent.prep_xfer_dlist(name, strided, segment)
        return Items(lists, segments, first, np.array(sizes, dtype=np.int64))


def _spread(start: NDArray[np.int64], n: NDArray[np.int64]) -> NDArray[np.int32]:
    """[runs] starts and lengths to the [sum of lengths] indices of the runs' items, in order."""
    ends = np.cumsum(n)
    return (np.repeat(start - (ends - n), n) + np.arange(n.sum())).astype(np.int32)
