"""What `kvoracle bench kernels` shows: device time of each stage against its floor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from importlib.metadata import version
from typing import Any

import torch
from rich.box import SIMPLE
from rich.console import RenderableType
from rich.table import Column, Table
from rich.text import Text

from fuzz.terminal import JsonFile, UsageError, check_writable, deliver, out


def kernels(*stages: str, json: JsonFile = None) -> int:
    """Time the kernels of a decode step and of prefill on this GPU, at the sizes of a server,
    beside what their bytes take at least.  Exit status 1 where an output is wrong.

    Parameters
    ----------
    stages
        Only these; all without names.
    """
    check_writable(json)
    if not torch.cuda.is_available():
        raise UsageError(
            "No CUDA device is here, and kernels are timed on one: run it where one is."
        )
    bench = import_module("optimized.bench.run")
    if unknown := set(stages) - set(bench.STAGES):
        known = ", ".join(bench.STAGES)
        raise UsageError(f"There is no stage {min(unknown)!r}: choose from {known}.")
    limits = import_module("optimized.bench.ceilings").ceilings()
    rows = list(bench.measured(stages or list(bench.STAGES)))
    found = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "ceilings": limits,
        "stages": rows,
    }
    deliver(out, _parts(rows, found), json=json, result=found)
    return 0 if all(row.error < bench.MOST_ERROR for row in rows) else 1


def _parts(rows: Sequence[Any], found: Mapping[str, Any]) -> Iterator[RenderableType]:
    table = Table(
        *("stage", "at"),
        *(
            Column(name, justify="right")
            for name in ("us", "spread", "floor", "x floor", "target", "TB/s", "error", "GiB")
        ),
        box=SIMPLE,
    )
    for row in rows:
        table.add_row(
            row.name,
            row.at,
            f"{row.us:.2f}",
            f"{row.spread:.1%}",
            f"{row.floor_us:.1f}",
            f"{row.us / row.floor_us:.2f}",
            f"{row.target_us:g}",
            f"{row.bytes / row.us / 1e6:.2f}",
            f"{row.error:.1e}",
            f"{row.peak_bytes / 2**30:.1f}",
            style="" if row.us <= row.target_us else "yellow",
        )
    yield table
    limits = ", ".join(f"{name} {value:.2f}" for name, value in found["ceilings"].items())
    yield Text(f"{found['device']}, torch {found['torch']}, Triton {found['triton']}; {limits}")
