"""Notifications that are lost, come twice, or say less than they are taken for."""

from __future__ import annotations

from fuzz.bugs.registry import bug, scenario
from fuzz.bugs.scene import TURNS, Handed, played, require
from fuzz.mutants.registry import Body
from fuzz.step import Violation
from reference.protocol import Side


def _told_nobody(original: Body, self: object, sources: set[int]) -> tuple[object, tuple[()]]:
    """What a writer gives up is its own affair."""
    given_up, _ = original(self, sources)
    return given_up, ()


@scenario(
    faults={"optimized.transfer.ranks.PrefillRank._give_up": _told_nobody}, caught_by=("exact",)
)
def failure_of_a_writer_reaches_d() -> list[Violation]:
    """P gives up a request that D has offered a place, and nobody but P can tell D: no timer goes
    off, and the router is silent."""

    def scene() -> None:
        with Handed() as both:
            lives = both.router.lives
            asked = both.router.submit(range(1, both.page + 1), room=0)
            for _ in range(2):  # D offers in the first, and P hears of it in the second
                both.turn()
            lives[Side.PREFILL].each(lambda node: node.abort(asked.request))
            failed = set()
            for _ in range(TURNS):
                both.router.steps(1000, 0)
                lives[Side.PREFILL].tick()
                failed |= lives[Side.DECODE].tick().failed
            known = asked.request in failed
            require(known, "failed", f"D should know that {asked.name} failed; it waits for it.")

    return played(scene)


# none comes, or it comes without its cause

bug(
    "LMCache#2972",
    "A write that raises is caught and logged, and the code behind it tells the other side that "
    "all is there.",
    by=("broken_taken_for_landed", "failed_copy_taken_for_landed"),
)
bug(
    "TensorRT-LLM#17665",
    "The word that a transfer is complete goes as a message of its own, which nobody sends again "
    "if it is lost.",
    by=("report_not_repeated",),
)
bug(
    "nixl#688",
    "What is to be told behind a write is kept where the write ends at once, and forgotten where "
    "it is in progress when the post returns.",
    by=("note_lost_while_in_progress",),
)
bug(
    "sglang#18939",
    "The receiver waits for kinds of state that the sender has no code to send.",
    by=("component_without_a_way_out",),
)
bug(
    "sglang#24878",
    "A kind of state that the sender does not know is passed over as sent, and the receiver goes "
    "on from what was in its slot.",
    by=("state_left_out",),
)
bug(
    "sglang#36033",
    "A prefill worker whose write failed tells the decode side nothing, which waits until its "
    "timeout.",
    by=("failure_of_a_writer_reaches_d",),
)

# it says less than it is taken for

bug(
    "nixl#2107",
    "An error that overtakes the notification makes an entry in which no fragment has come and "
    "none is expected: it looks complete.",
    by=("giving_up_counts_as_complete",),
)
bug(
    "sglang#39846",
    "A notification names the component of the state that has come; the receiver drops the name, "
    "so that the first component stands for all.",
    by=("component_of_note_discarded",),
)
bug(
    "vllm#52234",
    "A reference to cached blocks outlives them: no generation is compared, so that a read returns "
    "what their next owner stored.",
    by=("evicted_page_found_again",),
)

# acknowledgements that do not reach their rank

bug(
    "sglang#38961a",
    "A sender that fails clears its room, and with it whom to acknowledge, while a worker is still "
    "inside a write: the acknowledgement that is due at its end finds nobody.",
    by=("ack_target_cleared_at_failure",),
)
bug(
    "sglang#38961b",
    "A room has one entry for who waits for an acknowledgement, and the ABORT of a second decode "
    "rank overwrites the first's.",
    by=("second_abort_overwrites_the_first",),
)
bug(
    "sglang#38961c",
    "An ABORT for a room that is no longer active is acknowledged if nothing is outstanding, and "
    "else never: nobody comes back to it when the last chunk ends.",
    by=("settled_without_ack", "dropped_without_ack"),
)
