"""Puts one release of SGLang into this process, from the folder that holds `sglang/`.

SGLang's own `__init__` imports all that it depends on, and its configurations a package of every
model; both are replaced by bare packages, so that what is imported is what the caches need.
"""

from __future__ import annotations

import ast
import logging
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from packaging.version import InvalidVersion, Version

from systems import CannotLoad
from systems.sglang import interpreter, stubs
from systems.sglang.releases import RELEASES, Differences

_SKIPPED = "sglang.srt.configs"
"""A package whose `__init__` imports every model's configuration."""


@dataclass(frozen=True, slots=True)
class Release:
    """A release of SGLang that this process has loaded.

    Fields:
        version: what it says of itself.
        root: the folder that holds `sglang/`.
        differences: the table's row of that release, or of a checkout the one of the newest
            release that it is based on.
    """

    version: str
    root: Path
    differences: Differences


_loaded: Release | None = None


def load(root: Path) -> Release:
    """Make `import sglang.srt...` mean what lies in `root`, from now on.

    Loading the same root again does nothing.

    Raises:
        CannotLoad: there is no SGLang, one older than the table, or another one is loaded here
            already; or Triton cannot run its kernels here.
    """
    global _loaded
    root = root.resolve()
    if _loaded is not None and _loaded.root == root:
        return _loaded
    if _loaded is not None or "sglang" in sys.modules:
        raise CannotLoad(
            f"SGLang is loaded already from {_loaded.root if _loaded else 'elsewhere'}, and a "
            f"process can hold only one: load {root} in a process of its own."
        )
    version = version_of(root)
    differences = _row(version, root)
    interpreter.prepare()
    stubs.install()
    # of kernels that are compiled for a GPU
    logging.getLogger("sglang").setLevel(logging.ERROR)
    # of quantisations that a CPU lacks
    warnings.filterwarnings("ignore", module=r"sglang\.")
    package = root / "sglang"
    sys.modules["sglang"] = _bare("sglang", package)
    for name in stubs.REPLACED:
        sys.modules[name] = stubs.StandIn(name)
    sys.modules[_SKIPPED] = stubs.StandIn(_SKIPPED, [str(package / "srt" / "configs")])
    _loaded = Release(version, root, differences)
    return _loaded


def version_of(root: Path) -> str:
    """The version of the SGLang in `root`.

    Raises:
        CannotLoad: there is none, or it does not tell its version.
    """
    package = root / "sglang"
    if not (package / "srt").is_dir():
        raise CannotLoad(
            f"{root} holds no SGLang: give a checkout, or the folder of an unpacked wheel, in "
            "which sglang/srt lies."
        )
    built = package / "_version.py"
    if built.is_file() and (found := _assigned(built, "__version__")):
        return found
    tags = ["git", "-C", str(root), "describe", "--tags", "--match=v*"]
    said = subprocess.run(tags, capture_output=True, text=True).stdout
    if tag := re.match(r"v(\d+(?:\.\d+)+)", said):
        return tag[1]
    raise CannotLoad(
        f"The SGLang in {root} does not tell its version: give a git checkout with its tags, or "
        "write `__version__ = '...'`, the release that it is based on, to sglang/_version.py."
    )


def _row(version: str, root: Path) -> Differences:
    """The row of the newest release of the table that is not newer than `version`."""
    try:
        older = [row for known, row in RELEASES.items() if Version(known) <= Version(version)]
    except InvalidVersion:
        older = []
    if not older:
        raise CannotLoad(
            f"{root} holds SGLang {version}, which is no release, or older than all that is "
            f"known here: take one of {', '.join(RELEASES)}, or add a row to "
            "systems/sglang/releases.py."
        )
    return older[-1]


def _assigned(file: Path, name: str) -> str | None:
    """The text that a module assigns to `name` at last, read without running it."""
    found = None
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            names = [target.id for target in node.targets if isinstance(target, ast.Name)]
            found = str(node.value.value) if name in names else found
    return found


def _bare(name: str, folder: Path) -> ModuleType:
    """A package of that folder whose `__init__` is not run."""
    package = ModuleType(name)
    package.__path__ = [str(folder)]
    return package
