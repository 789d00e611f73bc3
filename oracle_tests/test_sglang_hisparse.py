"""SGLang's HiSparse on a CPU: the swap-in kernel's own text, and the coordinator around it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from optimized.kernels.swap_in import swap_in
from oracle_tests.sglang_hot_cases import SIZE, TOPK, differences, on
from reference.hisparse import HotBuffer
from systems.sglang.hisparse_kernel import (
    UNWRITTEN,
    CannotCompile,
    Kernel,
    compile_kernel,
    kernel_of,
    source_of,
)
from systems.sglang.wheels import unpacked

RELEASES = ("0.5.21", "0.5.22", "0.5.23")
FAULTS = (
    "no wait for the backup",
    "no backup",
    "tags outlive their request",
    "rows are kept",
)


@pytest.fixture(scope="module")
def kernels() -> dict[str, Kernel]:
    return {}


@pytest.fixture
def kernel(request: Any, kernels: dict[str, Kernel]) -> Kernel:
    """The kernel of a release, compiled once."""
    if request.param not in kernels:
        kernels[request.param] = kernel_of(unpacked(request.param), topk=TOPK, size=SIZE)
    return kernels[request.param]


every_kernel = pytest.mark.parametrize("kernel", RELEASES, indirect=True)


@pytest.mark.sglang
@every_kernel
@pytest.mark.parametrize("seed", range(3))
def test_the_kernel_does_what_the_reference_does(kernel: Kernel, seed: int) -> None:
    assert differences(kernel, seed) == []


def without_newest(row: list[int]) -> None:
    """All cells are of other positions."""
    row[row.index(max(row))] = min(set(range(max(row))) - set(row))


@pytest.mark.sglang
@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("change", [None, without_newest])
def test_a_hot_buffer_of_exactly_topk_rows_is_enough_for_topk_cells(
    release: str, change: Any
) -> None:
    kernel = kernel_of(unpacked(release), topk=TOPK, size=TOPK)
    assert differences(kernel, 0, change) == []


def void(row: list[int]) -> None:
    """The first cell that is not the newest position names none."""
    row[0 if row[0] < max(row) else 1] = -1


def repeat(row: list[int]) -> None:
    """The last two positions of the request are one."""
    low = [n for n, position in enumerate(row) if position < max(row)]
    row[low[1]] = row[low[0]] = max(row) - 1


@pytest.mark.sglang
@every_kernel
def test_a_void_cell_is_left_unwritten(kernel: Kernel) -> None:
    """Beyond the short path; a finding, and no promise of the kernel's."""
    [wrong] = differences(kernel, 0, void)
    assert wrong.startswith("slots: ")
    assert f"{UNWRITTEN}" in wrong


@pytest.mark.sglang
@every_kernel
def test_a_position_selected_twice_is_loaded_twice(kernel: Kernel) -> None:
    wrong = differences(kernel, 0, repeat)
    assert [sentence.partition(":")[0] for sentence in wrong] == ["slots", "misses", "tags", "LRU"]


@pytest.mark.parametrize("change", [void, repeat])
def test_our_kernel_takes_both(change: Any) -> None:
    """The control of the two: what they ask for can be done, and the check passes it."""
    size, length = 8, 30
    row = [3, 20, 21, 22, 29]
    change(row)
    buffer = HotBuffer(size)
    buffer.admit(length)
    tags, lru = torch.tensor([buffer.tags]), torch.tensor([buffer.lru])
    plan = swap_in(
        torch.tensor([row]),
        torch.tensor([length]),
        tags,
        lru,
        torch.arange(size + 1)[None],
        torch.arange(length)[None],
        torch.zeros(length, 16, dtype=torch.uint8),
        torch.zeros(size + 1, 16, dtype=torch.uint8),
        backend="torch",
    )
    should = buffer.swap_in(row, length, range(length))
    assert tuple(plan.rows[0].tolist()) == should.slots
    assert tags[0].tolist() == buffer.tags
    assert lru[0].tolist() == buffer.lru


@pytest.mark.sglang
@pytest.mark.parametrize("release", RELEASES)
def test_requests_under_the_coordinator(release: str) -> None:
    found = on(release, "live")
    assert found["wrong"] == []
    assert found["conserved"]
    kinds = ("a miss", "a short step", "a first long step", "a slot is used again")
    assert all(found["events"][kind] for kind in kinds)


@pytest.mark.sglang
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_the_coordinator_is_seen(fault: str) -> None:
    found = on("0.5.23", "live", fault)
    assert found["wrong"] or not found["conserved"]


def test_a_text_without_the_kernel_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotCompile, match="is not like that of the known releases"):
        compile_kernel("int main() {}", tmp_path, topk=8, size=16)
    with pytest.raises(CannotCompile, match=r"has no hisparse\.cuh"):
        source_of(tmp_path)
