"""Work in a forked process of its own, so that an engine which ends its process ends no campaign.

The process that has the engine loaded is forked, which takes milliseconds where loading takes
seconds.  The child tells at once what it draws and does, over a pipe: of one that died everything
is known up to its last draw.
"""

from __future__ import annotations

import os
import signal
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, Generic, Literal, NoReturn, TypeVar, get_args

import msgspec
import torch

from fuzz.outcome import Operation, Outcome
from fuzz.step import Step, Violation, World
from fuzz.tape import Span, Tape
from reference.protocol import Observation

TIMEOUT_S = 300
"""After which a child is ended by SIGALRM."""
T = TypeVar("T")
Kind = Literal["values", "bounds", "spans", "operations", "result", "error"]


class ChildFailed(Exception):
    """The work itself raised, which is no doing of an engine; with the child's traceback."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Child(Generic[T]):
    """A child that is over.

    Fields:
        result: what its work returned; None if it died first.
        values, bounds, spans: its tape, as far as it drew it.
        operations: those that it had done.
        end: what ended it: the name of a signal, or "exit" and its status.
    """

    result: T | None
    values: list[int]
    bounds: list[int]
    spans: list[Span]
    operations: list[Operation]
    end: str


class Teller:
    """A child's end of the pipe, and a `Watch` that tells of operations."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    def tell(self, kind: Kind, item: Any) -> None:
        """Send something to the parent."""
        self._pipe.send_bytes(msgspec.json.encode((kind, item)))

    def listened(self, tape: Tape) -> Tape:
        """`tape`, with all that is drawn from it told."""
        for kind in ("values", "bounds", "spans"):
            setattr(tape, kind, _Told(getattr(tape, kind), kind, self.tell))
        return tape

    def begin(self, run: World) -> None:
        """As of a `Watch`."""
        self._world = run

    def after(self, operation: Step, seen: Sequence[Observation] = ()) -> None:
        """As of a `Watch`."""
        tokens = sum(len(c.tokens) + len(c.drafts) for c in self._world.clients.values())
        about = sorted(int(request) for request in operation.about)
        self.tell("operations", Operation(operation.text, about, tokens, operation.idle))


class _Told(list[Any]):
    """A list of which each new item is told."""

    def __init__(self, items: Iterable[Any], kind: Kind, tell: Callable[[Kind, Any], None]) -> None:
        super().__init__(items)
        self._kind, self._tell = kind, tell

    def append(self, item: Any) -> None:
        super().append(item)
        self._tell(self._kind, item)


def forked(work: Callable[[Teller], T], returns: Any, *, timeout_s: int | None = None) -> Child[T]:
    """Do `work` in a child, which hands back what it returns: of the type `returns`, that msgspec
    can encode.  It has `timeout_s` seconds, or TIMEOUT_S.

    Raises:
        ChildFailed: where `work` raised.
    """
    here, there = Pipe(duplex=False)
    pid = os.fork()
    if not pid:
        here.close()
        _work(work, there, timeout_s or TIMEOUT_S)
    there.close()
    try:
        said = _heard(here)
    except BaseException:
        os.kill(pid, signal.SIGKILL)
        raise
    finally:
        here.close()
        _, status = os.waitpid(pid, 0)
    if said["error"]:
        raise ChildFailed(msgspec.json.decode(said["error"][0], type=str))

    def all_of(kind: Kind, item: Any) -> list[Any]:
        return [msgspec.json.decode(each, type=item) for each in said[kind]]

    return Child(
        result=next(iter(all_of("result", returns)), None),
        values=all_of("values", int),
        bounds=all_of("bounds", int),
        spans=all_of("spans", Span),
        operations=all_of("operations", Operation),
        end=_end(status),
    )


def cpu_seconds() -> float:
    """CPU time of this process, and of all its children that are over."""
    times = os.times()
    return time.process_time() + times.children_user + times.children_system


def crashed(child: Child[Any], *, target: str, setup: str) -> Outcome:
    """The outcome of a run whose child died; the operation that it died of is not among those
    done."""
    last = child.operations[-1] if child.operations else None
    how = (
        f"did not come back within {TIMEOUT_S} seconds"
        if child.end == signal.SIGALRM.name
        else f"ended its process ({child.end})"
    )
    sentence = f"The engine {how}, in what followed {last.text if last else 'the setup'!r}."
    return Outcome(
        target=target,
        values=child.values,
        bounds=child.bounds,
        spans=child.spans,
        violations=[Violation("crash", child.end, sentence)],
        exact="",
        digest="",
        setup=setup,
        operations=child.operations,
        requests=1 + max((r for done in child.operations for r in done.requests), default=-1),
        tokens=last.tokens if last else 0,
    )


def _work(work: Callable[[Teller], Any], pipe: Connection, timeout_s: int) -> NoReturn:
    """All that a child does."""
    teller = Teller(pipe)
    try:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(timeout_s)
        # the threads of the parent's pool are not here
        torch.set_num_threads(1)
        teller.tell("result", work(teller))
    except Exception:  # a SystemExit is the engine's
        teller.tell("error", traceback.format_exc())
    finally:
        os._exit(1)


def _heard(pipe: Connection) -> dict[str, list[msgspec.Raw]]:
    """All that a child tells until it is over, by kind."""
    said: dict[str, list[msgspec.Raw]] = {kind: [] for kind in get_args(Kind)}
    while True:
        try:
            frame = pipe.recv_bytes()
        except (EOFError, OSError):  # the latter where it died within a frame
            return said
        kind, item = msgspec.json.decode(frame, type=tuple[str, msgspec.Raw])
        said[kind].append(item)


def _end(status: int) -> str:
    """What `os.waitpid` says of a process that is over."""
    if os.WIFSIGNALED(status):
        return signal.Signals(os.WTERMSIG(status)).name
    return f"exit {os.WEXITSTATUS(status)}"
