"""The released versions of a package, each unpacked from its wheel into a folder of its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import (
    InvalidName,
    InvalidWheelFilename,
    canonicalize_name,
    parse_wheel_filename,
)
from packaging.version import InvalidVersion, Version

from fuzz.bisect.running import Unusable, environment
from fuzz.terminal import UsageError, check_writable_folder


class Wheels:
    """The versions of a package from `good` to `bad`: those that pip lists, and those whose
    wheels lie in `cache`, where downloads go as well.

    Fields:
        names: versions, the good end first.
        titles: nothing more is known of them.
    """

    def __init__(self, package: str, *, good: str, bad: str, cache: Path) -> None:
        try:
            self._package = canonicalize_name(package, validate=True)
        except InvalidName as error:
            raise UsageError(f"{package!r} is no package: give a name that pip takes.") from error
        check_writable_folder(cache)
        self._cache = cache.absolute()
        first, last = _version(good, "good"), _version(bad, "bad")
        if first >= last:
            raise UsageError(f"version {good} is not older than {bad}: swap --good and --bad.")
        known = self._listed(pre=first.is_prerelease or last.is_prerelease) | self._wheels().keys()
        for version, option in ((first, "good"), (last, "bad")):
            if version not in known:
                raise UsageError(
                    f"pip lists no {self._package} {version}: give --{option} another version, "
                    f"or put {self._file(version)} into {cache}."
                )
        self._versions = sorted(version for version in known if first <= version <= last)
        self.names = [str(version) for version in self._versions]
        self.titles = [""] * len(self.names)

    def place(self, at: int) -> Path:
        """The folder of a version.

        Raises:
            Unusable: there is no wheel of it for this machine, or it is damaged.
        """
        version = self._versions[at]
        folder = self._cache / f"{self._package}-{version}"
        if folder.is_dir():
            return folder
        wheel = self._wheels().get(version) or self._downloaded(version)
        # renamed once it is whole, so that an interrupted unpacking is not taken for a version
        part = folder.with_name(f"{folder.name}.part")
        shutil.rmtree(part, ignore_errors=True)
        try:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(part)
            part.rename(folder)
        except (OSError, zipfile.BadZipFile) as error:
            raise Unusable(f"{wheel} cannot be unpacked ({error})") from error
        return folder

    def _listed(self, *, pre: bool) -> set[Version]:
        """What pip finds, by its own configuration; nothing without a network."""
        said = _pip("index", "versions", self._package, *(["--pre"] if pre else []))
        found = re.search(r"^Available versions: (.+)$", said, re.MULTILINE)
        return {Version(word.strip()) for word in found[1].split(",")} if found else set()

    def _wheels(self) -> dict[Version, Path]:
        """Wheels of the package in the cache that this Python can use."""
        found = {}
        usable = frozenset(sys_tags())
        for path in sorted(self._cache.glob("*.whl")):
            try:
                name, version, _, tags = parse_wheel_filename(path.name)
            except InvalidWheelFilename:
                continue
            if name == self._package and not usable.isdisjoint(tags):
                found[version] = path
        return found

    def _downloaded(self, version: Version) -> Path:
        wanted = f"{self._package}=={version}"
        said = _pip("download", "--no-deps", "--only-binary=:all:", f"--dest={self._cache}", wanted)
        wheel = self._wheels().get(version)
        if wheel is None:
            raise Unusable(
                f"pip cannot download it ({_complaint(said)}): put {self._file(version)} into "
                f"{self._cache}"
            )
        return wheel

    def _file(self, version: Version) -> str:
        return f"{self._package.replace('-', '_')}-{version}-*.whl"


def _version(text: str, option: str) -> Version:
    try:
        return Version(text)
    except InvalidVersion as error:
        raise UsageError(f"--{option} {text!r} is no version: give one such as 1.2.0.") from error


def _pip(command: str, *arguments: str) -> str:
    """What pip said, whether it succeeded or not."""
    quick = ("--disable-pip-version-check", "--no-input", "--retries=1", "--timeout=15")
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *quick, *arguments],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    return done.stdout


def _complaint(said: str) -> str:
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("ERROR")), "it said nothing")
