"""What a cached prefix is made of, and what backing it up, evicting and restoring it may leave.

A cached prefix ends on a KDA checkpoint, hence on a logical page.  Its parts are its KV rows,
its index rows (keys with scales) and the state at its end; a hit is a hit only with all of
them.  A copy to or from the host therefore moves all parts or none, whatever fails on the way:
the prefix stands as before, or it is gone from the tier that was to be filled.  Specifies host
restore on hybrid pools, whose fault (index keys left behind) SGLang #42178 measures.

The host tier keeps each page once, however many prefixes begin with it, and each prefix's state;
what is used last goes last.

The `judge_*` functions return sentences; no sentence means no fault.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from reference.contract import Component, HostTier, InvalidCall, TierSnapshot
from reference.geometry import Geometry, ModelShape

Row = TypeVar("Row", bound=Hashable)


class Tier(StrEnum):
    """A memory in which a prefix can stand whole."""

    DEVICE = "device"
    HOST = "host"


class Step(StrEnum):
    """What can be done to a cached prefix.  EVICT gives up the device's copy, DROP the host's."""

    BACK_UP = "back_up"
    EVICT = "evict"
    RESTORE = "restore"
    DROP = "drop"

    @property
    def tier(self) -> Tier:
        """The only tier in which a step changes what stands, and where it makes room."""
        return Tier.HOST if self in (Step.BACK_UP, Step.DROP) else Tier.DEVICE


class Part(NamedTuple):
    """One row of a prefix, as `Engine.read` numbers it: `row` is a position for KV, a group for
    INDEX, and the length of the prefix for STATE; `layer` counts within DSA or KDA layers."""

    component: Component
    layer: int
    row: int


Parts = Mapping[Part, Row]
"""Stored rows by part, in one tier."""

Prefix = tuple[int, ...]
"""The tokens of a prefix."""

Standing = frozenset[Tier]
"""The tiers in which a prefix stands whole."""

MISS: Standing = frozenset()
"""The prefix is gone."""


def parts_of(length: int, geometry: Geometry, shape: ModelShape) -> frozenset[Part]:
    """All parts of a cached prefix of `length` positions.

    Raises:
        InvalidCall: no prefix of this length can be cached.
    """
    if length < 1 or length % geometry.logical_page_size:
        raise InvalidCall(
            f"a prefix of {length} positions ends inside a logical page: cut it at a multiple "
            f"of {geometry.logical_page_size}, where no tail is open."
        )
    dsa = range(len(shape.dsa_layers))
    kda = range(len(shape.kda_layers))
    groups = length // geometry.kpool
    return frozenset(
        [
            *(Part(Component.KV, layer, row) for layer in dsa for row in range(length)),
            *(Part(Component.INDEX, layer, row) for layer in dsa for row in range(groups)),
            *(Part(Component.STATE, layer, length) for layer in kda),
        ]
    )


def legal_outcomes(
    step: Step, before: Standing, *, failed: bool = False, locked: bool = False
) -> frozenset[Standing]:
    """How a prefix may stand after a step on it that stood as `before`.

    A step without its source changes nothing.  A failed one leaves what was, or a miss in its
    tier; a locked prefix, which a running request reads, keeps its device copy in either case.
    """
    if step is Step.BACK_UP:
        done = before | {Tier.HOST} if Tier.DEVICE in before else before
    elif step is Step.RESTORE:
        done = before | {Tier.DEVICE} if Tier.HOST in before else before
    elif step is Step.DROP:
        done = before - {Tier.HOST}
    else:
        done = before if locked else before - {Tier.DEVICE}
    outcomes = {before, before - {step.tier}} if failed else {done}
    kept = before & {Tier.DEVICE} if locked else MISS
    return frozenset(outcome for outcome in outcomes if kept <= outcome)


class Tiers(Generic[Row]):
    """Both tiers as plain dictionaries: a step is done aside, then put in place at once.

    Fields:
        stored: for each tier, the parts of each cached prefix (by its tokens).
        locks: prefixes that running requests read.
    """

    def __init__(self, geometry: Geometry, shape: ModelShape) -> None:
        self.geometry, self.shape = geometry, shape
        self.stored: dict[Tier, dict[tuple[int, ...], dict[Part, Row]]] = {t: {} for t in Tier}
        self.locks: set[tuple[int, ...]] = set()

    def insert(self, tokens: tuple[int, ...], rows: Parts[Row]) -> None:
        """Cache a prefix on the device.

        Raises:
            InvalidCall: `rows` are not exactly its parts.
        """
        if rows.keys() != parts_of(len(tokens), self.geometry, self.shape):
            raise InvalidCall(f"the prefix has {len(rows)} parts: insert all and no others.")
        self.stored[Tier.DEVICE][tokens] = dict(rows)

    def standing(self, tokens: tuple[int, ...]) -> Standing:
        """The tiers that hold this prefix."""
        return frozenset(tier for tier in Tier if tokens in self.stored[tier])

    def step(self, step: Step, tokens: tuple[int, ...], copy: Callable[[Part, Row], Row]) -> bool:
        """Do one step; `copy` moves one part between the tiers, and whatever it raises passes
        through with nothing changed.  Returns whether the prefix stands differently."""
        before = self.standing(tokens)
        if step in (Step.BACK_UP, Step.RESTORE):
            ends = (Tier.DEVICE, Tier.HOST)
            source, target = ends if step is Step.BACK_UP else reversed(ends)
            if source in before and target not in before:
                moved = {part: copy(part, row) for part, row in self.stored[source][tokens].items()}
                self.stored[target][tokens] = moved
        elif step is Step.DROP or tokens not in self.locks:
            self.stored[Tier.HOST if step is Step.DROP else Tier.DEVICE].pop(tokens, None)
        return self.standing(tokens) != before

    def hit(self, tokens: Sequence[int], tier: Tier = Tier.DEVICE) -> int:
        """Positions of the longest prefix of `tokens`, shorter than them, that stands in `tier`:
        on the device what a request reuses, on the host what a restore can bring."""
        size = self.geometry.logical_page_size
        ends = range((len(tokens) - 1) // size * size, 0, -size)
        return next((end for end in ends if tuple(tokens[:end]) in self.stored[tier]), 0)


def judge_prefix(
    length: int, stored: Parts[Row], truth: Parts[Row], geometry: Geometry, shape: ModelShape
) -> list[str]:
    """A prefix of `length` positions that an engine calls a hit, or backed up, is whole: all its
    parts are among the `stored`, and equal the rows that were written (`truth`)."""
    missing: dict[tuple[Component, int], list[int]] = {}
    found: list[str] = []
    for part in sorted(parts_of(length, geometry, shape)):
        if part not in stored:
            missing.setdefault((part.component, part.layer), []).append(part.row)
        elif stored[part] != truth[part]:
            found.append(
                f"{part.component} row {part.row} of layer {part.layer} should be as it was "
                f"written; it differs, in a prefix of {length} positions."
            )
    for (component, layer), rows in missing.items():
        found.append(
            f"a prefix of {length} positions should have all its parts; {component} rows {rows} "
            f"of layer {layer} are missing: half a hit."
        )
    return found


def judge_outcome(
    step: Step, before: Standing, after: Standing, *, failed: bool = False, locked: bool = False
) -> list[str]:
    """The prefix that a step was for stands as `legal_outcomes` says."""
    legal = legal_outcomes(step, before, failed=failed, locked=locked)
    if after in legal:
        return []
    return [
        f"after a {'failed ' if failed else ''}{step} the prefix, which stood on "
        f"{_names(before)}, should stand on {' or '.join(sorted(map(_names, legal)))}; it "
        f"stands on {_names(after)}."
    ]


def judge_bystander(
    step: Step, before: Standing, after: Standing, *, locked: bool = False
) -> list[str]:
    """Any other prefix may have made room in the step's tier, but not under a reader."""
    found: list[str] = []
    lost, gained = before - after, after - before
    if locked and Tier.DEVICE in lost:
        found.append("a locked prefix should keep its device copy; it was evicted.")
    elif lost - {step.tier}:
        found.append(
            f"a {step} makes room on {step.tier} alone; another prefix is gone from "
            f"{_names(lost - {step.tier})}."
        )
    if gained:
        found.append(
            f"a prefix that stood on {_names(before)} should not appear on {_names(gained)}, "
            "where no step copied it."
        )
    return found


