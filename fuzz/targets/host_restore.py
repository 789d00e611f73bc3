"""Prefixes go to the host tier and come back, while pools are so tight that neither tier keeps
them all.

Any allocation or copy on the way may fail.  SGLang #42178 lists host restore with index keys as
open; LMCache and HiCache have lost parts of a prefix on that way more than once.
"""

from __future__ import annotations

from fuzz.targets import Target
from fuzz.targets.setup import Ranges

HOST_RESTORE = Target(
    name="host_restore",
    ranges=Ranges(
        pages=(5, 20),
        spare_states=(2, 10),
        max_requests=(1, 4),
        tier=((2, 16), (1, 6)),
        hisparse=(False, False, True),
    ),
    weights={
        "submit": 10,
        "extend": 30,
        "decode": 3,
        "finish": 4,
        "retract": 6,
        "resume": 10,
        "abort": 1,
        "evict": 8,
        "verify": 1,
        "accept": 6,
        "back_up": 8,
        "restore": 12,
    },
    required=frozenset(
        {
            "hit",
            "hit_after_restore",
            "backed_up",
            "backed_up_again",
            "failed_back_up",
            "tier_evicted",
            "shared_pages_in_tier",
            "restored",
            "restored_after_eviction",
            "restored_part",
            "restored_while_shared",
            "failed_restore",
            "restore_evicted",
            "restore_refused",
            "page_reused",
        }
    ),
    operations=48,
)
