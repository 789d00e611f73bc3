"""Hash-consing: equal values are one small integer, so that a state of many parts is cheap to
hash, to compare and to keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any


class Interner:
    """Numbers for values, and results of pure functions of them, each computed once."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._ids: dict[Hashable, int] = {}
        self._results: dict[Hashable, Any] = {}

    def id(self, value: Hashable) -> int:
        """The number of `value`."""
        found = self._ids.get(value)
        if found is None:
            found = self._ids[value] = len(self.values)
            self.values.append(value)
        return found

    def once(self, call: Hashable, compute: Callable[[], Any]) -> Any:
        """What `compute` returns for this `call`, which must name all that it depends on."""
        try:
            return self._results[call]
        except KeyError:
            result = self._results[call] = compute()
            return result
