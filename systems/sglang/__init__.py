"""SGLang behind the contract: an unpacked wheel or a checkout, run without its dependency tree."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path

from reference.contract import System
from systems import CannotLoad
from systems.sglang import wheels
from systems.sglang.loader import Release, load
from systems.sglang.releases import RELEASES


def system(name: str) -> System:
    """The system called `name`: `sglang==VERSION` for a release, which is fetched if it is not in
    the cache, or `sglang@PATH` for a checkout.

    Raises:
        CannotLoad: there is none, it cannot be fetched, or this process holds another one.
    """
    if "==" in name:
        version = name.removeprefix("sglang==")
        if version not in RELEASES:
            raise CannotLoad(
                f"Nothing is known here of SGLang {version!r}: take one of {', '.join(RELEASES)}, "
                "or add a row to systems/sglang/releases.py."
            )
        root = wheels.unpacked(version)
    else:
        root = _package_folder(Path(name.removeprefix("sglang@")).expanduser().resolve())
        name = f"sglang@{root}"
    return _loaded(name, load(root))


@cache
def _loaded(name: str, release: Release) -> System:
    """Made once: SGLang counts in places that all engines of a process share."""
    # it imports SGLang, which must be loaded first
    engine = import_module("systems.sglang.engine")
    return System(
        name=name,
        version=release.version,
        factory=engine.factory(release),
        capabilities=engine.capabilities(release),
        sizes=engine.sizes(release),
        isolated=True,
    )


def _package_folder(checkout: Path) -> Path:
    """Of a checkout, the folder that holds `sglang/`."""
    nested = checkout / "python"
    return nested if (nested / "sglang").is_dir() else checkout
