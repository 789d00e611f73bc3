"""Files that several processes share: written whole or not at all, read whatever lies there."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

TEMPORARY = ".writing-"
"""Beginning of the name under which a file is written."""


class Unreadable(ValueError):
    """Something that is no plain file of a size to read; the message says what it is."""


def write_whole(path: Path, data: bytes) -> None:
    """Put a file there, making its folder: whoever reads, and whoever is killed, sees what was
    there before or all of `data`.

    Raises:
        OSError: where that fails; nothing is left then.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_plain(path: Path, *, most_bytes: int) -> bytes:
    """The content of a plain file; a link, a pipe or a device is none, and is never waited for.

    Raises:
        FileNotFoundError: where there is nothing.
        Unreadable: where there is something else, or a larger file.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror})") from error
    try:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise Unreadable("is no plain file")
        with os.fdopen(handle, "rb", closefd=False) as file:
            data = file.read(most_bytes + 1)
    finally:
        os.close(handle)
    if len(data) > most_bytes:
        raise Unreadable(f"has more than {most_bytes} bytes")
    return data
