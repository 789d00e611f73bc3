"""A saved failure: one JSON file that anybody can read, and one command that replays it."""

from __future__ import annotations

import platform
import shlex
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import msgspec

from fuzz.outcome import Outcome
from fuzz.step import Violation
from fuzz.tape import LIMIT, trimmed
from fuzz.targets.setup import Pin

SCHEMA = "kvoracle-case"
VERSION = 1
"""Raised whenever saved tapes stop meaning the same run; the changelog says when."""
MOST_BYTES = 1 << 20

Value = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Text = Annotated[str, msgspec.Meta(max_length=4000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]


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
        replay: the command that runs it again.
    """

    schema: Name = SCHEMA
    version: int = VERSION
    system: Name
    mutant: Name | None = None
    target: Name
    pin: Pin = Pin()
    setup: Text
    operations: Annotated[list[Text], msgspec.Meta(max_length=1000)]
    violations: Annotated[list[Violation], msgspec.Meta(max_length=1000)]
    versions: dict[Name, Name]
    values: Annotated[list[Value], msgspec.Meta(max_length=LIMIT)]
    replay: Text


class _Header(msgspec.Struct):
    schema: str
    version: int


def case_of(
    outcome: Outcome, *, system: str, path: Path, pin: Pin, mutant: str | None = None
) -> Case:
    """The case of a failing outcome, to be saved at `path`."""
    return Case(
        system=system,
        mutant=mutant,
        target=outcome.target,
        pin=pin,
        setup=outcome.setup,
        operations=[operation.text for operation in outcome.operations],
        violations=outcome.violations,
        versions={
            "python": platform.python_version(),
            **{name: version(name) for name in ("kvoracle", "torch", "numpy")},
        },
        values=trimmed(outcome.values),
        replay=f"kvoracle replay {shlex.quote(str(path))}",
    )


def check_same_run(case: Case, outcome: Outcome, path: Path) -> None:
    """A case whose tape no longer fails counts as mended only if it is still the run that was
    saved: the same setup, and as many operations of the same kinds.

    Raises:
        CaseError: with one sentence, where it is not.
    """
    # whom an operation concerned and what came of it is the engine's doing
    was = [_kind(text) for text in case.operations]
    is_ = [_kind(operation.text) for operation in outcome.operations]
    if case.setup != outcome.setup or was != is_[: len(was)]:
        raise CaseError(
            f"{path} no longer fails, but its tape no longer gives the run that it tells of "
            "either: replay it as it was saved, with the KVOracle release that saved it."
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
    try:
        with path.open("rb") as file:
            data = file.read(MOST_BYTES + 1)
    except OSError as error:
        raise CaseError(
            f"{path} cannot be read ({error.strerror}): give the path of a saved case."
        ) from error
    if len(data) > MOST_BYTES:
        raise CaseError(
            f"{path} has more than {MOST_BYTES} bytes: give a case that `kvoracle fuzz` saved."
        )
    try:
        header = msgspec.json.decode(data, type=_Header)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise CaseError(
            f"{path} is no saved case ({error}): give a JSON file that `kvoracle fuzz` saved."
        ) from error
    if header.schema != SCHEMA or header.version != VERSION:
        raise CaseError(
            f"{path} is a {header.schema!r} of version {header.version}, not a {SCHEMA!r} of "
            f"version {VERSION}: replay it with the KVOracle release that saved it, or search anew."
        )
    try:
        return msgspec.json.decode(data, type=Case)
    except msgspec.MsgspecError as error:
        raise CaseError(
            f"{path} is a damaged case ({error}): save it anew with `kvoracle fuzz`."
        ) from error
