"""Pages of several sizes, and prefixes that end inside one of them."""

from __future__ import annotations

import pkgutil
from typing import Any

from fuzz.bugs.registry import bug, scenario
from fuzz.bugs.scene import TURNS, Handed, played, require
from fuzz.mutants.registry import Body
from fuzz.step import Violation


def _of_own_heads(original: Body, shape: Any) -> int:
    """An item is what a head of this rank takes, times its heads."""
    return int(original(shape)) * int(shape.kda_heads)


@scenario(
    faults={
        "optimized.memory.transfers.state_unit": _of_own_heads,
        "optimized.transfer.plan.state_unit": _of_own_heads,
    },
    caught_by=("exact",),
)
def ends_of_other_ranks_fit_together() -> list[Violation]:
    """One rank of P, which has all heads, hands a request over to two of D."""
    refused = pkgutil.resolve_name("optimized.transfer.transport").Refused

    def scene() -> None:
        try:
            with Handed(ranks=(1, 2)) as both:
                asked = both.submit(range(1, both.page + 1))
                for _ in range(TURNS):
                    both.turn()
                require(asked.was_live, "live", f"{asked.name} should have gone live.")
        except refused as refusal:
            require(False, "handshake", f"The ends should fit: {refusal}")

    return played(scene)


# pages of several sizes

bug(
    "sglang#31218",
    "Keys of accepted drafts are moved by token number in a buffer that is cut into pages, each "
    "of which has its keys and behind them its scales.",
    by=("verify_by_loc", "gather_by_loc"),
)
bug(
    "sglang#42832",
    "After pooling, the accessor of a shared index cache reads by another page size than it is "
    "written by.",
    by=("reader_assumes_contiguous_pages",),
)
bug(
    "vllm#41037",
    "The size of a block is worked out from the heads of one GPU, so that two ends of different "
    "tensor-parallel sizes do not recognise each other's.",
    by=("ends_of_other_ranks_fit_together",),
)
bug(
    "vllm#50714",
    "The block size of the whole cache becomes that of its smallest group, for which no kernel has "
    "a block.",
    missing="A choice among the block sizes of several kernels: a geometry has the one of its own.",
)
bug(
    "vllm#54359",
    "A backend takes the manager's block for its own, so that block ids are multiplied by the "
    "kernel's smaller page, and thousands of keys share a few hundred slots.",
    by=("slots_by_pages_of_the_kernel",),
)

# prefixes that end inside a page

bug(
    "Mooncake#4153",
    "With a shared store, answers drift to other prompts'; the reporter suspects a hit that ends "
    "inside a block.",
    missing="The report's cause is not settled.",
)
bug(
    "sglang#38161",
    "The tree cuts an edge inside a compression group, and two suffixes write the one row of it.",
    by=("edge_cut_inside_a_group",),
)
bug(
    "sglang#38815",
    "Where the windows end a branch before the states do, a prefix is cached at the shorter length "
    "with the state of the longer one.",
    by=("final_state_as_checkpoint", "split_leaves_state_on_parent"),
)
bug(
    "sglang#42178",
    "The prefix tree works in pages of which a pooled index page is several, so that a request "
    "that resumes inside a group writes its keys to a page that others read.",
    by=("page_table_41494",),
)
