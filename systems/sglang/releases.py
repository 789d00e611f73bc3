"""In what SGLang's releases differ, as far as the adapters must know: one row a release."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True, kw_only=True)
class Differences:
    """What holds for one release.

    Fields:
        logical_pages: allocator, prefix tree and index pages are of kpool physical pages; before,
            of one, which is #41494.
        locks: a request's lock on the tree is an object of its own, its chunk ends at a number of
            its own, and a prompt is cached by a checkpoint; before, by other names.
        head_gates: an indexer projects the weights of its heads together with query and key;
            before, by themselves.
        statuses: a prefill rank tells of the end of a transfer in a message of its own; before, a
            notification of NIXL's came with each write.
        host_receive_off: the threshold from which a decode rank takes nothing into host memory.
    """

    logical_pages: bool
    locks: bool
    head_gates: bool = True
    statuses: bool = False
    host_receive_off: int = 1


_PHYSICAL = Differences(logical_pages=False, locks=False, host_receive_off=0)
_LOGICAL = Differences(logical_pages=True, locks=True)

RELEASES: dict[str, Differences] = {
    "0.5.20": replace(_PHYSICAL, head_gates=False),
    "0.5.21": _PHYSICAL,
    "0.5.22": _LOGICAL,
    "0.5.23": replace(_LOGICAL, statuses=True),
}
"""By version, the oldest first."""
