"""Faults of a transfer: which bytes of a request move, from where, to where, and when.

The places are those of the request and the protocol is sound; what is wrong is what is sent.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np

from fuzz.mutants.registry import mutant
from reference.protocol import Landed

PLAN = "optimized.transfer.plan."
NODE = "optimized.transfer."
MEMORY = "optimized.memory.transfers."
KV, INDEX, TAIL = range(3)
MISPLACED = ("containment", "provenance")


def transfer(*where: str, bug: str = "own", kills: tuple[str, ...] = ("provenance",), **more: Any):
    """Register a mutant of a transfer."""
    return mutant(*where, bug=bug, killed_by=kills, target="transfer", **more)


# Addresses.


@transfer(PLAN + "Plan._of_layers", bug="sglang#42178", kills=MISPLACED)
def index_pages_in_token_units(original, self, part, runs):
    """An index page is looked for where it would be if index pages counted tokens."""
    if part == INDEX:
        runs = runs.copy()
        runs[:, :2] //= self.geometry.kpool
    return original(self, part, runs)


@transfer(PLAN + "Plan._tail", bug="sglang#42178", kills=MISPLACED)
def tail_wraps_as_at_the_other_end(original, self, here, there):
    """The cells of the tail are paired as they lie, not by position, as if both rings wrapped at
    one point."""
    lying = (replace(end, tail=tuple(sorted(end.tail))) for end in (here, there))
    return original(self, *lying)


@transfer(MEMORY + "_places", kills=("exact", "provenance"))
def tail_cells_without_drafts(original, memory, record, length):
    """The tail's cells are told as if the ring had no room for drafts."""
    places, geometry = original(memory, record, length), memory.geometry
    first, kpool = record.slot * geometry.ring_size, geometry.kpool
    tail = range(length // kpool * kpool, length)
    return replace(places, tail=tuple(first + position % kpool for position in tail))


@transfer(MEMORY + "_places", kills=("exact",))
def logical_pages_for_host_pages(original, memory, record, length):
    """Under HiSparse D advertises logical pages of the device for those of its host pool."""
    places = original(memory, record, length)
    return replace(places, kv=places.index)


@transfer(PLAN + "Plan._of_layers", kills=MISPLACED)
def all_layers_to_the_first(original, self, part, runs):
    """The runs of every layer go between the regions of the first."""
    planned = original(self, part, runs)
    return np.column_stack([np.full(len(planned), part), planned[:, 1:]])


@transfer(NODE + "prefill_node.PrefillNode._runs", kills=("containment", "exact"))
def aux_row_to_the_writers_slot(original, self, transfer, piece):
    """The aux row goes to the row at D that it has at P."""
    runs = original(self, transfer, piece)
    if piece == self._plans[transfer.to.rank].pieces:
        runs[:, 2] = runs[:, 1] % 3
    return runs


# Runs.


def _merged(runs, follows):
    firsts = np.flatnonzero(np.concatenate([np.ones(min(len(runs), 1), dtype=bool), ~follows]))
    if not firsts.size:
        return runs
    merged = runs[firsts]
    merged[:, 2] = np.add.reduceat(runs[:, 2], firsts)
    return merged


@transfer(PLAN + "_coalesced", kills=MISPLACED)
def merged_across_a_gap(original, runs):
    """Runs that follow one another at P are made one though there is a gap between them at D."""
    follows = (runs[1:, 0] == runs[:-1, 0] + runs[:-1, 2]) & (runs[1:, 1] > runs[:-1, 1])
    return _merged(runs, follows)


@transfer(PLAN + "_coalesced", kills=MISPLACED)
def merged_across_a_gap_at_the_source(original, runs):
    """Runs that follow one another at D are made one though there is a gap between them at P."""
    follows = (runs[1:, 1] == runs[:-1, 1] + runs[:-1, 2]) & (runs[1:, 0] > runs[:-1, 0])
    return _merged(runs, follows)


@transfer(PLAN + "_coalesced")
def merged_run_one_item_short(original, runs):
    """A run made of several lacks its last item."""
    merged = original(runs)
    whole = np.isin(merged[:, 0], runs[:, 0]) & (merged[:, 2:] == runs[:, 2]).any(1)
    merged[~whole, 2] -= 1
    return merged


# What is left out.


@transfer(PLAN + "Plan._of_layers", bug="sglang#42178")
def index_left_out(original, self, part, runs):
    """The index pages of a request are not sent."""
    return original(self, part, runs[:0] if part == INDEX else runs)


@transfer(PLAN + "Plan._of_layers")
def tail_left_out(original, self, part, runs):
    """The keys and gates of the tail are not sent."""
    return original(self, part, runs[:0] if part == TAIL else runs)


@transfer(PLAN + "Plan._state")
def state_left_out(original, self, here, there):
    """The KDA state is not sent."""
    return original(self, here, there)[:0]


@transfer(PLAN + "_head_parts")
def convolution_left_out(original, shape, heads, some):
    """Of the KDA state only the matrices are sent, and not the short convolution's inputs."""
    first, items, width = original(shape, heads, some)
    return first[:1], items[:1], width


@transfer(PLAN + "Plan._of_layers")
def last_layer_left_out(original, self, part, runs):
    """Of several layers the last is not sent."""
    planned = original(self, part, runs)
    return planned[: len(planned) - len(planned) // len(self.shape.dsa_layers)]


@transfer(PLAN + "Plan._of_layers")
def last_page_in_physical_pages(original, self, part, runs):
    """Of a logical page that is not full whole physical pages are sent, and no rows behind."""
    if part == KV:
        runs = runs.copy()
        runs[:, 2] -= runs[:, 2] % self.geometry.physical_page_size
    return original(self, part, runs[runs[:, 2] > 0])


@transfer(PLAN + "Plan.runs")
def index_of_full_pages_alone(original, self, piece, here, there):
    """The index page of a logical page that is not full is not sent, though groups are closed."""
    runs, full = original(self, piece, here, there), there.length // self.geometry.logical_page_size
    layers = 3 * len(self.shape.dsa_layers)
    index = (runs[:, 0] < layers) & (runs[:, 0] % 3 == INDEX)
    return runs[~index | np.isin(runs[:, 2], there.index[:full])]


@transfer(PLAN + "_share")
def page_between_shares_lost(original, start, stop, part, parts):
    """The first page of every piece but the first belongs to none."""
    first, last = original(start, stop, part, parts)
    return min(first + (part > 0), last), last


# Ranks.


@transfer(PLAN + "_head_parts", kills=MISPLACED)
def heads_from_the_first_on(original, shape, heads, some):
    """A rank that sends or takes some of its KDA heads counts them from its first."""
    return original(shape, heads, (heads.start, heads.start + some[1] - some[0]))


@transfer(PLAN + "_head_parts", kills=MISPLACED)
def convolution_by_heads(original, shape, heads, some):
    """Of the convolution's inputs the channels of a head are taken to lie together, q, k and v."""
    first, items, width = original(shape, heads, some)
    channels = items[1:].reshape(-1, 3).sum(1)
    whole = channels // (some[1] - some[0]) * len(heads)
    steps = first[1] - (some[0] - heads.start) * shape.kda_key_dim + np.cumsum(whole) - whole
    skipped = (some[0] - heads.start) * channels // (some[1] - some[0])
    return np.append(first[:1], steps + skipped), np.append(items[:1], channels), width


@transfer(PLAN + "Plan.runs")
def second_writer_sends_no_pages(original, self, piece, here, there):
    """Where two ranks of P write to one of D the second leaves all pages to the first."""
    runs = original(self, piece, here, there)
    return runs[:0] if self.writer and piece < self.chunks else runs


# What is sent when.


@transfer(PLAN + "Plan.required", kills=("provenance",))
def piece_sent_a_position_early(original, self, piece, length):
    """A piece is sent when all of its positions but the last are stored."""
    required, size = original(self, piece, length), self.geometry.logical_page_size
    return required - (piece < self.chunks and required % size > 1)


@transfer(MEMORY + "places", kills=("provenance", "drain"))
def source_pages_not_kept(original, memory, record):
    """A prompt that completes while its pages are read switches to cached ones, and frees its
    own."""
    places = original(memory, record)
    record.placed = False
    return places


@transfer(MEMORY + "adopt", kills=("drain", "exact"))
def adopted_pages_not_kept(original, memory, record):
    """A request that goes live switches to pages that are cached, and frees those of its
    transfer."""
    record.reserved = False
    slots = np.array([record.slot])
    memory.advance(slots, memory.table.known[slots])
    memory.complete(record)


@transfer(NODE + "decode_node.DecodeNode._reserve", kills=("exact",))
def aux_row_not_cleared(original, self, waiting):
    """A transfer finds its aux row as the last one has left it."""
    kept = self._aux.clone()
    reserved = original(self, waiting)
    self._aux.copy_(kept)
    return reserved


@transfer(NODE + "prefill_node.encode_aux", kills=("exact",))
def first_token_of_the_prompts_end(original, aux):
    """The token that D is to decode first is told as the length of the prompt."""
    return original(aux._replace(first_token=aux.length))


@transfer(NODE + "decode_node.DecodeNode._enter", kills=("exact",))
def first_token_of_the_last_transfer(original, self, key, phase):
    """D goes on from the first token that the transfer before this one has brought."""
    coming = self._coming[key]
    told, self.__dict__["last"] = self.__dict__.get("last", coming.first_token), coming.first_token
    if phase.name == "LIVE":
        coming.first_token = told
    original(self, key, phase)


# What NIXL makes of order and identity: notifications that come twice, descriptors that are stale.


@transfer("optimized.transfer.drain.Incoming._arrive", kills=("drain", "exact", "provenance"))
def notifications_counted(original, self, message):
    """Notifications are counted, so that one that comes twice stands for another piece."""
    mine = sorted(item for item in self.missing if item[0] == message.writer)
    if isinstance(message, Landed) and mine:
        return original(self, msgspec.structs.replace(message, piece=mine[0][1]))
    return original(self, message)


@transfer(NODE + "prefill_node.PrefillNode._runs", kills=MISPLACED)
def stale_places_of_the_room(original, self, transfer, piece):
    """A writer goes on using the places that D told first of a room, whose descriptors it has."""
    known = self.__dict__.setdefault("places_by_room", {})
    first = known.setdefault((transfer.key.room, transfer.to), transfer.places)
    alike = [len(part) for part in first] == [len(part) for part in transfer.places]
    if alike and first[3][1] == transfer.places[3][1]:
        transfer = transfer._replace(places=first)
    return original(self, transfer, piece)
