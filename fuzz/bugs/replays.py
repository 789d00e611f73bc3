"""What a step leaves for the next: states of drafts, and what a replayed graph still reads."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# drafts

bug(
    "vllm#49620",
    "A request is preempted while its drafts are being checked, and their outcome, which comes "
    "late, is applied to it all the same.",
    by=("drafts_accepted_after_retract",),
)
bug(
    "vllm#50272",
    "The window of a convolution keeps the inputs of rejected drafts.",
    by=("rejected_drafts_in_window",),
)
bug(
    "vllm#52942",
    "A step with drafts leaves the live state in the column of the last accepted one, and a step "
    "without reads the first column.",
    by=("first_draft_state_adopted",),
)
bug(
    "vllm#53505",
    "Where an accept ends on the boundary of a block, the copy between the old and the new block "
    "runs backwards.",
    by=("accept_at_boundary_copies_back",),
)
bug(
    "vllm#53912",
    "A block whose state was written over rejected drafts stays in the cache, since the groups of "
    "states do not drop it.",
    by=("rejected_drafts_in_checkpoint",),
)

# replays

bug(
    "TensorRT-LLM#18769",
    "A replay goes on with the plan of the batch that it was captured with, since the refresh asks "
    "for one kind of wrapper alone.",
    by=("replayed_table_stale", "replayed_lengths_stale"),
)
bug(
    "aiter#4587",
    "A bounded cache lets go of a tensor whose address a captured graph still has.",
    missing="Captured graphs that hold bare addresses: on a CPU a step holds its tensors.",
)
bug(
    "sglang#31471",
    "A transfer takes virtual ids for places, which they are until the pool is compacted.",
    missing="A pool that is compacted, and pages whose virtual and physical ids part by it.",
)
bug(
    "sglang#42750",
    "The pooled page table is not refreshed, or not divided, when a verify is replayed.",
    by=("verify_table_not_refreshed", "pooled_table_not_divided"),
)
bug(
    "vllm#56158",
    "What copies new rows to the host is host code of the step, which a replayed graph does not "
    "run.",
    by=("decoded_row_never_backed_up",),
)
bug(
    "vllm#57388",
    "A captured step and an eager prefill use one workspace, with nothing between them that keeps "
    "them apart.",
    by=("verify_and_prefill_share_a_workspace",),
)
