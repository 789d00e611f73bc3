"""Reads of memory that nobody has written for them."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# padding

bug(
    "sglang#32477",
    "Rows of padding write what is undefined to the reserved slot, and a tile that reads past its "
    "rows takes it from there.",
    by=("padding_row_read_by_a_tile",),
)
bug(
    "sglang#39288",
    "Masked candidates are gathered from slot 0 of a scratch buffer, which is never written, and "
    "a weight of zero does not silence a NaN.",
    by=("void_cells_gather_slot_0",),
)
bug(
    "vllm#57156",
    "The capture of a graph writes garbage to block 0, from which invalid indices are gathered in "
    "every replay.",
    by=("void_cells_gather_slot_0",),
)
bug(
    "flashinfer#941",
    "The unused slots of a request's last page are multiplied by zero, and not left out.",
    by=("last_page_read_to_its_end",),
)

# what a slot held before

bug(
    "sglang#39342",
    "A mixed batch skips the write of a checkpoint, whose slot goes to the cache all the same.",
    by=("checkpoint_not_written",),
)
bug(
    "vllm#43990",
    "Fresh blocks are not zeroed any more, and a kernel reads them whole.",
    by=("last_page_read_to_its_end", "first_state_not_zeroed"),
)
bug(
    "vllm#47574",
    "Blocks that a window has left go to a group of another type, and are read as its own.",
    missing="Groups of different types whose pages come from one pool.",
)
bug(
    "vllm#27264",
    "Answers are malformed once the allocation of blocks has come round.",
    missing="The report shows a symptom and no cause.",
)
bug(
    "DeepSeek-v4-Flash-Vision-Exp-DSpark-1M-NVFP4-KV-2x-DGX-Spark#2",
    "A selection buffer lives on from step to step, and entries behind those that a step wrote are "
    "followed as if they were its own.",
    by=("selection_buffer_not_reset",),
)
bug(
    "sglang#23239",
    "A device buffer grows, and of its three tables one is not told of the new rows.",
    by=("grown_slot_not_tagged",),
)
bug(
    "sglang#19897",
    "A hit has the rows of the target model, and those of the draft model were never computed.",
    missing="A draft model with pools of its own.",
)
