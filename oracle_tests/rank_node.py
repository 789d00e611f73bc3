"""A rank of P or D as a process of its own: engine, node, transport and serving loop.

It is told what to do over a pipe, and over the same pipe says all that it notes, hears and
computes, at once, so that a process which is killed leaves nothing unsaid.  All ranks of an
instance are told the same in the same order; what all of them have been told when a turn begins
is done in that turn.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np
import torch

from optimized.groups import ALONE, GlooGroup, RankLost
from optimized.transfer.decode_node import DecodeNode
from optimized.transfer.hello import Instance
from optimized.transfer.nixl import NixlTransport
from optimized.transfer.node import Freed, Live, News, Node, Timers, aux_rows, regions_of
from optimized.transfer.plan import Plan, writers_of
from optimized.transfer.prefill_node import PrefillNode
from optimized.transfer.ranks import DecodeRank, PrefillRank
from optimized.transfer.shared_pool import SharedPool
from optimized.transfer.shm import ShmTransport
from optimized.transfer.shm_hello import Setup
from oracle_tests.transfer_cases import PLAIN
from oracle_tests.transfer_runs import SHAPE4, weights
from reference.contract import (
    Chunk,
    EngineOptions,
    HiSparse,
    OutOfMemory,
    RequestId,
    StepOutput,
    kv_bytes,
)
from reference.geometry import Geometry
from reference.prefix import judge_snapshot
from reference.protocol import Completion, Observation, Peer, Side, Topology
from systems import load

context = multiprocessing.get_context("forkserver")
# one server forks the processes of all tests, and whoever starts it says what it has imported
context.set_forkserver_preload(
    [__name__, "oracle_tests.nixl_child", "oracle_tests.shm_child", "oracle_tests.rank_faults"]
)
torch.set_num_threads(1)


PATIENT = Timers(retry_s=0.1, abort_timeout_s=60, transfer_timeout_s=60)
"""Timers of which only the retry is ever due, unless something hangs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How the processes of a world are made.

    Fields:
        tls: UCX_TLS; "tcp" leaves a write in flight until its target polls.
        shared: D's KV pools are shared memory, into which P writes itself.
        pages: logical pages of D's token pool.
        step: positions that P computes of a prompt in a turn; `chunks` as in Plan.
    """

    ranks: int = 1
    completion: Completion = Completion.STATUS
    tls: str = "all"
    shared: bool = False
    hisparse: bool = False
    pages: int = 40
    step: int = 8
    chunks: int = 2
    quarantine_limit: int = 2
    timers: Timers = PATIENT

    @property
    def topology(self) -> Topology:
        return Topology(
            pieces=self.chunks + 1,
            writers=writers_of(self.ranks, self.ranks),
            quarantine_limit=self.quarantine_limit,
        )

    def engine(self, side: Side) -> tuple[Geometry, EngineOptions]:
        """What the engines of a side are made of."""
        if side is Side.PREFILL:
            return PLAIN, EngineOptions(
                pages=40, state_slots=64, max_requests=6, page_order="permuted"
            )
        tight = EngineOptions(pages=self.pages, state_slots=48, max_requests=4, page_order="high")
        if not self.hisparse:
            return PLAIN, tight
        least = PLAIN.topk + max(0, PLAIN.kpool - 2)
        rows = HiSparse(device_pages=4 * least + 1, host_pages=self.pages)
        return replace(PLAIN, device_buffer_size=least), replace(tight, hisparse=rows)


# What a process says, besides its node's news.


class Note(NamedTuple):
    """Something was done to the outside, at that time of the clock that all processes share."""

    at_ns: int
    seen: Observation


class Computed(NamedTuple):
    """D decoded a token, and sampled the next one."""

    output: StepOutput
    sampled: int

    @property
    def request(self) -> RequestId:
        return self.output.request


class Introduced(NamedTuple):
    """What this process's peers must be given from now on."""

    hello: bytes


class Answer(NamedTuple):
    """What came of a command."""

    value: Any


class Ending(NamedTuple):
    """The process ends, because of this."""

    why: str


class Holdings(NamedTuple):
    """What a process's transport keeps: registrations of memory, agents of peers, writes that are
    not over, and pools of others that it has mapped."""

    registrations: int
    agents: int
    writes: int
    mapped: int


