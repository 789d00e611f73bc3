"""`kvoracle bench kernels`, and that its stages are right where there is a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from optimized.bench import run

CUDA = torch.cuda.is_available()


def test_without_a_gpu_it_says_so():
    command = [sys.executable, "-m", "fuzz.cli", "bench", "kernels"]
    hidden = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=hidden)
    assert done.returncode == 2
    assert done.stderr == (
        "kvoracle: No CUDA device is here, and kernels are timed on one: run it where one is.\n"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="kernels are timed on a GPU")
@pytest.mark.parametrize("name", run.STAGES)
def test_every_stage_is_right_at_every_size(name):
    for row in run.measured([name]):
        assert row.error < run.MOST_ERROR


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="kernels are timed on a GPU")
def test_a_stage_that_computes_something_else_is_wrong(monkeypatch):
    """The control: nothing is copied."""
    monkeypatch.setattr("optimized.bench.swap.swap_in", lambda *args, **_: _Nothing(args[0]))
    assert not any(row.error < run.MOST_ERROR for row in run.measured(["swap-in"]))


class _Nothing:
    def __init__(self, selection: torch.Tensor) -> None:
        self.misses = self.absent = selection.new_zeros(len(selection))
        self.rows = torch.zeros_like(selection)
