"""Memory that is somebody else's before the last read or write of it has ended."""

from __future__ import annotations

from fuzz.bugs.registry import bug

# who holds a cached prefix

bug(
    "LMCache#2772",
    "Objects that a look-up pinned and no read used lose the cache's own reference with the pin, "
    "and are freed while the cache still finds them.",
    by=("unused_pages_of_a_lookup_freed",),
)
bug(
    "LMCache#4133",
    "Between a look-up and the read that it promises the prefix is evicted, since nothing holds "
    "it.",
    by=("hit_locked_after_room", "restore_evicts_what_it_extends"),
)
bug(
    "LMCache#5095",
    "A read takes its pin off, and the end of the look-up takes the same pin off again.",
    by=("pin_taken_off_twice",),
)
bug(
    "Mooncake#730",
    "A read marks an object for deletion where it should have lengthened its lease: the object is "
    "gone after the first one.",
    by=("gone_after_the_first_read",),
)
bug(
    "Mooncake#4239",
    "One of several ways to read an object does not look whether its lease is over.",
    missing="Leases, which end with a clock: a prefix is held by a lock or not at all.",
)

# sources of a transfer

bug(
    "Mooncake#850",
    "A lease ends while a transfer still reads under it, and the memory goes to another object.",
    missing="Leases that end with a clock.",
)
bug(
    "TensorRT-LLM#12542",
    "A request that ended is sent later, and nothing holds its blocks until then.",
    by=("source_pages_not_kept",),
)
bug(
    "vllm#57705",
    "A write that was put off begins its own timer anew, and is made from blocks that the "
    "scheduler has released at the end of its own.",
    by=("late_offer_served_from_released_source",),
)
bug(
    "nixl#2027",
    "A prepared transfer is checked against its peer's name alone, and posted to places of the "
    "peer's former life.",
    missing="Prepared handles of a transport that outlive its peer: each write names its places.",
)

# copies to the host and from it

bug(
    "sglang#24585",
    "A node is evicted from the device before its copy to the host is known to have been made.",
    by=("backup_not_waited_for",),
)
bug(
    "sglang#28468",
    "Copies to the host are no longer waited for one by one, and pages with a copy under way are "
    "freed at both ends.",
    by=("backup_in_flight_at_release",),
)
bug(
    "sglang#34076",
    "Memory is freed on the stream that owns it while another stream still reads it.",
    by=("backup_in_flight_at_release",),
)
bug(
    "vllm#47282",
    "What is loaded from the host goes to a block that a computation under way still reads.",
    missing="A computation that is still under way when the next step's loads start.",
)

# steps that are under way

bug(
    "vllm-ascend#14055",
    "Blocks are freed when a step says that a request ended, while the next step, which is under "
    "way, still uses them.",
    missing="Two steps under way at once: a step here ends before the next one is asked for.",
)
bug(
    "vllm-ascend#13501",
    "What a sliding window has left behind is freed without regard to the tokens under way.",
    missing="Layers with a sliding window, whose pages go while their request runs.",
)
bug(
    "tpu-inference#3412",
    "A request with a prefix hit reads its state from a slot that has just been another's, as "
    "though the hit had filled it.",
    by=("state_not_restored",),
)
bug(
    "sglang#23020",
    "Answers turn to gibberish after a hundred requests between a prefill and a decode server.",
    missing="The report shows a symptom and no cause.",
)

# destinations of a transfer

bug(
    "sglang#24527",
    "An abort gives the destination back as if the end of the request were the end of its writes.",
    by=("failed_as_if_never_advertised",),
)
bug(
    "sglang#38961d",
    "Only a decode rank's own abort waits for the writers: where a failure is found elsewhere, "
    "the destination is freed at once.",
    by=("peers_failure_frees_at_once",),
)
bug(
    "sglang#seed000",
    "A destination is freed when one rank's writes have drained, and another's have not.",
    by=("ready_by_any",),
)
bug(
    "vllm#32255",
    "An abort frees the blocks into which a load is still under way.",
    by=("failed_as_if_never_advertised",),
)
