"""Many executions of a target, over processes; what they found, saw and cost."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, as_completed, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress

import msgspec
import torch

import systems
from fuzz import interleave, mutants, targets
from fuzz.outcome import Outcome
from fuzz.run import DRIVERS, check_deterministic, execute
from fuzz.shrink import cost, shrink
from fuzz.step import Violation
from fuzz.tape import Tape
from fuzz.targets.setup import Pin
from fuzz.workers import workers

BATCH = 25
"""Seeds that a worker takes at a time."""
TWICE = 100
"""One execution in so many is repeated, and must observe the same."""

Progress = Callable[[int, int], None]


class Plan(msgspec.Struct, kw_only=True, frozen=True):
    """What to run.  `executions` or `seconds` bounds it, whichever comes first; seeds count up
    from `seed`."""

    target: str
    system: str = "optimized"
    mutant: str | None = None
    pin: Pin = Pin()
    executions: int | None = None
    seconds: float | None = None
    seed: int = 0
    processes: int = 1


class Failure(msgspec.Struct, kw_only=True, frozen=True):
    """All failures of one signature: how many, and the smallest with its seed."""

    signature: str
    count: int
    seed: int
    outcome: Outcome


class Summary(msgspec.Struct, kw_only=True, frozen=True):
    """What a campaign did.

    Fields:
        executions, operations: how many; cpu_seconds: of all workers together.
        events: what was seen how often; missing: required events that never were.
        failures: by signature, the smallest case first.
        ratios: largest error by its bound of the model runs, by stage.
        skipped: operations that the engine lacks the capability for.
        interrupted: Ctrl-C ended it early.
    """

    plan: Plan
    executions: int
    operations: int
    seconds: float
    cpu_seconds: float
    events: dict[str, int]
    missing: list[str]
    failures: list[Failure]
    ratios: dict[str, float]
    skipped: list[str]
    interrupted: bool = False

    @property
    def executions_per_second_and_core(self) -> float:
        return self.executions / max(self.cpu_seconds, 1e-9)

    @property
    def passed(self) -> bool:
        """It ran to its end, nothing was found, and nothing that must be seen was missed."""
        return not self.failures and not self.missing and not self.interrupted


class _Part(msgspec.Struct, kw_only=True):
    """What one worker found in one batch of seeds, or all of them so far."""

    executions: int = 0
    operations: int = 0
    cpu_seconds: float = 0.0
    events: dict[str, int] = {}
    ratios: dict[str, float] = {}
    skipped: list[str] = []
    failures: dict[str, Failure] = {}

    def add(self, other: _Part) -> None:
        self.executions += other.executions
        self.operations += other.operations
        self.cpu_seconds += other.cpu_seconds
        self.events = dict(Counter(self.events) + Counter(other.events))
        self.skipped = other.skipped or self.skipped
        for stage, ratio in other.ratios.items():
            self.ratios[stage] = max(ratio, self.ratios.get(stage, 0.0))
        for failure in other.failures.values():
            self.note(failure)

    def note(self, failure: Failure) -> None:
        """Count a failure, keeping the smallest of its signature."""
        known = self.failures.get(failure.signature)
        if known is None:
            self.failures[failure.signature] = failure
            return
        smaller = min(known, failure, key=lambda f: cost(f.outcome))
        self.failures[failure.signature] = msgspec.structs.replace(
            smaller, count=known.count + failure.count
        )


def run(plan: Plan, *, progress: Progress = lambda executions, failures: None) -> Summary:
    """Run a campaign; `progress` is called after each batch with the executions done and the
    signatures found so far.  Failures are shrunk at the end.

    Ctrl-C ends it early, with all that was found so far: the batches at work are still counted
    and the failure at hand is shrunk; a second Ctrl-C waits for neither."""
    began = time.monotonic()
    target, total, failures = targets.find(plan.target), _Part(), []
    with _until_interrupted() as stopped:
        with suppress(KeyboardInterrupt):
            for part in _parts(plan, began, stopped):
                total.add(part)
                progress(total.executions, len(total.failures))
        for failure in total.failures.values():
            smallest = failure
            with suppress(KeyboardInterrupt):
                if not stopped.is_set():
                    smallest = _shrunk(plan, failure)
            failures.append(smallest)
    return Summary(
        plan=plan,
        executions=total.executions,
        operations=total.operations,
        seconds=time.monotonic() - began,
        cpu_seconds=total.cpu_seconds,
        events=dict(sorted(total.events.items())),
        missing=target.missing(total.events, plan.pin),
        failures=sorted(failures, key=lambda failure: cost(failure.outcome)),
        ratios=total.ratios,
        skipped=total.skipped,
        interrupted=stopped.is_set(),
    )


@contextmanager
def _until_interrupted() -> Iterator[threading.Event]:
    """An event that the first Ctrl-C sets; the second one interrupts, as always."""
    stopped = threading.Event()

    def stop(*_: object) -> None:
        stopped.set()
        signal.signal(signal.SIGINT, usual)

    usual = signal.signal(signal.SIGINT, stop)
    try:
        yield stopped
    finally:
        signal.signal(signal.SIGINT, usual)


def _parts(plan: Plan, began: float, stopped: threading.Event) -> Iterator[_Part]:
    """The parts of all batches, as they come."""
    batches = itertools.takewhile(lambda _: not stopped.is_set(), _batches(plan, began))
    if plan.processes == 1:
        for seeds in batches:
            yield _search(plan, seeds)
        return
    with workers(plan.processes) as pool:
        running: set[Future[_Part]] = set()
        for seeds in batches:
            running.add(pool.submit(_search, plan, seeds))
            while len(running) > plan.processes:
                done, running = wait(running, return_when=FIRST_COMPLETED)
                yield from (future.result() for future in done)
        yield from (future.result() for future in as_completed(running))


def _batches(plan: Plan, began: float) -> Iterator[range]:
    end = None if plan.executions is None else plan.seed + plan.executions
    first = plan.seed
    while (end is None or first < end) and (
        plan.seconds is None or time.monotonic() - began < plan.seconds
    ):
        stop = first + BATCH if end is None else min(first + BATCH, end)
        yield range(first, stop)
        first = stop


def _search(plan: Plan, seeds: range) -> _Part:
    """Execute some seeds, in this process."""
    torch.set_num_threads(1)
    target, part, began = targets.find(plan.target), _Part(), time.process_time()
    with _faulty(plan):
        system = systems.load(plan.system)
        for seed in seeds:
            outcome = execute(system, target, Tape(seed=seed), pin=plan.pin)
            if seed % TWICE == 0 and not outcome.failed:
                outcome = _repeated(outcome, plan)
            part.add(
                _Part(
                    executions=1,
                    operations=len(outcome.operations),
                    events=outcome.events,
                    ratios=outcome.ratios,
                    skipped=outcome.skipped,
                )
            )
            if outcome.signature:
                part.note(Failure(signature=outcome.signature, count=1, seed=seed, outcome=outcome))
    part.cpu_seconds = time.process_time() - began
    return part


def _repeated(outcome: Outcome, plan: Plan) -> Outcome:
    """The outcome, or one that says that another run of its tape observed something else."""
    system, target = systems.load(plan.system), targets.find(plan.target)
    if check_deterministic(system, target, outcome, pin=plan.pin):
        return outcome
    sentence = "Running the same tape twice should observe the same; the digests differ."
    return msgspec.structs.replace(
        outcome, violations=[Violation("determinism", "digest", sentence)]
    )


def _shrunk(plan: Plan, failure: Failure) -> Failure:
    with _faulty(plan):
        system, target = systems.load(plan.system), targets.find(plan.target)
        if DRIVERS.get(target.name) is interleave:
            smallest = interleave.shrink(target, failure.outcome)
        else:
            smallest = shrink(
                lambda values: execute(system, target, Tape(values), pin=plan.pin), failure.outcome
            )
    return msgspec.structs.replace(failure, outcome=smallest)


def _faulty(plan: Plan) -> AbstractContextManager[None]:
    return mutants.find(plan.mutant).applied() if plan.mutant else nullcontext()
