"""One end of a NIXL transfer, in this process or in one that may be stopped and killed.

Rows name their writer: the item i that writer w sent is filled with the word w * 2**32 + i, and
memory that nobody wrote with the canary, so a count of words tells what landed where.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import numpy as np
import torch

from optimized.transfer.hello import Instance
from optimized.transfer.nixl import NixlTransport
from optimized.transfer.transport import Event, Region, Write
from reference.geometry import Geometry
from reference.protocol import Completion, Peer, Side, Status, TransferKey

CANARY = 0x5AFE5AFE5AFE5AFE
ITEM_BYTES = 16384
WAIT_S = 20.0
"""Bound of every wait, far above what any takes."""

INSTANCE = Instance(1, Completion.STATUS, Geometry())
KEY = TransferKey(room=7, generation=1, incarnation=1)

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload([__name__])


def prefill(incarnation: int = 1) -> Peer:
    """The only rank of P, in that life."""
    return Peer(Side.PREFILL, 0, incarnation)


def decode(incarnation: int = 1) -> Peer:
    """The only rank of D, in that life."""
    return Peer(Side.DECODE, 0, incarnation)


class Node:
    """A transport and its memory: `items` items of region "kv" between two regions of canaries."""

    def __init__(self, me: Peer, items: int, *, stamp: int | None = None, grace_s: float = 2.0):
        self.words = [
            torch.full((n, ITEM_BYTES // 8), CANARY, dtype=torch.int64) for n in (4, items, 4)
        ]
        if stamp is not None:
            self.words[1][:] = (stamp * 2**32 + torch.arange(items))[:, None]
        regions = [
            Region(name, words.view(torch.uint8))
            for name, words in zip(("before", "kv", "after"), self.words, strict=True)
        ]
        self.transport = NixlTransport(me, INSTANCE, regions, grace_s=grace_s)
        self.events: list[Event] = []

    def hello(self) -> bytes:
        return self.transport.hello()

    def connect(self, hello: bytes) -> Peer:
        return self.transport.connect(hello)

    def write(self, to: Peer, here: int, there: int, items: int, piece: int = 0) -> None:
        """Post a write of the items from `here` on, with a note."""
        runs = np.array([[1, here, there, items]], dtype=np.int64)
        note = Status(KEY, self.transport.me)
        self.transport.post(Write(key=KEY, to=to, piece=piece, runs=runs, note=note))

    def poll(self) -> list[Event]:
        """Poll once; returns all events so far."""
        self.events += self.transport.poll()
        return self.events

    def landed(self, stamp: int, here: int, there: int, items: int) -> int:
        """Words of a write to `there` that are there."""
        sent = (stamp * 2**32 + torch.arange(here, here + items))[:, None]
        return int((self.words[1][there : there + items] == sent).sum())

    def intruders(self, there: int, items: int) -> int:
        """Words outside of that range which are no canaries any more."""
        before, kv, after = (words != CANARY for words in self.words)
        return int(before.sum() + kv[:there].sum() + kv[there + items :].sum() + after.sum())

    def close(self) -> None:
        self.transport.close()


def until(condition: Callable[[], object], *polled: Node) -> None:
    """Poll until the condition holds."""
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, [node.events for node in polled]
        for node in polled:
            node.poll()


def serve(pipe: Connection, tls: str, arguments: dict[str, Any]) -> None:
    """The child: do what it is told, and poll in between from the first "run" on."""
    os.environ["UCX_TLS"] = tls
    node = Node(**arguments)
    running = False
    pipe.send(node.hello())
    while True:
        while running and not pipe.poll():
            node.poll()
        call, *rest = pipe.recv()
        if call == "run":
            running = True
        pipe.send(None if call == "run" else getattr(node, call)(*rest))


class Child:
    """A node in a process of its own, called by name over a pipe."""

    def __init__(self, tls: str, **arguments: Any) -> None:
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, tls, arguments), daemon=True)
        self.process.start()
        theirs.close()
        self.hello: bytes = self._answer()

    def __call__(self, call: str, *rest: Any) -> Any:
        """Call the node's method of that name; "run" lets it poll whenever it is not called."""
        self.pipe.send((call, *rest))
        return self._answer()

    def kill(self) -> None:
        """Kill the process, and wait until it was reaped."""
        self.process.kill()
        self.process.join(WAIT_S)
        assert self.process.exitcode is not None, "the killed process was not reaped"

    def _answer(self) -> Any:
        assert self.pipe.poll(WAIT_S), "the child does not answer"
        return self.pipe.recv()


@contextmanager
def child(tls: str, **arguments: Any) -> Iterator[Child]:
    """A child that is gone afterwards."""
    it = Child(tls, **arguments)
    try:
        yield it
    finally:
        it.kill()
        it.pipe.close()
