"""One execution: a tape, a target, an engine, and the verdict of all oracles."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar, cast

import msgspec
import torch

from fuzz import handover, interleave
from fuzz.coverage import Coverage
from fuzz.digest import Digest, buffers
from fuzz.isolation import Teller, crashed, forked
from fuzz.oracles.containment import Containment
from fuzz.oracles.exact import Exact
from fuzz.oracles.metamorphic import Metamorphic
from fuzz.oracles.numeric import Numeric
from fuzz.oracles.provenance import Provenance
from fuzz.oracles.residency import Residency
from fuzz.oracles.tiering import Tiering
from fuzz.oracles.view import Viewer
from fuzz.outcome import Operation, Outcome
from fuzz.stamps import stamper_of
from fuzz.step import EngineCrash, Guarded, Oracle, Step, Violation, World
from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.events import Events
from fuzz.targets.session import KINDS, MOVES, NEEDS, Session
from fuzz.targets.setup import Pin, Setup, draw_setup, model_weights
from fuzz.watch import Watch
from reference.contract import (
    Capability,
    ContractError,
    Engine,
    EngineOptions,
    System,
)

STOP_WEIGHT = 0.8
"""Of a run's end, beside those of its operations: docs/decisions/0010."""
NO_PIN = Pin()
T = TypeVar("T")
DRIVERS = {"multi_rank": interleave, "transfer": handover, "shared_memory": handover}
"""What executes the targets that drive no single engine."""


@torch.inference_mode()
def execute(
    system: System, target: Target, tape: Tape, *, pin: Pin = NO_PIN, watch: Watch | None = None
) -> Outcome:
    """Run `tape` on a fresh engine of `system`; stop at the first step with a violation.  `watch`
    looks on, unless the engine has a process of its own."""
    if target.ranges is None:
        most = pin.operations or target.operations
        return DRIVERS[target.name].execute(target, tape, most=most, watch=watch)
    system = for_target(system, target)
    if system.isolated:
        return _isolated(system, target, tape, pin)
    return execute_here(system, target, tape, pin=pin, watch=watch)


def for_target(system: System, target: Target) -> System:
    """What of a system a target drives: where all its runs are with HiSparse, and that is an engine
    of its own, that one."""
    always = target.ranges is not None and all(target.ranges.hisparse)
    return system.hot() if always and system.hot else system


def _isolated(system: System, target: Target, tape: Tape, pin: Pin) -> Outcome:
    """`execute_here` in a process of its own, whose death is a violation."""

    def work(teller: Teller) -> Outcome:
        return execute_here(system, target, teller.listened(tape), pin=pin, watch=teller)

    child = forked(work, Outcome)
    if child.result:
        return child.result
    setup = _setup(system, target, Tape(child.values), pin)
    return crashed(child, target=target.name, setup=str(setup))


@torch.inference_mode()
def execute_here(
    system: System, target: Target, tape: Tape, *, pin: Pin, watch: Watch | None = None
) -> Outcome:
    """`execute` on a single engine, in this process."""
    system = for_target(system, target)
    setup = _setup(system, target, tape, pin)
    run = Run(system, setup, tape, watch)
    violations = run.play(target, pin.operations or target.operations)
    session, digest = run.session, run.digest(violations)
    return Outcome(
        target=target.name,
        values=tape.values,
        bounds=tape.bounds,
        spans=tape.spans,
        operations=run.done,
        violations=violations,
        exact=digest.exact,
        digest=digest.full,
        events=dict(session.seen),
        features=run.coverage.features,
        ratios=run.numeric.ratios,
        requests=len(run.world.clients),
        tokens=session.tokens,
        skipped=_skipped(system, target),
        setup=str(setup),
    )


def _setup(system: System, target: Target, tape: Tape, pin: Pin) -> Setup:
    """What `tape` builds the engine from, as far as the system can do it."""
    assert target.ranges is not None, "the target drives a single engine"
    if Capability.MODEL not in system.capabilities:
        pin = msgspec.structs.replace(pin, payload="stamped")
    if Capability.HISPARSE not in system.capabilities:
        pin = msgspec.structs.replace(pin, hisparse=False)
    setup = draw_setup(tape, target.ranges, pin, system.sizes)
    if Capability.HOST_TIER not in system.capabilities:
        setup = replace(setup, options=replace(setup.options, host_tier=None))
    return setup


def _skipped(system: System, target: Target) -> list[str]:
    """Operations, and HiSparse, that the target has and the system has not."""
    lacking = [
        kind
        for kind, need in NEEDS.items()
        if kind in target.weights and need not in system.capabilities
    ]
    hisparse = any(target.ranges.hisparse) and Capability.HISPARSE not in system.capabilities
    return [*lacking, "hisparse"] if hisparse else lacking


