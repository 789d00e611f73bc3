"""A folder of tapes worth starting from and of failures, shared by any number of campaigns.

    tapes/TARGET/DIGEST.json          a tape and the features that it shows
    failures/SIGNATURE/DIGEST.json    a case; SIGNATURE stands for what makes two failures one
    campaigns/*.json                  how far each campaign has come (`fuzz.journal`)

A file of the first two is named by a digest of its content and never changes, so that folders
merge by union and writers need no lock.  What lies there and is no such file is left alone and
told of.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from hashlib import blake2b
from itertools import chain, islice, pairwise
from pathlib import Path
from stat import S_ISREG
from typing import Annotated, Any, TypeVar

import msgspec

from fuzz.case import MOST_BYTES, Case, Name, Value, replay_command
from fuzz.case import VERSION as CASE_VERSION
from fuzz.files import TEMPORARY, Unreadable, read_plain, write_whole
from fuzz.guidance import Garden, Grown
from fuzz.tape import LIMIT
from fuzz.targets.setup import Pin

VERSION = 1
"""Raised whenever saved tapes or features stop meaning the same: older ones are ignored then."""
MOST_FILES = 100_000
"""Files of one kind that are looked at."""
ABANDONED_S = 3600.0
"""What is half written for longer belongs to nobody any more."""
T = TypeVar("T")


class CorpusError(ValueError):
    """A folder that cannot serve as a corpus; the message names the cure."""


class SavedTape(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """A tape, as `fuzz.guidance.Grown`, and what it was run on: elsewhere it would show other
    features."""

    version: int = VERSION
    target: Name
    system: Name
    pin: Pin = Pin()
    values: Annotated[list[Value], msgspec.Meta(max_length=LIMIT)]
    starts: Annotated[list[Value], msgspec.Meta(max_length=LIMIT)]
    features: Annotated[dict[Name, Value], msgspec.Meta(max_length=4000)]

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"it is of version {self.version}, not {VERSION}")
        places = [0, *self.starts, len(self.values)]
        if any(a > b for a, b in pairwise(places)):
            raise ValueError("its operations do not follow one another")

    @property
    def grown(self) -> Grown:
        return Grown(values=self.values, starts=self.starts, features=self.features)

    @property
    def digest(self) -> str:
        return _digest(self)


class Corpus:
    """The folder at `path`, which is made when something is added.

    Fields:
        ignored: what was met and is no file of a corpus, with the reason.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ignored: dict[Path, str] = {}

    def tapes(self) -> Iterator[tuple[Path, SavedTape]]:
        """All tapes, in the order of their names."""
        for path in self._files("tapes"):
            saved = self._read(path, SavedTape)
            if saved and self._is_named(path, saved.target, saved.digest):
                yield path, saved

    def grown(self, target: str, system: str, pin: Pin) -> Iterator[Grown]:
        """The tapes that were run on the same."""
        for _, saved in self.tapes():
            if (saved.target, saved.system, saved.pin) == (target, system, pin):
                yield saved.grown

    def cases(self) -> Iterator[tuple[Path, Case]]:
        """All failures, in the order of their names."""
        yield from self._cases("*")

    def _cases(self, signature: str) -> Iterator[tuple[Path, Case]]:
        for path in self._files("failures", signature):
            case = self._read(path, Case)
            if case is None:
                continue
            if case.version != CASE_VERSION:
                self.ignored[path] = f"it is of version {case.version}, not {CASE_VERSION}"
            elif not case.violations:
                self.ignored[path] = "it tells of no violation"
            elif self._is_named(path, signature_of(case), _digest_of(case)):
                yield path, case

    def failures(self) -> list[tuple[Path, Case]]:
        """The smallest case of each signature, the smallest of all first."""
        return sorted(_smallest(self.cases()), key=lambda found: size(found[1]))

    def add_tape(self, saved: SavedTape) -> bool:
        """Write a tape; whether it is new."""
        return self._add(self.path / "tapes" / saved.target / f"{saved.digest}.json", saved)

    def add_failure(self, case: Case) -> bool:
        """Write a case, unless one of its signature is there that is as small; whether it was
        written.  Then those that it replaces go."""
        signature = signature_of(case)
        known = [*self._cases(signature)]
        if any(size(other) <= size(case) for _, other in known):
            return False
        path = self.path / "failures" / signature / f"{_digest_of(case)}.json"
        self._add(path, msgspec.structs.replace(case, replay=replay_command(path, case.system)))
        for path, _ in known:
            _remove(path)
        return True

    def merge(self, other: Corpus) -> int:
        """Add what `other` has, which is not changed; how many files came."""
        came = sum(self.add_tape(saved) for _, saved in other.tapes())
        return came + sum(self.add_failure(case) for _, case in other.failures())

    def minimise(self) -> int:
        """Drop tapes that show nothing that smaller ones do not, cases that have a smaller one of
        their signature, and what was left half written; how many files went.

        Raises:
            CorpusError: where a file cannot be removed.
        """
        groups: dict[bytes, dict[Path, Grown]] = {}
        for path, saved in self.tapes():
            alike = msgspec.json.encode((saved.target, saved.system, saved.pin))
            groups.setdefault(alike, {})[path] = saved.grown
        # one listing: others may write between two
        cases = list(self.cases())
        smallest = {path for path, _ in _smallest(cases)}
        dropped = [path for path, _ in cases if path not in smallest]
        for tapes in groups.values():
            kept = {id(tape) for tape in Garden(tapes.values())}
            dropped += [path for path, tape in tapes.items() if id(tape) not in kept]
        dropped += self._abandoned()
        for path in dropped:
            _remove(path)
        return len(dropped)

    def _abandoned(self) -> list[Path]:
        """What writers that were killed have left."""
        found = chain(*(self.path.glob(f"{kind}/{TEMPORARY}*") for kind in ("*", "*/*")))
        before = time.time() - ABANDONED_S
        return [path for path in islice(found, MOST_FILES) if _is_older(path, before)]

    def _files(self, kind: str, folder: str = "*") -> list[Path]:
        """What might be a file of a kind: everything but what is being written."""
        found = islice((self.path / kind).glob(f"{folder}/*"), MOST_FILES)
        return sorted(path for path in found if not path.name.startswith(TEMPORARY))

    def _read(self, path: Path, kind: type[T]) -> T | None:
        """The file at `path`; None, and a note, where it is not of that kind."""
        try:
            return msgspec.json.decode(read_plain(path, most_bytes=MOST_BYTES), type=kind)
        except FileNotFoundError:
            return None
        except (Unreadable, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self.ignored[path] = str(error)
            return None

    def _is_named(self, path: Path, folder: str, digest: str) -> bool:
        if (path.parent.name, path.name) == (folder, f"{digest}.json"):
            return True
        self.ignored[path] = "its content is not what its name says"
        return False

    def _add(self, path: Path, saved: msgspec.Struct) -> bool:
        if path.exists():
            return False
        try:
            write_whole(path, msgspec.json.format(msgspec.json.encode(saved), indent=1) + b"\n")
        except OSError as error:
            raise CorpusError(
                f"{path} cannot be written ({error.strerror}): name a folder on a disk with room "
                "by --corpus."
            ) from error
        return True


def _remove(path: Path) -> None:
    """Remove a file that is there, or was until another process removed it."""
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise CorpusError(
            f"{path} cannot be removed ({error.strerror}): name a folder that you may change."
        ) from error


def _is_older(path: Path, before: float) -> bool:
    """Whether a file was last written before that time; not one that is gone by now."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return S_ISREG(found.st_mode) and found.st_mtime < before


def _smallest(cases: Iterable[tuple[Path, Case]]) -> Iterable[tuple[Path, Case]]:
    """The smallest case of each signature, of several the first."""
    smallest: dict[str, tuple[Path, Case]] = {}
    for path, case in cases:
        known = smallest.get(path.parent.name)
        if known is None or size(case) < size(known[1]):
            smallest[path.parent.name] = path, case
    return smallest.values()


def size(case: Case) -> tuple[int, int, list[int]]:
    """By which cases are compared: operations, then values, then the smaller of those."""
    return len(case.operations), len(case.values), case.values


def signature_of(case: Case) -> str:
    """A name for all failures that count as one: of one violation of one system with one planted
    fault, under one target."""
    return _digest((case.target, case.system, case.mutant, case.violations[0].signature))


def _digest_of(case: Case) -> str:
    return _digest((case.version, case.target, case.system, case.mutant, case.pin, case.values))


def _digest(content: Any) -> str:
    return blake2b(msgspec.json.encode(content), digest_size=16).hexdigest()
