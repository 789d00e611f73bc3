"""What a component is, and how its stand-ins are listed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

Body = Callable[..., Any]
Stand = TypeVar("Stand", bound=Body)


@dataclass(frozen=True, slots=True)
class Component:
    """A part of the optimized engine.

    Fields:
        name: of its module in `optimized`.
        does: what it does, in a few words.
        stand_ins: by dotted name, what stands in for each of its functions.
    """

    name: str
    does: str
    stand_ins: dict[str, Body] = field(default_factory=dict)

    def by(self, function: str) -> Callable[[Stand], Stand]:
        """Let the decorated function stand in for one of the component's."""

        def register(body: Stand) -> Stand:
            self.stand_ins[f"optimized.{self.name}.{function}"] = body
            return body

        return register