def use(held: Sequence[Prefix], prefix: Prefix, tier: HostTier, geometry: Geometry) -> list[Prefix]:
    """What a host tier that holds these prefixes, the least recently used first, holds once
    `prefix` was backed up or restored: it goes last from now on, and the first go until all that
    stay fit.  One that does not fit even alone drives nothing out."""
    if len(_pages([prefix], geometry)) > tier.pages or not tier.states:
        return list(held)
    stay = [*(other for other in held if other != prefix), prefix]
    while len(stay) > tier.states or len(_pages(stay, geometry)) > tier.pages:
        del stay[0]
    return stay


def judge_tier(snapshot: TierSnapshot, tier: HostTier, geometry: Geometry) -> list[str]:
    """Every page of the tier is free or stands for one beginning, which no other stands for;
    every state is free or one prefix's; and there are as many as were asked for."""
    found: list[str] = []
    spelt: dict[int, Prefix] = {}
    places: dict[Prefix, int] = {}
    for prefix in snapshot.prefixes:
        beginnings = list(_beginnings(prefix.tokens, geometry))
        if len(prefix.pages) != len(beginnings):
            found.append(
                f"a prefix of {len(prefix.tokens)} tokens should have {len(beginnings)} pages of "
                f"the tier; it has {len(prefix.pages)}."
            )
        for page, beginning in zip(prefix.pages, beginnings, strict=False):
            if spelt.setdefault(page, beginning) != beginning:
                found.append(f"page {page} of the tier should stand for one beginning, not two.")
            elif places.setdefault(beginning, page) != page:
                found.append(
                    f"pages {places[beginning]} and {page} of the tier hold the same: prefixes "
                    "with a common beginning should share its pages."
                )
    states = Counter(prefix.state for prefix in snapshot.prefixes)
    found += [
        f"state {state} of the tier should have one owner; it has {count}."
        for state, count in states.items()
        if count > 1
    ]
    for what, held, free, total in (
        ("pages", spelt.keys(), snapshot.free_pages, tier.pages),
        ("states", states.keys(), snapshot.free_states, tier.states),
    ):
        found += [f"{what} {sorted(held & free)} of the tier are held and free."] * bool(
            held & free
        )
        if len(held | free) != total:
            found.append(
                f"{total} {what} of the tier should be free or held; {len(held | free)} are."
            )
    return found


def _beginnings(prefix: Prefix, geometry: Geometry) -> Iterator[Prefix]:
    """The prefix up to the end of each of its logical pages."""
    size = geometry.logical_page_size
    return (prefix[:end] for end in range(size, len(prefix) + 1, size))


def _pages(prefixes: Sequence[Prefix], geometry: Geometry) -> set[Prefix]:
    """The pages of all these prefixes, each once, by what they spell."""
    return {beginning for prefix in prefixes for beginning in _beginnings(prefix, geometry)}


def _names(standing: Standing) -> str:
    return " and ".join(sorted(standing)) or "neither tier"