class Rank(ABC):
    """One process; its public methods are the commands that it takes."""

    def __init__(self, pipe: Connection, me: Peer, setting: Setting, port: int) -> None:
        """Meet the instance's other ranks at the `meeting_point` with that port."""
        self._pipe = pipe
        self._setting = setting
        self._told: list[tuple[str, tuple[Any, ...]]] = []
        self._running, self._leaving, self._epoch = False, False, -1
        self._group = ALONE if setting.ranks == 1 else GlooGroup(me.rank, setting.ranks, port=port)
        geometry, options = setting.engine(me.side)
        self._pool = None
        if setting.shared and me.side is Side.DECODE:
            self._pool = SharedPool(kv_bytes(geometry, SHAPE4, options))
            options = replace(options, kv_memory=self._pool.memory)
        self._engine = load("optimized").factory(
            geometry, SHAPE4, options, weights(), group=self._group
        )
        self._sizes = {"pages": options.pages, "state_slots": options.state_slots}
        aux = aux_rows(options.state_slots)
        regions = regions_of(self._engine, aux)
        instance = Instance(setting.ranks, setting.completion, PLAIN)
        self._nixl = NixlTransport(me, instance, regions)
        self._shm = None
        if setting.shared:
            setup = Setup(opted_in=True)
            self._shm = ShmTransport(self._nixl, regions, setup=setup, pool=self._pool)
        how = {"group": self._group, "timers": setting.timers, "observe": self._note}
        self._node = self._join(me, self._shm or self._nixl, aux, how)

    @abstractmethod
    def _join(self, me: Peer, transport: Any, aux: torch.Tensor, how: dict[str, Any]) -> Node: ...

    @abstractmethod
    def turn(self) -> None:
        """A turn of the serving loop, with a tick of the node."""

    @abstractmethod
    def _heed(self, news: News) -> None: ...

    def serve(self) -> None:
        """Do what is told, and take turns in between while running."""
        self._introduce()
        while not self._leaving:
            for command, arguments in self._agreed():
                self._say(Answer(getattr(self, command)(*arguments)))
            if self._running:
                self.turn()

    def _agreed(self) -> list[tuple[str, tuple[Any, ...]]]:
        """What all ranks have been told by now.  One that stands waits to be told something."""
        while self._pipe.poll(0 if self._running or self._told else None):
            self._told.append(self._pipe.recv())
        [count] = self._group.reduce_min(np.array([len(self._told)])).tolist()
        taken, self._told = self._told[:count], self._told[count:]
        return taken

    def _say(self, something: News | Note | Computed | Introduced | Answer | Ending) -> None:
        # tensors by value: those that `send` shares are gone with their process
        self._pipe.send_bytes(pickle.dumps(something))

    def _note(self, seen: Observation) -> None:
        self._say(Note(time.monotonic_ns(), seen))

    def _introduce(self) -> None:
        """Say how this process is reached, if that is new."""
        if self._nixl.epoch != self._epoch:
            self._epoch = self._nixl.epoch
            self._say(Introduced(self._node.transport.hello()))

    def run(self) -> None:
        self._running = True

    def stand(self) -> None:
        self._running = False

    def tick(self) -> None:
        """A turn in which nothing is computed."""
        for news in self._node.tick():
            self._say(news)
            self._heed(news)
        self._introduce()

    def connect(self, hellos: Sequence[bytes]) -> list[str | None]:
        """Returns, for each peer, why no memory is shared with it."""
        peers = [self._node.connect(hello) for hello in hellos]
        return [self._shm.why_not(peer) if self._shm else "over NIXL" for peer in peers]

    def abort(self, request: RequestId) -> None:
        self._node.abort(request)

    def inspect(self) -> list[str]:
        """What is wrong with the memory of a rank that is at rest."""
        snapshot = self._engine.inspect()
        found = [str(one) for one in judge_snapshot(snapshot, self._engine.geometry, **self._sizes)]
        if snapshot.holders:
            found.append(f"requests are left: {snapshot.holders}")
        if sum(len(node.pages) for node in snapshot.cached) != len(snapshot.ref_counts):
            found.append("pages are owned that no cache has")
        if self._pool is not None and not self._pool.is_intact():
            found.append("a guard page of the shared pool was written to")
        return found

    def holdings(self) -> Holdings:
        links = [*self._nixl._links.values(), *self._nixl._retired]
        return Holdings(
            registrations=len(self._nixl.endpoint._registered),
            agents=len(links),
            writes=sum(len(link.posted) + len(link.kept) for link in links),
            mapped=len(self._shm._shares) + len(self._shm._retired) if self._shm else 0,
        )

    def close(self) -> Holdings:
        """Give everything back, and stay; only `leave` may follow."""
        self._running = False
        self._node.transport.close()
        left = self.holdings()
        del self._node, self._engine, self._nixl, self._shm
        gc.collect()
        if self._pool is not None:
            self._pool.close()
        return left

    def leave(self) -> None:
        self._leaving = True


