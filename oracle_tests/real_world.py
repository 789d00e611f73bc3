"""A P and a D instance of R real processes each, and the router, which is the test.

Processes run by themselves, or stand until they are told to run.  Each says at once what it notes,
with the time of the machine's one monotonic clock; in that order the notes of all of them are the
run that is judged.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import connection
from pathlib import Path
from typing import Any

from optimized.groups import meeting_point
from optimized.transfer.node import Failed, Freed, Live
from oracle_tests.rank_node import (
    Answer,
    Computed,
    Ending,
    Introduced,
    Note,
    Setting,
    context,
    serve,
)
from oracle_tests.shm_cases import mappings
from oracle_tests.transfer_world import Asked
from reference.contract import RequestId
from reference.drain import Violation, judge
from reference.protocol import Died, Observation, Peer, Side

WAIT_S = 60.0
"""Bound of every wait, far above what any takes."""

LOOK_S = 0.005
"""Between two looks at what no process says, such as that it was stopped."""

Fault = Callable[[], None]


class Process:
    """A rank's process as the router knows it.

    Fields:
        notes: what it has noted, in order, and at last that it died.
        said: its part of what all ranks of its instance have to say alike.
        freed: requests whose memory it has given back.
        ends: its end is no surprise.
        over: it was reaped.
    """

    def __init__(self, me: Peer, setting: Setting, port: int, fault: Fault | None) -> None:
        self.me = me
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(
            target=serve, args=(theirs, me, setting, port, fault), daemon=True
        )
        self.process.start()
        theirs.close()
        self.hello = b""
        self.notes = [Note(time.monotonic_ns(), None)]
        self.said: list[Any] = []
        self.freed: set[RequestId] = set()
        self.answers: list[Any] = []
        self.told, self.ends, self.over, self.why = 0, False, False, ""

    @property
    def pid(self) -> int:
        return self.process.pid

    def tell(self, command: str, arguments: tuple[Any, ...]) -> None:
        """To one that has ended by now nothing can be told."""
        self.told += 1
        if not self.over:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                self.pipe.send((command, arguments))

    def hear(self) -> Any:
        """What it says next; None once it is over, and then it is reaped."""
        try:
            return pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join(WAIT_S)
        assert self.process.exitcode is not None, f"{self.me} was not reaped"
        assert self.ends, f"{self.me} ended ({self.process.exitcode}): {self.why}"
        self.over = True
        self.pipe.close()
        # after all that it noted, and before anybody noticed
        self.notes.append(Note(self.notes[-1].at_ns + 1, Died(self.me)))
        return None


class World:
    """Both instances, all standing at first; `faults` are patched onto single processes."""

    def __init__(self, setting: Setting, faults: Mapping[Peer, Fault]) -> None:
        self.setting = setting
        self.asked: dict[RequestId, Asked] = {}
        self.ends: dict[Side, list[Process]] = {}
        self.past: list[Process] = []
        self._faults = faults
        self._lives = dict.fromkeys(Side, 0)
        self._points: list[Any] = []
        for side in Side:
            self._begin(side)
        self._meet()

    def _begin(self, side: Side) -> None:
        point = meeting_point()
        self._points.append(point)
        peers = [Peer(side, rank, self._lives[side]) for rank in range(self.setting.ranks)]
        self.ends[side] = [
            Process(me, self.setting, point.port, self._faults.get(me)) for me in peers
        ]
        self._lives[side] += 1

    def _meet(self) -> None:
        """Make the processes of each rank number known to each other."""
        processes = [process for end in self.ends.values() for process in end]
        self.until(lambda: all(process.hello for process in processes))
        for side, other in ((Side.PREFILL, Side.DECODE), (Side.DECODE, Side.PREFILL)):
            refusals = self.ask_each(side, "connect", [([p.hello],) for p in self.ends[other]])
            assert [refusal for [refusal] in refusals].count(None) == (
                self.setting.ranks if self.setting.shared else 0
            ), refusals

    def start(self, side: Side) -> None:
        """Start an instance that was killed again; what is waiting for it is given up."""
        other = Side.DECODE if side is Side.PREFILL else Side.PREFILL
        for asked in self.asked.values():
            if other not in asked.over and not asked.live:
                asked.failed = True
                self.abort(asked, other)
        self._begin(side)
        self._meet()

    # What processes are told, and what they say.

    def tell(self, side: Side, command: str, *arguments: Any) -> None:
        """Tell all ranks of an instance the same."""
        for process in self.ends.get(side, ()):
            process.tell(command, arguments)

    def ask_each(self, side: Side, command: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Tell each rank its own, and wait for what comes of it."""
        end = self.ends[side]
        for process, own in zip(end, arguments, strict=True):
            process.tell(command, own)
        self.until(lambda: all(len(process.answers) == process.told for process in end))
        return [process.answers[-1] for process in end]

    def ask_all(self, side: Side, command: str, *arguments: Any) -> list[Any]:
        """Tell all ranks the same, and wait for what comes of it."""
        return self.ask_each(side, command, [arguments] * self.setting.ranks)

    def until(self, condition: Callable[[], object]) -> None:
        """Listen until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not condition():
            assert time.monotonic() < deadline, f"no end in sight of {list(self.asked.values())}"
            self._listen()

    def _listen(self) -> None:
        living = {p.pipe: p for end in self.ends.values() for p in end if not p.over}
        for pipe in connection.wait(living, LOOK_S):
            process = living[pipe]
            match process.hear():
                case Note() as note:
                    process.notes.append(note)
                case Answer(value):
                    process.answers.append(value)
                case Introduced(hello):
                    self._introduce(process, hello)
                case Ending(why):
                    process.why = why
                case Failed(request):
                    self._fail(self.asked[request])
                case Live() | Freed() | Computed() as said:
                    process.said.append(_bits(said))
                    self._hear(process, said)

    def _introduce(self, process: Process, hello: bytes) -> None:
        """A process that is reached otherwise than before has to meet its peer anew."""
        again, process.hello = bool(process.hello), hello
        other = Side.DECODE if process.me.side is Side.PREFILL else Side.PREFILL
        if again:
            for peer in self.ends.get(other, ()):
                peer.tell("connect", ([hello] if peer.me.rank == process.me.rank else [],))

    def _hear(self, process: Process, said: Live | Freed | Computed) -> None:
        """What rank 0 says is for the client; a request is over when all ranks have said so."""
        asked, side = self.asked[said.request], process.me.side
        if isinstance(said, Freed):
            process.freed.add(said.request)
            if all(said.request in each.freed for each in self.ends[side]):
                asked.over.add(side)
                asked.live = asked.live and side is Side.PREFILL
        elif isinstance(said, Live) and not process.me.rank:
            asked.live = True
            asked.sampled.append(said.first_token)
        elif not process.me.rank:
            asked.outputs.append(said.output)
            asked.sampled.append(said.sampled)

    def _fail(self, asked: Asked) -> None:
        """One rank of one end gave it up; both ends have to."""
        if not asked.failed:
            asked.failed = True
            self.abort(asked)

    # The router.

    def ask(self, tokens: Sequence[int], *, steps: int = 3, room: int | None = None) -> Asked:
        """Send a new request to both ends."""
        request = RequestId(len(self.asked))
        asked = Asked(request, request if room is None else room, list(tokens), steps)
        self.asked[request] = asked
        self.tell(Side.DECODE, "submit", request, asked.room, asked.tokens, steps)
        self.tell(Side.PREFILL, "submit", request, asked.room, asked.tokens)
        return asked

    def abort(self, asked: Asked, *sides: Side) -> None:
        """Give a request up at some ends (by default both), which tell the others."""
        for side in sides or Side:
            self.tell(side, "abort", asked.request)

    def run(self, *sides: Side) -> None:
        """Let instances (by default both) take turns by themselves."""
        for side in sides or Side:
            self.tell(side, "run")

    def stand(self, side: Side) -> None:
        """Let an instance stand still, without polling anything."""
        self.ask_all(side, "stand")

    def turns(self, side: Side, until: Callable[[], object], turn: str = "turn") -> None:
        """Let an instance that stands take single turns, or ticks, until the condition holds."""
        deadline = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < deadline, f"no end in sight of {list(self.asked.values())}"
            self.ask_all(side, turn)

    @property
    def is_over(self) -> bool:
        """Whether every request is over at both ends."""
        return all(len(asked.over) == len(Side) for asked in self.asked.values())

    # What is done to processes.

    def process(self, side: Side, rank: int = -1) -> Process:
        """A process of the present life; by default the last rank's."""
        return self.ends[side][rank]

    def kill(self, side: Side, rank: int = -1) -> None:
        """Kill a process; the others of its instance end by themselves, as they miss it."""
        end = self.ends[side]
        for process in end:
            process.ends = True
        end[rank].process.kill()
        self.tell(side, "run")
        self.until(lambda: all(process.over for process in end))
        assert all("build the instance anew" in p.why for p in end if p is not end[rank])
        self.past += self.ends.pop(side)
        for asked in self.asked.values():
            asked.over.add(side)
            asked.live = asked.live and side is Side.PREFILL

    def has_stopped(self, process: Process) -> bool:
        """Whether all threads of a process stand still after a SIGSTOP, and all that it has said
        was heard."""
        threads = Path(f"/proc/{process.pid}/task").glob("*/stat")
        states = {thread.read_text().rpartition(")")[2].split()[0] for thread in threads}
        return states == {"T"} and not process.pipe.poll()

    def resume(self, process: Process) -> None:
        """Let a stopped process go on."""
        os.kill(process.pid, signal.SIGCONT)

    # The end.

    @property
    def log(self) -> list[Observation]:
        """The run so far, of all processes that there are and were."""
        processes = [*self.past, *(process for end in self.ends.values() for process in end)]
        notes = [note for process in processes for note in process.notes[1:]]
        return [note.seen for note in sorted(notes, key=lambda note: note.at_ns)]

    def verdict(self, *, live: bool = True) -> Violation | None:
        """What the reference says of the run.  All ranks of an instance must have said the same,
        and where nothing is to follow (`live`) their memory must be empty and whole, too."""
        for side in self.ends:
            self.stand(side)
            if live:
                found = self.ask_all(side, "inspect")
                assert found == [[]] * self.setting.ranks, found
            assert all(p.said == self.ends[side][0].said for p in self.ends[side])
        return judge(self.log, self.setting.topology, arrivals=False, live=live)

    def must_hold_no_more(self) -> None:
        """Processes at rest keep what their peers of the present life need, and nothing of the
        past."""
        shared = self.setting.shared
        for side, end in self.ends.items():
            for process, held in zip(end, self.ask_all(side, "holdings"), strict=True):
                assert (held.agents, held.writes) == (1, 0), held
                assert held.mapped == (shared and side is Side.PREFILL), held
                assert mappings(process.pid) == shared, segments(process.pid)

    def close(self) -> list[str]:
        """End all processes in good order; returns what they had not given back before."""
        leaks = []
        for side, end in self.ends.items():
            for process, left in zip(end, self.ask_all(side, "close"), strict=True):
                leaks += [f"{process.me} keeps {left}"] if any(left) else []
                leaks += [f"{process.me} has {what}" for what in segments(process.pid)]
        for side, end in self.ends.items():
            for process in end:
                process.ends = True
            self.tell(side, "leave")
            self.until(lambda end=end: all(process.over for process in end))
            leaks += [f"{p.me} ended so: {p.why}" for p in end if p.process.exitcode or p.why]
        return leaks + [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if "kvoracle" in name]

    def end(self) -> None:
        """Kill whatever is left, and have it reaped."""
        for process in (process for end in self.ends.values() for process in end):
            process.process.kill()
            process.process.join(WAIT_S)
            process.pipe.close()


def segments(pid: int) -> list[str]:
    """The shared memory of pools that a process has open or mapped, an entry each."""
    open_files = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            open_files.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    lines = [*open_files, *Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return [line for line in lines if "memfd:kvoracle" in line]


def _bits(said: Live | Freed | Computed) -> Any:
    """The same in a form that can be compared, bit by bit."""
    if not isinstance(said, Computed):
        return said
    logits, selected = said.output.logits.numpy(), said.output.selected.numpy()
    return said.request, said.sampled, logits.tobytes(), selected.tobytes()


@contextmanager
def world(faults: Mapping[Peer, Fault] | None = None, **setting: Any) -> Iterator[World]:
    """A world of which no process is left afterwards."""
    it = World(Setting(**setting), faults or {})
    try:
        yield it
    finally:
        it.end()


def must_be_clean(world: World) -> None:
    """The run is judged clean, memory is empty, and nothing is left of either end."""
    assert world.is_over
    assert (found := world.verdict()) is None, found
    world.must_hold_no_more()
    assert world.close() == []
    everybody = [*world.past, *(process for end in world.ends.values() for process in end)]
    assert not any(process.process.is_alive() for process in everybody)
