"""Boundaries: where chunks, checkpoints, pages, groups and the selection end."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# ends of chunks

bug(
    "cudnn-frontend#1013",
    "A batch whose last sequence has one token makes a kernel read beyond its input.",
    missing="The kernel's own source: the report gives the shapes, and no address that is wrong.",
)
bug(
    "flash-linear-attention#103",
    "Two equal offsets, an empty sequence of a batch, make its neighbour's item its own.",
    by=("empty_span_owns_the_next_item",),
)
bug(
    "flashinfer#4896",
    "A kernel returns the state behind the last token alone, and a cache takes it for the state at "
    "the last boundary before.",
    by=("final_state_as_checkpoint",),
)
bug(
    "sglang#30938",
    "A chunk shorter than the unit of state checkpoints is masked out of their tracking, so that a "
    "boundary that it reaches is never written.",
    by=("short_chunk_keeps_no_checkpoint",),
)
bug(
    "vllm#54076",
    "Chunks are cut at one group's block size, and states are published by another's, under a "
    "length for which they do not stand.",
    by=("checkpoints_one_boundary_off",),
)

# ends of the selection

bug(
    "FlashMLA#109",
    "Kernels take a negative index for void, or one beyond the keys, or both; padding in the form "
    "that is not known is dereferenced.",
    by=("void_if_negative_alone",),
)
bug(
    "sglang#24371",
    "A key of fewer tokens than a page is looked up in the tree, where keys are pairs of tokens.",
    missing="Keys of token pairs: the tree's keys are the tokens themselves.",
)
bug(
    "sglang-jax#1607",
    "The bound of what a query may select counts a group that later tokens close.",
    by=("one_group_too_many_visible", "pooled_length_rounded_up"),
)
bug(
    "tilelang#1948",
    "Unused columns of a selection are masked in the scores, and their rows are loaded all the "
    "same.",
    by=("void_columns_masked_in_scores_alone",),
)
bug(
    "vllm#51323",
    "More keys tie at the threshold than a block collects, and fewer indices are written than are "
    "read.",
    by=("ties_at_the_threshold_dropped", "void_cell_not_written"),
)
bug(
    "vllm#52109",
    "A needle is missed at some lengths of a long prompt, now and then.",
    missing="The report shows a symptom and no cause.",
)
bug(
    "vllm#53504",
    "The boundary at which a state is kept and the one at which it is looked up differ by a block, "
    "so that the first repeat of a prompt computes all of it again.",
    by=("repeat_of_whole_pages_hits",),
)
