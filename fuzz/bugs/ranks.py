"""Ranks that know, or decide, different things."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

import systems
from fuzz.bugs.registry import bug, scenario
from fuzz.bugs.scene import TURNS, Found, Handed, played, require
from fuzz.mutants.registry import Body
from fuzz.step import Violation
from reference.drain import judge
from reference.geometry import Geometry, GeometryError
from reference.protocol import Observation, Peer, Reduced, Side, Topology

RANKS = "optimized.transfer.ranks.DecodeRank"
GATHER_TIMEOUT_S = 2.0
"""How long a rank waits for the others before a scene has failed."""


class Decoders:
    """Two ranks of D with a transfer each has offered, and their rounds as the judge sees them."""

    def __init__(self, *, quarantine_limit: int) -> None:
        self._ranks = systems.load_ranks()
        self.topology = Topology(pieces=1, writers=((0,), (1,)), quarantine_limit=quarantine_limit)
        self.ranks: list[Any] = []
        self.seen: list[Observation] = []
        for rank in range(2):
            here = self._ranks.DecodeRank(Peer(Side.DECODE, rank, 0), self.topology)
            here, key = here.meet(Peer(Side.PREFILL, rank, 0)).reserve(0, 0)
            self.ranks.append(here.advertise(key)[0])
        self.key = key

    def on(self, rank: int, call: Callable[[Any], tuple[Any, Any]]) -> None:
        """A rank does something alone."""
        self.ranks[rank], _ = call(self.ranks[rank])

    def round(self, number: int) -> None:
        """Each rank that has something to bring takes part in a round."""
        brought = [rank.contributions() for rank in self.ranks]
        self.seen += [
            Reduced(rank.me, number, len(values))
            for rank, values in zip(self.ranks, brought, strict=True)
            if values
        ]
        if len(set(map(len, brought))) == 1:
            together = self._ranks.decode_together(brought)
            self.ranks = [rank.reduced(together)[0] for rank in self.ranks]

    def judge(self) -> None:
        """Raises Found where the ranks' rounds are not the same."""
        violation = judge(self.seen, self.topology, live=False)
        if violation is not None:
            raise Found([Violation("drain", violation.clause.value, violation.sentence)])


def _those_under_way(original: Body, self: Any) -> tuple[Any, ...]:
    """A rank that has given a transfer up has nothing to say of it."""
    every = original(self)
    return tuple(c for t, c in zip(self.transfers, every, strict=True) if c.progress)


@scenario(faults={f"{RANKS}.contributions": _those_under_way}, caught_by=("drain",))
def rank_that_gave_up_takes_part() -> list[Violation]:
    """One of two ranks gives its transfer up; both meet in the next rounds."""

    def scene() -> None:
        both = Decoders(quarantine_limit=2)
        both.on(1, lambda rank: rank.cancel(both.key))
        for number in (1, 2):
            both.round(number)
        both.judge()

    return played(scene)


def _held_back_here(original: Body, self: Any, together: Sequence[Any]) -> Any:
    """A rank counts what it itself has in quarantine."""
    mine = [
        all_ranks._replace(hold=own.hold)
        for all_ranks, own in zip(together, self.contributions(), strict=True)
    ]
    return original(self, mine)


@scenario(faults={f"{RANKS}.reduced": _held_back_here}, caught_by=("drain",))
def admission_is_the_same_on_all_ranks() -> list[Violation]:
    """One of two ranks has a transfer in quarantine, which fills it; each admits what it may."""

    def scene() -> None:
        both = Decoders(quarantine_limit=1)
        for rank in range(2):
            both.on(rank, lambda rank: rank.cancel(both.key))
        both.on(0, lambda rank: rank.expire(both.key))
        both.round(1)
        for number, rank in enumerate(both.ranks):
            if rank.admits:
                both.on(number, lambda rank: rank.reserve(1, 1))
        both.round(2)
        both.judge()

    return played(scene)


