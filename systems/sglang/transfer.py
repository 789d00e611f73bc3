"""Prefill and decode ranks of one SGLang release, in processes of their own, and their network.

The ends are forked from this process, which must have loaded the release.  Control messages go
through here, so that a scenario says when each arrives, and what happened is told to a `Ledger`.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Literal

from reference.protocol import Ack, Died, Peer, Phase, Side, TransferKey
from systems.sglang import transfer_end
from systems.sglang.releases import Differences
from systems.sglang.transfer_end import (
    CANARY,
    DECODE_PORT,
    LAYERS,
    PAGE_BYTES,
    PREFILL_PORT,
    DecodeEnd,
    PrefillEnd,
)
from systems.sglang.transfer_log import Asked, Ledger, Letter
from systems.sglang.transfer_wire import WAIT_S

P, D = Side
POLL_S = 0.001
STUCK_S = 2.0
"""After which a request that is served in milliseconds will not be served any more."""
_PATIENCE = "SGLANG_DISAGGREGATION_DEFERRED_DECODE_KV_RELEASE_TIMEOUT"

Served = Literal["own data", "foreign data", "nothing"]
"""What D decodes a request from; nothing, if it waits for ever."""


class EndError(RuntimeError):
    """A call into an end failed; the message is SGLang's."""


class Child:
    """One end, called by method name."""

    def __init__(self, side: Side, rank: int, arguments: dict[str, Any]) -> None:
        context = multiprocessing.get_context("fork")
        self.me = Peer(side, rank, 0)
        self.sleeps = False
        self.pipe, theirs = context.Pipe()
        kind = (PrefillEnd, DecodeEnd)[side]
        port = (PREFILL_PORT, DECODE_PORT)[side] + rank
        given = {"rank": rank, **arguments}
        self.process = context.Process(
            target=transfer_end.serve, args=(theirs, kind, port, given), daemon=True
        )
        self.process.start()
        theirs.close()

    def send(self, name: str, *rest: Any) -> None:
        """Call a method; `answer` gets what it returns."""
        self.pipe.send((name, *rest))

    def answer(self) -> Any:
        """
        Raises:
            EndError: the method raised, or does not return.
        """
        if not self.pipe.poll(WAIT_S):
            raise EndError(f"{self.me} does not answer.")
        result, error = self.pipe.recv()
        if error is not None:
            raise EndError(error)
        return result

    def __call__(self, name: str, *rest: Any) -> Any:
        self.send(name, *rest)
        return self.answer()

    def is_alive(self) -> bool:
        return self.process.is_alive()

    def stop(self) -> None:
        """Stop the process, as it is; until `resume` it is not asked for its journal."""
        self.sleeps = True
        os.kill(self.process.pid or 0, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.process.pid or 0, signal.SIGCONT)
        self.sleeps = False

    def kill(self) -> None:
        self.process.kill()
        self.process.join(WAIT_S)


