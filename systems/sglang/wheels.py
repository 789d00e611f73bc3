"""SGLang's wheels: fetched by pip without what they depend on, and unpacked once, in a cache.

The cache is $KVORACLE_CACHE, or ~/.cache/kvoracle.  Whoever adds to it holds a lock that ends with
its process, and what it adds gets its name once it is whole; so any number of processes may need
one release at once, and each may be killed at any time.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from systems import CannotLoad

PIP = ("-m", "pip", "--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15")


def cache() -> Path:
    """The folder of the wheels, each with its unpacked folder beside it."""
    return Path(os.environ.get("KVORACLE_CACHE") or "~/.cache/kvoracle").expanduser().absolute()


def unpacked(version: str) -> Path:
    """The folder that holds the `sglang/` of a release, fetched if need be.

    Raises:
        CannotLoad: pip cannot fetch it, its wheel is damaged, or the cache cannot be written.
    """
    folder = cache() / f"sglang-{version}"
    if folder.is_dir():
        return folder
    try:
        with _adding(version) as part:
            if not folder.is_dir():  # another process may have been first
                _unpack(_wheel(version) or _fetched(version, part), part / "unpacked")
                (part / "unpacked").rename(folder)
    except OSError as error:
        raise CannotLoad(
            f"{cache()} cannot be used for SGLang {version} ({error.strerror or error}): name a "
            "folder with room in KVORACLE_CACHE."
        ) from error
    return folder


@contextmanager
def _adding(version: str) -> Iterator[Path]:
    """An empty folder in the cache, for one process at a time."""
    cache().mkdir(parents=True, exist_ok=True)
    part = cache() / f".sglang-{version}.part"
    with (cache() / f".sglang-{version}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # of a process that was killed
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        try:
            yield part
        finally:
            shutil.rmtree(part, ignore_errors=True)


def _wheel(version: str) -> Path | None:
    """The wheel of a release that lies in the cache; any will do, since only Python is taken."""
    wheels = sorted(cache().glob(f"sglang-{version}-*.whl"))
    # a pipe or a device would be read for ever
    return next((wheel for wheel in wheels if wheel.is_file()), None)


def _fetched(version: str, part: Path) -> Path:
    """The wheel of a release, after pip has brought it to the cache."""
    options = ("download", "--no-deps", "--only-binary=:all:", f"--dest={part}")
    done = subprocess.run(
        [sys.executable, *PIP, *options, f"sglang=={version}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    wheel = next(iter(part.glob("*.whl")), None)
    if wheel is None:
        lines = [line.strip() for line in done.stdout.splitlines() if line.strip()]
        said = next((line for line in reversed(lines) if line.startswith("ERROR")), "no reason")
        raise CannotLoad(
            f"pip cannot download SGLang {version} ({said}): put its wheel, "
            f"sglang-{version}-*.whl, into {cache()}."
        )
    return wheel.rename(cache() / wheel.name)


def _unpack(wheel: Path, folder: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(folder)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError) as error:
        raise CannotLoad(
            f"{wheel} is damaged ({error}): remove it, and it is fetched again."
        ) from error
    if not (folder / "sglang" / "srt").is_dir():
        raise CannotLoad(f"{wheel} holds no SGLang: remove it, and it is fetched.")
