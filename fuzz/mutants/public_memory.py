"""Faults of who holds memory, and of what moves between tiers and ends, that public reports tell
of."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fuzz.mutants.drain import INCOMING, LIVENESS, RANKS, drain
from fuzz.mutants.hisparse import RESIDENT
from fuzz.mutants.registry import Body, mutant
from fuzz.mutants.restoring import ROWS, STANDING, TIER, TREE, Part, all_but, choosing
from fuzz.mutants.sharing import ENGINE, MEMORY, OWNED
from fuzz.mutants.transfer import MISPLACED, transfer
from reference.protocol import Abort, Phase

Ints = npt.NDArray[np.int64]
RESTORE = "host_restore"


# what is never free again, or too soon


@mutant(f"{MEMORY}.make_room", bug="TensorRT-LLM#12313", killed_by=OWNED, target="slot_reuse")
def room_made_only_while_some_is_free(
    original: Body, self: Any, *, pages: int = 0, states: int = 0, **keep: Any
) -> None:
    """What can be given back is looked for on a way that itself takes a free page and a free
    state, so that a pool that is full stays full."""
    if self.pages.available and self.states.available:
        original(self, pages=pages, states=states, **keep)
    self.pages.require(pages)
    self.states.require(states)


@mutant(f"{ENGINE}.finish", bug="TensorRT-LLM#15018", killed_by=OWNED)
def finished_pages_freed_then_cached(original: Body, self: Any, request: Any) -> None:
    """A request that ends lets its pages go first and enters them into the cache then: they are
    found there, and are somebody else's next."""
    before = {page for node in self.memory.tree.nodes() for page in node.pages.tolist()}
    original(self, request)
    cached = {page for node in self.memory.tree.nodes() for page in node.pages.tolist()}
    self.memory.pages.release(sorted(cached - before))


@mutant(f"{MEMORY}.release", bug="sglang#7130", killed_by=OWNED, target="slot_reuse")
def page_of_rejected_drafts_lost(original: Body, self: Any, record: Any) -> None:
    """A request frees as many pages as its length fills: one that only rejected drafts had
    reached is nobody's from then on."""
    table, slot = self.table, record.slot
    filled = -(-int(table.length[slot]) // self.geometry.logical_page_size)
    self.pages.retain(table.pages[slot, filled : table.pages_held[slot]])
    original(self, record)


@mutant(f"{TREE}.resumable", bug="Mooncake#3599", killed_by=OWNED, target=RESTORE)
def probe_keeps_its_lock(original: Body, self: Any, tokens: Ints) -> Any:
    """A look at what could be moved holds what it finds, as a use would, and nothing lets go of
    it."""
    match = original(self, tokens)
    self.lock(match.node)
    return match


# what the host tier has


@mutant(f"{TIER}.back_up", bug="sglang#26975", killed_by=ROWS, target=RESTORE)
def index_rows_not_backed_up(original: Body, self: Any, *call: Any) -> int:
    """The buffer beside the KV rows, which is indexed like them, is not copied to the host: a
    restore brings what was there."""
    return int(choosing(original, self, *call, choose=all_but("index rows")))


@mutant(f"{TIER}._bring_back", bug="LMCache#4463", killed_by=ROWS, target=RESTORE)
def restored_in_another_layout(original: Body, self: Any, *call: Any) -> None:
    """A page was stored row by row, and is read back as all first halves of the rows and then all
    second halves: the two layouts have one shape."""

    def halved(part: Part) -> Iterator[Part]:
        name, device, host = part
        if name.startswith("KV rows"):
            planes = host.reshape(2, len(host), -1)
            host = planes.transpose(0, 1).reshape(host.shape)
        yield name, device, host

    choosing(original, self, *call, choose=halved)


@mutant(f"{MEMORY}.kv_page", bug="LMCache#4247", killed_by=ROWS, target=RESTORE)
def page_of_the_other_group(original: Body, self: Any, layer: int, page: int) -> Tensor:
    """The page ids of the index rows serve for the KV rows as well, which are a group of their own
    under HiSparse."""
    size = self.geometry.logical_page_size
    first = min(page * size, self.pools.kv.shape[1] - size)
    rows: Tensor = self.pools.kv[layer, first : first + size]
    return rows


@mutant(f"{TIER}.back_up", bug="sglang#27108", killed_by=STANDING, target=RESTORE)
def refused_back_up_counts(original: Body, self: Any, tokens: Ints, before: Any) -> int:
    """Nobody asks whether the host had room: a back-up whose allocation failed is reported as
    done."""
    refused: list[str] = []

    def noted(what: str) -> None:
        try:
            before(what)
        except BaseException:
            refused.extend([what] if what.startswith("allocate") else [])
            raise

    found: int = self._memory.tree.resumable(tokens).hit
    try:
        return int(original(self, tokens, noted))
    except BaseException:
        if not refused:
            raise
        return found


# layers and pages at two ends


@mutant(
    "optimized.hisparse.pools.HotPools.of_layer",
    bug="vllm#57019",
    killed_by=(*RESIDENT, "provenance", "containment"),
    target="hot_buffer",
)
def layers_at_one_offset(original: Body, self: Any, layer: int) -> tuple[Tensor, Tensor]:
    """All layers share one allocation, and each binds its hot rows to where that begins."""
    _, host = original(self, layer)
    return self.device[0], host


@transfer(
    "optimized.memory.transfers._places", bug="sglang#31901", kills=("drain", "exact", *MISPLACED)
)
def host_pages_for_index_pages(original: Body, memory: Any, record: Any, length: int) -> Any:
    """Where KV rows go to the host, index pages go to the device pages of the host pages' ids."""
    places = original(memory, record, length)
    last = len(memory.pools.index[0]) - 1
    return replace(places, index=tuple(min(page, last) for page in places.kv))


# aborts of a transfer


@drain(INCOMING + "cancel", bug="TensorRT-LLM#12314", kills=LIVENESS)
def cancelled_only_while_queued(original: Body, self: Any) -> Any:
    """A transfer can be cancelled until it is offered, and not while it is on its way."""
    return original(self) if self.phase is Phase.RESERVED else (self, ())


@drain(RANKS + "PrefillRank.receive", bug="sglang#30352", kills=LIVENESS)
def abort_unknown_to_the_listener(original: Body, self: Any, message: Any) -> Any:
    """What listens at P knows no ABORT, and drops it."""
    return (self, ()) if isinstance(message, Abort) else original(self, message)


@drain(INCOMING + "fence", bug="vllm#46283", kills=LIVENESS)
def only_a_note_releases(original: Body, self: Any, writer: Any) -> Any:
    """Memory waits for its writer's word, though that is over and proved to be."""
    return self, ()