class Run:
    """One engine with its caller, its oracles and its digest.

    Fields:
        done: the operations so far, in words.
    """

    def __init__(
        self, system: System, setup: Setup, tape: Tape, watch: Watch | None = None
    ) -> None:
        stamped = setup.payload == "stamped"
        weights = None if stamped else model_weights(setup.geometry)
        ape = stamper_of(setup.geometry, setup.shape).ape if stamped else None

        def build(options: EngineOptions) -> Engine:
            engine = system.factory(setup.geometry, setup.shape, options, weights)
            return cast(Engine, Guarded(engine))

        # For any one request, and without what must make no difference.
        roomy = replace(setup.options, pages=64, state_slots=64, max_requests=1)
        ample = replace(roomy, hisparse=None, host_tier=None)
        engine = build(replace(setup.options, ape=ape))
        # Judged by the engine's own geometry: it may have its own idea of a page.
        self.world = World(
            engine=engine,
            geometry=engine.geometry,
            shape=setup.shape,
            options=setup.options,
            stamper=stamper_of(engine.geometry, setup.shape),
            clients={},
            weights=weights,
        )
        self.session = Session(
            self.world, tape, max_tokens=setup.max_tokens, max_length=setup.max_length
        )
        self._events = Events(self.world, self.session.seen)
        self.coverage = Coverage(lambda: len(tape.values))
        viewer = Viewer(self.world)
        self.numeric = Numeric(self.world)
        self._oracles: list[Oracle] = [
            Exact(self.world),
            *([Residency(self.world)] if setup.options.hisparse else []),
            Tiering(self.world),
            Provenance(self.world, viewer),
            Containment(self.world, viewer),
            self.numeric,
            Metamorphic(self.world, lambda: build(ample)),
        ]
        self._digest = Digest()
        self.done: list[Operation] = []
        self._watch = watch
        if watch:
            watch.begin(self.world)

    def play(self, target: Target, most: int) -> list[Violation]:
        """Do operations until the tape stops, `most` are done or one has violations, which are
        returned."""
        weights = self._weights(target)
        for _ in range(most):
            found = self.operate(weights)
            if found is None:
                break
            if found:
                return found
        return self.end()

    def operate(self, weights: Sequence[float]) -> list[Violation] | None:
        """Do an operation that the tape draws by `weights`, of stopping and of each kind; what is
        wrong with it, None if the tape stops."""
        return self._caught(lambda: self._operate(weights))

    def end(self) -> list[Violation]:
        """What is wrong with the run as a whole, now that no operation follows."""
        return self._caught(self._end)

    def _operate(self, weights: Sequence[float]) -> list[Violation] | None:
        step = self.session.step(weights)
        if step is None:
            return None
        found = self._judge(step)
        if not found:
            self._events.observe(step)
            self.coverage.step(step, self.world)
            self.coverage.count(self.session.seen)
        return found

    def _end(self) -> list[Violation]:
        for step in self.session.last_steps():
            if found := self._judge(step):
                return found
        return [v for oracle in self._oracles for v in oracle.close()]

    def _caught(self, do: Callable[[], T]) -> T | list[Violation]:
        """What `do` returns, or what is wrong where the engine raises."""
        try:
            return do()
        except EngineCrash as crash:
            return [crash.violation]
        except ContractError as refusal:
            sentence = f"The engine refused a legal call: {refusal}"
            return [Violation("exact", "refused", sentence)]

    def _judge(self, step: Step) -> list[Violation]:
        """Enter a step among those done; what is wrong with it."""
        requests = sorted(int(request) for request in step.about)
        self.done.append(Operation(step.text, requests, self.session.tokens, step.idle))
        self._record(step)
        if self._watch:
            self._watch.after(step)
        return [v for oracle in self._oracles for v in oracle.check(step)]

    def _weights(self, target: Target) -> list[float]:
        """Of stopping and of each kind, times this seed's swarm; what every run needs to get
        anywhere stays in, and what hot buffers are for."""
        swarm = self.session.tape.swarm(len(KINDS))
        base = [target.weights.get(kind, 0.0) for kind in KINDS]
        always = {"submit", "extend", "accept", *MOVES}
        if self.world.options.hisparse:
            always.add("decode")
        mixed = [
            w * (max(s, 1.0) if kind in always else s)
            for kind, w, s in zip(KINDS, base, swarm, strict=True)
        ]
        return [STOP_WEIGHT, *mixed]

    def _record(self, step: Step) -> None:
        after = step.after
        self._digest.add(step.text, after.requests, after.cached, after.hot, after.tier)
        for _, output in step.outputs:
            for values in (output.selected, output.misses, output.attended, output.logits):
                if values is not None:
                    self._digest.add_tensor(values, exact=values is not output.logits)

    def digest(self, violations: Sequence[Violation]) -> Digest:
        """Of the whole run, once it is over, and of all buffers as they stand."""
        world = self.world
        self._digest.add(self.session.tape.values, [v.signature for v in violations])
        for values in buffers(world.engine, world.shape, world.options):
            self._digest.add_tensor(values, exact=world.stamped)
        return self._digest


def check_deterministic(system: System, target: Target, outcome: Outcome, *, pin: Pin) -> bool:
    """Whether another run of an outcome's tape observes the same."""
    again = execute(system, target, Tape(outcome.values), pin=pin)
    return again.digest == outcome.digest
