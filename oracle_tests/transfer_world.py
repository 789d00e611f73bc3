"""A P and a D instance in this process, a router, and a serving loop for each, over any transport.

All ranks of an instance tick at once, each in its thread.  The nodes' notes are put into one order
that does not depend on which thread was first: what the ranks did before their round, in rank
order, then what they did after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from optimized.cluster import Instance
from optimized.groups import ThreadGroup
from optimized.transfer.decode_node import DecodeNode
from optimized.transfer.node import Failed, Freed, Live, News, Node, Timers, aux_rows, regions_of
from optimized.transfer.plan import Plan, writers_of
from optimized.transfer.prefill_node import PrefillNode
from optimized.transfer.ranks import DecodeRank, PrefillRank
from optimized.transfer.transport import Region, Transport
from reference.contract import (
    Chunk,
    EngineOptions,
    HiSparse,
    OutOfMemory,
    RequestId,
    StepOutput,
    Weights,
    kv_bytes,
)
from reference.drain import Violation, judge
from reference.geometry import Geometry, ModelShape
from reference.prefix import judge_snapshot
from reference.protocol import (
    Completion,
    Observation,
    Peer,
    Reduced,
    Side,
    Topology,
)

Make = Callable[[Peer, Sequence[Region]], Transport]
"""Makes the transport of a process."""

ROUND_TIMEOUT_S = 10.0
"""How long a rank waits for the others, before a test fails."""

TURNS = Timers(retry_s=20, abort_timeout_s=60, transfer_timeout_s=300)
"""Timers that count turns of the world."""


@dataclass(slots=True)
class Asked:
    """A request as the router sees it.

    Fields:
        steps: tokens that D is to decode after the first.
        sampled: its tokens after the prompt, which are those of the highest logits.
        prompt, outputs: of the prefill at P, and of the decode steps at D.
        over: ends at which it is over.
        kept: it is not finished when it has all its tokens.
    """

    request: RequestId
    room: int
    tokens: list[int] = field(repr=False)
    steps: int
    kept: bool = False
    sampled: list[int] = field(default_factory=list)
    prompt: list[StepOutput] = field(default_factory=list, repr=False)
    outputs: list[StepOutput] = field(default_factory=list, repr=False)
    live: bool = False
    failed: bool = False
    over: set[Side] = field(default_factory=set)


class End:
    """One life of an instance, with a node for each of its ranks."""

    def __init__(self, instance: Instance, nodes: list[Any], notes: list[list[Observation]]):
        self.instance = instance
        self.nodes = nodes
        self._notes = notes

    def each(self, call: Callable[[Any], None]) -> list[Observation]:
        """Make the same call of all nodes; returns what they noted."""
        for node in self.nodes:
            call(node)
        return self._taken()

    def tick(self) -> tuple[list[list[News]], list[Observation]]:
        """What each node had to say, and what they all noted."""
        news = self.instance.each(lambda _, rank: self.nodes[rank].tick())
        said = [[item for item in each if not isinstance(item, Failed)] for each in news]
        assert all(each == said[0] for each in said), f"ranks do not agree on {said}"
        return news, self._taken()

    def _taken(self) -> list[Observation]:
        before, after = [], []
        for notes in self._notes:
            reduced = (n for n, seen in enumerate(notes, 1) if isinstance(seen, Reduced))
            middle = next(reduced, len(notes))
            before += notes[:middle]
            after += notes[middle:]
            notes.clear()
        return before + after


class World:
    """Both instances, and the run so far as `log`.

    Args:
        make: see Make.
        advance: lets time pass between two turns.
        clock: what `timers` count in; None for turns.
        pages: logical pages of D's token pool.
        hisparse: D has it.
        step: positions that P computes of a prompt in a turn.
        share: the memory, of so many bytes, in which a rank of D keeps its KV pool; None lets
            its engine allocate it.
    """

    def __init__(
        self,
        make: Make,
        geometry: Geometry,
        shape: ModelShape,
        weights: Weights,
        *,
        ranks: int = 1,
        chunks: int = 2,
        completion: Completion = Completion.STATUS,
        advance: Callable[[], None] = lambda: None,
        clock: Callable[[], float] | None = None,
        timers: Timers = TURNS,
        pages: int = 40,
        hisparse: bool = False,
        step: int = 8,
        quarantine_limit: int = 2,
        share: Callable[[int, int], Tensor | None] = lambda rank, size: None,
    ) -> None:
        self.make, self.advance = make, advance
        self.geometry, self.shape, self.weights = geometry, shape, weights
        self.ranks, self.chunks, self.completion = ranks, chunks, completion
        self.clock = clock or (lambda: float(self.turns))
        self.timers = timers
        self.step, self.share = step, share
        roomy = EngineOptions(pages=40, state_slots=64, max_requests=6, page_order="permuted")
        tight = EngineOptions(pages=pages, state_slots=48, max_requests=4, page_order="high")
        self.options = {Side.PREFILL: roomy, Side.DECODE: tight}
        self.geometries = dict.fromkeys(Side, geometry)
        if hisparse:
            least = geometry.topk + max(0, geometry.kpool - 2)
            self.geometries[Side.DECODE] = replace(geometry, device_buffer_size=least)
            rows = HiSparse(device_pages=4 * least + 1, host_pages=pages)
            self.options[Side.DECODE] = replace(tight, hisparse=rows)
        self.topology = Topology(
            pieces=chunks + 1,
            writers=writers_of(ranks, ranks),
            quarantine_limit=quarantine_limit,
        )
        self.turns = 0
        self.log: list[Observation] = []
        self.asked: dict[RequestId, Asked] = {}
        self.ends: dict[Side, End] = {}
        for side in Side:
            self.start(side, 0)

    def start(self, side: Side, incarnation: int) -> None:
        """Start an instance, perhaps again, and let it meet the other one."""
        options, notes = self.options[side], [[] for _ in range(self.ranks)]
        geometry = self.geometries[side]
        each = [options] * self.ranks
        if side is Side.DECODE:
            size = kv_bytes(geometry, self.shape, options)
            each = [replace(options, kv_memory=self.share(r, size)) for r in range(self.ranks)]
        instance = Instance(geometry, self.shape, each, self.weights)
        groups = ThreadGroup.of(self.ranks, timeout_s=ROUND_TIMEOUT_S)
        nodes = [
            self._node(Peer(side, rank, incarnation), instance, groups[rank], notes[rank])
            for rank in range(self.ranks)
        ]
        self.ends[side] = End(instance, nodes, notes)
        if len(self.ends) == len(Side):
            self.meet()

    def meet(self) -> None:
        """Hand every process the hellos of those that it moves requests to or from."""
        for reader in self.ends[Side.DECODE].nodes:
            for rank in self.topology.writers[reader.me.rank]:
                writer = self.ends[Side.PREFILL].nodes[rank]
                hellos = [node.transport.hello() for node in (reader, writer)]
                writer.connect(hellos[0])
                reader.connect(hellos[1])

    def _node(
        self, me: Peer, instance: Instance, group: ThreadGroup, notes: list[Observation]
    ) -> Node:
        engine, aux = instance.engines[me.rank], aux_rows(self.options[me.side].state_slots)
        transport = self.make(me, regions_of(engine, aux))
        how = {
            "group": group,
            "timers": self.timers,
            "clock": self.clock,
            "observe": notes.append,
        }
        if me.side is Side.DECODE:
            return DecodeNode(DecodeRank(me, self.topology), engine, transport, aux, **how)
        rank = PrefillRank(me, self.topology, self.completion)
        plans = {
            reader: Plan.between(
                self.geometry,
                self.shape,
                prefill=(me.rank, self.ranks),
                decode=(reader, self.ranks),
                chunks=self.chunks,
            )
            for reader in rank.targets
        }
        return PrefillNode(rank, engine, transport, aux, plans, **how)

    # The router.

    def ask(
        self, tokens: Sequence[int], *, steps: int = 3, room: int | None = None, kept: bool = False
    ) -> Asked:
        """Send a new request to both ends."""
        request = RequestId(len(self.asked))
        asked = Asked(request, request if room is None else room, list(tokens), steps, kept)
        self.asked[request] = asked
        self._all(Side.DECODE, lambda node: node.submit(request, asked.room, asked.tokens))
        self.ends[Side.PREFILL].instance.submit(request, asked.tokens)
        length = len(asked.tokens)
        self._all(Side.PREFILL, lambda node: node.submit(request, asked.room, length))
        return asked

    def abort(self, asked: Asked, *sides: Side) -> None:
        """Give a request up at some ends (by default both), which tell the others."""
        for side in sides or Side:
            self._all(side, lambda node: node.abort(asked.request))

    def kill(self, side: Side, kill: Callable[[Peer], None]) -> None:
        """All processes of an instance end, `kill` tells the network, and others start; what was
        not live at D yet is given up."""
        end, other = self.ends[side], Side.DECODE if side is Side.PREFILL else Side.PREFILL
        for node in end.nodes:
            kill(node.me)
        end.instance.close()
        for asked in self.asked.values():
            asked.over.add(side)
            if side is Side.DECODE or not asked.live:
                asked.failed, asked.live = True, False
                self.abort(asked, other)
        self.start(side, end.nodes[0].me.incarnation + 1)

    def finish(self, asked: Asked) -> None:
        """D decodes no more of it."""
        asked.live = False
        self._all(Side.DECODE, lambda node: node.finish(asked.request))

    def _all(self, side: Side, call: Callable[[Any], None]) -> None:
        self.log += self.ends[side].each(call)

    # The serving loops.

    def turn(self) -> None:
        """Let something happen everywhere."""
        self.turns += 1
        self.advance()
        self._prefill()
        for side in Side:
            news, seen = self.ends[side].tick()
            self.log += seen
            self._hear(side, news)
        self._decode()

    def _hear(self, side: Side, news: list[list[News]]) -> None:
        for item in news[0]:
            asked = self.asked[item.request]
            if isinstance(item, Live):
                asked.live = not asked.failed
                asked.sampled.append(item.first_token)
            elif isinstance(item, Freed):
                asked.over.add(side)
                asked.live = asked.live and side is Side.PREFILL
        for request in {i.request for each in news for i in each if isinstance(i, Failed)}:
            if not self.asked[request].failed:
                self.asked[request].failed = True
                self.abort(self.asked[request])

    def _prefill(self) -> None:
        """Compute a step more of each prompt, and say so."""
        end = self.ends[Side.PREFILL]
        for request, view in end.instance.inspect().requests.items():
            tokens = self.asked[request].tokens
            if view.length == len(tokens):
                continue
            stop = min(view.length + self.step, len(tokens))
            chunk = Chunk(request=request, stop=stop, outputs_from=view.length)
            [output] = end.instance.extend([chunk])
            self.asked[request].prompt.append(output)
            first = int(output.logits[-1].argmax()) if stop == len(tokens) else None
            self._all(
                Side.PREFILL,
                lambda node, r=request, s=stop, f=first: node.computed(r, s, f),
            )

    def _decode(self) -> None:
        """Decode a token of each live request that finds memory for it, and finish those that have
        all of theirs."""
        going = [a for a in self.asked.values() if a.live and len(a.outputs) < a.steps]
        try:
            self._step(going)
        except OutOfMemory:
            for asked in going:
                with suppress(OutOfMemory):
                    self._step([asked])

    def _step(self, going: list[Asked]) -> None:
        batch = [asked.request for asked in going]
        latest = [asked.sampled[-1] for asked in going]
        outputs = self.ends[Side.DECODE].instance.decode(batch, latest)
        for asked, output in zip(going, outputs, strict=True):
            asked.outputs.append(output)
            asked.sampled.append(int(output.logits[-1].argmax()))
            if len(asked.outputs) == asked.steps and not asked.kept:
                self.finish(asked)

    # The end.

    def run(self, until: Callable[[], bool] | None = None, *, turns: int = 2000) -> None:
        """Take turns until everything is over, or something is so."""
        for _ in range(turns):
            if until() if until else self.is_over:
                return
            self.turn()
        raise AssertionError(f"no end after {turns} turns: {list(self.asked.values())}")

    @property
    def is_over(self) -> bool:
        """Whether every request is over at both ends."""
        return all(len(asked.over) == len(Side) for asked in self.asked.values())

    def verdict(self, *, arrivals: bool, live: bool = True) -> Violation | None:
        """What the reference says of the run; memory must add up, too."""
        self._all(Side.DECODE, lambda node: node.count())
        for side, end in self.ends.items():
            options = self.options[side]
            sizes = {"pages": options.pages, "state_slots": options.state_slots}
            found = judge_snapshot(end.instance.inspect(), self.geometries[side], **sizes)
            assert not found, found
        return judge(self.log, self.topology, arrivals=arrivals, live=live)

    def close(self) -> None:
        """End all threads and transports."""
        for end in self.ends.values():
            for node in end.nodes:
                node.transport.close()
            end.instance.close()
