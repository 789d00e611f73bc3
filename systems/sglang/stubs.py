"""Stand-ins for third-party packages that SGLang imports and the cache path never calls.

Most stand in for packages that are installed, too: a release runs the same way everywhere, and
loads in seconds.  A stand-in can be imported, named in an annotation, and derived from.  Whoever
calls it, or makes an instance of a class that derives from it, or computes with it, gets an error
which names it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, NoReturn

PACKAGES = frozenset(
    {
        "aiohttp",
        "compressed_tensors",
        "dill",
        "einops",
        "fastapi",
        "gguf",
        "huggingface_hub",
        "IPython",
        "openai",
        "orjson",
        "partial_json_parser",
        "pybase64",
        "pydantic",
        "pydantic_core",
        "regex",
        "starlette",
        "torchvision",
        "transformers",
        "xgrammar",
        "zmq",
    }
)
"""What SGLang imports on the way to its caches without providing for its absence.  What it does
provide for must stay absent, so that it takes its own way."""

IF_ABSENT = frozenset({"PIL", "requests", "safetensors", "tqdm", "tvm_ffi", "yaml"})
"""The same, of packages that others here may import: where they are installed, they are taken."""

REPLACED = (
    "sglang.srt.entrypoints",
    "sglang.srt.model_loader",
    "sglang.srt.parser",
    "sglang.srt.utils.hf_transformers",
    "sglang.srt.utils.hf_transformers_utils",
)
"""Modules of SGLang that serve requests or read model folders, with all that they import."""

CALLED_AT_IMPORT = frozenset({"zmq.Context", "zmq.Context().set"})
"""What modules call while they are imported; the result is a stand-in again."""

PROVIDED: dict[str, Any] = {"transformers.utils.logging.get_logger": logging.getLogger}
"""The same, where the result is needed."""


class Absent(RuntimeError):
    """Something of a package that has a stand-in was used; the message names it."""


def _refusal(path: str) -> Absent:
    return Absent(
        f"SGLang used {path}, for which there is only a stand-in here: keep to the calls that the "
        f"adapter makes, or install {path.partition('.')[0]!r} and take it out of "
        "systems.sglang.stubs."
    )


class _Name(type):
    """The type of all stand-ins: a class, so that annotations, base classes and isinstance take
    it; nothing can be an instance of it."""

    path: str

    def __new__(
        mcs, name: str, bases: tuple[type, ...], members: dict[str, Any], **_: Any
    ) -> _Name:
        return super().__new__(mcs, name, bases, members)

    def __init__(
        cls, name: str, bases: tuple[type, ...], members: dict[str, Any], **_: Any
    ) -> None:
        super().__init__(name, bases, members)

    def __getattr__(cls, name: str) -> Any:
        return _named(cls.path, name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls.path in CALLED_AT_IMPORT:
            return _Name("result", (), {"path": f"{cls.path}()"})
        raise _refusal(cls.path)

    def __getitem__(cls, parameters: Any) -> _Name:
        return cls


def _refuse(operator: str) -> Callable[..., NoReturn]:
    def use(cls: _Name, *args: Any) -> NoReturn:
        raise _refusal(cls.path)

    use.__name__ = operator
    return use


for _operator in (
    *("__bool__", "__len__", "__iter__", "__next__", "__contains__", "__enter__", "__exit__"),
    *("__int__", "__float__", "__index__", "__setitem__", "__lt__", "__le__", "__gt__", "__ge__"),
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__"),
    *("__floordiv__", "__mod__", "__and__", "__rand__", "__lshift__", "__rshift__", "__matmul__"),
    *("__neg__", "__invert__", "__await__", "__aiter__"),
):
    setattr(_Name, _operator, _refuse(_operator))


def _named(owner: str, name: str) -> Any:
    """The stand-in for `name` of `owner`, another stand-in's path."""
    if name.startswith("__") and name.endswith("__"):
        raise AttributeError(f"the stand-in for {owner} has no {name}")
    path = f"{owner}.{name}"
    return PROVIDED.get(path) or _Name(name, (), {"path": path, "__module__": owner})


class StandIn(ModuleType):
    """A module, or package, all of whose names are stand-ins, but for the modules in its `path`."""

    def __init__(self, name: str, path: Sequence[str] = ()) -> None:
        super().__init__(name)
        self.__path__ = list(path)

    def __getattr__(self, name: str) -> Any:
        module = f"{self.__name__}.{name}"
        if PathFinder.find_spec(module, self.__path__):
            return import_module(module)
        found = _named(self.__name__, name)
        setattr(self, name, found)  # one class a name, whoever asks
        return found


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for whatever lies in some packages."""

    def __init__(self, packages: Iterable[str]) -> None:
        self._packages = frozenset(packages)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        parts = name.split(".")
        used = getattr(sys.modules.get(parts[0]), "__spec__", None)
        if used and not isinstance(used.loader, _Finder) and parts[0] != "sglang":
            # somebody here uses the real one
            return None
        within = (".".join(parts[:n]) for n in range(1, len(parts) + 1))
        return ModuleSpec(name, self, is_package=True) if self._packages & {*within} else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


ALWAYS, ELSE = _Finder(PACKAGES), _Finder({*IF_ABSENT, *REPLACED})


def install() -> None:
    """Let these packages be stand-ins from now on, in this process."""
    if ALWAYS not in sys.meta_path:
        sys.meta_path.insert(0, ALWAYS)
        sys.meta_path.append(ELSE)
