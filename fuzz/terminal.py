"""What every subcommand shares: progress on the terminal, results as JSON."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Tick = Callable[[str, int, int], None]
"""Called with a part's name, the units done and the units in all."""


class UsageError(Exception):
    """The command line asks for something that cannot be; the message names the cure."""


@contextmanager
def bars(console: Console) -> Iterator[Tick]:
    """A progress bar for each part that reports; on standard error, so that standard output
    stays the result."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def tick(part: str, done: int, total: int) -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=total)
            progress.update(tasks[part], completed=done, total=total)

        yield tick


def check_writable(path: Path | None) -> None:
    """Refuse a result file that could not be written, before hours go into the result."""
    if path is None:
        return
    folder = path.absolute().parent
    if not folder.is_dir() or path.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(f"{path} cannot be written: name a file in a folder that is there.")


def write_json(path: Path | None, result: Any) -> None:
    """Write a result (a msgspec Struct or plain data) as readable JSON."""
    if path is not None:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
