"""A crew on a Ray cluster: the same campaign on many machines (extra `fleet`)."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from fuzz.terminal import UsageError
from fuzz.workers import Crew

LOCAL = "local"
"""Stands for a cluster that is started on this machine, and ends with the campaign."""
KNOCK_S = 5.0
Result = TypeVar("Result")


class Fleet:
    """One job for each CPU of a cluster that was joined.  The cluster does none of them again by
    itself, so that the campaign knows what was counted."""

    # a worker that died idle is taken for alive, and costs the next job a try
    tries = 4

    def __init__(self, ray: Any) -> None:
        self.size = max(1, int(ray.cluster_resources().get("CPU", 1)))
        failures = ray.exceptions
        self.deaths: tuple[type[Exception], ...] = (
            failures.WorkerCrashedError,
            failures.NodeDiedError,
            failures.ObjectLostError,
            failures.OutOfMemoryError,
        )
        self._remote = ray.remote(num_cpus=1, max_retries=0)(_call)

    def submit(self, work: Callable[..., Result], /, *args: Any) -> Future[Result]:
        future: Future[Result] = self._remote.remote(work, *args).future()
        return future


def _call(work: Callable[..., Result], *args: Any) -> Result:
    return work(*args)


def _knock(address: str) -> None:
    """Find out within seconds whether somebody is at HOST:PORT, for which Ray waits minutes.

    Raises:
        OSError: where nobody is.
    """
    host, _, port = address.rpartition(":")
    if port.isdigit() and "://" not in address:
        socket.create_connection((host, int(port)), timeout=KNOCK_S).close()


@contextmanager
def fleet(address: str, *, processes: int) -> Iterator[Crew]:
    """The workers of the cluster at `address`; those of a local one are so many processes.  Each
    of its machines has to have this version of KVOracle.

    Raises:
        UsageError: without Ray, or where no cluster answers.
    """
    # read once, as ray is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray
    except ImportError as error:
        raise UsageError(
            "--ray needs Ray, which is not here: pip install kvoracle[fleet]."
        ) from error
    where = {"num_cpus": processes} if address == LOCAL else {"address": address}
    try:
        _knock(address)
        ray.init(**where, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError) as error:
        raise UsageError(
            f"No Ray cluster answers at {address!r} ({error}): start one by `ray start --head` and "
            f"give its address, or {LOCAL!r} for one on this machine."
        ) from error
    try:
        yield Fleet(ray)
    finally:
        ray.shutdown()