def _known_alone(original: Body, size: int, **options: Any) -> list[Any]:
    """Each rank enters another list of ranks, and gets a group that nobody else is in."""
    return [original(size, **options)[rank] for rank in range(size)]


@scenario(faults={"optimized.groups.ThreadGroup.of": _known_alone}, caught_by=("exact",))
def ranks_of_a_group_meet() -> list[Violation]:
    """The ranks of an instance make their group, and gather once."""
    groups = pkgutil.resolve_name("optimized.groups")

    def scene() -> None:
        ranks = groups.ThreadGroup.of(2, timeout_s=GATHER_TIMEOUT_S)
        with ThreadPoolExecutor(len(ranks)) as threads:
            gathering = [threads.submit(rank.gather, torch.tensor([rank.rank])) for rank in ranks]
        errors = [each.exception() for each in gathering]
        lost = next((error for error in errors if isinstance(error, groups.RankLost)), None)
        require(lost is None, "collective", f"All ranks should meet; {lost}")

    return played(scene)


def _last_alone(original: Body, self: Any, writer: Peer) -> Any:
    """What is known of a peer is kept under the instance's name, the same for all its ranks."""
    return original(self, writer)._replace(writers=(writer,))


@scenario(faults={f"{RANKS}.meet": _last_alone}, caught_by=("exact",))
def every_writer_of_a_rank_is_known() -> list[Violation]:
    """Two ranks of P write to one of D: a request goes live."""

    def scene() -> None:
        with Handed(ranks=(2, 1)) as both:
            asked = both.submit(range(1, both.page + 1))
            for _ in range(TURNS):
                both.turn()
            require(asked.was_live, "live", f"{asked.name} should have gone live; it did not.")

    return played(scene)


def _not_asked(original: Body, self: Geometry) -> None:
    """Ranks that split a context are let through."""
    try:
        original(self)
    except GeometryError as error:
        if "dcp_size" not in str(error):
            raise


@scenario(faults={"reference.geometry.Geometry.__post_init__": _not_asked}, caught_by=("exact",))
def group_of_several_ranks_is_refused() -> list[Violation]:
    """Two ranks take the positions of a context in turns, and a pooled key wants four of them."""

    def scene() -> None:
        kpool, ranks = 4, 2
        try:
            Geometry(kpool=kpool, dcp_size=ranks)
        except GeometryError:
            return
        owners = sorted({position % ranks for position in range(kpool)})
        said = f"Group 0 should lie on one rank; its positions are on ranks {owners}."
        require(False, "startup", said)

    return played(scene)


bug(
    "TensorRT-LLM#15139",
    "A rank applies the end of a transfer as it sees it, though others have failed or not ended.",
    by=("live_by_any", "freed_alone"),
)
bug(
    "sglang#15805",
    "Nodes make a process group from different lists of ranks, and wait for each other for ever.",
    by=("ranks_of_a_group_meet",),
)
bug(
    "sglang#30760",
    "Each rank stops admitting when its own memory is full; where they differ by a page, they "
    "issue different numbers of collectives.",
    by=("admission_is_the_same_on_all_ranks",),
)
bug(
    "sglang#38273",
    "A rank to which a request is not known returns before the collective in which the others "
    "wait.",
    by=("rank_that_gave_up_takes_part",),
)
bug(
    "sglang#42536",
    "Context parallel ranks take positions in turns, so that no rank has all members of a pooled "
    "key.",
    by=("group_of_several_ranks_is_refused",),
)
bug(
    "vllm#43523",
    "With more prefill ranks than decode ranks the layout of some peers is never entered, and a "
    "look-up of theirs fails.",
    by=("every_writer_of_a_rank_is_known",),
)
bug(
    "vllm#50653",
    "Each rank works out by itself how many blocks its host memory has, and ids are handed out "
    "beyond the end of the smallest.",
    by=("ids_beyond_the_ranks_own_tier",),
)
