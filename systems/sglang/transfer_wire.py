"""Control messages and the NIXL agent of an SGLang process, under the harness's schedule.

SGLang sends control messages over ZeroMQ, from threads of its own.  `Mail` stands in for that
network: what a process sends is noted down, and what it receives is handed to it one message at a
time, each after the one before was handled.  `Gate` stands before the real NIXL agent and may hold
writes back, as a slow network does: they are posted as far as SGLang knows, and reach NIXL when the
gate opens.
"""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from types import ModuleType
from typing import Any

WAIT_S = 20.0
"""Bound of every wait, far above what any takes."""


class Mail:
    """The messages of one process, and a journal of what it did, in order.

    Entries of the journal are tuples whose first member says what happened: ("sent", port, frames),
    and those of `Gate` and of the ends.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self.journal: list[tuple[Any, ...]] = []
        self._inbox: deque[list[bytes]] = deque()
        self._idle = False
        self._changed = threading.Condition()

    def note(self, *entry: Any) -> None:
        """Append to the journal; safe in any thread."""
        with self._changed:
            self.journal.append(entry)
            self._changed.notify_all()

    def take(self) -> list[bytes]:
        """The next message; its receiver calls this when it has handled the one before."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._inbox)
            self._idle = False
            return self._inbox.popleft()

    def deliver(self, frames: list[bytes], *, bound_s: float = WAIT_S) -> None:
        """Hand a message over, and wait until it was handled.

        Raises:
            TimeoutError: it was not; the receiving thread may have ended.
        """
        with self._changed:
            self._inbox.append(frames)
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._idle and not self._inbox, bound_s):
                raise TimeoutError(f"SGLang did not handle the message {frames[0][:20]!r}.")

    def drain(self) -> list[tuple[Any, ...]]:
        """The journal since the last call."""
        with self._changed:
            seen, self.journal = self.journal, []
            return seen


_here: list[Mail] = []


def open_mail(port: int) -> Mail:
    """This process's mail; sockets that it binds from now on receive what comes to `port`."""
    _here[:] = [Mail(port)]
    return _here[0]


class Socket:
    """What SGLang uses of a ZeroMQ socket."""

    def __init__(self) -> None:
        self._port: int | None = None
        self._bound = False

    def bind_to_random_port(self, address: str) -> int:
        self._bound = True
        return _here[0].port

    def connect(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])

    def send_multipart(self, frames: list[bytes], *_: Any, **__: Any) -> None:
        _here[0].note("sent", self._port, [bytes(frame) for frame in frames])

    def recv_multipart(self, flags: int = 0) -> list[bytes]:
        if not self._bound:  # a monitor, of a connection that never breaks
            raise Again
        return _here[0].take()

    def get_monitor_socket(self, events: int) -> Socket:
        return Socket()

    def setsockopt(self, *_: Any) -> None:
        """Nothing here has options."""

    set = setsockopt

    def close(self, linger: int | None = None) -> None:
        """Nothing is held open."""


class Context:
    """What SGLang uses of a ZeroMQ context."""

    def set(self, *_: Any) -> None:
        """Nothing here has limits."""

    def socket(self, kind: int) -> Socket:
        return Socket()


class ZMQError(Exception):
    """The base of ZeroMQ's errors."""


class Again(ZMQError):
    """Nothing is there to receive."""


def install() -> None:
    """Let `import zmq` mean this module's stand-in, before SGLang is imported."""
    zmq = ModuleType("zmq")
    members = {"Context": Context, "Socket": Socket, "ZMQError": ZMQError, "Again": Again}
    names = (
        *("PUSH", "PULL", "PAIR", "DEALER", "REQ", "REP", "NOBLOCK", "POLLIN", "IPV6", "LINGER"),
        *("MAX_SOCKETS", "SNDTIMEO", "RECONNECT_IVL", "SNDHWM", "RCVHWM", "SNDBUF", "RCVBUF"),
        *("TCP_KEEPALIVE", "TCP_KEEPALIVE_IDLE", "TCP_KEEPALIVE_INTVL", "TCP_KEEPALIVE_CNT"),
        "EVENT_DISCONNECTED",
    )
    vars(zmq).update(members, SocketType=int, **dict(zip(names, itertools.count(1))))
    zmq.__path__ = []
    sys.modules["zmq"] = zmq


class Batch:
    """What a transfer worker took from its queue, and the writes that it made of it."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.handles: set[int] = set()
        self.done: set[int] = set()


class Gate:
    """The agent of a prefill process; `shut` holds back what is posted from then on.

    It notes ("taken", batch, room), ("posted", batch), ("dropped", batch) and ("settled", batch,
    "LANDED" | "BROKEN" | "UNKNOWN"), where a batch is what a worker dequeued, by number.
    """

    def __init__(self, agent: Any, mail: Mail) -> None:
        self._agent, self._mail = agent, mail
        self._numbers = itertools.count()
        self._batches: dict[int, Batch] = {}  # by handle
        self._current = threading.local()
        self._held: dict[int, Any] = {}
        self._lost: dict[int, Exception] = {}
        self._lock = threading.Lock()
        self.is_shut = False
        self.refuses = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def dequeued(self, room: int) -> None:
        """A worker begins with another batch; without a write the one before was dropped."""
        self.idle()
        self._current.batch = batch = Batch(next(self._numbers))
        self._mail.note("taken", batch.number, room)

    def idle(self) -> None:
        """A worker has done with its batch."""
        batch = getattr(self._current, "batch", None)
        if batch is not None and not batch.handles:
            self._mail.note("dropped", batch.number)
        self._current.batch = None

    def transfer(self, handle: Any) -> str:
        batch: Batch = self._current.batch
        if not batch.handles:
            self._mail.note("posted", batch.number)
        batch.handles.add(id(handle))
        self._batches[id(handle)] = batch
        if self.refuses:
            self._mail.note("settled", batch.number, "UNKNOWN")
            raise RuntimeError("the transport refused the write")
        with self._lock:
            if self.is_shut:
                self._held[id(handle)] = handle
                return "PROC"
        return str(self._agent.transfer(handle))

    def check_xfer_state(self, handle: Any) -> str:
        with self._lock:
            if id(handle) in self._held:
                return "PROC"
        batch = self._batches[id(handle)]
        try:
            if id(handle) in self._lost:
                raise self._lost[id(handle)]
            state = str(self._agent.check_xfer_state(handle))
        except Exception as error:
            gone = "RemoteDisconnect" in type(error).__name__
            self._mail.note("settled", batch.number, "BROKEN" if gone else "UNKNOWN")
            raise
        if state in ("DONE", "ERR") and id(handle) not in batch.done:
            batch.done.add(id(handle))
            if state == "ERR" or batch.done == batch.handles:
                outcome = "LANDED" if state == "DONE" else "BROKEN"
                self._mail.note("settled", batch.number, outcome)
        return state

    def open(self) -> None:
        """Let through what is held back, and what comes."""
        with self._lock:
            self.is_shut = False
            for number, handle in self._held.items():
                try:
                    self._agent.transfer(handle)
                except Exception as error:
                    self._lost[number] = error  # it was posted: who asks for its state is told
            self._held.clear()
