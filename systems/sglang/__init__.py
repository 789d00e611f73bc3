"""SGLang behind the contract: an unpacked wheel or a checkout, run without its dependency tree."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType

from reference.contract import EngineFactory, System
from systems import CannotLoad
from systems.sglang import wheels
from systems.sglang.hisparse_kernel import CannotCompile
from systems.sglang.loader import Release, load
from systems.sglang.releases import RELEASES


def system(name: str) -> System:
    """The system called `name`: `sglang==VERSION` for a release, which is fetched if it is not in
    the cache, or `sglang@PATH` for a checkout.

    Raises:
        CannotLoad: there is none, it cannot be fetched, or this process holds another one.
    """
    if name.startswith("sglang=="):
        version = name.removeprefix("sglang==")
        if version not in RELEASES:
            raise CannotLoad(
                f"Nothing is known here of SGLang {version!r}: take one of {', '.join(RELEASES)}, "
                "or add a row to systems/sglang/releases.py."
            )
        root = wheels.unpacked(version)
    else:
        root = _package_folder(name.removeprefix("sglang@"))
        name = f"sglang@{root}"
    return _loaded(name, load(root))


@cache
def _loaded(name: str, release: Release) -> System:
    """Made once: SGLang counts in places that all engines of a process share."""
    engine, factory = _engine("engine", release)
    return System(
        name=name,
        version=release.version,
        factory=factory,
        capabilities=engine.capabilities(release),
        sizes=engine.sizes(release),
        isolated=True,
        hot=lambda: _hot(name, release),
    )


@cache
def _hot(name: str, release: Release) -> System:
    """The same release's HiSparse, whose kernel a C++ compiler must take."""
    engine, factory = _engine("hot_engine", release)
    return System(
        name=name,
        version=release.version,
        factory=factory,
        capabilities=engine.CAPABILITIES,
        sizes=engine.sizes(),
        isolated=True,
    )


def _engine(module: str, release: Release) -> tuple[ModuleType, EngineFactory]:
    """An adapter of a release that is loaded, which it imports, and what builds its engines.

    Raises:
        CannotLoad: the release is not whole, or its kernel does not compile.
    """
    engine = import_module(f"systems.sglang.{module}")
    try:
        return engine, engine.factory(release)
    except CannotCompile as reason:
        raise CannotLoad(str(reason)) from reason
    except (ImportError, SyntaxError, AttributeError, TypeError) as error:
        raise CannotLoad(
            f"The SGLang in {release.root} cannot be imported ({error}): complete it, or take "
            "another release or checkout."
        ) from error


def _package_folder(path: str) -> Path:
    """Of the checkout at a path, the folder that holds `sglang/`."""
    if not path or not path.isprintable():
        raise CannotLoad(f"{path!r} is no path of a checkout: write sglang@PATH.")
    checkout = Path(path).expanduser().resolve()
    nested = checkout / "python"
    return nested if (nested / "sglang").is_dir() else checkout
