"""How far a campaign has come, on disk after every batch: what a killed one goes on from."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Annotated, Any

import msgspec

from fuzz.corpus import CorpusError
from fuzz.files import Unreadable, read_plain, write_whole
from fuzz.tally import Tally

VERSION = 1
MOST_BYTES = 64 << 20

Seed = Annotated[int, msgspec.Meta(ge=-(1 << 62), le=1 << 62)]


class Progress(msgspec.Struct, kw_only=True):
    """What a campaign has done.

    Fields:
        done: seeds [start, stop) that are counted in `total`.
        seconds: that it has run.
    """

    version: int = VERSION
    done: Annotated[list[tuple[Seed, Seed]], msgspec.Meta(max_length=1_000_000)] = []
    seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    total: Tally = msgspec.field(default_factory=Tally)

    def __post_init__(self) -> None:
        total = self.total
        counts = total.executions, total.operations, total.guided, total.planted, total.deaths
        if min(*counts, total.cpu_seconds) < 0:
            raise ValueError("it counts less than nothing")


class Journal:
    """The file of one campaign.  Nobody else writes it while this one is open."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def load(self) -> Progress:
        """What was saved; nothing done where nothing was.

        Raises:
            CorpusError: where the file is none of this version.
        """
        try:
            progress = msgspec.json.decode(
                read_plain(self.path, most_bytes=MOST_BYTES), type=Progress
            )
        except FileNotFoundError:
            return Progress()
        except (Unreadable, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise CorpusError(
                f"{self.path} tells of no campaign ({error}): start it anew without --resume."
            ) from error
        if progress.version != VERSION:
            raise CorpusError(
                f"{self.path} is of version {progress.version}, not {VERSION}: start the campaign "
                "anew without --resume."
            )
        return progress

    def save(self, progress: Progress) -> None:
        """Put it on the disk, in place of what was there.

        Raises:
            CorpusError: where that fails.
        """
        try:
            write_whole(self.path, msgspec.json.encode(progress))
        except OSError as error:
            raise CorpusError(
                f"{self.path} cannot be written ({error.strerror}): name a folder on a disk with "
                "room by --corpus."
            ) from error


@contextmanager
def journal(folder: Path, identity: Any) -> Iterator[Journal]:
    """The journal, in `folder`, of a campaign that is told by `identity`.  Another one of the same
    that runs now has another.

    Raises:
        CorpusError: where the folder is none, or none to write to.
    """
    name = blake2b(msgspec.json.encode(identity), digest_size=8).hexdigest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path, lock = _first_free(folder, name)
    except OSError as error:
        raise CorpusError(
            f"{error.filename or folder} cannot be used ({error.strerror}): name a folder that "
            "you may change by --corpus."
        ) from error
    try:
        yield Journal(path)
    finally:
        os.close(lock)


def _first_free(folder: Path, name: str) -> tuple[Path, int]:
    """The first journal that no running campaign has, and its lock."""
    number = 1
    while (lock := _lock(folder / f"{name}-{number}.lock")) is None:
        number += 1
    return folder / f"{name}-{number}.json", lock


def _lock(path: Path) -> int | None:
    """The lock at `path`, which the system lets go of however this process ends; None where
    another process has it."""
    lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    except BaseException:
        os.close(lock)
        raise
    return lock
