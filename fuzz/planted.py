"""Faults planted on purpose: a campaign that misses one of these is broken.

Every so many seeds a fault is planted that almost any tape finds, and searched for with tapes of
its own.  That nothing was found in a campaign means something only where these were.
"""

from __future__ import annotations

from dataclasses import replace

from fuzz import mutants
from fuzz.mutants.report import kill
from fuzz.tape import SplitMix

EVERY, AT = 100, 50
"""The seeds at which one is planted: those that leave AT."""
TAPES = 60
"""Executions in which it has to be found."""
BUDGET_S = 120.0
"""Seconds of CPU after which it is missed."""
EASY: dict[str, tuple[str, ...]] = {
    "prefix_split": ("reader_assumes_contiguous_pages", "part_of_page_inserted", "extend_by_loc"),
    "slot_reuse": ("ring_row_left_at_abort", "ring_without_drafts"),
    "hot_buffer": ("released_by_length", "padding_page_freed", "index_pool_of_device_tokens"),
    "host_restore": ("no_move_announced", "copies_not_announced", "restore_without_index"),
    "multi_rank": ("released_twice", "ready_by_any", "acks_without_closing"),
    "transfer": ("index_pages_in_token_units", "all_layers_to_the_first", "convolution_left_out"),
    "shared_memory": ("regions_at_one_offset", "source_rows_for_target_rows"),
}
"""By target, mutants that a tape finds with a chance of a quarter at least: TAPES of them all miss
one with less than 1e-7."""


def due(seed: int) -> bool:
    """Whether one is planted at this seed."""
    return seed % EVERY == AT


def missed(target: str, seed: int) -> str | None:
    """Plant a fault of this target and search for it: its name if it was not found."""
    easy = EASY[target]
    mutant = mutants.find(easy[SplitMix(seed).below(len(easy))])
    # those of the drain protocol are searched for by exploring otherwise
    planted = replace(mutant, target=target)
    found = kill(planted, seed=seed, executions=TAPES, budget_s=BUDGET_S)
    return None if found.oracle else mutant.name
