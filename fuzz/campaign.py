"""Many executions of a target, over workers; what they found, saw and cost.

A campaign keeps what it learns in a corpus (`fuzz.corpus`) and how far it has come in a journal
there, so that it goes on after whatever ended it.  Some of its executions are guided: they begin
like an earlier one that showed something rare (`fuzz.guidance`).  Now and then it proves that it
would find something (`fuzz.planted`).
"""

from __future__ import annotations

import os
import platform
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from functools import partial
from typing import NamedTuple

import msgspec
import torch

import systems
from fuzz import interleave, mutants, planted, targets
from fuzz.case import case_of
from fuzz.corpus import Corpus, CorpusError, SavedTape
from fuzz.guidance import Garden, Grown, bred, grown
from fuzz.isolation import cpu_seconds
from fuzz.journal import Journal, Progress, journal
from fuzz.outcome import Outcome
from fuzz.resident import resident_bytes
from fuzz.run import DRIVERS, check_deterministic, execute, for_target
from fuzz.shrink import cost, shrink
from fuzz.step import Violation
from fuzz.summary import Memory, Plan, Summary
from fuzz.tally import Failure, Tally, gaps, merged
from fuzz.tape import Tape
from fuzz.targets.setup import settled
from fuzz.workers import Crew, Done, carried_out, processes

BATCH = 25
"""Seeds that a worker takes at a time."""
LAST = 1 << 62
"""A seed that no campaign comes to."""
AT_ONCE = 1
"""The same of a system whose executions have processes of their own, and take seconds: Ctrl-C waits
for those at work."""
TWICE = 100
"""One execution in so many is repeated, and must observe the same."""


class News(NamedTuple):
    """How far a campaign is in all its calls: executions (`fresh`: of this one), signatures of
    failures, features, and seconds of the clock."""

    executions: int
    fresh: int
    failures: int
    features: int
    seconds: float


class Batch(msgspec.Struct, kw_only=True, frozen=True):
    """Seeds start .. stop - 1, and what the guided ones among them begin like."""

    start: int
    stop: int
    parents: dict[int, tuple[Grown, Grown]]


class Part(msgspec.Struct, kw_only=True):
    """What one worker found in one batch: its tally, the tapes of what was clean, and which
    process it was with how many resident bytes."""

    tally: Tally
    tapes: list[Grown]
    worker: str
    resident: int


def run(
    plan: Plan,
    *,
    corpus: Corpus | None = None,
    resume: bool = False,
    crew: Crew | None = None,
    progress: Callable[[News], None] = lambda news: None,
) -> Summary:
    """Run a campaign; `progress` is told after each batch.  Failures are shrunk at the end.

    Ctrl-C ends it early, with all that was found so far: the batches at work are still counted
    and the failure at hand is shrunk; a second Ctrl-C waits for neither.  So does a corpus that
    can no longer be written.

    Args:
        corpus: where tapes and failures go, and the journal; without one they are only returned.
        resume: go on from the journal of a campaign of the same `Plan.identity`.
        crew: does the work, in place of `plan.processes` processes.

    Raises:
        CorpusError: where the corpus cannot be used from the start.
    """
    with ExitStack() as stack:
        log = None
        if corpus is not None:
            log = stack.enter_context(journal(corpus.path / "campaigns", plan.identity))
        campaign = _Campaign(plan, corpus, log, resume)
        stopped = stack.enter_context(_until_interrupted())
        try:
            with suppress(KeyboardInterrupt):
                for done in _worked(plan, campaign.batches(stopped), crew):
                    campaign.take(done)
                    progress(campaign.news())
        except CorpusError as error:
            campaign.give_up(error)
        return campaign.close(stopped)


