"""Which prefixes stand where, and what the device lacked of one that was to be restored."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fuzz.step import Step
from reference.contract import CachedNode, Snapshot
from reference.prefix import cached_prefixes
from reference.restore import Prefix
from reference.restore import Step as TierStep


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """What a restore was to bring, and what it brought.

    Fields:
        prefix: the one that was to come.
        held: logical pages that the device had of it.
        pages, states: how many it lacked.
        path: its logical pages afterwards; none if the restore failed.
    """

    prefix: Prefix
    held: tuple[int, ...]
    pages: int
    states: int
    path: tuple[int, ...]

    @property
    def brought(self) -> tuple[int, ...]:
        """The logical pages that were filled."""
        return self.path[len(self.held) :]


def on_device(snapshot: Snapshot) -> Mapping[Prefix, bool]:
    """The prefixes that stand whole on the device, and whether a running request reads them."""
    paths = cached_prefixes(snapshot.cached)
    return {
        paths[node.node].tokens[:end]: node.locks > 0
        for node in snapshot.cached
        for end in node.checkpoints
    }


def in_tier(snapshot: Snapshot) -> list[Prefix]:
    """The prefixes that stand whole in the host tier, the least recently used first."""
    return [prefix.tokens for prefix in snapshot.tier.prefixes] if snapshot.tier else []


def longest(tokens: Prefix, prefixes: Collection[Prefix]) -> Prefix:
    """The longest beginning of `tokens` that is among `prefixes`; else none of them."""
    return max((p for p in prefixes if tokens[: len(p)] == p), key=len, default=())


def restoration(step: Step, page_size: int) -> Restoration | None:
    """What the step brought, if it was a restore."""
    call = step.tier
    if call is None or call.step is not TierStep.RESTORE:
        return None
    prefix = longest(call.tokens, in_tier(step.before))
    held = tuple(matching(prefix, step.before.cached, page_size))
    return Restoration(
        prefix=prefix,
        held=held,
        pages=len(prefix) // page_size - len(held),
        states=int(bool(prefix) and prefix not in on_device(step.before)),
        path=(
            () if call.returned is None else tuple(matching(prefix, step.after.cached, page_size))
        ),
    )


def matching(tokens: Sequence[int], cached: Iterable[CachedNode], size: int) -> Sequence[int]:
    """The pages of the longest cached prefix of `tokens`, in whole pages of `size` tokens,
    whether or not it can be resumed."""
    best: Sequence[int] = ()
    for path in cached_prefixes(cached).values():
        whole = min(len(tokens), len(path.tokens)) // size
        while whole > len(best) and tuple(tokens[: whole * size]) != path.tokens[: whole * size]:
            whole -= 1
        if whole > len(best):
            best = path.pages[:whole]
    return best
