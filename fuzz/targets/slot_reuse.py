"""A pool so tight that pages, ring rows and state slots are taken again as soon as they are free.

Requests come and go by every door (finish, abort, retract, eviction, rejected drafts), decode
batches are uneven, and memory runs out in the middle.
"""

from __future__ import annotations

from fuzz.targets import Target
from fuzz.targets.setup import Ranges
from reference.contract import Capability

SLOT_REUSE = Target(
    name="slot_reuse",
    ranges=Ranges(pages=(3, 9), spare_states=(0, 6), max_requests=(1, 4)),
    weights={
        "submit": 4,
        "extend": 6,
        "decode": 4,
        "finish": 2,
        "retract": 1.5,
        "resume": 2,
        "abort": 1.5,
        "evict": 1,
        "verify": 4,
        "accept": 4,
    },
    required=frozenset(
        {
            "page_reused",
            "page_reused_at_once",
            "ring_slot_reused",
            "state_slot_reused",
            "out_of_memory",
            "evicted",
            "hit_after_eviction",
            "uneven_decode_batch",
            "group_mixing_ring_and_chunk",
            "decode_closed_group",
            "rejected_draft_closed_group",
            "resumed_with_hit",
            "chunk_inside_prompt",
        }
    ),
    needs={
        Capability.VERIFY: frozenset({"rejected_draft_closed_group"}),
        Capability.ANY_CHUNK: frozenset({"group_mixing_ring_and_chunk"}),
    },
    narrowed={("kpool", 1): frozenset({"group_mixing_ring_and_chunk"})},
    operations=32,
)
