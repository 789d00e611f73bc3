"""Requests whose KV rows live on the host: decodes well past the size of their hot buffers.

The layers of a stamped run are told what to select: the latest positions, the first, the same as
before, those longest out of use, void and repeated cells.  Buffers are often of the least legal
size, device pages often short of what requests may run, and host pages of the logical ones; ids
are permuted apart, and copies on the side stream come early, late or in between.
"""

from __future__ import annotations

from fuzz.targets import Target
from fuzz.targets.setup import Ranges
from reference.contract import Capability

HOT_BUFFER = Target(
    name="hot_buffer",
    ranges=Ranges(pages=(8, 24), spare_states=(2, 16), max_requests=(1, 4), hisparse=(True,)),
    weights={
        "submit": 4,
        "extend": 6,
        "decode": 12,
        "finish": 1.5,
        "retract": 1,
        "resume": 1.5,
        "abort": 1,
        "evict": 1,
    },
    required=frozenset(
        {
            "swapped_in",
            "hit_in_buffer",
            "all_selected_missed",
            "most_columns_missed",
            "crossed_buffer_size",
            "duplicate_selected",
            "void_selected",
            "out_of_range_selected",
            "newest_selected",
            "tail_selected",
            "refused_for_device",
            "refused_for_host",
            "hot_pages_reused",
            "host_page_reused",
            "released_past_buffer_size",
            "hit",
            "at_lower_bound",
            "ids_differ",
            "early_copies",
            "late_copies",
            "random_copies",
            "capacity_ratio_1",
            "capacity_ratio_2",
            "capacity_ratio_4",
            "capacity_ratio_8",
        }
    ),
    needs={
        Capability.PREFIX_SHARING: frozenset({"hit"}),
        Capability.HOT_AHEAD: frozenset({"refused_for_device"}),
        Capability.ANY_CELLS: frozenset(
            {"duplicate_selected", "void_selected", "out_of_range_selected"}
        ),
    },
    # A model selects each position once, and none that is not there.
    stamped_only=frozenset({"duplicate_selected", "out_of_range_selected"}),
    narrowed={
        ("kpool", 1): frozenset({"tail_selected"}),
        # so large are the pages that one prompt takes more than that of the host
        **{("physical_page_size", size): frozenset({"capacity_ratio_1"}) for size in (16, 32, 64)},
    },
    operations=32,
)
