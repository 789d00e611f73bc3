"""The passes of the shrinker: ways to make a case smaller that know what its values mean.

A pass takes a case and yields tapes, the boldest first.  Most are no failure at all; whoever asked
runs them and keeps what is smaller (`fuzz.shrink`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from fuzz.shrinking import numbers, operations, setups
from fuzz.shrinking.case import Case, Values

Pass = Callable[[Case], Iterator[Values]]

TIERS: tuple[tuple[Pass, ...], ...] = (
    (setups.plain_setup, operations.without_operations, operations.without_request, numbers.plain),
    (
        setups.lower_setup,
        operations.heirs_for_resumed,
        operations.resumed_for_heirs,
        operations.something_else_instead,
        operations.merged,
        numbers.prompts_for_steps,
        numbers.shorter,
        operations.in_order,
        operations.exchanged,
        operations.other_kinds,
        numbers.later_tokens,
        numbers.lowered_pairs,
    ),
    (
        numbers.traded,
        operations.without_two,
        operations.fewer_and_others,
        numbers.fewer_and_numbers,
        setups.fewer_in_another_setup,
        setups.other_setup,
    ),
)
"""The passes in the order in which they have their turn."""
AFRESH: tuple[Pass, ...] = (operations.short_lives,)
"""Those that make nothing of the case at hand; what they find shows mostly in another way."""
