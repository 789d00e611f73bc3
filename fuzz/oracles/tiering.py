"""Restore: a prefix goes to the host tier and back whole, whatever fails on the way.

How prefixes stand in both tiers before and after each step is judged by the reference's rules
(`reference.restore`), and the tier's order by its own account.  What the rows of a restored
prefix hold is the provenance oracle's business, since they become readable.
"""

from __future__ import annotations

from collections.abc import Iterator

from fuzz.oracles.history import spare_pages
from fuzz.oracles.standings import in_tier, longest, on_device, restoration
from fuzz.step import Step, TierCall, Violation, World
from reference.contract import Snapshot
from reference.restore import (
    Prefix,
    Standing,
    Tier,
    judge_bystander,
    judge_outcome,
    judge_tier,
    use,
)
from reference.restore import Step as TierStep


class Tiering:
    """Judges engines with a host tier."""

    name = "restore"

    def __init__(self, world: World) -> None:
        self._world = world

    def check(self, step: Step) -> list[Violation]:
        """The tier after any step; after a back-up or restore also what it returned, how all
        prefixes stand, and that no running request was touched."""
        tier, after = self._world.options.host_tier, step.after.tier
        if tier is None:
            return []
        if after is None:
            sentence = "The account should say what the host tier holds; it has nothing on it."
            return [Violation(self.name, "tier", sentence)]
        parts = {"tier": judge_tier(after, tier, self._world.geometry), "order": self._order(step)}
        if step.tier is not None:
            asked = self._asked(step, step.tier)
            parts |= {
                "returned": self._returned(step, step.tier, asked),
                "announced": self._announced(step, step.tier, asked),
                "standing": list(_standings(step, step.tier, asked)),
                "requests": _touched(step),
            }
        return [Violation(self.name, part, s) for part, said in parts.items() for s in said]

    def close(self) -> list[Violation]:
        return []

    def _asked(self, step: Step, call: TierCall) -> Prefix:
        """The prefix that the call is about, () if there is none: the longest that stands where
        it is to come from, if it could fit where it is to go to."""
        if call.step is TierStep.RESTORE:
            return longest(call.tokens, in_tier(step.before))
        prefix = longest(call.tokens, on_device(step.before))
        return prefix if prefix in self._used(step, prefix) else ()

    def _used(self, step: Step, prefix: Prefix) -> list[Prefix]:
        """What the tier should hold after a use of `prefix`."""
        tier = self._world.options.host_tier
        assert tier is not None
        return use(in_tier(step.before), prefix, tier, self._world.geometry)

    def _order(self, step: Step) -> list[str]:
        """The least recently used go first, and no more than had to; a call that fails may have
        let some of them go already, and may count as a use."""
        held, now = in_tier(step.before), in_tier(step.after)
        asked = self._asked(step, step.tier) if step.tier else ()
        legal = [held]
        if step.tier is not None and asked:
            used = self._used(step, asked)
            if step.tier.returned is not None:
                legal = [used]
            elif asked in held:
                legal = [held, used]
            else:
                legal = [held[gone:] for gone in range(len(held) - len(used) + 2)]
        if now in legal:
            return []
        names = {prefix: f"{i} ({len(prefix)} tokens)" for i, prefix in enumerate(held)}
        should, is_ = (
            ", ".join(names.get(prefix, f"the new one ({len(prefix)} tokens)") for prefix in order)
            for order in (legal[-1], now)
        )
        return [
            f"after '{step.text}' the tier, least recently used first, should hold "
            f"{should or 'nothing'}; it holds {is_ or 'nothing'}."
        ]

    def _returned(self, step: Step, call: TierCall, asked: Prefix) -> list[str]:
        """The length of what was asked for, or what the harness raised; a refusal only where
        there was no room."""
        if call.failed_at is not None and not call.raised:
            return [f"'{step.text}' should raise what was raised in it, and nothing else."]
        found = []
        if call.returned not in (None, len(asked)):
            found.append(
                f"'{step.text}' should return {len(asked)}, the tokens of the longest prefix that "
                f"it could copy; it returned {call.returned}."
            )
        if step.refused is not None and self._has_room(step):
            found.append(f"'{step.text}' should succeed: there was room, free or to be made.")
        return found

    def _announced(self, step: Step, call: TierCall, asked: Prefix) -> list[str]:
        """What a call took and copied it announced before.  How much goes in one copy is the
        engine's affair, but pages and states are apart, and so are KV and index rows."""
        if call.returned is None or not asked:
            return []
        held = in_tier(step.before)
        pages, state = all(prefix[: len(asked)] != asked for prefix in held), asked not in held
        if need := restoration(step, self._world.geometry.logical_page_size):
            pages, state = need.pages > 0, need.states > 0
        least = (1 + 2) * pages + (1 + 1) * state
        if call.moves >= least:
            return []
        return [
            f"'{step.text}' should announce {least} allocations and copies at least, of "
            f"{'pages, of KV rows and index rows, and of ' if pages else ''}a state; it announced "
            f"{call.moves}."
        ]

    def _has_room(self, step: Step) -> bool:
        """Whether the device had, or could have made, room for what a restore was to bring."""
        need, before = restoration(step, self._world.geometry.logical_page_size), step.before
        if need is None:
            return True
        loose = [n for n in before.cached if not n.locks and set(n.pages).isdisjoint(need.held)]
        pages = spare_pages(before) + sum(len(node.pages) for node in loose)
        states = len(before.free_states) + sum(len(node.checkpoints) for node in loose)
        return need.pages <= pages and need.states <= states


def _standings(step: Step, call: TierCall, asked: Prefix) -> Iterator[str]:
    """How each prefix that stands anywhere, before or after, may have changed."""
    before, after = _where(step.before), _where(step.after)
    locked = on_device(step.before)
    failed = call.returned is None
    for prefix in before.keys() | after.keys():
        was, is_ = (stood.get(prefix, frozenset()) for stood in (before, after))
        lock = locked.get(prefix, False)
        if prefix == asked:
            said = judge_outcome(call.step, was, is_, failed=failed, locked=lock)
        else:
            said = judge_bystander(call.step, was, is_, locked=lock)
        for sentence in said:
            yield f"'{step.text}', prefix of {len(prefix)} tokens: {sentence}"


def _where(snapshot: Snapshot) -> dict[Prefix, Standing]:
    """The tiers in which each prefix stands."""
    device, host = on_device(snapshot), set(in_tier(snapshot))
    both = {Tier.DEVICE: device.keys(), Tier.HOST: host}
    return {
        prefix: frozenset(tier for tier, held in both.items() if prefix in held)
        for prefix in device.keys() | host
    }


def _touched(step: Step) -> list[str]:
    """No running request is concerned by what goes to the tier or comes from it."""
    before, after = step.before.requests, step.after.requests
    return [
        f"'{step.text}' should not touch request {request}; it changed."
        for request in before.keys() | after.keys()
        if before.get(request) != after.get(request)
    ]
