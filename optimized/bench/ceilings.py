"""What the device itself reaches, measured in the same run as the kernels."""

from __future__ import annotations

import torch
import triton

from optimized.bench.timing import timed

COPIED, SUMMED, SENT = 1 << 31, 1 << 32, 1 << 28
"""Bytes of the device copy, of the sum, and of the copy from the host."""


def ceilings() -> dict[str, float]:
    """Rates, and the microseconds of an empty kernel in a graph."""
    return {
        "device copy TB/s": _copied_tb_s(),
        "device sum TB/s": _summed_tb_s(),
        "host to device GB/s": _sent_gb_s(),
        "empty kernel us": _empty_us(),
    }


def _copied_tb_s() -> float:
    """Bytes read and written."""
    source, target = (torch.empty(COPIED, dtype=torch.uint8, device="cuda") for _ in range(2))
    source.view(torch.int64).random_()
    return 2 * COPIED / timed([lambda: target.copy_(source)], least=4).us / 1e6


def _summed_tb_s() -> float:
    numbers = torch.empty(SUMMED // 4, device="cuda").normal_()
    total = numbers.new_empty(())
    return SUMMED / timed([lambda: torch.sum(numbers, dim=0, out=total)], least=4).us / 1e6


def _sent_gb_s() -> float:
    host = torch.empty(SENT, dtype=torch.uint8, pin_memory=True)
    device = torch.empty(SENT, dtype=torch.uint8, device="cuda")
    return SENT / timed([lambda: device.copy_(host, non_blocking=True)], least=4).us / 1e3


def _empty_us() -> float:
    some = torch.empty(1, device="cuda")
    return timed([lambda: empty_kernel[(48,)](some)]).us


@triton.jit
def empty_kernel(pointer):
    """Does nothing."""
