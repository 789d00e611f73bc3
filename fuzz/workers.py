"""Worker processes for independent jobs: how all of them start, and how they end early."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


@contextmanager
def workers(
    processes: int,
    *,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Iterator[ProcessPoolExecutor]:
    """A pool of worker processes.  Ctrl-C reaches this process alone; an exception, Ctrl-C among
    them, ends the workers at once, and what they had not finished is lost.  However this process
    ends, its workers do not outlive it."""
    # spawn: a forked child would inherit torch's thread pools in whatever state they are
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=_begin, initargs=(initializer, initargs)
    ) as pool:
        try:
            _start(pool, processes)
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _begin(initializer: Callable[..., None] | None, initargs: tuple[Any, ...]) -> None:
    """In a worker: watch the parent, and then what the caller wants."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if initializer is not None:
        initializer(*initargs)


def _end_with_parent() -> None:
    """A parent that was killed shut no pool down, and its workers would wait for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start all workers now, each for a job that does nothing, while Ctrl-C is ignored: they
    inherit that.  A terminal sends it to every process in the foreground."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(processes):
            pool.submit(int)
    finally:
        signal.signal(signal.SIGINT, handler)


class Crew(Protocol):
    """Workers, here or elsewhere, whose death costs the job at hand and nothing else.

    Fields:
        size: jobs that it takes at a time.
        deaths: what a job's future raises if its worker died.
        tries: workers that a job may cost before it is given up.
    """

    size: int
    tries: int
    deaths: tuple[type[Exception], ...]

    def submit(self, work: Callable[..., Result], /, *args: Any) -> Future[Result]:
        """Start a job; there may be `size` of them."""
        ...


class Processes:
    """A crew of processes of this machine.  Each has a pool of its own: all jobs of a pool end
    with any of its processes."""

    tries = 2
    deaths: tuple[type[Exception], ...] = (BrokenProcessPool,)

    def __init__(self, size: int, stack: ExitStack) -> None:
        self.size = size
        self._stack = stack
        self._pools = [stack.enter_context(workers(1)) for _ in range(size)]
        self._jobs: list[Future[Any] | None] = [None] * size

    def submit(self, work: Callable[..., Result], /, *args: Any) -> Future[Result]:
        free = next(i for i, job in enumerate(self._jobs) if job is None or job.done())
        try:
            job = self._pools[free].submit(work, *args)
        except BrokenProcessPool:
            self._pools[free] = self._stack.enter_context(workers(1))
            job = self._pools[free].submit(work, *args)
        self._jobs[free] = job
        return job


@contextmanager
def processes(size: int) -> Iterator[Crew]:
    """A crew of so many processes; they end as those of `workers`."""
    with ExitStack() as stack:
        yield Processes(size, stack)


@dataclass(frozen=True, slots=True)
class Done(Generic[Job, Result]):
    """A job that is over.

    Fields:
        result: None if it was given up.
        deaths: workers that died of it.
    """

    job: Job
    result: Result | None
    deaths: int


def carried_out(
    crew: Crew, work: Callable[[Job], Result], jobs: Iterable[Job]
) -> Iterator[Done[Job, Result]]:
    """Each job as it ends.  One whose worker died is done again, `Crew.tries` times in all."""
    running: dict[Future[Result], tuple[Job, int]] = {}

    def ended() -> Iterator[Done[Job, Result]]:
        for future in wait(running, return_when=FIRST_COMPLETED).done:
            job, deaths = running.pop(future)
            try:
                yield Done(job, future.result(), deaths)
            except crew.deaths:
                if deaths + 1 == crew.tries:
                    yield Done(job, None, crew.tries)
                else:
                    running[crew.submit(work, job)] = job, deaths + 1

    for job in jobs:
        running[crew.submit(work, job)] = job, 0
        while len(running) >= crew.size:
            yield from ended()
    while running:
        yield from ended()
