"""A saved failure: one JSON file that anybody can read, and one command that replays it."""

from __future__ import annotations

import os
import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec

import systems
from fuzz.files import Unreadable, read_plain
from fuzz.outcome import Outcome
from fuzz.rarity import Rarity
from fuzz.step import Name, Text, Violation
from fuzz.tape import LIMIT, trimmed
from fuzz.targets.setup import Pin

SCHEMA = "kvoracle-case"
VERSION = 2
"""Raised whenever saved tapes stop meaning the same run; the changelog says when."""
MOST_BYTES = 1 << 20
MOST_OPERATIONS, MOST_VIOLATIONS, MOST_LETTERS = 4000, 1000, 4000

Value = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class CaseError(ValueError):
    """A file that is no case which this version can replay; the message names the cure."""


class Case(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A failing run.

    Fields:
        schema, version: what the file is; a tape of another version is refused.
        system, mutant, target, pin: what to run, and with which choices taken from the tape.
        setup, operations: the run in words.
        violations: what was wrong with its last operation.
        versions: of what it was found with.
        values: the tape.
        seen: how often the search that found it met it; None where nobody counted.
        replay: the command that runs it again.
    """

    schema: Name = SCHEMA
    version: int = VERSION
    system: Name
    mutant: Name | None = None
    target: Name
    pin: Pin = Pin()
    setup: Text
    operations: Annotated[list[Text], msgspec.Meta(max_length=MOST_OPERATIONS)]
    violations: Annotated[list[Violation], msgspec.Meta(max_length=MOST_VIOLATIONS)]
    versions: Annotated[dict[Name, Name], msgspec.Meta(max_length=100)]
    values: Annotated[list[Value], msgspec.Meta(max_length=LIMIT)]
    seen: Rarity | None = None
    replay: Text


class _Header(msgspec.Struct):
    schema: Name
    version: int


def case_of(
    outcome: Outcome,
    *,
    system: str,
    path: Path,
    pin: Pin,
    mutant: str | None = None,
    seen: Rarity | None = None,
) -> Case:
    """The case of a failing outcome, to be saved at `path`; what is too long to be read again is
    cut short."""
    return Case(
        system=system,
        mutant=mutant,
        target=outcome.target,
        pin=pin,
        setup=_cut(outcome.setup),
        operations=[_cut(each.text) for each in outcome.operations[:MOST_OPERATIONS]],
        violations=[_brief(each) for each in outcome.violations[:MOST_VIOLATIONS]],
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("kvoracle", "torch", "numpy")},
        },
        values=trimmed(outcome.values),
        seen=seen,
        replay=replay_command(path, system),
    )


def _cut(text: str) -> str:
    return text if len(text) <= MOST_LETTERS else text[: MOST_LETTERS - 1] + "…"


def _brief(violation: Violation) -> Violation:
    texts = {name: _cut(getattr(violation, name)) for name in ("sentence", "expected", "actual")}
    return msgspec.structs.replace(violation, **texts)


def replay_command(path: Path, system: str) -> str:
    """What runs the case at `path` again, which was found on `system`."""
    named = f" --system {shlex.quote(system)}" if systems.is_checkout(system) else ""
    return f"kvoracle replay {shlex.quote(str(path))}{named}"


def check_same_run(case: Case, outcome: Outcome, path: Path) -> None:
    """A case whose tape no longer fails counts as mended only if it is still the run that was
    saved: the same setup, and as many operations of the same kinds.

    Raises:
        CaseError: with one sentence, where it is not.
    """
    # whom an operation concerned and what came of it is the engine's doing
    was = [_kind(text) for text in case.operations]
    is_ = [_kind(operation.text) for operation in outcome.operations]
    if case.setup != _cut(outcome.setup) or was != is_[: len(was)]:
        raise CaseError(
            f"{path} no longer fails, but its tape no longer gives the run that it tells of "
            "either: replay it on the system that it was found on, with the KVOracle release that "
            "saved it."
        )


def _kind(text: str) -> str:
    return text.partition(" ")[0].rstrip(":")


def save(case: Case, path: Path) -> None:
    """Write `case` to `path`, making its folder.

    Raises:
        CaseError: with one sentence, where that fails.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(case), indent=1) + b"\n")
    except OSError as error:
        raise CaseError(
            f"{path} cannot be written ({error.strerror}): name a folder on a disk with room."
        ) from error


def load(path: Path) -> Case:
    """Read a case.

    Raises:
        CaseError: with one sentence, where the file cannot be read, is too large, is no case,
            or is one of another version.
    """
    return decode(read(path), path)


def read(path: Path) -> bytes:
    """What lies at `path`: a plain file of a case's size, or a link to one.

    Raises:
        CaseError: with one sentence, where it is anything else.
    """
    try:
        # a pipe or a device is not waited for, wherever a link leads
        return read_plain(Path(os.path.realpath(path)), most_bytes=MOST_BYTES)
    except (FileNotFoundError, Unreadable) as error:
        cause = error if isinstance(error, OSError) else error.__cause__
        why = cause.strerror if isinstance(cause, OSError) else f"it {error}"
        raise CaseError(f"{path} cannot be read ({why}): give the path of a saved case.") from error


def decode(data: bytes, path: Path) -> Case:
    """The case that `data` is, which was read from `path`.

    Raises:
        CaseError: with one sentence, where it is none, or one of another version.
    """
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(
            f"{path} is no saved case ({_printable(error)}): give a JSON file that `kvoracle fuzz` "
            "saved."
        ) from error
    if header.schema != SCHEMA or header.version != VERSION:
        raise CaseError(
            f"{path} is a {header.schema!r} of version {header.version}, not a {SCHEMA!r} of "
            f"version {VERSION}: replay it with the KVOracle release that saved it, or search anew."
        )
    try:
        return msgspec.json.decode(data, type=Case)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise CaseError(
            f"{path} is a damaged case ({_printable(error)}): save it anew with `kvoracle fuzz`."
        ) from error


def _printable(error: Exception) -> str:
    """What a decoder says, which may quote the file: a part of it, and nothing that steers a
    terminal."""
    said = str(error)[:200]
    return "".join(letter if letter.isprintable() else "?" for letter in said)
