"""Host memory that another process of the same machine may write to directly.

The owner allocates its pool in a memfd.  That has no name which could leak after a crash, or by
which a peer could map what somebody else made anew; and it is sealed against resize, for whoever
touches a page that was truncated away dies of SIGBUS.  A peer that was handed the descriptor maps
the same pages.  The mapping outlives the owner, so a peer never faults on it.

Nothing protects a mapped page from a peer.  A guard page at either end, filled with the pool's
nonce, tells the peer that it mapped the right memory, and the owner that nobody wrote past the
ends; within, peers check tickets (shm.py).
"""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import secrets
from pathlib import Path
from types import TracebackType

import numpy as np
import torch
from torch import Tensor

from optimized.transfer.hello import NONCE_BYTES
from optimized.transfer.transport import Refused

GUARD_BYTES = mmap.PAGESIZE
REGISTER_BYTES = 1 << 30
"""CUDA pins memory in chunks of this size: one call for a whole pool holds the driver's lock, and
everybody else's launches, for seconds.  No single copy may then cross a boundary of two chunks; a
kernel may."""


class Segment:
    """A sealed memfd as one process has it mapped, with its guard pages.

    Fields:
        memory: [total bytes] uint8, without the guards.
    """

    def __init__(self, descriptor: int, *, total_bytes: int, cuda: bool) -> None:
        """Map and prefault the memory, and with `cuda` pin it for the device's copies.

        The descriptor stays the caller's.

        Raises:
            OSError: where it cannot be mapped.
            RuntimeError: where it cannot be pinned.
        """
        size = total_bytes + 2 * GUARD_BYTES
        self._map = mmap.mmap(
            descriptor,
            size,
            flags=mmap.MAP_SHARED | mmap.MAP_POPULATE,  # never a fault in a copy
        )
        # a fork of a mapper would go on mapping after it, unseen by the fence
        self._map.madvise(mmap.MADV_DONTFORK)
        # by way of numpy, whose arrays keep the map from closing under them
        self._whole = torch.from_numpy(np.frombuffer(self._map, dtype=np.uint8))
        self.memory = self._whole[GUARD_BYTES:-GUARD_BYTES]
        self._pinned: list[int] = []
        if cuda:
            try:
                self._pin()
            except RuntimeError:
                self.close()
                raise

    def mark(self, nonce: bytes) -> None:
        """Fill both guard pages with the nonce."""
        for guard in self._guards():
            guard.copy_(_as_row(nonce))

    def is_marked(self, nonce: bytes) -> bool:
        """Whether both guard pages hold the nonce and nothing else."""
        return all(bool((guard == _as_row(nonce)).all()) for guard in self._guards())

    def _guards(self) -> list[Tensor]:
        ends = (self._whole[:GUARD_BYTES], self._whole[-GUARD_BYTES:])
        return [guard.view(-1, NONCE_BYTES) for guard in ends]

    def chunks_of(self, memory: Tensor) -> list[slice]:
        """The parts of a row of its bytes that are pinned together: CUDA refuses to copy over the
        boundary of two."""
        start = memory.data_ptr() - self._whole.data_ptr()
        cuts = range(REGISTER_BYTES - start % REGISTER_BYTES, len(memory), REGISTER_BYTES)
        return [slice(*ends) for ends in itertools.pairwise([0, *cuts, len(memory)])]

    def _pin(self) -> None:
        for start in range(0, len(self._whole), REGISTER_BYTES):
            chunk = self._whole[start : start + REGISTER_BYTES]
            _check(torch.cuda.cudart().cudaHostRegister(chunk.data_ptr(), len(chunk), 0))
            self._pinned.append(chunk.data_ptr())

    def close(self) -> None:
        """Unpin and unmap.  Once is enough, and again does no harm.

        Raises:
            RuntimeError: where tensors over the memory are still there; nothing is unmapped then.
        """
        while self._pinned:
            _check(torch.cuda.cudart().cudaHostUnregister(self._pinned.pop()))
        self._whole = self.memory = torch.empty(0, dtype=torch.uint8)
        try:
            self._map.close()
        except BufferError as error:
            raise RuntimeError(
                "tensors over shared memory outlive it: drop every view of a pool before closing "
                "the pool."
            ) from error