class World(Ledger):
    """All ends, and the messages between them."""

    def __init__(
        self,
        differences: Differences,
        *,
        ranks: int = 1,
        rows: int = 8,
        patience_s: float = 30.0,
        hisparse: bool = False,
    ) -> None:
        """`rows` of metadata on each rank; D holds what was given up for `patience_s`, SGLang's
        own being 30 s; with `hisparse` its pages are host rows."""
        super().__init__(ranks, notifies=not differences.statuses)
        self.ranks, self.rows = ranks, rows
        os.environ[_PATIENCE] = str(patience_s)
        common = {"ranks": ranks, "rows": rows, "host_receive_off": differences.host_receive_off}
        self.ends: dict[Side, list[Child]] = {}
        with tempfile.TemporaryDirectory() as folder:
            for side, more in ((P, {}), (D, {"hisparse": hisparse})):
                os.environ["KVORACLE_RENDEZVOUS"] = str(Path(folder) / side.name)
                self.ends[side] = [Child(side, rank, common | more) for rank in range(ranks)]
            for child in (*self.ends[P], *self.ends[D]):
                child.answer()

    # what a scenario does

    def ask(
        self, room: int, pages: list[int], *, source: list[int] | None = None, deliver: bool = True
    ) -> Asked:
        """Reserve pages for a request on D, offer them, and begin with it on P."""
        name = len(self.asked) + 1
        asked = Asked(TransferKey(room, name, 0), name, pages, source or pages)
        self.asked[name] = asked
        for p in self.ends[P]:
            p("stamp", (name << 32) + p.me.rank, asked.source)
            p("fill_row", name % self.rows, room, 1000 + name)
            p("start", room, name, len(pages), name % self.rows)
            self.held(p.me, asked)
        for d in self.ends[D]:
            self.reserved(d.me, asked)
            d("stamp", CANARY, pages)
            d("offer", room, name, pages)
        self.see()
        if deliver:
            self.deliver()
        return asked

    def send(self, asked: Asked) -> None:
        """Let P's workers have the request."""
        for p in self.ends[P]:
            p("send", asked.name, asked.source)

    def tick(self, side: Side) -> None:
        """A turn of the scheduler on all ranks of a side, after all that P's workers did."""
        self.see()
        number = self.next_round(side)
        for child in self.ends[side]:
            child.send("tick", number)
        for child in self.ends[side]:
            child.answer()
        self.see()

    def deliver(self, kind: type | None = None, *, drop: bool = False) -> int:
        """Let messages arrive, of that kind or all, or lose them; returns how many.  What is for
        a process that has ended is lost."""
        self.see()
        due = list(self.letters) if kind is None else self.waits(kind)
        self.letters = [letter for letter in self.letters if letter not in due]
        for letter in due:
            if not drop and self._end(letter.to).is_alive():
                self.arrive(letter)
        return len(due)

    def arrive(self, letter: Letter) -> None:
        """Let a message arrive, which one that has arrived may do again."""
        to, message = self._end(letter.to), letter.message
        if message is None:
            to("deliver", letter.frames)
            return
        believes = ("acks" if isinstance(message, Ack) else "status", message.key.room)
        before = to(*believes)
        self.arriving(letter)
        to("deliver", letter.frames)
        self.arrived(letter, changed=to(*believes) != before)
        self.see()

    def until(self, condition: Callable[[], object], bound_s: float = WAIT_S) -> None:
        """Look at the journals until something holds.

        Raises:
            TimeoutError: it did not come to that.
        """
        end = time.monotonic() + bound_s
        while not condition():
            if time.monotonic() > end:
                raise TimeoutError(f"It did not come to that after {self.log[-3:]}.")
            time.sleep(POLL_S)
            self.see()

    def turns(self, side: Side, condition: Callable[[], object], bound_s: float = WAIT_S) -> None:
        """Turns of a side's scheduler until something holds, and all messages arrive; bounded."""

        def turn() -> object:
            self.tick(side)
            self.deliver()
            return condition()

        self.until(turn, bound_s)

    def serve(self, asked: Asked) -> Served:
        """Send a request, and let it go as far as it goes; returns what D has then."""
        self.send(asked)
        return self.see_off(asked)

    def see_off(self, asked: Asked) -> Served:
        """`serve`, of a request that was sent."""
        with suppress(TimeoutError):
            self.turns(D, lambda: self.is_everywhere(asked, Phase.LIVE), STUCK_S)
        with suppress(TimeoutError):
            self.turns(P, lambda: all(asked.name not in p("left") for p in self.ends[P]), STUCK_S)
        if not self.is_everywhere(asked, Phase.LIVE):
            return "nothing"
        own = self.landed(asked, asked.pages) == 1 and self.tokens[asked.name] == 1000 + asked.name
        self.finish(asked)
        return "own data" if own else "foreign data"

    def finish(self, asked: Asked) -> None:
        """D ends a request where it is live."""
        for d in self.ends[D]:
            if self.phases.get((d.me, asked.key)) is Phase.LIVE:
                self.finished(d.me, asked)

    def kill(self, side: Side) -> None:
        """Kill all ranks of a side."""
        for child in self.ends[side]:
            child.kill()
            self.log.append(Died(child.me))

    # what a scenario looks at

    def see(self) -> None:
        """Take in what happened at the ends; writers first, as D counts on what they said."""
        for side in (P, D):
            awake = [child for child in self.ends[side] if child.is_alive() and not child.sleeps]
            self.take(side, [(child.me, *entry) for child in awake for entry in child("journal")])

    def is_everywhere(self, asked: Asked, phase: Phase) -> bool:
        """Whether the request stands there on all ranks of D."""
        return all(self.phases[d.me, asked.key] is phase for d in self.ends[D])

    def has(self, kind: type) -> bool:
        """Whether anything of that kind was observed."""
        return any(isinstance(seen, kind) for seen in self.log)

    def count(self, kind: type, asked: Asked) -> int:
        """Observations of that kind about the request."""
        return sum(isinstance(seen, kind) and seen.key == asked.key for seen in self.log)  # type: ignore[attr-defined]

    def waits(self, kind: type) -> list[Letter]:
        """Messages of that kind that are under way."""
        self.see()
        return [letter for letter in self.letters if isinstance(letter.message, kind)]

    def landed(self, writer: Asked, pages: list[int]) -> float:
        """The part of pages of D that holds a request's words."""
        words = LAYERS * len(pages) * PAGE_BYTES // 8
        found = [d("count", (writer.name << 32) + d.me.rank, pages) for d in self.ends[D]]
        return float(sum(found) / (words * len(found)))

    def _end(self, peer: Peer) -> Child:
        return self.ends[peer.side][peer.rank]

    def close(self) -> None:
        """End all processes."""
        for child in (*self.ends[P], *self.ends[D]):
            child.kill()
            child.pipe.close()


@contextmanager
def world(differences: Differences, **options: Any) -> Iterator[World]:
    """A world whose processes are gone afterwards."""
    it = World(differences, **options)
    try:
        yield it
    finally:
        it.close()
