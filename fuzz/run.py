"""One execution: a tape, a target, an engine, and the verdict of all oracles."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b
from typing import cast

import msgspec
import torch

from fuzz import handover, interleave
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
from reference.contract import (
    Capability,
    Component,
    ContractError,
    Engine,
    EngineOptions,
    System,
    components,
)

STOP_WEIGHT = 0.8
"""Of a run's end, beside those of its operations: docs/decisions/0010."""
NO_PIN = Pin()
DRIVERS = {"multi_rank": interleave, "transfer": handover, "shared_memory": handover}
"""What executes the targets that drive no single engine."""


@torch.inference_mode()
def execute(system: System, target: Target, tape: Tape, *, pin: Pin = NO_PIN) -> Outcome:
    """Run `tape` on a fresh engine of `system`; stop at the first step with a violation."""
    if target.ranges is None:
        most = pin.operations or target.operations
        return DRIVERS[target.name].execute(target, tape, most=most)
    if Capability.MODEL not in system.capabilities:
        pin = msgspec.structs.replace(pin, payload="stamped")
    if Capability.HISPARSE not in system.capabilities:
        pin = msgspec.structs.replace(pin, hisparse=False)
    setup = draw_setup(tape, target.ranges, pin)
    if Capability.HOST_TIER not in system.capabilities:
        setup = replace(setup, options=replace(setup.options, host_tier=None))
    run = _Run(system, setup, tape)
    violations, operations = run.play(target, pin.operations or target.operations)
    session = run.session
    return Outcome(
        target=target.name,
        values=tape.values,
        bounds=tape.bounds,
        spans=tape.spans,
        operations=operations,
        violations=violations,
        digest=run.digest(),
        events=dict(session.seen),
        ratios=run.numeric.ratios,
        requests=len(run.world.clients),
        tokens=session.tokens,
        skipped=_skipped(system, target),
        setup=str(setup),
    )


def _skipped(system: System, target: Target) -> list[str]:
    """Operations, and HiSparse, that the target has and the system has not."""
    lacking = [
        kind
        for kind, need in NEEDS.items()
        if kind in target.weights and need not in system.capabilities
    ]
    hisparse = any(target.ranges.hisparse) and Capability.HISPARSE not in system.capabilities
    return [*lacking, "hisparse"] if hisparse else lacking


class _Run:
    """One engine with its caller, its oracles and its digest."""

    def __init__(self, system: System, setup: Setup, tape: Tape) -> None:
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
        self._digest = blake2b(setup.payload.encode(), digest_size=16)

    def play(self, target: Target, most: int) -> tuple[list[Violation], list[Operation]]:
        """Do operations until the tape stops, `most` are done or one has violations; returns
        those, and all operations."""
        weights = self._weights(target)
        done: list[Operation] = []
        try:
            for _ in range(most):
                step = self.session.step(weights)
                if step is None:
                    break
                if found := self._judge(step, done):
                    return found, done
                self._events.observe(step)
            for step in self.session.last_steps():
                if found := self._judge(step, done):
                    return found, done
            return [v for oracle in self._oracles for v in oracle.close()], done
        except EngineCrash as crash:
            return [crash.violation], done
        except ContractError as refusal:
            sentence = f"The engine refused a legal call: {refusal}"
            return [Violation("exact", "refused", sentence)], done

    def _judge(self, step: Step, done: list[Operation]) -> list[Violation]:
        """Enter a step among those done; what is wrong with it."""
        requests = sorted(int(request) for request in step.about)
        done.append(Operation(step.text, requests, self.session.tokens, step.idle))
        self._record(step)
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
        self._digest.update(step.text.encode())
        self._digest.update(msgspec.msgpack.encode((step.after.requests, step.after.cached)))
        for account in (step.after.hot, step.after.tier):
            if account:
                self._digest.update(msgspec.msgpack.encode(account))
        for _, output in step.outputs:
            for values in (output.selected, output.logits, output.misses, output.attended):
                if values is not None:
                    self._digest.update(values.numpy().tobytes())

    def digest(self) -> str:
        """Of the run so far, and of all buffers as they stand."""
        engine, shape = self.world.engine, self.world.shape
        if Capability.RAW in engine.capabilities:
            for component in components(self.world.options):
                states = component is Component.STATE
                for layer in range(len(shape.kda_layers if states else shape.dsa_layers)):
                    self._digest.update(engine.raw(component, layer).numpy().tobytes())
        return self._digest.hexdigest()


def check_deterministic(system: System, target: Target, outcome: Outcome, *, pin: Pin) -> bool:
    """Whether another run of an outcome's tape observes the same."""
    again = execute(system, target, Tape(outcome.values), pin=pin)
    return again.digest == outcome.digest
