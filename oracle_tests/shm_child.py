"""The other process in tests of shared memory: one end of a transfer, told over a pipe what to do.

It can be made to stop where the test wants to find it, and waits there until it is killed.
"""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from optimized.transfer import shm_copy, shm_hello
from optimized.transfer.transport import Event, WriteEnded
from oracle_tests.shm_cases import D, End, P, decode, footprint, mappings, poll_until, prefill
from reference.protocol import Side

HELD = "held"
"""Said when the child has stopped where it should."""


def run(pipe: Connection, side: Side, stop_at: str) -> None:
    """Introduce oneself, connect to what comes back, say how that went, and obey until closed."""
    if stop_at:
        STOPS[stop_at](pipe)
    before = footprint()
    end = prefill() if side is Side.PREFILL else decode()
    pipe.send(end.transport.hello())
    end.transport.connect(pipe.recv())
    pipe.send(end.transport.why_not(D if side is Side.PREFILL else P))
    obey(pipe, end)
    pipe.send((before, footprint()))


def stop_in_a_copy(pipe: Connection) -> None:
    """Stop before the last run of a copy."""

    def copy_rows(share, here, runs, copy=shm_copy.copy_rows):  # type: ignore[no-untyped-def]
        copy(share, here, runs[:-1])
        stop(pipe)

    shm_copy.copy_rows = copy_rows


def stop_with_the_pool_mapped(pipe: Connection) -> None:
    """Stop between mapping the pool and saying so."""

    @functools.wraps(shm_hello.attach)
    def attach(*arguments, attach=shm_hello.attach, **options):  # type: ignore[no-untyped-def]
        segment = attach(*arguments, **options)
        stop(pipe)
        return segment

    shm_hello.attach = attach


def stop(pipe: Connection) -> None:
    """Say so, and wait to be killed."""
    pipe.send(HELD)
    threading.Event().wait()


STOPS = {"copy": stop_in_a_copy, "mapped": stop_with_the_pool_mapped}


def obey(pipe: Connection, end: End) -> None:
    """Poll, and do what is asked for, until that is to close."""
    while True:
        poll_until(lambda _: pipe.poll(), end.transport)
        command, argument = pipe.recv()
        if command == "close":
            end.close()
            return
        pipe.send(COMMANDS[command](end, argument))


def post(end: End, write: Any) -> list[Event]:
    """Post a write, and what came of it."""
    end.transport.post(write)
    return poll_until(lambda events: any(isinstance(e, WriteEnded) for e in events), end.transport)


def mappings_of_a_fork(end: End, _: None) -> tuple[int, int]:
    """How often this process has the pool mapped, and how often a fork of it."""
    child = os.fork()
    if not child:
        signal.pause()
    try:
        return mappings(os.getpid()), mappings(child)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


COMMANDS: dict[str, Callable[[End, Any], object]] = {
    "post": post,
    "mappings of a fork": mappings_of_a_fork,
}