class Prefill(Rank):
    """A rank of P: prefills a step more of each prompt a turn."""

    def _join(self, me: Peer, transport: Any, aux: torch.Tensor, how: dict[str, Any]) -> Node:
        self._prompts: dict[RequestId, int] = {}  # positions that are still to be computed
        ranks, topology = self._setting.ranks, self._setting.topology
        rank = PrefillRank(me, topology, self._setting.completion)
        plans = {
            reader: Plan.between(
                PLAIN,
                SHAPE4,
                prefill=(me.rank, ranks),
                decode=(reader, ranks),
                chunks=self._setting.chunks,
            )
            for reader in rank.targets
        }
        return PrefillNode(rank, self._engine, transport, aux, plans, **how)

    def submit(self, request: RequestId, room: int, tokens: Sequence[int]) -> None:
        hit = self._engine.submit(request, tokens).hit
        self._prompts[request] = len(tokens) - hit
        self._node.submit(request, room, len(tokens))

    def turn(self) -> None:
        for request, left in self._prompts.items():
            if left:
                self._extend(request, left)
        self.tick()

    def _heed(self, news: News) -> None:
        if isinstance(news, Freed):
            del self._prompts[news.request]

    def _extend(self, request: RequestId, left: int) -> None:
        taken = min(left, self._setting.step)
        stop = self._engine.inspect().requests[request].length + taken
        [output] = self._engine.extend([Chunk(request=request, stop=stop)])
        self._prompts[request] = left - taken
        first = int(output.logits[-1].argmax()) if taken == left else None
        self._node.computed(request, stop, first)


@dataclass(slots=True)
class _Decoding:
    """A request with so many `steps` to go, after its latest token once it is live."""

    steps: int
    latest: int | None = None


class Decode(Rank):
    """A rank of D: decodes a token of each live request a turn."""

    def _join(self, me: Peer, transport: Any, aux: torch.Tensor, how: dict[str, Any]) -> Node:
        self._asked: dict[RequestId, _Decoding] = {}
        rank = DecodeRank(me, self._setting.topology)
        return DecodeNode(rank, self._engine, transport, aux, **how)

    def submit(self, request: RequestId, room: int, tokens: Sequence[int], steps: int) -> None:
        self._asked[request] = _Decoding(steps)
        self._node.submit(request, room, tokens)

    def inspect(self) -> list[str]:
        self._node.count()
        return super().inspect()

    def _heed(self, news: News) -> None:
        if isinstance(news, Live):
            self._asked[news.request].latest = news.first_token
        elif isinstance(news, Freed):
            del self._asked[news.request]

    def turn(self) -> None:
        self.tick()
        going = [r for r, asked in self._asked.items() if asked.steps and asked.latest is not None]
        try:
            self._step(going)
        except OutOfMemory:
            for request in going:
                with suppress(OutOfMemory):
                    self._step([request])

    def _step(self, going: list[RequestId]) -> None:
        outputs = self._engine.decode(going, [self._asked[request].latest for request in going])
        for output in outputs:
            asked, token = self._asked[output.request], int(output.logits[-1].argmax())
            asked.latest, asked.steps = token, asked.steps - 1
            self._say(Computed(output, token))
            if not asked.steps:
                self._node.finish(output.request)


def serve(
    pipe: Connection, me: Peer, setting: Setting, port: int, fault: Callable[[], None] | None
) -> None:
    """The process; a `fault` is patched on first."""
    gc.freeze()  # what is imported is no garbage, and not worth looking at
    os.environ["UCX_TLS"] = setting.tls
    os.environ["NIXL_LOG_LEVEL"] = "ERROR"
    if fault is not None:
        fault()
    try:
        (Decode if me.side is Side.DECODE else Prefill)(pipe, me, setting, port).serve()
    except RankLost as lost:
        pipe.send_bytes(pickle.dumps(Ending(str(lost))))
    except Exception:
        pipe.send_bytes(pickle.dumps(Ending(traceback.format_exc())))
