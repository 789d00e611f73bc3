"""What a campaign does to what it tests: pool sizes, a mix of operations, and what must be seen."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from fuzz.targets.setup import Pin, Ranges
from reference.contract import Capability


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One way to drive an engine, the ranks of the drain protocol, or both ends of a transfer.

    Fields:
        ranges: the pools that it draws; None has a driver of its own (`fuzz.run.DRIVERS`).
        weights: how often each operation is drawn, for generation; those left out, never.
        required: events that a campaign of a few hundred executions must have seen.
        stamped_only: those of them that no model run can show.
        narrowed: those that a pin rules out, by its field and value.
        needs: those that an engine without a capability cannot show.
        operations: most operations of a run.
    """

    name: str
    required: frozenset[str]
    ranges: Ranges | None = None
    weights: Mapping[str, float] = field(default_factory=dict)
    stamped_only: frozenset[str] = frozenset()
    narrowed: Mapping[tuple[str, int], frozenset[str]] = field(default_factory=dict)
    needs: Mapping[Capability, frozenset[str]] = field(default_factory=dict)
    operations: int = 24

    def missing(
        self, seen: Mapping[str, int], pin: Pin, capabilities: Collection[Capability] | None = None
    ) -> list[str]:
        """The required events that are not among those seen; a campaign owes only what its pins,
        and the capabilities of its system (None has them all), let it show."""
        owed = self.required - (self.stamped_only if pin.payload == "model" else frozenset())
        for (name, value), events in self.narrowed.items():
            if getattr(pin, name) == value:
                owed -= events
        for capability, events in self.needs.items():
            if capabilities is not None and capability not in capabilities:
                owed -= events
        return sorted(event for event in owed if not seen.get(event))


class UnknownTarget(ValueError):
    """No target has that name; the message lists those that there are."""


def names() -> tuple[str, ...]:
    """The names that `find` takes."""
    return tuple(_targets())


def find(name: str) -> Target:
    """The target called `name`.

    Raises:
        UnknownTarget: with one sentence that lists the known names.
    """
    targets = _targets()
    if name not in targets:
        raise UnknownTarget(f"There is no target {name!r}: choose one of {', '.join(targets)}.")
    return targets[name]


def _targets() -> dict[str, Target]:
    from fuzz.targets.host_restore import HOST_RESTORE
    from fuzz.targets.hot_buffer import HOT_BUFFER
    from fuzz.targets.multi_rank import MULTI_RANK
    from fuzz.targets.prefix_split import PREFIX_SPLIT
    from fuzz.targets.shared_memory import SHARED_MEMORY
    from fuzz.targets.slot_reuse import SLOT_REUSE
    from fuzz.targets.transfer import TRANSFER

    known = (
        PREFIX_SPLIT,
        SLOT_REUSE,
        HOT_BUFFER,
        HOST_RESTORE,
        MULTI_RANK,
        TRANSFER,
        SHARED_MEMORY,
    )
    return {target.name: target for target in known}