class _Campaign:
    """A campaign in progress."""

    def __init__(
        self, plan: Plan, corpus: Corpus | None, log: Journal | None, resume: bool
    ) -> None:
        self._plan, self._corpus, self._log = plan, corpus, log
        self._progress = log.load() if log and resume else Progress()
        self._total = self._progress.total
        self._resumed = self._total.executions
        self._before, self._began = self._progress.seconds, time.monotonic()
        known = corpus.grown(plan.target, plan.system, plan.pin) if corpus else ()
        self._garden = Garden(known)
        self._memory = Memory(start=resident_bytes())
        self._unsaved = ""
        self._workers: dict[str, tuple[int, int]] = {}
        """Resident bytes of each, first and last."""

    def news(self) -> News:
        total = self._total
        return News(
            executions=total.executions,
            fresh=total.executions - self._resumed,
            failures=len(total.failures),
            features=len(self._garden),
            seconds=self._seconds(),
        )

    def batches(self, stopped: threading.Event) -> Iterator[Batch]:
        """What is still to be done, until the budget is used up."""
        plan = self._plan
        end = LAST if plan.executions is None else plan.seed + plan.executions
        size = AT_ONCE if systems.load(plan.system).isolated else BATCH
        for start, stop in gaps(self._progress.done, plan.seed, end):
            for first in range(start, stop, size):
                spent = plan.seconds is not None and self._seconds() >= plan.seconds
                if spent or stopped.is_set():
                    return
                last = min(first + size, stop)
                yield Batch(start=first, stop=last, parents=self._parents(range(first, last)))

    def take(self, done: Done[Batch, Part]) -> None:
        """Count a batch that is over, and put it on the disk: first what may be written twice."""
        batch, part, total = done.job, done.result, self._total
        total.deaths += done.deaths
        if part is None:
            total.lost.append((batch.start, batch.stop))
        else:
            total.add(part.tally)
            self._grow(part.tapes)
            for failure in part.tally.failures.values():
                if total.failures[failure.signature].outcome is failure.outcome:
                    self._keep(failure)
            first, _ = self._workers.get(part.worker, (part.resident, 0))
            self._workers[part.worker] = first, part.resident
        self._progress.done = merged([*self._progress.done, (batch.start, batch.stop)])
        self._progress.seconds = self._seconds()
        if self._log:
            self._log.save(self._progress)

    def give_up(self, error: CorpusError) -> None:
        """Write nothing more, since that has failed."""
        self._corpus = self._log = None
        self._unsaved = str(error)

    def close(self, stopped: threading.Event) -> Summary:
        """Shrink what was found, and sum up.  A failure is called by what its smallest case shows:
        of a model run that may be what a stamped run says of the same."""
        plan, total, smallest = self._plan, self._total, Tally()
        target = targets.find(plan.target)
        system = for_target(systems.load(plan.system), target)
        owing = settled(plan.pin, system.sizes)
        for failure in total.failures.values():
            shown = failure
            with suppress(KeyboardInterrupt):
                if not stopped.is_set():
                    shown = _shrunk(plan, failure)
                    self._keep(shown)
            smallest.note(shown)
        self._memory.end = resident_bytes()
        for first, last in self._workers.values():
            self._memory.worker_start = max(first, self._memory.worker_start)
            self._memory.worker_end = max(last, self._memory.worker_end)
        return Summary(
            plan=plan,
            executions=total.executions,
            operations=total.operations,
            seconds=self._seconds(),
            cpu_seconds=total.cpu_seconds,
            events=dict(sorted(total.events.items())),
            missing=target.missing(total.events, owing, system.capabilities),
            failures=sorted(smallest.failures.values(), key=lambda failure: cost(failure.outcome)),
            ratios=total.ratios,
            skipped=total.skipped,
            features=len(self._garden),
            tapes=sum(1 for _ in self._garden),
            guided=total.guided,
            planted=total.planted,
            missed=total.missed,
            deaths=total.deaths,
            lost=total.lost,
            resumed=self._resumed,
            memory=self._memory,
            unsaved=self._unsaved,
            interrupted=stopped.is_set(),
        )

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._began

    def _parents(self, seeds: range) -> dict[int, tuple[Grown, Grown]]:
        chosen = ((seed, self._garden.parents(seed, share=self._plan.guided)) for seed in seeds)
        return {seed: parents for seed, parents in chosen if parents}

    def _grow(self, tapes: list[Grown]) -> None:
        """Keep what guidance starts from; with a planted fault it may show what no sound engine
        does, which is no business of others."""
        plan = self._plan
        for tape in tapes:
            self._garden.counts.update(tape.features.keys())
            if self._garden.add(tape) and self._corpus and plan.mutant is None:
                fields = msgspec.structs.asdict(tape)
                saved = SavedTape(target=plan.target, system=plan.system, pin=plan.pin, **fields)
                self._corpus.add_tape(saved)

    def _keep(self, failure: Failure) -> None:
        """Write a failure to the corpus."""
        if self._corpus:
            plan = self._plan
            case = case_of(
                failure.outcome,
                system=plan.system,
                path=self._corpus.path,
                pin=plan.pin,
                mutant=plan.mutant,
            )
            self._corpus.add_failure(case)


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


def _worked(plan: Plan, batches: Iterator[Batch], crew: Crew | None) -> Iterator[Done[Batch, Part]]:
    """All batches as they end; those of one process in this one."""
    if crew is None and plan.processes == 1:
        for batch in batches:
            yield Done(batch, _search(plan, batch), 0)
        return
    with nullcontext(crew) if crew else processes(plan.processes) as workers:
        yield from carried_out(workers, partial(_search, plan), batches)


def _search(plan: Plan, batch: Batch) -> Part:
    """Execute some seeds, in this process."""
    torch.set_num_threads(1)
    target, tally, tapes = targets.find(plan.target), Tally(), []
    began = cpu_seconds()
    with _faulty(plan):
        system = systems.load(plan.system)
        for seed in range(batch.start, batch.stop):
            parents = batch.parents.get(seed)
            tape = bred(seed, parents) if parents else Tape(seed=seed)
            outcome = execute(system, target, tape, pin=plan.pin)
            if seed % TWICE == 0 and not outcome.failed:
                outcome = _repeated(outcome, plan)
            tally.add(
                Tally(
                    executions=1,
                    operations=len(outcome.operations),
                    events=outcome.events,
                    ratios=outcome.ratios,
                    skipped=outcome.skipped,
                    guided=int(parents is not None),
                )
            )
            if outcome.signature:
                tally.note(
                    Failure(signature=outcome.signature, count=1, seed=seed, outcome=outcome)
                )
            else:
                tapes.append(grown(outcome))
            if plan.plants and planted.due(seed):
                tally.planted += 1
                if name := planted.missed(plan.target, seed):
                    tally.missed.append(name)
    tally.cpu_seconds = cpu_seconds() - began
    worker = f"{platform.node()}/{os.getpid()}"
    return Part(tally=tally, tapes=tapes, worker=worker, resident=resident_bytes())


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
    """The failure in its smallest form."""
    with _faulty(plan):
        system, target = systems.load(plan.system), targets.find(plan.target)
        if DRIVERS.get(target.name) is interleave:
            smallest = interleave.shrink(target, failure.outcome)
        else:
            smallest = shrink(
                lambda values: execute(system, target, Tape(values), pin=plan.pin), failure.outcome
            )
    signature = smallest.signature or failure.signature
    return msgspec.structs.replace(failure, signature=signature, outcome=smallest)


def _faulty(plan: Plan) -> AbstractContextManager[None]:
    return mutants.find(plan.mutant).applied() if plan.mutant else nullcontext()
