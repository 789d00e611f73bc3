"""A transport over Unix datagrams, within a process or between processes: what shared memory is
wrapped around in its tests.  A fence it grants at once, so that whatever holds a fence back is the
transport around it.  Not for large writes: a piece must fit into one datagram."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Sequence

import msgspec
import torch

from optimized.transfer import hello as hellos
from optimized.transfer.hello import Instance
from optimized.transfer.transport import Event, PeerFenced, Received, Region, Write, WriteEnded
from reference.protocol import Message, Outcome, Peer


class Datagram(msgspec.Struct):
    """Rows (region, first item, bytes) to put in place, and then what is to be said."""

    rows: list[tuple[int, int, bytes]]
    note: Message | None


class Datagrams:
    """One process's end."""

    def __init__(self, me: Peer, regions: Sequence[Region], instance: Instance) -> None:
        self.me = me
        self._regions = list(regions)
        self._instance = instance
        self._name = f"kvoracle-test-{secrets.token_hex(8)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind("\0" + self._name)
        self._names: dict[Peer, str] = {}
        self._events: list[Event] = []

    def hello(self) -> bytes:
        reach = {"datagrams": self._name.encode()}
        return hellos.introduce(self.me, self._instance, self._regions, reach=reach).encode()

    def connect(self, hello: bytes) -> Peer:
        theirs = hellos.decode(hello)
        hellos.check(hellos.decode(self.hello()), theirs)
        self._names[theirs.peer] = theirs.reach["datagrams"].decode()
        return theirs.peer

    def send(self, to: Peer, message: Message) -> None:
        self._put(to, Datagram([], message))

    def post(self, write: Write) -> None:
        rows = [
            (region, there, self._regions[region].memory[here : here + items].numpy().tobytes())
            for region, here, there, items in write.runs.tolist()
        ]
        landed = self._put(write.to, Datagram(rows, write.note))
        outcome = Outcome.LANDED if landed else Outcome.BROKEN
        self._events.append(WriteEnded(write.key, write.to, write.piece, outcome))

    def poll(self) -> Sequence[Event]:
        events, self._events = self._events, []
        while True:
            try:
                message = self._socket.recv(1 << 20, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return events
            datagram = msgspec.msgpack.decode(message, type=Datagram)
            for region, first, data in datagram.rows:
                memory = self._regions[region].memory
                rows = torch.frombuffer(bytearray(data), dtype=torch.uint8)
                rows = rows.view(-1, memory.shape[1])
                memory[first : first + len(rows)] = rows
            if datagram.note is not None:
                events.append(Received(datagram.note))

    def fence(self, peer: Peer) -> None:
        self._events.append(PeerFenced(peer))

    def close(self) -> None:
        self._socket.close()
        self._regions.clear()

    def _put(self, to: Peer, datagram: Datagram) -> bool:
        try:
            self._socket.sendto(msgspec.msgpack.encode(datagram), "\0" + self._names[to])
        except (KeyError, OSError):
            return False
        return True
