"""One execution of a target that moves requests: P, D and what is between them, by the tape.

Every operation takes WIDTH draws: its kind, whom it concerns, and up to three numbers.  One that is
not possible where it stands does nothing.  After the drawn part comes the rest: whatever is bound
to happen does, in the ordinary order, until every request is over at both ends.  After each
operation the oracles look: *drain* (the judge of the contract's clauses) and those of
`fuzz.oracles.landing`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

import torch

from fuzz.coverage import Coverage, boundary, several
from fuzz.digest import Digest, buffers
from fuzz.oracles.transfers import Transfers
from fuzz.outcome import Operation, Outcome
from fuzz.router import Asked, Router, landed
from fuzz.stamps import stamper_of
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.setup import boundaries
from fuzz.targets.shared_memory import SHARED_MEMORY, draw_shared_setup
from fuzz.targets.transfer import (
    ABORT_TIMEOUT,
    MOST_REQUESTS,
    RETRY,
    TransferSetup,
    draw_setup,
)
from fuzz.targets.transfer_events import TransferEvents
from fuzz.watch import Watch
from reference.contract import RequestId
from reference.protocol import Arrived, Moved, Observation, Peer, Side

KINDS = (
    "submit",
    "compute",
    "network",
    "tick",
    "decode",
    "finish",
    "abort",
    "restart",
    "copy",
    "produce",
)
"""Operations in the order of their tape values, after 0, which stops."""
WIDTH = 5
STOP_WEIGHT = 0.8
MOST_STEPS, MANY_STEPS = 8, 1000
"""Of the network in one operation, and in one turn of the rest."""
MOST_RESTARTS = 2
ORDERS = 256
SIDES = ((Side.PREFILL, Side.DECODE), (Side.PREFILL,), (Side.DECODE,))
"""That an operation concerns, by its draw."""
PATIENCE = RETRY + ABORT_TIMEOUT
"""Turns for which the rest goes on without anything new; each has two ticks."""


class Handover:
    """A run in progress.

    Fields:
        violations: of the last operation.
        done: the operations so far, in words.
        tokens: of all prompts and decodes, a measure of a case's size.
    """

    def __init__(self, setup: TransferSetup, tape: Tape, watch: Watch | None = None) -> None:
        self.setup, self.tape = setup, tape
        self._geometry = geometry = setup.wiring.geometries[Side.PREFILL]
        self.router = Router(setup, stamper_of(geometry, setup.wiring.shape))
        self.violations: list[Violation] = []
        self.done: list[Operation] = []
        self.digest = Digest()
        self.events = TransferEvents(self.router)
        self.coverage = Coverage(lambda: len(tape.values))
        self._oracles = Transfers(self.router)
        # prompts that end on a checkpoint are shared: as often as all other boundaries
        ends = boundaries(geometry, setup.max_tokens)
        checkpoints = range(0, setup.max_tokens + 1, geometry.mamba_track_interval)[1:]
        self._lengths = ends + tuple(itertools.islice(itertools.cycle(checkpoints), len(ends) // 2))
        self.tokens = self._drawn_tokens = self._restarts = 0
        self._kinds: dict[str, tuple[Callable[[], Sequence[object]], Callable[[], str]]] = {
            "submit": (lambda: range(MOST_REQUESTS - len(self.router.asked)), self._submit),
            "compute": (self.router.computable, self._compute),
            "network": (self.router.on_the_way, self._network),
            "tick": (lambda: (None,), self._tick),
            "decode": (self._decodable, self._decode),
            "finish": (self.router.live, self._finish),
            "abort": (self.router.unfinished, self._abort),
            "restart": (lambda: range(MOST_RESTARTS - self._restarts), self._restart),
            "copy": (self.router.copies, self._copy),
            "produce": (self.router.behind, self._produce),
        }
        self._copy_faults = setup.shared.device_faults if setup.shared else 0
        self._watch = watch
        if watch:
            watch.begin(self)

    def begin(self) -> None:
        """The first operation, which is not drawn."""
        self._do("meet", self._meet)

    def draw(self, weights: Sequence[float]) -> bool:
        """Draw and do one operation; False when the tape says stop."""
        start = len(self.tape.values)
        with self.tape.span("operation"):
            if self.tape.generating:
                weights = [w * p for w, p in zip(weights, self._likelihoods(), strict=True)]
            choice = self.tape.choose(weights)
            if choice == 0:
                return False
            kind = KINDS[choice - 1]
            who, operate = self._kinds[kind]
            if who():
                self._do(kind, operate)
            else:
                self.done.append(Operation(f"{kind}: nothing to do", [], self.tokens, True))
            while len(self.tape.values) < start + WIDTH:
                self.tape.draw(1)
        return True

    def rest(self) -> None:
        """Let happen what is bound to, and judge where it ends.  Where something went wrong by
        choice memory may be lost for good, and what waits for it is given up."""
        given_up, waited = False, 0
        while self.router.unfinished() and not self.violations:
            before = self.router.standing()
            self._do("rest", self._turn)
            waited = waited + 1 if self.router.standing() == before else 0
            if waited == PATIENCE:
                if given_up or not self._oracles.excused:
                    break
                given_up, waited = True, 0
                self._do("rest", self._give_up)
        if not self.violations:
            self._do("end", self._end)

    def record(self) -> None:
        """Enter all memory as it stands in the digest."""
        self.digest.add(self.tape.values, [v.signature for v in self.violations])
        for side, life in self.router.lives.items():
            wiring = self.setup.wiring
            for engine, aux in zip(life.engines, life.aux, strict=True):
                for values in (*buffers(engine, wiring.shape, wiring.options[side]), aux):
                    self.digest.add_tensor(values, exact=True)

    def close(self) -> None:
        """End what the run has started."""
        self.router.close()

    # one operation

    def _do(self, kind: str, operate: Callable[[], str]) -> None:
        """Do an operation and judge it; what the product raises is a finding, but of no oracle."""
        self._fresh: list[Asked] = []
        self._found: list[Violation] = []
        self._about: list[int] = []
        seen: list[Observation] = []
        try:
            text = operate()
            seen = self.router.taken()
            moved = kind not in ("submit", "compute", "produce")
            self._found += self._oracles.check(seen, fresh=self._fresh, moved=moved)
            self.violations = self._found
            self._cover(kind, text)
            self.coverage.observe(seen)
            self.events.observe(seen, ticked=kind in ("tick", "rest"))
            self.coverage.count(self.events.seen)
        except Exception as cause:
            text = f"{kind}, which raised {cause!r}"
            crash = f"{kind}.{type(cause).__name__}"
            self.violations = [Violation("crash", crash, f"{kind} raised {cause!r}.")]
        self.done.append(Operation(text, self._about, self.tokens, False))
        if self._watch:
            self._watch.after(self.done[-1], seen or [*self.router.log])
        self.digest.add(text, seen)

    def _cover(self, kind: str, text: str) -> None:
        """Note an operation by where its request stands, and what is on its way."""
        classes = []
        for about in self._about[:1]:
            asked = self.router.asked[RequestId(about)]
            end = asked.stored if kind == "compute" else len(asked.tokens)
            classes = [self.coverage.standing(asked.room), boundary(end, self._geometry)]
        if kind in ("tick", "restart"):
            kind = text.partition(";")[0]
        self.coverage.operation(kind, *classes, f"{several(len(self.events.flying))} on the way")

    def _likelihoods(self) -> Iterator[float]:
        """Of stopping and of each kind: generation leaves out what is not possible, an end before
        anything was asked for, and mostly ticks in which nothing would happen and mishaps with no
        write on its way."""
        yield float(bool(self.router.asked))
        futile = {"abort", "restart"} if not self.events.flying else set()
        if not self.router.is_due():
            futile.add("tick")
        for kind, (who, _) in self._kinds.items():
            yield bool(who()) * (0.1 if kind in futile else 1.0)

    # operations

    def _fresh_token(self) -> int:
        self._drawn_tokens += 1
        return self._drawn_tokens

    def _one(self, candidates: Sequence[Asked]) -> Asked:
        asked = candidates[self.tape.draw(len(candidates))]
        self._about = [int(asked.request)]
        return asked

    def _submit(self) -> str:
        tape, parents = self.tape, list(self.router.asked.values())
        parent = tape.draw(len(parents) + 1, favour=range(1, len(parents) + 1))
        source = parents[parent - 1] if parent else None
        again = tape.draw(len(parents) + 1)
        room = parents[again - 1].room if again else len(parents)
        alike = [source.length - 1] * len(self._lengths) if source else []
        lengths = [n - 1 for n in self._lengths]
        total = 1 + tape.draw(self.setup.max_tokens, favour=lengths + alike)
        most = min(total, source.length) if source else 0
        shared = tape.draw(most + 1, favour=(*self._lengths, *[most] * len(self._lengths)))
        tokens = source.tokens[:shared] if source else []
        tokens = tokens + [self._fresh_token() for _ in range(total - shared)]
        asked = self.router.submit(tokens, room)
        self._about, self.tokens = [int(asked.request)], self.tokens + total
        self.events.submitted(asked)
        origin = f", the first {shared} as in {source.name}" if source else ""
        return f"submit {asked.name} with {total} tokens{origin}, as room {room}"

    def _compute(self) -> str:
        asked = self._one(self.router.computable())
        self.tape.draw(1)
        rest, ends = asked.length - asked.stored, [asked.length - n for n in self._lengths]
        left = self.tape.draw(rest, favour=[0] * (len(ends) // 2) + ends)
        self.router.compute(asked, asked.length - left, self._fresh_token())
        return f"compute {asked.name} to {asked.stored} of {asked.length}"

    def _network(self) -> str:
        self.tape.draw(1)
        most = 1 + self.tape.draw(MOST_STEPS, favour=(2, 4, 7))
        order = self.tape.draw(ORDERS)
        steps = self._steps(most, order)
        return f"network: {steps} steps" + (f" in order {order}" if order else "")

    def _tick(self) -> str:
        return self._ticked(SIDES[self.tape.draw(len(SIDES))])

    def _ticked(self, sides: Sequence[Side]) -> str:
        said = []
        for side in sides:
            news = self.router.tick(side)
            for request, token in news.live.items():
                said.append(f"request {request} is live")
                self._went_live(self.router.asked[request], token)
            said += [f"request {r} failed at {_letter(side)}" for r in sorted(news.failed)]
            said += [f"request {r} is freed at {_letter(side)}" for r in sorted(news.freed)]
            if side is Side.DECODE:
                if any(isinstance(n, Moved) for n in self.router.log):
                    self.router.count()
                self._forge()
        return "; ".join([f"tick {' and '.join(map(_letter, sides))}", *said])

    def _forge(self) -> None:
        if self.router.forge():
            self._oracles.excused = True
            self.events.count(forged=True)

    def _meet(self) -> str:
        """The processes have met, whatever one of them or a third has tried."""
        shared = self.setup.shared
        if shared is not None:
            if self.router.got_in:
                sentence = f"Nobody should get in where {shared.hostility.value}; somebody did."
                self._found.append(Violation("exact", "handshake", sentence))
            self.events.met(shared.hostility)
        self._found += self._oracles.handshake()
        return "meet"

    def _went_live(self, asked: Asked, token: int) -> None:
        self._fresh.append(asked)
        self.events.went_live(asked)
        if token != asked.first_token:
            sentence = (
                f"D should decode {asked.name} from token {asked.first_token} on, which P has "
                f"sampled; it is told {token}."
            )
            self._found.append(Violation("exact", "first_token", sentence))

    def _decodable(self) -> list[Asked]:
        return [a for a in self.router.live() if len(a.tokens) < self.setup.max_length]

    def _decode(self) -> str:
        batch = self._decodable()
        self._about = [int(asked.request) for asked in batch]
        found = self.router.decode(batch, [self._fresh_token() for _ in batch])
        self.tokens += len(batch) if found else 0
        self.events.decoded(batch if found else [])
        names = ", ".join(asked.name for asked in batch)
        return f"decode a token of {names}" + ("" if found else " (out of memory)")

    def _finish(self) -> str:
        asked = self._one(self.router.live())
        self.router.finish(asked)
        return f"finish {asked.name}"

    def _abort(self) -> str:
        asked = self._one(self.router.unfinished())
        sides = SIDES[self.tape.draw(len(SIDES))]
        self.events.aborted(asked)
        self.router.abort(asked, sides)
        return f"abort {asked.name} at {' and '.join(map(_letter, sides))}"

    def _restart(self) -> str:
        side = Side(self.tape.draw(len(Side)))
        self._oracles.excused = True
        self._restarts += 1
        self.router.restart(side)
        self._found += self._oracles.handshake()
        self.events.count(restarted=True)
        return f"restart {_letter(side)}"

    def _copy(self) -> str:
        me = self.router.copies()[self.tape.draw(len(self.router.copies()))]
        fails = bool(self._copy_faults and self.tape.draw(2))
        return self._copied(me, fails=fails)

    def _copied(self, me: Peer, *, fails: bool = False) -> str:
        """Make the oldest copy of a process; it has to keep to its places too."""
        self._copy_faults -= fails
        self._oracles.excused |= fails
        self._oracles.watch()
        copy, mapped = self.router.copy(me, fails=fails)
        write, what = copy.left, f"the copy of piece {copy.left.piece} of room {copy.left.key.room}"
        came = Arrived(write.to, write.key, me, write.piece, 1, 1)
        self._found += self._oracles.contained([came])
        if not mapped:
            sentence = (
                f"{what} of {me} should go to memory of {write.to} that is mapped; it is not."
            )
            self._found.append(Violation("containment", "mapping", sentence))
        self.events.copied(me, write.to, failed=fails)
        return f"copy: {what}" + (" fails" if fails else "")

    def _produce(self) -> str:
        me = self.router.behind()[self.tape.draw(len(self.router.behind()))]
        self.router.produce(me)
        return f"produce: the device of P{me.rank} stores what was computed"

    # the rest

    def _turn(self) -> str:
        """A turn of everybody."""
        for asked in self.router.computable():
            self.router.compute(asked, asked.length, self._fresh_token())
        for asked in self.router.live():
            self.router.finish(asked)
        while copies := self.router.copies():
            self._copied(copies[0])
        self._steps(MANY_STEPS, 0)
        return "rest: " + self._ticked(SIDES[0])

    def _give_up(self) -> str:
        for asked in self.router.unfinished():
            self.router.abort(asked)
        return "rest: give up what is left"

    def _end(self) -> str:
        """Judge the whole run, and the memory that is left."""
        self._found += self._oracles.finish()
        return "end"

    def _steps(self, most: int, order: int) -> int:
        """Let the network take steps; what lands has to keep to its places."""
        self._oracles.watch()
        steps = self.router.steps(most, order)
        self._found += self._oracles.contained(landed(self.router.log))
        return steps


def _letter(side: Side) -> str:
    return "PD"[side]


def execute(target: Target, tape: Tape, *, most: int, watch: Watch | None = None) -> Outcome:
    """Do what `tape` says, at most so many operations, and then the rest; stop at the first that
    breaks something.  `watch` looks on."""
    with torch.inference_mode(False):  # the ranks' threads are not in it
        setup = (draw_shared_setup if target is SHARED_MEMORY else draw_setup)(tape)
        try:
            run = Handover(setup, tape, watch)
        except Exception as cause:
            return _stillborn(target, tape, setup, cause)
        try:
            run.begin()
            weights = _weights(target, tape)
            while len(run.done) < most and not run.violations and run.draw(weights):
                pass
            if not run.violations:
                run.rest()
            run.record()
        finally:
            run.close()
    return Outcome(
        target=target.name,
        values=tape.values,
        bounds=tape.bounds,
        spans=tape.spans,
        operations=run.done,
        violations=run.violations,
        exact=run.digest.exact,
        digest=run.digest.full,
        events=dict(run.events.seen),
        features=run.coverage.features,
        requests=len(run.router.asked),
        tokens=run.tokens,
        setup=str(setup),
    )


def _stillborn(target: Target, tape: Tape, setup: TransferSetup, cause: Exception) -> Outcome:
    """The outcome of a run whose ends cannot even be built."""
    crash = Violation("crash", f"build.{type(cause).__name__}", f"build raised {cause!r}.")
    digest = Digest()
    digest.add(tape.values, [crash.signature])
    return Outcome(
        target=target.name,
        values=tape.values,
        bounds=tape.bounds,
        spans=tape.spans,
        violations=[crash],
        exact=digest.exact,
        digest=digest.full,
        setup=str(setup),
    )


def _weights(target: Target, tape: Tape) -> list[float]:
    """Of stopping and of each kind, times this seed's swarm; what every run needs stays in."""
    always = {"submit", "compute", "network", "tick", "copy"}
    swarm = tape.swarm(len(KINDS))
    return [STOP_WEIGHT] + [
        target.weights.get(kind, 0.0) * (max(each, 1.0) if kind in always else each)
        for kind, each in zip(KINDS, swarm, strict=True)
    ]
