"""Worker processes for independent jobs: how all of them start, and how they end early."""

from __future__ import annotations

import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any


@contextmanager
def workers(
    processes: int,
    *,
    initializer: Callable[..., None] | None = None,
    initargs: tuple[Any, ...] = (),
) -> Iterator[ProcessPoolExecutor]:
    """A pool of worker processes.  Ctrl-C reaches this process alone; an exception, Ctrl-C among
    them, ends the workers at once, and what they had not finished is lost."""
    # spawn: a forked child would inherit torch's thread pools in whatever state they are
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(
        processes, mp_context=context, initializer=initializer, initargs=initargs
    ) as pool:
        try:
            _start(pool, processes)
            yield pool
        except BaseException:
            for worker in set(multiprocessing.active_children()) - others:
                worker.terminate()
            pool.shutdown(cancel_futures=True)
            raise


def _start(pool: ProcessPoolExecutor, processes: int) -> None:
    """Start all workers now, each for a job that does nothing, while Ctrl-C is ignored: they
    inherit that.  A terminal sends it to every process in the foreground."""
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for _ in range(processes):
            pool.submit(int)
    finally:
        signal.signal(signal.SIGINT, handler)
