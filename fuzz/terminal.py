"""What every subcommand shares: progress on the terminal, and results that reach their reader."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Protocol

import msgspec
from cyclopts import Parameter, validators
from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from fuzz.outcome import Outcome

JsonFile = Annotated[Path | None, Parameter(name="--json", help="Write the result to this file.")]
Processes = Annotated[int, Parameter(validator=validators.Number(gte=1, lte=256))]
Natural = Annotated[int, Parameter(validator=validators.Number(gte=0))]
Positive = Annotated[int, Parameter(validator=validators.Number(gte=1))]


EXIT_INTERRUPTED = 130
"""Exit status of a command that Ctrl-C ended before it had found anything."""


class Tick(Protocol):
    """Told of a part: its name, the units done, the units in all, and what else is new of it."""

    def __call__(self, part: str, done: int, total: int, note: str = "") -> None: ...


class UsageError(Exception):
    """The command line asks for something that cannot be; the message names the cure."""


class Terminal(Console):
    """Standard output.  Data is printed as it is: nothing in it is taken for markup, and what
    should look special is a `Text` with a style."""

    def __init__(self) -> None:
        super().__init__(markup=False, emoji=False, highlight=False)

    def show(self, parts: Iterable[RenderableType]) -> None:
        """Print tables, and lines that are not wrapped.

        Raises:
            UsageError: where the stream cannot be written, a closed pipe for example.
        """
        try:
            for part in parts:
                self.print(part, soft_wrap=not isinstance(part, Table))
        except OSError as error:
            # what is still buffered must not fail once more when the interpreter exits
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise UsageError(
                f"standard output took only a part of the result ({error.strerror}): read it to "
                "the end, or write it to a file with --json."
            ) from error

    def on_broken_pipe(self) -> None:
        """Called while the error is handled: it goes on to `show`."""
        raise


out, err = Terminal(), Console(stderr=True)


@contextmanager
def bars(console: Console) -> Iterator[Tick]:
    """A progress bar for each part that reports; on standard error, so that standard output
    stays the result.  Where that is no terminal, a line as each part ends."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", markup=False),
    )
    with Progress(*columns, console=console) as progress:
        tasks: dict[str, Any] = {}

        def tick(part: str, done: int, total: int, note: str = "") -> None:
            if part not in tasks:
                tasks[part] = progress.add_task(part, total=total, note=note)
            progress.update(tasks[part], completed=done, total=total, note=note)
            if done == total and not console.is_terminal:
                said = f"{part}: {total:,} done" + (f", {note}" if note else "")
                print(said, file=sys.stderr, flush=True)

        yield tick


def outcome_lines(outcome: Outcome) -> list[Text]:
    """A run in words, and what was wrong with its end."""
    return [
        Text(outcome.setup),
        *(Text(f"  {n}. {op.text}") for n, op in enumerate(outcome.operations, start=1)),
        *(
            Text.assemble("  ", (violation.oracle, "red"), f": {violation.sentence}")
            for violation in outcome.violations
        ),
    ]


def check_writable(path: Path | None) -> None:
    """Refuse a result file that could not be written, before hours go into the result."""
    if path is None:
        return
    folder = path.absolute().parent
    if (
        not folder.is_dir()
        or path.is_dir()
        or not os.access(path if path.exists() else folder, os.W_OK)
    ):
        raise UsageError(f"{path} cannot be written: name a file in a folder that is there.")


def printable(text: str) -> str:
    """A text that may quote a file, with all that would steer a terminal spelt out."""
    return "".join(
        letter
        if letter.isprintable() or letter == "\n"
        else letter.encode("unicode_escape").decode()
        for letter in text
    )


def check_kept(file: Path, *outputs: Path | None) -> None:
    """Refuse to write a result over the case in `file`, by whatever name."""
    for path in outputs:
        if path is not None and path.exists() and file.exists() and path.samefile(file):
            raise UsageError(f"{path} is the case itself: name another file for what is written.")


def check_writable_folder(folder: Path) -> None:
    """Make the folder for cases, or refuse it, before there is anything to lose."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be made ({error.strerror}): name a folder that can be written."
        ) from error
    if not os.access(folder, os.W_OK):
        raise UsageError(f"{folder} cannot be written: name a folder that can be.")


def write_file(path: Path, data: bytes) -> None:
    """Write a result.

    Raises:
        UsageError: with one sentence, where that fails.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise UsageError(
            f"{path} cannot be written ({error.strerror}): name a file on a disk with room."
        ) from error


def json_of(result: Any) -> bytes:
    """A result (a msgspec Struct or plain data) as readable JSON, which has no infinities: they
    are the strings "inf", "-inf" and "nan"."""
    return msgspec.json.format(msgspec.json.encode(_finite(msgspec.to_builtins(result)))) + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def deliver(
    out: Terminal, parts: Iterable[RenderableType], *, json: Path | None, result: Any
) -> None:
    """Write `result` to the file `json`, if there is one, and then print: a reader who goes
    away costs nobody the file, nor a full disk the print.

    Raises:
        UsageError: where either fails.
    """
    try:
        if json is not None:
            write_file(json, json_of(result))
    finally:
        out.show(parts)
