"""Collectives of the ranks of one instance: alone, in threads of one process, or in processes.

What a rank gets is in rank order, whichever rank came last, so that a sum or a product over it
has the same bits on every rank.  All ranks have to issue the same sequence of collectives.
"""

from __future__ import annotations

from datetime import timedelta
from threading import Condition
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from optimized.addressing import Array

TIMEOUT_S = 60.0
"""How long a rank waits for the others in a collective."""


class RankLost(RuntimeError):
    """A rank did not come to a collective.  The ranks stand in different places from then on: one
    sentence says who is missing, and to build the instance anew."""


class Group(Protocol):
    """The ranks of an instance as one of them sees them."""

    rank: int
    size: int

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order; all are of one shape.  Nobody may write to them.

        Raises:
            RankLost: as in the reductions.
        """
        ...

    def reduce_min(self, values: Array) -> Array:
        """[n] int64: the least of each of n values over all ranks."""
        ...

    def reduce_max(self, values: Array) -> Array:
        """[n] int64: the greatest of each of n values over all ranks."""
        ...


class Alone:
    """The only rank of its instance."""

    rank = 0
    size = 1

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return [tensor]

    def reduce_min(self, values: Array) -> Array:
        return values.copy()

    def reduce_max(self, values: Array) -> Array:
        return values.copy()


ALONE = Alone()


class ThreadGroup:
    """A rank that is a thread of one process with the others."""

    def __init__(self, rank: int, table: _Table) -> None:
        self.rank = rank
        self.size = table.size
        self._table = table

    @classmethod
    def of(cls, size: int, *, timeout_s: float = TIMEOUT_S) -> list[ThreadGroup]:
        """All ranks of an instance, in order; each belongs to one thread."""
        table = _Table(size, timeout_s)
        return [cls(rank, table) for rank in range(size)]

    def gather(self, tensor: Tensor) -> list[Tensor]:
        return list(self._table.exchange(self.rank, tensor))

    def reduce_min(self, values: Array) -> Array:
        return np.minimum.reduce(self._table.exchange(self.rank, values.copy()))

    def reduce_max(self, values: Array) -> Array:
        return np.maximum.reduce(self._table.exchange(self.rank, values.copy()))

    def leave(self) -> None:
        """Say that this rank's thread ends: a collective that waits for it raises RankLost."""
        self._table.leave(self.rank)

    def enter(self) -> None:
        """Take part again after `leave`.  To be called before any rank is in a collective."""
        self._table.enter(self.rank)


class _Table:
    """Where threads lay down what they bring to a collective.  The last one to come takes all of
    it to the others; a round that failed is never made up for."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self.size = size
        self._timeout_s = timeout_s
        self._changed = Condition()
        self._brought: dict[int, Any] = {}
        self._taken: list[Any] = []
        self._round = 0
        self._away: set[int] = set()
        self._failed = ""

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """What all ranks brought to this round, in rank order."""
        with self._changed:
            mine = self._round
            self._brought[rank] = value
            if len(self._brought) == self.size and not self._failed:
                self._taken = [self._brought[other] for other in range(self.size)]
                self._brought = {}
                self._round += 1
                self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._round > mine or self._failed or self._away, self._timeout_s
            )
            # nobody can end the next round before this rank comes to it, so what is taken is ours
            if self._round == mine:
                raise RankLost(self._fail())
            return self._taken

    def _fail(self) -> str:
        missing = self._away or set(range(self.size)) - set(self._brought)
        self._failed = self._failed or (
            f"rank {' and '.join(map(str, sorted(missing)))} of {self.size} "
            f"{'left' if self._away else 'did not come'} while the others waited in a "
            "collective: see why, and build the instance anew."
        )
        self._changed.notify_all()
        return self._failed

    def leave(self, rank: int) -> None:
        with self._changed:
            self._away.add(rank)
            self._changed.notify_all()

    def enter(self, rank: int) -> None:
        with self._changed:
            self._away.discard(rank)


class GlooGroup:
    """A rank that is a process of its own, over torch.distributed's gloo on one machine."""

    def __init__(self, rank: int, size: int, *, port: int, timeout_s: float = TIMEOUT_S) -> None:
        """Meet the other ranks at the `meeting_point` with that port.  A process can be one rank
        of one instance."""
        self.rank = rank
        self.size = size
        timeout = timedelta(seconds=timeout_s)
        store = dist.TCPStore(_HERE, port, is_master=False, timeout=timeout)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timeout)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        tensor = tensor.contiguous()
        out = [torch.empty_like(tensor) for _ in range(self.size)]
        self._run(dist.all_gather, out, tensor)
        return out

    def reduce_min(self, values: Array) -> Array:
        return self._reduce(values, dist.ReduceOp.MIN)

    def reduce_max(self, values: Array) -> Array:
        return self._reduce(values, dist.ReduceOp.MAX)

    def close(self) -> None:
        """Leave the group for good."""
        dist.destroy_process_group()

    def _reduce(self, values: Array, operation: Any) -> Array:
        reduced = torch.from_numpy(values.copy())
        self._run(dist.all_reduce, reduced, operation)
        return reduced.numpy()

    def _run(self, collective: Any, *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.rank} of {self.size} lost another one in a collective ({error}): see "
                "why that one ended or waits, and build the instance anew."
            ) from error


_HERE = "127.0.0.1"


def meeting_point() -> dist.TCPStore:
    """Where the processes of one instance find each other: hand its `port`, which the system
    chose, to each of them, and keep it until all have met."""
    return dist.TCPStore(_HERE, 0, is_master=True, wait_for_workers=False)
