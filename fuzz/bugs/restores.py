"""What goes to the host and comes back."""

from __future__ import annotations

from fuzz.bugs.registry import bug

bug(
    "TensorRT-LLM#8813",
    "A block is brought back from the host before its copy to there has been made.",
    by=("shared_before_backup",),
)
bug(
    "dynamo#15079",
    "A copy that failed counts as made, and what it was to bring is served.",
    by=("failed_back_up_stands",),
)
bug(
    "dynamo#5068",
    "The same prompt gives other answers with offloading, though all else is batch invariant.",
    missing="The report shows a symptom and no cause.",
)
bug(
    "sglang#26975",
    "A buffer beside the KV rows, indexed by the same slots, does not go to the host with them.",
    by=("index_rows_not_backed_up",),
)
bug(
    "sglang#27108",
    "A back-up returns that the host had no room; nobody looks, and the prefix counts as saved.",
    by=("refused_back_up_counts",),
)
bug(
    "sglang#28896",
    "A restore brings the KV rows of a layer and leaves its index as it was.",
    missing="A draft model with pools of its own, of which the report is.",
)
bug(
    "sglang#30986",
    "What a restore is to fill is entered before it is known to succeed; one that is given up "
    "leaves it there unwritten.",
    by=("cached_before_it_is_copied",),
)
bug(
    "sglang#32176",
    "Drafts are accepted less often behind a restore.",
    missing="A draft model's own pools beside the target's; and the report leaves the cause open.",
)
bug(
    "sglang#38031",
    "A hybrid cache restores KV rows and states, and not the index keys and scales.",
    by=("restore_without_index",),
)
bug(
    "sglang#39830",
    "Answers behind a hit in the host tier are wrong, and behind one on the device right.",
    missing="The report shows a symptom and no cause.",
)
