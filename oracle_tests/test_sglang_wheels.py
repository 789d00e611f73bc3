"""SGLang's wheels in the cache: fetched once, whole or not at all, whoever else is at it."""

from __future__ import annotations

import os
import signal
import zipfile
from pathlib import Path

import pytest

from systems import CannotLoad
from systems.sglang import wheels

VERSION = "0.5.23"
NAME = f"sglang-{VERSION}-py3-none-any.whl"


def wheel(folder: Path) -> Path:
    """A wheel that pip takes, of nothing but a version."""
    info = f"sglang-{VERSION}.dist-info"
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / NAME, "w") as archive:
        archive.writestr("sglang/srt/__init__.py", "")
        archive.writestr("sglang/_version.py", f"__version__ = '{VERSION}'\n")
        archive.writestr(
            f"{info}/METADATA", f"Metadata-Version: 2.1\nName: sglang\nVersion: {VERSION}\n"
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(f"{info}/RECORD", "")
    return folder / NAME


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a pip that finds nothing."""
    monkeypatch.setenv("KVORACLE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    return tmp_path / "cache"


def test_pip_is_asked_once(cache, tmp_path, monkeypatch):
    wheel(tmp_path / "index")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "index"))
    folder = wheels.unpacked(VERSION)
    assert folder == cache / f"sglang-{VERSION}"
    assert (folder / "sglang" / "_version.py").is_file()
    assert (cache / NAME).is_file()
    monkeypatch.delenv("PIP_FIND_LINKS")
    assert wheels.unpacked(VERSION) == folder
    assert not list(cache.glob("*.part"))


def test_without_a_network_the_file_and_its_place_are_named(cache):
    with pytest.raises(CannotLoad) as refusal:
        wheels.unpacked(VERSION)
    assert str(refusal.value).startswith(f"pip cannot download SGLang {VERSION} (ERROR: ")
    assert str(refusal.value).endswith(f": put its wheel, sglang-{VERSION}-*.whl, into {cache}.")
    wheel(cache)
    assert (wheels.unpacked(VERSION) / "sglang").is_dir()


def test_a_damaged_wheel_is_named(cache):
    cache.mkdir()
    (cache / NAME).write_bytes(b"half of it")
    with pytest.raises(CannotLoad, match=f"{NAME} is damaged .*: remove it, and it is fetched"):
        wheels.unpacked(VERSION)
    assert not (cache / f"sglang-{VERSION}").exists()


def test_a_wheel_damaged_inside_is_named(cache):
    path = wheel(cache)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("sglang/srt/__init__.py", "x" * 10_000)
        start = archive.infolist()[0].header_offset + 60
    data = bytearray(path.read_bytes())
    data[start : start + 8] = b"\xff" * 8
    path.write_bytes(data)
    with pytest.raises(CannotLoad, match=r"is damaged .*: remove it, and it is fetched again"):
        wheels.unpacked(VERSION)


def test_a_wheel_of_something_else_is_not_kept(cache):
    with zipfile.ZipFile(wheel(cache), "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(CannotLoad, match=r"none-any\.whl holds no SGLang: remove it"):
        wheels.unpacked(VERSION)
    wheel(cache)
    assert (wheels.unpacked(VERSION) / "sglang" / "srt").is_dir()


def test_what_is_no_plain_file_is_no_wheel(cache):
    cache.mkdir()
    (cache / NAME).symlink_to("/dev/zero")
    with pytest.raises(CannotLoad, match="put its wheel"):
        wheels.unpacked(VERSION)


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVORACLE_CACHE", str(tmp_path / "file"))
    with pytest.raises(CannotLoad, match="name a folder with room in KVORACLE_CACHE"):
        wheels.unpacked(VERSION)


def test_a_process_killed_while_it_unpacks_leaves_no_half_release(cache, monkeypatch):
    wheel(cache)

    def killed(path: Path, folder: Path) -> None:
        (folder / "sglang").mkdir(parents=True)
        os.kill(os.getpid(), signal.SIGKILL)

    if (child := os.fork()) == 0:
        monkeypatch.setattr(wheels, "_unpack", killed)
        wheels.unpacked(VERSION)
        os._exit(0)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert not (cache / f"sglang-{VERSION}").exists()
    assert list(cache.glob(".*.part/unpacked/sglang")), "it was killed at work"
    assert (wheels.unpacked(VERSION) / "sglang" / "_version.py").is_file()
    assert not list(cache.glob(".*.part"))


def test_of_many_processes_one_fetches(cache, tmp_path, monkeypatch):
    asked = tmp_path / "asked"

    def fetched(version: str, part: Path) -> Path:
        with asked.open("a") as log:
            log.write(f"{version}\n")
        return wheel(cache)

    monkeypatch.setattr(wheels, "_fetched", fetched)
    children = []
    for _ in range(6):
        if (child := os.fork()) == 0:
            try:
                whole = (wheels.unpacked(VERSION) / "sglang" / "_version.py").is_file()
                os._exit(0 if whole else 3)
            finally:
                os._exit(4)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0] * 6
    assert asked.read_text().splitlines() == [VERSION]
