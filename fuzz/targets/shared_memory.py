"""The same transfers through memory that P has mapped, between ends that may be hostile.

KV rows go through shared memory, in copies that the tape puts in order with the work of the device
that stores their source; all else goes over the simulated network.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from fuzz.tape import Tape
from fuzz.targets import Target
from fuzz.targets.transfer import WEIGHTS, TransferSetup, draw_setup
from reference.protocol import Side


class Hostility(StrEnum):
    """What one end has against the other, or a third against both."""

    NONE = "all is well"
    P_OPTS_OUT = "P does not opt in"
    D_OPTS_OUT = "D does not opt in"
    IMPOSTOR = "D hands out other memory than it announced"
    INTRUDER = "a visitor has no nonce"
    MISROUTED = "P is given another rank's hello first"


class Forgery(StrEnum):
    """What becomes of D's first offer on its way."""

    NONE = "as it was"
    OUTSIDE = "with a last page behind the pool"
    TWICE = "with another page of its last piece for the last"


SHARED_BY = (Hostility.NONE, Hostility.INTRUDER, Hostility.MISROUTED)
"""Those in spite of which memory is shared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedSetup:
    """What is added to a transfer.

    Fields:
        device_faults: how many copies may fail.
    """

    hostility: Hostility
    forgery: Forgery
    device_faults: int

    @property
    def is_shared(self) -> bool:
        """Whether the ends must agree to share memory."""
        return self.hostility in SHARED_BY

    @property
    def opted_in(self) -> frozenset[Side]:
        out = {Hostility.P_OPTS_OUT: Side.PREFILL, Hostility.D_OPTS_OUT: Side.DECODE}
        return frozenset(Side) - {out.get(self.hostility)}

    def __str__(self) -> str:
        return (
            f"shared memory, {self.hostility.value}, D's first offer comes {self.forgery.value}, "
            f"{self.device_faults} copies may fail"
        )


SHARED_MEMORY = Target(
    name="shared_memory",
    weights={**WEIGHTS, "copy": 6, "produce": 1.5, "restart": 1.5},
    required=frozenset(
        {
            "aborted_with_copy_waiting",
            "copy_failed",
            "copy_of_former_life",
            "copy_to_former_life",
            "copy_waited_for_event",
            "fell_back_live",
            "forged",
            "hisparse_live",
            "intruded",
            "live",
            "misrouted",
            "page_reused",
            "shared_live",
            "two_ranks_live",
        }
    ),
    operations=60,
)


def draw_shared_setup(tape: Tape) -> TransferSetup:
    """Read a setup off the tape, as `fuzz.targets.transfer.draw_setup`; both ends have as many
    ranks, or they would not share memory."""
    setup = draw_setup(tape, ranks=((1, 1), (2, 2)))
    with tape.span("setup"):
        hostility = tuple(Hostility)[tape.choose((8, 1, 1, 1, 1, 2))]
        forgery = tuple(Forgery)[tape.choose((8, 1, 1))]
        device_faults = tape.choose((4, 1))
    if setup.wiring.ranks[Side.DECODE] == 1 and hostility is Hostility.MISROUTED:
        hostility = Hostility.NONE
    if hostility not in SHARED_BY:
        forgery, device_faults = Forgery.NONE, 0
    shared = SharedSetup(hostility=hostility, forgery=forgery, device_faults=device_faults)
    return replace(setup, shared=shared)
