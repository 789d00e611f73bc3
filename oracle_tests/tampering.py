"""Engines that lie or err in one chosen way: negative controls for oracles."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from reference.contract import Engine, System


class Tampered:
    """An engine of which single methods are replaced: `changes` maps a name to a function of
    the engine and the call's arguments."""

    def __init__(self, engine: Engine, changes: dict[str, Callable[..., Any]]) -> None:
        self._engine, self._changes = engine, changes

    def __getattr__(self, name: str) -> Any:
        if name in self._changes:
            return lambda *args, **kwargs: self._changes[name](self._engine, *args, **kwargs)
        return getattr(self._engine, name)


def tampered(system: System, **changes: Callable[..., Any]) -> System:
    """`system` with engines of which `changes` are replaced."""

    def factory(*args: Any, **kwargs: Any) -> Any:
        return Tampered(system.factory(*args, **kwargs), changes)

    return replace(system, factory=factory)
