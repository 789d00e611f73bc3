"""Requests that end early, and memory that nobody gives back."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# aborts that race

bug(
    "TensorRT-LLM#12314",
    "A transfer can be cancelled only while it is queued, so that blocks of one in flight are "
    "lost; freeing them at once would leave them to a write that still runs.",
    by=("cancelled_only_while_queued", "failed_as_if_never_advertised"),
)
bug(
    "TensorRT-LLM#13713",
    "After a burst of cancelled requests the server lives on and admits nobody any more.",
    by=("probe_after_a_burst_of_aborts",),
)
bug(
    "sglang#30352",
    "The listener of the prefill side knows no ABORT message; and a status that comes late brings "
    "a failed room back to life.",
    by=("abort_unknown_to_the_listener", "failed_overwritten"),
)
bug(
    "sglang-jax#1523",
    "A request whose chunk failed is taken up again by a stale pointer, and writes by a slot that "
    "somebody else has by then.",
    by=("aborted_prompt_does_not_go_on",),
)
bug(
    "vllm#24268",
    "A timeout and the notification that races it both free the blocks of a transfer.",
    by=("released_twice",),
)
bug(
    "vllm#25562",
    "Blocks that nobody reads expire, and the late word of their transfer finds no entry.",
    missing="The report leaves open which side drops the entry first.",
)

# memory that is never free again

bug(
    "TensorRT-LLM#12313",
    "What would give blocks back runs on a way that only a request with free blocks takes, so that "
    "a full pool never recovers.",
    by=("room_made_only_while_some_is_free",),
)
bug(
    "TensorRT-LLM#15018",
    "A sequence is removed before its blocks are registered for reuse, so that the tree hands out "
    "blocks that are free.",
    by=("finished_pages_freed_then_cached",),
)
bug(
    "Mooncake#3599",
    "Every look whether something is there renews a lease on it, and what is looked at often can "
    "never be evicted.",
    by=("probe_keeps_its_lock",),
)
bug(
    "sglang#11970",
    "At rest a few tokens are neither free nor cached.",
    missing="The report shows the sums and no cause.",
)
bug(
    "sglang#36081",
    "At rest one of two pools has lost a page, and the other is whole.",
    missing="The report shows the sums and no cause.",
)
bug(
    "sglang#37103",
    "A restore that is aborted half-way keeps the device pages that it had taken.",
    by=("pages_lost_by_failed_restore",),
)
bug(
    "sglang#7130",
    "With pages of several tokens, a page that only rejected drafts reached is not given back.",
    by=("page_of_rejected_drafts_lost",),
)
bug(
    "vllm#46283",
    "Blocks of an aborted request wait for a word of a peer that is gone; they must come back, "
    "and not before its writes are known to be over.",
    by=("only_a_note_releases", "death_taken_for_a_fence"),
)
