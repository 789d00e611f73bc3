"""The optimized engine's transfer in one process: instances of nodes over a simulated network.

Nothing here happens by itself: a campaign makes the calls of the serving loop, and lets the
network take its steps (`optimized.transfer.simulated`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from optimized.cluster import Instance
from optimized.groups import ThreadGroup
from optimized.transfer.decode_node import DecodeNode
from optimized.transfer.node import (
    Failed,
    Freed,
    Live,
    Node,
    Options,
    Timers,
    aux_rows,
    regions_of,
)
from optimized.transfer.plan import Plan
from optimized.transfer.prefill_node import PrefillNode
from optimized.transfer.ranks import DecodeRank, PrefillRank
from optimized.transfer.simulated import Network
from optimized.transfer.transport import Region, Transport
from reference.contract import RequestId, kv_bytes
from reference.protocol import Observation, Peer, Reduced, Side
from systems.wiring import Wiring

__all__ = ["Life", "Network", "Said", "meet"]

Attach = Callable[[Peer, Sequence[Region]], Transport]
"""Makes the transport of a process that starts."""
ROUND_TIMEOUT_S = 10.0
"""How long a rank waits for the others, before a run fails."""


@dataclass(frozen=True, slots=True)
class Said:
    """What the nodes of an instance had to say after a tick.

    Fields:
        live: the first token of each request that may be decoded now.
        failed: requests that some rank gave up; freed: those whose memory was given back.
    """

    live: dict[RequestId, int]
    failed: set[RequestId]
    freed: set[RequestId]


class Life:
    """One life of an instance: its engines, and a node for each of its ranks.

    Fields:
        engines, nodes: in rank order; engine: all engines, called like one.
        aux: each rank's aux rows, [state slots, bytes] uint8.
        notes: what the nodes noted, until it is taken.
    """

    def __init__(
        self,
        wiring: Wiring,
        side: Side,
        incarnation: int,
        attach: Attach,
        clock: Callable[[], float],
        *,
        ape: Tensor,
        memory: Callable[[int, int], Tensor | None] = lambda rank, size: None,
    ) -> None:
        """Start an instance of stamped engines, with the position weights `ape`; `memory` finds a
        rank of D so many bytes for its KV pool, None lets the engine allocate it."""
        self.wiring, self.side, self.incarnation = wiring, side, incarnation
        geometry, options = wiring.geometries[side], replace(wiring.options[side], ape=ape)
        ranks = range(wiring.ranks[side])
        each = [options for _ in ranks]
        if side is Side.DECODE:
            size = kv_bytes(geometry, wiring.shape, options)
            each = [replace(options, kv_memory=memory(rank, size)) for rank in ranks]
        self._instance = Instance(geometry, wiring.shape, each)
        self.engines = self._instance.engines
        self.engine = self._instance if len(ranks) > 1 else self.engines[0]
        self.aux = [aux_rows(options.state_slots) for _ in ranks]
        self.notes: list[list[Observation]] = [[] for _ in ranks]
        groups = ThreadGroup.of(len(ranks), timeout_s=ROUND_TIMEOUT_S)
        self.nodes: list[Any] = [
            self._node(Peer(side, rank, incarnation), groups[rank], attach, clock) for rank in ranks
        ]

    def _node(
        self, me: Peer, group: ThreadGroup, attach: Attach, clock: Callable[[], float]
    ) -> Node:
        wiring, engine, aux = self.wiring, self.engines[me.rank], self.aux[me.rank]
        transport = attach(me, regions_of(engine, aux))
        timers = Timers(
            retry_s=wiring.retry,
            abort_timeout_s=wiring.abort_timeout,
            transfer_timeout_s=wiring.transfer_timeout,
        )
        how: Options = {
            "group": group,
            "timers": timers,
            "clock": clock,
            "observe": self.notes[me.rank].append,
        }
        if me.side is Side.DECODE:
            return DecodeNode(DecodeRank(me, wiring.topology), engine, transport, aux, **how)
        rank = PrefillRank(me, wiring.topology, wiring.completion)
        plans = {
            reader: Plan.between(
                wiring.geometries[Side.PREFILL],
                wiring.shape,
                prefill=(me.rank, wiring.ranks[Side.PREFILL]),
                decode=(reader, wiring.ranks[Side.DECODE]),
                chunks=wiring.chunks,
            )
            for reader in rank.targets
        }
        return PrefillNode(rank, engine, transport, aux, plans, **how)

    def each(self, call: Callable[[Any], None]) -> None:
        """Make the same call of all nodes, one after the other."""
        for node in self.nodes:
            call(node)

    def tick(self) -> Said:
        """Let all nodes tick at once, each in its thread, since they meet in a round."""
        if len(self.nodes) == 1:
            news = self.nodes[0].tick()
        else:
            ticked = self._instance.each(lambda _, rank: self.nodes[rank].tick())
            news = [item for each in ticked for item in each]
        return Said(
            live={item.request: item.first_token for item in news if isinstance(item, Live)},
            failed={item.request for item in news if isinstance(item, Failed)},
            freed={item.request for item in news if isinstance(item, Freed)},
        )

    def close(self) -> None:
        """End the ranks' threads."""
        self._instance.close()

    def taken(self) -> list[Observation]:
        """What the nodes noted since the last call, in an order that does not depend on which
        thread was first: what the ranks did before their round, in rank order, then what they did
        after it."""
        before, after = [], []
        for notes in self.notes:
            reduced = (n for n, seen in enumerate(notes, 1) if isinstance(seen, Reduced))
            middle = next(reduced, len(notes))
            before += notes[:middle]
            after += notes[middle:]
            notes.clear()
        return before + after


def meet(prefill: Life, decode: Life) -> None:
    """Hand every process the hellos of those that it moves requests to or from."""
    for reader in decode.nodes:
        for rank in decode.wiring.topology.writers[reader.me.rank]:
            writer = prefill.nodes[rank]
            hellos = reader.transport.hello(), writer.transport.hello()
            writer.connect(hellos[0])
            reader.connect(hellos[1])