class SharedPool:
    """The owner's side: memory that is handed to peers by descriptor.

    Fields:
        descriptor: the memfd, to be passed over a Unix socket.
        nonce: NONCE_BYTES random bytes, which only this pool has.
        total_bytes: size of `memory`.
    """

    def __init__(self, total_bytes: int, *, cuda: bool = False) -> None:
        """Allocate, seal, map and prefault; with `cuda` pin it too.

        Raises:
            ValueError: where total_bytes is not positive.
            MemoryError: where the machine does not have so much left.
            OSError: where the kernel refuses.
            RuntimeError: where it cannot be pinned.
        """
        if total_bytes < 1:
            raise ValueError(f"a pool of {total_bytes} bytes cannot be shared: give it some.")
        # the kernel would not say no to a memfd, but kill processes until it fits
        if total_bytes > (available := _available_bytes()):
            raise MemoryError(
                f"a shared pool needs {total_bytes} bytes and {available} are available: lower "
                "host_to_device_ratio."
            )
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.total_bytes = total_bytes
        self.descriptor = os.memfd_create("kvoracle", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            # all pages now: memory that runs out later would be a SIGBUS in some copy
            os.posix_fallocate(self.descriptor, 0, total_bytes + 2 * GUARD_BYTES)
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _required_seals())
            self._segment = Segment(self.descriptor, total_bytes=total_bytes, cuda=cuda)
        except BaseException:
            os.close(self.descriptor)
            raise
        self._segment.mark(self.nonce)

    @property
    def memory(self) -> Tensor:
        """[total bytes] uint8, zero at first; the engine's host pools are views of it.  Where it is
        pinned, a kernel may cross a boundary of two chunks, and a copy may not."""
        return self._segment.memory

    def offset_of(self, memory: Tensor) -> int | None:
        """Where in the pool a contiguous tensor begins, in bytes; None where it lies elsewhere.

        Raises:
            ValueError: where it lies in the pool in part.
        """
        offset = memory.data_ptr() - self.memory.data_ptr()
        if memory.is_cuda or offset + memory.nbytes <= 0 or offset >= self.total_bytes:
            return None
        if offset < 0 or offset + memory.nbytes > self.total_bytes:
            raise ValueError("a region reaches over an end of the shared pool: make it a view.")
        return offset

    def is_intact(self) -> bool:
        """Whether the guard pages are as they were made: no peer wrote past an end."""
        return self._segment.is_marked(self.nonce)

    def close(self) -> None:
        """Unmap and give back; the pages go when the last peer unmaps them too.

        Raises:
            RuntimeError: where tensors over the memory are still there.
        """
        self._segment.close()
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    def __enter__(self) -> SharedPool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def attach(descriptor: int, *, total_bytes: int, nonce: bytes, cuda: bool) -> Segment:
    """The mapper's side: map a pool that a peer handed over, once it is what was announced.

    The descriptor stays the caller's.

    Raises:
        Refused: where its size, seals or nonce is another, or it cannot be pinned; nothing stays
            mapped.
        OSError: where it cannot be mapped.
    """
    size = os.fstat(descriptor).st_size - 2 * GUARD_BYTES
    if size != total_bytes:
        raise Refused(
            f"the peer announced {total_bytes} bytes of shared memory and handed over {size}: "
            "start it anew."
        )
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise Refused("the peer handed over no memfd: run one release on both ends.") from error
    if seals & _required_seals() != _required_seals():
        raise Refused(
            "the peer's shared memory can still be resized: run one release on both ends."
        )
    try:
        segment = Segment(descriptor, total_bytes=total_bytes, cuda=cuda)
    except RuntimeError as error:
        raise Refused(
            f"the peer's shared memory cannot be pinned ({error}): raise the limit on locked "
            "memory."
        ) from error
    if not segment.is_marked(nonce):
        segment.close()
        raise Refused(
            "the peer's shared memory does not hold the nonce that it announced: exchange the "
            "hellos anew."
        )
    return segment


def _required_seals() -> int:
    return fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def _available_bytes() -> int:
    """Memory that new pages can have without swapping (MemAvailable)."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))


def _as_row(nonce: bytes) -> Tensor:
    return torch.tensor(list(nonce), dtype=torch.uint8)


def _check(status: object) -> None:
    torch.cuda.check_error(int(status))  # type: ignore[call-overload]
