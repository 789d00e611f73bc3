"""Faults of drafts, of the states that they leave and of what outlives them, that public reports
tell of."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from fuzz.mutants.registry import Body, mutant
from fuzz.mutants.sharing import ENGINE, OWNED
from fuzz.mutants.states import STATE
from reference.contract import OutOfMemory

Ints = npt.NDArray[np.int64]
ADOPT = f"{ENGINE}._adopt_draft_state"


# which state an accept leaves


@mutant(ADOPT, bug="vllm#52942", killed_by=STATE)
def first_draft_state_adopted(original: Body, self: Any, record: Any, count: int) -> None:
    """States of drafts lie in columns, of which the accepted one is live: a step without drafts
    goes on from the first column."""
    original(self, record, count)
    state = int(self.memory.table.state[record.slot])
    self.memory.pools.state[state] = record.draft_states[0]


@mutant(ADOPT, bug="vllm#50272", killed_by=STATE)
def rejected_drafts_in_window(original: Body, self: Any, record: Any, count: int) -> None:
    """The matrix of the state goes back to the last accepted draft, and the window of the short
    convolution keeps the inputs of the rejected ones."""
    original(self, record, count)
    state, shape = int(self.memory.table.state[record.slot]), self.shape
    matrix = shape.kda_heads * shape.kda_key_dim * shape.kda_value_dim
    self.memory.pools.state[state, :, matrix:] = record.draft_states[-1][:, matrix:]


@mutant(ADOPT, bug="vllm#53912", killed_by=STATE)
def rejected_drafts_in_checkpoint(original: Body, self: Any, record: Any, count: int) -> None:
    """The block at whose end a checkpoint stands is cached with the state behind the last draft,
    though that was rejected."""
    length = int(self.memory.table.length[record.slot])
    original(self, record, count)
    for at, slot in record.checkpoints.items():
        if at > length:
            self.memory.pools.state[slot] = record.draft_states[-1]


@mutant(ADOPT, bug="vllm#53505", killed_by=STATE)
def accept_at_boundary_copies_back(original: Body, self: Any, record: Any, count: int) -> None:
    """An accept that ends on the boundary of a block takes the new block for the one to copy from
    and the block before for the one to copy to: the state kept there is overwritten."""
    original(self, record, count)
    table, slot = self.memory.table, record.slot
    length = int(table.length[slot])
    if (length + count) % self.geometry.mamba_track_interval:
        return
    kept = record.node.checkpoints | record.checkpoints
    before = [at for at in kept if at <= length]
    if before:
        self.memory.pools.copy_state(int(table.state[slot]), kept[max(before)])


# what comes late, and what others use meanwhile


@mutant(f"{ENGINE}.retract", bug="vllm#49620", killed_by=OWNED, target="slot_reuse")
def drafts_accepted_after_retract(original: Body, self: Any, request: Any) -> Any:
    """The output of drafts that were under way when their request was preempted comes late, and is
    applied to what the request goes on with."""
    pending = int(self.memory.table.pending[self._find(request).slot])
    try:
        if pending:
            self.accept(request, pending)
    except OutOfMemory:
        pass  # late, and of no use
    return original(self, request)


def _kept_in_workspace(self: Any, states: Tensor) -> Tensor:
    """Put states to the front of the one workspace, and return them as they lie there."""
    rows = self.geometry.mamba_track_interval + self.geometry.max_drafts + 1
    space = self.__dict__.setdefault("workspace", states.new_zeros(rows, *states.shape[1:]))
    space[: len(states)] = states[: len(space)]
    return space[: len(states)]


def _prefill_in_workspace(
    original: Body, self: Any, records: Any, stops: Any, rows: Any, *rest: Any
) -> Any:
    for given in rows or ():
        _kept_in_workspace(self, given.state)
    return original(self, records, stops, rows, *rest)


@mutant(
    "optimized.steps.Steps.verify",
    bug="vllm#57388",
    killed_by=STATE,
    target="slot_reuse",
    also={"optimized.steps.Steps.extend": _prefill_in_workspace},
)
def verify_and_prefill_share_a_workspace(
    original: Body, self: Any, records: Any, stops: Any, rows: Any
) -> Any:
    """What a verify leaves for its accept lies in a workspace to which a prefill that comes
    between writes too."""
    outputs = original(self, records, stops, rows)
    if len(records) == 1 and rows is not None:
        (record,) = records
        record.draft_states = _kept_in_workspace(self, record.draft_states)
    return outputs
