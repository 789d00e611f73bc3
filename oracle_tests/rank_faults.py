"""Faults and stops that are patched onto a rank's process before it starts; each call patches."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any

from optimized.transfer import drain, prefill_node
from optimized.transfer.endpoint import Endpoint
from optimized.transfer.plan import Aux, encode_aux
from optimized.transfer.prefill_node import PrefillNode
from optimized.transfer.shared_pool import Segment
from optimized.transfer.shm_copy import Copier, Copy, copy_rows
from optimized.transfer.transport import Write
from reference.protocol import Phase


def _stopper(room: int, piece: int) -> Callable[[Write], None]:
    """Called with that write of the room for the first time, it stops the process as SIGSTOP does,
    before it returns."""
    signals = [signal.SIGSTOP]

    def stop(write: Write) -> None:
        while signals and (write.key.room, write.piece) == (room, piece):
            # sent to the process, it may be another thread's to take, and that too late
            signal.pthread_kill(threading.get_ident(), signals.pop())

    return stop


def stop_before_post(room: int, piece: int) -> None:
    """The process stops between noting a write and starting it."""
    start, stop = PrefillNode._start, _stopper(room, piece)

    def _start(self: PrefillNode, write: Write) -> None:
        stop(write)
        start(self, write)

    PrefillNode._start = _start


def stop_in_a_copy(room: int, piece: int) -> None:
    """The process stops when a write is all in shared memory but its last run."""
    stop = _stopper(room, piece)

    def _perform(self: Copier, copy: Copy) -> None:
        copy_rows(copy.share, self._sources, copy.runs[:-1])
        stop(copy.left)
        copy_rows(copy.share, self._sources, copy.runs[-1:])

    Copier._perform = _perform


def name_another_room() -> None:
    """The first aux row names a room that is not the transfer's."""
    written: list[Aux] = []

    def encode(aux: Aux) -> Any:
        written.append(aux)
        wrong = aux._replace(key=aux.key._replace(room=aux.key.room + 1))
        return encode_aux(aux if len(written) > 1 else wrong)

    prefill_node.encode_aux = encode


def free_at_once() -> None:
    """What fails counts as drained, whoever may still write there."""
    fail = drain.Incoming._fail

    def _fail(self: drain.Incoming) -> drain.Step:
        failed, actions = fail(self)
        if failed.phase is not Phase.ABORTED:
            return failed, actions
        return failed._enter(Phase.LOCAL_DRAINED, actions)

    drain.Incoming._fail = _fail


def keep_mappings() -> None:
    """Shared memory stays mapped."""
    kept: list[Segment] = []
    Segment.close = lambda self: kept.append(self)


def keep_registrations() -> None:
    """Memory stays registered with NIXL."""
    Endpoint.deregister = lambda self: None
