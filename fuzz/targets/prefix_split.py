"""Requests that share prefixes ending anywhere: the scenario of SGLang #41494.

Prompts are derived from one another by keeping a prefix, cut with preference at the ends of
groups, physical and logical pages and checkpoint intervals, one before and one behind.  The pool
is roomy, so that what goes wrong goes wrong by sharing.
"""

from __future__ import annotations

from fuzz.targets import Target
from fuzz.targets.setup import Ranges
from reference.contract import Capability

PREFIX_SPLIT = Target(
    name="prefix_split",
    ranges=Ranges(pages=(12, 40), spare_states=(8, 24), max_requests=(3, 6)),
    weights={
        "submit": 4,
        "extend": 6,
        "decode": 2,
        "finish": 1,
        "retract": 0.5,
        "resume": 1,
        "abort": 0.5,
        "evict": 1.5,
        "verify": 4,
        "accept": 4,
    },
    required=frozenset(
        {
            "hit",
            "hit_then_diverged_inside_group",
            "hit_then_diverged_inside_physical_page",
            "hit_then_diverged_inside_logical_page",
            "page_shared_by_running_requests",
            "node_split",
            "duplicate_freed",
            "group_mixing_ring_and_chunk",
            "chunk_inside_prompt",
            "batched_extend",
            "decode_closed_group",
            "rejected_draft_closed_group",
            "resumed_with_hit",
            "evicted",
            "hit_after_eviction",
        }
    ),
    needs={
        Capability.VERIFY: frozenset({"rejected_draft_closed_group"}),
        Capability.ANY_CHUNK: frozenset({"group_mixing_ring_and_chunk"}),
    },
    narrowed={
        ("kpool", 1): frozenset({"hit_then_diverged_inside_group", "group_mixing_ring_and_chunk"})
    },
)
