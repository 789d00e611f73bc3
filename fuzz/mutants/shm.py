"""Faults of the shared-memory transport: what is agreed, what is checked, and what comes first."""

from __future__ import annotations

from typing import Any

import numpy as np

from fuzz.mutants.registry import mutant
from reference.protocol import Outcome

COPY = "optimized.transfer.shm_copy."
HELLO = "optimized.transfer.shm_hello."
SHM = "optimized.transfer.shm.ShmTransport."


def shm(*where: str, bug: str = "own", kills: tuple[str, ...], **more: Any):
    """Register a mutant of the shared-memory transport."""
    return mutant(*where, bug=bug, killed_by=kills, target="shared_memory", **more)


# What comes first.


@shm(COPY + "Copier.ended", kills=("containment", "provenance"))
def notified_before_the_event(original, self):
    """A copy counts as ended, and its note is sent, when it has been ordered."""
    told = self.__dict__.setdefault("told", {})
    waiting = [self._asked.get() for _ in range(self._asked.qsize())]
    for copy in waiting:
        self._asked.put(copy)
    ended = [(copy, Outcome.LANDED) for copy in waiting] + original(self)
    fresh = [(copy, outcome) for copy, outcome in ended if id(copy) not in told]
    told.update({id(copy): copy for copy, _ in fresh})
    return fresh


@shm(COPY + "Copier._perform", kills=("provenance",))
def copied_before_its_source_is_there(original, self, copy):
    """The copy stream does not wait for the event of what produces the source."""
    return original(self, copy._replace(ready=None))


@shm(SHM + "_unmap", kills=("containment",))
def unmapped_before_drained(original, self):
    """What a former life of a peer shared is unmapped at once, with copies to it on their way."""
    for share in self._retired:
        share.tickets._spans.clear()
    original(self)


@shm(HELLO + "Host.bar", kills=("containment", "drain", "provenance"))
def fenced_before_its_mappers_are_reaped(original, self, peer):
    """A dead peer counts as fenced though a process that had mapped the memory is not reaped."""
    return True


@shm(SHM + "_follow", kills=("provenance",))
def failed_copy_taken_for_landed(original, self, copy, outcome):
    """A copy that the device broke off counts as landed."""
    return original(self, copy, Outcome.LANDED)


# Tickets.


@shm(COPY + "Tickets.__init__", kills=("provenance",))
def bounds_in_bytes(original, self, to, *, here, there):
    """The rows of a ticket are held against the bytes of the region."""
    original(self, to, here=here, there=there)
    self.here, self.there = self.here * 64, self.there * 64


@shm(COPY + "Tickets.open", kills=("containment", "provenance"))
def rows_may_be_written_twice(original, self, ticket, runs):
    """A ticket may name a row twice, or one that another open ticket names."""
    try:
        original(self, ticket, runs)
    except ValueError as refusal:
        if "writes an item twice" not in str(refusal):
            raise
        self._spans[ticket] = np.zeros((0, 2), dtype=np.int64)


@shm(COPY + "Tickets.close", kills=("exact",))
def tickets_stay_open(original, self, ticket):
    """A ticket is not closed when its copies have ended, so that its rows are never free again."""


@shm(COPY + "Share.__init__", kills=("containment", "provenance"))
def regions_at_one_offset(original, self, mine, theirs, segment, connection):
    """All regions of a mapped pool are taken to begin where the first does."""
    original(self, mine, theirs, segment, connection)
    first = next(iter(self.rows.values()))
    self.rows = dict.fromkeys(self.rows, first)


@shm(COPY + "copy_rows", kills=("containment", "provenance"))
def source_rows_for_target_rows(original, share, here, runs):
    """Rows are copied to the place that they have at P, as far as D has it."""
    runs = runs.copy()
    limits = np.array([len(share.rows[region]) for region in runs[:, 0].tolist()])
    runs[:, 2] = np.minimum(runs[:, 1], limits - runs[:, 3])
    original(share, here, runs)


# The handshake.


@shm("optimized.transfer.shared_pool.Segment.is_marked", kills=("exact",))
def mapped_without_its_nonce(original, self, nonce):
    """Memory is mapped without a look at the nonce in its guard pages."""
    return True


@shm(HELLO + "Host._admit", kills=("exact",))
def visitor_without_the_nonce(original, self, connection, nonce, theirs):
    """A visitor is handed the memory though it does not know its nonce."""
    return original(self, connection, self._pool.nonce, theirs)


@shm("optimized.transfer.hello._same", kills=("exact",))
def rank_not_checked(original, what, mine, theirs, cure):
    """A rank takes the hello of another rank's peer for that of its own."""
    if what != "rank":
        original(what, mine, theirs, cure)


@shm(HELLO + "unmet", "optimized.transfer.shm.unmet", kills=("exact",))
def one_side_opts_in_for_both(original, mine, theirs):
    """Memory is shared as soon as one of the two has opted in."""
    found = original(mine, theirs)
    refusing = [sentence for sentence in found if "did not opt in" in sentence]
    return [sentence for sentence in found if len(refusing) == 2 or sentence not in refusing]
