"""Copies of newest rows to the host, apart from the step that ordered them.

A decode step orders the copies when it starts; what overwrites or frees a copied row waits first.
On a GPU a side stream copies meanwhile.  On a CPU the copies queue up and are made one by one, as
soon or as late as `HiSparse.copies` says, so that a wait left out is found by interleaving and not
by luck.
"""

from __future__ import annotations

from collections import deque
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from optimized.hisparse.pools import HotPools
from optimized.kernels import swap_in
from reference.contract import CopyOrder


class Backups(Protocol):
    """Ordered copies from device to host rows, in all layers."""

    def start(self, device_rows: Tensor, host_rows: Tensor) -> None:
        """Order a copy of device rows [n] int64 to host rows [n] int64."""

    def progress(self) -> None:
        """Others work now, and the copies may come forward."""

    def wait(self) -> None:
        """Nothing that is launched after this precedes a copy that was ordered before."""

    def drain(self) -> None:
        """Return once no launched work reads or writes the host rows."""


class BackupQueue:
    """Backups on a CPU.

    Fields:
        pending: (layer, device rows, host rows) of the copies still to be made, oldest first.
    """

    def __init__(
        self,
        pools: HotPools,
        *,
        copies: CopyOrder,
        seed: int,
        backend: str,
    ) -> None:
        self.pending: deque[tuple[int, Tensor, Tensor]] = deque()
        self._pools = pools
        self._copies = copies
        self._rng = np.random.default_rng(seed)
        self._backend = backend

    def start(self, device_rows: Tensor, host_rows: Tensor) -> None:
        for layer in range(len(self._pools.device)):
            self.pending.append((layer, device_rows, host_rows))
        self.progress()

    def progress(self) -> None:
        if self._copies == "early":
            self.wait()
        elif self._copies == "random" and self.pending:
            for _ in range(self._rng.integers(len(self.pending), endpoint=True)):
                self.copy_oldest()

    def copy_oldest(self) -> None:
        """Make the copies of one step and layer."""
        layer, device_rows, host_rows = self.pending.popleft()
        device, host = self._pools.of_layer(layer)
        swap_in.backup(device, host, device_rows, host_rows, backend=self._backend)

    def wait(self) -> None:
        while self.pending:
            self.copy_oldest()

    def drain(self) -> None:
        self.wait()


class StreamBackups:
    """Backups on a side stream of a GPU."""

    def __init__(self, pools: HotPools, *, backend: str) -> None:
        self._pools = pools
        self._backend = backend
        self._stream = torch.cuda.Stream(pools.device.device)

    def start(self, device_rows: Tensor, host_rows: Tensor) -> None:
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for layer in range(len(self._pools.device)):
                device, host = self._pools.of_layer(layer)
                swap_in.backup(device, host, device_rows, host_rows, backend=self._backend)
        for ids in (device_rows, host_rows):
            ids.record_stream(self._stream)  # else their memory is reused before they are read

    def progress(self) -> None:
        """The stream needs nobody's leave."""

    def wait(self) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)

    def drain(self) -> None:
        # the current stream's own swap-ins read the host too
        self.wait()
        torch.cuda.current_stream().synchronize()
