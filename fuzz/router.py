"""P, D and the router between them, in one process: what a run of transfers consists of.

The router numbers requests, tells both ends of them, and tells the one what the other gives up.
It has no will of its own: what is done next is for a tape to say (`fuzz.handover`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

import systems
from fuzz.stamps import U64, Stamper
from fuzz.tape import SplitMix
from fuzz.targets.shared_memory import Forgery, Hostility
from fuzz.targets.transfer import TransferSetup
from reference.contract import Chunk, OutOfMemory, RequestId
from reference.protocol import Advertise, Arrived, Observation, Peer, Sent, Side, TransferKey


@dataclass(slots=True)
class Asked:
    """A request as the router sees it.

    Fields:
        tokens: the prompt, and then what D has decoded; chain: of those.
        length: of the prompt; stored: how much of it P has.
        hit: how much of it P found in its cache.
        first_token: what P sampled after it; None until it has.
        live: D may decode it; was_live: it could at some time.
        given_up: somebody chose to, or a process ended.
        over: ends at which it is over.
    """

    request: RequestId
    room: int
    tokens: list[int]
    chain: U64
    length: int
    stored: int = 0
    hit: int = 0
    first_token: int | None = None
    live: bool = False
    was_live: bool = False
    given_up: bool = False
    failed: bool = False
    over: set[Side] = field(default_factory=set)

    @property
    def name(self) -> str:
        return f"request {self.request}"


class Router:
    """A run in progress.

    Fields:
        network: what is between the processes; lives: the present life of either instance.
        asked: every request, by its number; now: ticks so far, the nodes' clock.
        arrived: what landed since it was last cleared.
    """

    def __init__(self, setup: TransferSetup, stamper: Stamper) -> None:
        self.setup, self.wiring, self.stamper = setup, setup.wiring, stamper
        self._transfer = systems.load_transfer()
        self.network = self._transfer.Network(
            parts=setup.parts,
            message_faults=setup.message_faults,
            write_faults=setup.write_faults,
            observe=self._observe,
        )
        self.sharing = self._shared()
        self.asked: dict[RequestId, Asked] = {}
        self.now = 0
        self.log: list[Observation] = []
        self._asked_for = False
        self.lives: dict[Side, Any] = {}
        self._former: list[Any] = []
        self._forged: TransferKey | None = None
        try:
            for side in Side:
                self.lives[side] = self._start(side, 0)
            self.got_in = self._try()
            self._meet()
        except BaseException:
            self.close()
            raise

    def _shared(self) -> Any:
        shared = self.setup.shared
        if shared is None:
            return None
        impostor = shared.hostility is Hostility.IMPOSTOR
        sharing = systems.load_sharing().Sharing
        return sharing(self.network, self.wiring, shared.opted_in, impostor)

    def _start(self, side: Side, incarnation: int) -> Any:
        transport = self.sharing or self.network
        memory = {"memory": self.sharing.memory} if self.sharing else {}
        return self._transfer.Life(
            self.wiring,
            side,
            incarnation,
            transport.attach,
            lambda: self.now,
            ape=self.stamper.ape,
            **memory,
        )

    def _try(self) -> bool:
        """What somebody tries before the processes meet; whether it succeeds."""
        hostility = self.setup.shared and self.setup.shared.hostility
        here, there = (self.lives[side].nodes for side in Side)
        if hostility is Hostility.INTRUDER:
            return bool(self.sharing.intrude(there[0].me))
        if hostility is Hostility.MISROUTED:
            return bool(self.sharing.misroute(here[0].me, there[1].me))
        return False

    def _meet(self) -> None:
        self._transfer.meet(self.lives[Side.PREFILL], self.lives[Side.DECODE])

    def close(self) -> None:
        """End all threads, and unmap what is shared."""
        for life in (*self._former, *self.lives.values()):
            life.close()
        self._former.clear()
        self.lives.clear()
        if self.sharing:
            self.sharing.close()

    def taken(self) -> list[Observation]:
        """What was noted since the last call."""
        seen, self.log = self.log, []
        return seen

    def _observe(self, seen: Observation) -> None:
        self.log.append(seen)

    def _all(self, side: Side, call: Callable[[Any], None]) -> None:
        self._asked_for = True
        self.lives[side].each(call)
        self.log += self.lives[side].taken()

    # the router

    def submit(self, tokens: Sequence[int], room: int) -> Asked:
        """Tell both ends of a new request."""
        request = RequestId(len(self.asked))
        prompt = list(tokens)
        asked = Asked(request, room, prompt, self.stamper.chain(prompt), len(prompt))
        self.asked[request] = asked
        self._all(Side.DECODE, lambda node: node.submit(request, room, prompt))
        asked.hit = asked.stored = self.lives[Side.PREFILL].engine.submit(request, prompt).hit
        self._all(Side.PREFILL, lambda node: node.submit(request, room, len(prompt)))
        return asked

    def abort(self, asked: Asked, sides: Sequence[Side] = tuple(Side)) -> None:
        """Give a request up at some ends."""
        asked.given_up = True
        for side in sides:
            if side is Side.DECODE:
                asked.live = False
            if side not in asked.over:
                self._all(side, lambda node: node.abort(asked.request))

    def finish(self, asked: Asked) -> None:
        """D decodes no more of it."""
        asked.live = False
        self._all(Side.DECODE, lambda node: node.finish(asked.request))

    def restart(self, side: Side) -> None:
        """All processes of an instance end, and others start in their place.  What was not live at
        D is given up."""
        life = self.lives[side]
        other = Side.DECODE if side is Side.PREFILL else Side.PREFILL
        for node in life.nodes:
            self.network.kill(node.me)
            if self.sharing:
                self.sharing.kill(node.me)
        self._former.append(life)
        for asked in self.asked.values():
            asked.over.add(side)
            if side is Side.DECODE or not asked.was_live:
                self.abort(asked, (other,))
                asked.given_up, asked.live = True, False
        self.lives[side] = self._start(side, life.incarnation + 1)
        self._meet()

    # what takes time

    def compute(self, asked: Asked, stop: int, first_token: int) -> None:
        """P computes more of a prompt, and after its end samples that token."""
        rows = self.stamper.extend_rows(asked.chain, asked.stored, stop)
        chunk = Chunk(request=asked.request, stop=stop, rows=rows)
        self.lives[Side.PREFILL].engine.extend([chunk])
        if self.sharing:
            for node in self.lives[Side.PREFILL].nodes:
                self.sharing.devices[node.me].order()
        asked.stored = stop
        asked.first_token = first_token if stop == asked.length else None
        sampled = asked.first_token
        self._all(Side.PREFILL, lambda node: node.computed(asked.request, stop, sampled))

    def steps(self, count: int, order: int) -> int:
        """The network takes up to so many steps, in an order of that number; 0 is the ordinary
        one.  Returns how many there were."""
        random = SplitMix(order)
        self.network.choose = random.below if order else _ordinary
        return next((n for n in range(count) if not self.network.step()), count)

    def tick(self, side: Side) -> Any:
        """The nodes of an instance tick; the router hears what they say."""
        self.now += 1
        self._asked_for = False
        said = self.lives[side].tick()
        self.log += self.lives[side].taken()
        for request in said.live:
            asked = self.asked[request]
            asked.was_live = asked.live = True
        for request in said.freed:
            asked = self.asked[request]
            asked.over.add(side)
            asked.live = asked.live and side is Side.PREFILL
        for request in sorted(said.failed | said.freed):
            asked = self.asked[request]
            asked.failed = asked.failed or request in said.failed
            if not asked.was_live:
                self._tell(asked)
        return said

    def _tell(self, asked: Asked) -> None:
        """One end is through with a request that was never live: so is the other, unless it is P
        that has sent all."""
        if asked.failed or Side.DECODE in asked.over:
            given_up = asked.given_up
            self.abort(asked)
            asked.given_up = given_up

    def decode(self, batch: Sequence[Asked], tokens: Sequence[int]) -> bool:
        """D decodes a token of each; whether it found memory for them."""
        chains = self.stamper.append(
            np.array([asked.chain[-1] for asked in batch]),
            np.array([len(asked.tokens) for asked in batch]),
            np.array(tokens),
        )
        rows = self.stamper.step_rows(chains)
        geometry, shape = self.wiring.geometries[Side.DECODE], self.wiring.shape
        if self.wiring.options[Side.DECODE].hisparse:
            void = (len(shape.dsa_layers), len(batch), geometry.selection_width)
            rows = replace(rows, selected=torch.full(void, -1))
        try:
            self.lives[Side.DECODE].engine.decode([a.request for a in batch], tokens, rows)
        except OutOfMemory:
            return False
        for asked, token, chain in zip(batch, tokens, chains, strict=True):
            asked.tokens.append(token)
            asked.chain = np.append(asked.chain, chain)
        return True

    def count(self) -> None:
        """The ranks of D note how many pages are free, and who has the others."""
        self.lives[Side.DECODE].each(lambda node: node.count())
        self.log += self.lives[Side.DECODE].taken()

    # what is shared

    def forge(self) -> bool:
        """Change D's first offer of rank 0 on its way, whenever it is made, if that is to be;
        whether it was there."""
        forgery = self.setup.shared.forgery if self.setup.shared else Forgery.NONE
        if forgery is Forgery.NONE:
            return False
        messages = [each.message for each in self.log if isinstance(each, Sent)]
        offers = [m for m in messages if isinstance(m, Advertise) and m.at.rank == 0]
        if offers and self._forged is None:
            self._forged = offers[0].key
        mine = [offer for offer in offers if offer.key == self._forged]
        for offer in mine:
            kv, *others = offer.places
            option, chunks = self.wiring.options[Side.DECODE], self.wiring.chunks
            last = option.hisparse.host_pages if option.hisparse else option.pages
            other = (chunks - 1) * len(kv) // chunks
            if forgery is Forgery.TWICE and other < len(kv) - 1:
                last = kv[other]
            self.sharing.forge(offer, ((*kv[:-1], last), *others))
        return bool(mine)

    def copy(self, me: Peer, *, fails: bool) -> Any:
        """Make the oldest copy of a process of P."""
        return self.sharing.copy(me, fails=fails)

    def produce(self, me: Peer) -> None:
        """The device of a process of P does its work."""
        self.sharing.devices[me].run()

    def copies(self) -> list[Peer]:
        """Processes of P that have a copy to make."""
        return self.sharing.waiting() if self.sharing else []

    def behind(self) -> list[Peer]:
        """Processes of P whose device has work to do."""
        return self.sharing.behind() if self.sharing else []

    # what there is

    def is_due(self) -> bool:
        """Whether a node has something to handle."""
        ended = self.sharing is not None and self.sharing.has_ended()
        return self._asked_for or ended or any(end.inbox for end in self.network.ends.values())

    def standing(self) -> list[tuple[bool, int, int]]:
        """What changes as long as the run gets anywhere."""
        return [(a.live, a.stored, len(a.over)) for a in self.asked.values()]

    def pairs(self) -> list[tuple[Any, Any]]:
        """The nodes of each rank of D and of a rank of P that writes to it."""
        writers = self.lives[Side.PREFILL].nodes
        return [
            (writers[rank], reader)
            for reader in self.lives[Side.DECODE].nodes
            for rank in self.wiring.topology.writers[reader.me.rank]
        ]

    def computable(self) -> list[Asked]:
        """Requests of whose prompts P has more to compute."""
        return [
            asked
            for asked in self.asked.values()
            if asked.stored < asked.length and Side.PREFILL not in asked.over
        ]

    def live(self) -> list[Asked]:
        """Requests that D may decode."""
        return [asked for asked in self.asked.values() if asked.live]

    def unfinished(self) -> list[Asked]:
        """Requests that are not over at both ends."""
        return [asked for asked in self.asked.values() if len(asked.over) < len(Side)]

    def on_the_way(self) -> list[Any]:
        """What the network has to do."""
        return [*self.network.way, *(t for end in self.network.ends.values() for t in end.outbox)]


def landed(seen: Sequence[Observation]) -> list[Arrived]:
    """Those of some observations that bytes came."""
    return [each for each in seen if isinstance(each, Arrived)]


def _ordinary(possibilities: int) -> int:
    return 0
