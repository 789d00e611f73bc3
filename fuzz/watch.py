"""How one looks on at a run: `fuzz.run.execute(..., watch=...)`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from reference.protocol import Observation


class Watch(Protocol):
    """Sees all of one run and changes nothing of it."""

    def begin(self, run: Any) -> None:
        """Before the first operation.  `run` is the `World` of an engine, or the `Handover` or
        `Interleaving` that is in progress."""
        ...

    def after(self, operation: Any, seen: Sequence[Observation] = ()) -> None:
        """An operation has been done, and no oracle has looked yet: a `Step` of an engine, an
        `Event` of an interleaving, or an `Operation`; and what an observer noted during it."""
        ...
