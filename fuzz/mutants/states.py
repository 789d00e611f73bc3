"""Faults of the KDA state: running states, checkpoints, the convolution's window, leaks."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

from fuzz.mutants.registry import Body, mutant
from fuzz.mutants.sharing import ENGINE, MEMORY, OWNED, TREE

STATE = ("provenance", "containment")


@mutant(f"{MEMORY}.admit", bug="tpu-inference#3412", killed_by=STATE)
def state_not_restored(original: Body, self: Any, request: Any, tokens: Any) -> Any:
    """A request with a hit starts from whatever its fresh state slot holds."""
    with patch.object(self.pools, "copy_state"):
        return original(self, request, tokens)


@mutant("optimized.memory.pools.Pools.copy_state", bug="vllm#50272", killed_by=STATE)
def conv_window_not_restored(original: Body, self: Any, source: int, target: int) -> None:
    """A copied state lacks the newest inputs of the short convolution."""
    window = self.state[target, :, -1].clone()
    original(self, source, target)
    self.state[target, :, -1] = window


@mutant(f"{MEMORY}.admit", bug="vllm#43990", killed_by=("numeric", "metamorphic"), payload="model")
def first_state_not_zeroed(original: Body, self: Any, request: Any, tokens: Any) -> Any:
    """A request without a hit starts from what padding's state slot holds, not from zeros."""
    record = original(self, request, tokens)
    if not self.table.length[record.slot]:
        self.pools.copy_state(0, int(self.table.state[record.slot]))
    return record


@mutant(f"{MEMORY}.admit", bug="sglang#30986", killed_by=("exact", *STATE))
def checkpoint_run_on(original: Body, self: Any, request: Any, tokens: Any) -> Any:
    """A request with a hit runs on in the checkpoint's own slot: no copy on write."""
    record = original(self, request, tokens)
    hit, state = int(self.table.length[record.slot]), self.table.state
    if hit:
        self.states.release([state[record.slot]])
        state[record.slot] = record.node.checkpoints[hit]
        self.states.retain([state[record.slot]])
    return record


@mutant(f"{MEMORY}.keep_checkpoint", bug="sglang#39342", killed_by=STATE)
def checkpoint_not_written(original: Body, self: Any, record: Any, length: int) -> None:
    """A state slot is given to the cache as a checkpoint without having been written."""


@mutant(f"{MEMORY}.share", bug="flashinfer#4896", killed_by=STATE)
def final_state_as_checkpoint(original: Body, self: Any, record: Any) -> None:
    """The state behind a prompt's last token is cached as that of its last checkpoint."""
    if record.checkpoints:
        last = record.checkpoints[max(record.checkpoints)]
        self.pools.copy_state(int(self.table.state[record.slot]), last)
    original(self, record)


@mutant(f"{MEMORY}.share", bug="vllm#54076", killed_by=STATE)
def checkpoints_one_boundary_off(original: Body, self: Any, record: Any) -> None:
    """Checkpoints are published under the boundary behind their own."""
    lengths, slots = sorted(record.checkpoints), list(record.checkpoints.values())
    record.checkpoints = dict(zip(lengths, slots[-1:] + slots[:-1], strict=True))
    original(self, record)


@mutant(f"{TREE}.split", bug="sglang#38815", killed_by=OWNED)
def split_leaves_state_on_parent(original: Body, self: Any, node: Any, depth: int) -> Any:
    """A cut leaves the lower half's checkpoints on the upper."""
    upper = original(self, node, depth)
    upper.checkpoints |= node.checkpoints
    node.checkpoints = {}
    return upper


@mutant(f"{ENGINE}._adopt_draft_state", bug="vllm#52942", killed_by=STATE)
def rejected_drafts_in_state(original: Body, self: Any, record: Any, count: int) -> None:
    """The state that an accept adopts has seen the rejected drafts as well."""
    original(self, record, len(record.draft_states))


@mutant(f"{ENGINE}._adopt_draft_state", bug="own", killed_by=STATE)
def last_checkpoint_of_accept_only(original: Body, self: Any, record: Any, count: int) -> None:
    """Of the checkpoints that an accept passes only the last is written."""
    every = record.checkpoints
    record.checkpoints = dict(sorted(every.items())[-1:])
    original(self, record, count)
    record.checkpoints = every


@mutant("optimized.steps.Steps.verify", bug="own", killed_by=STATE)
def draft_states_not_copied(original: Body, self: Any, records: Any, stops: Any, rows: Any) -> Any:
    """The states of drafts stay in the caller's tensors, which the caller uses again."""
    outputs = original(self, records, stops, rows)
    for record, given in zip(records, rows or (), strict=rows is not None):
        record.draft_states = given.state
    return outputs


@mutant(f"{ENGINE}.verify", bug="own", killed_by=OWNED)
def drafts_counted_by_first(original: Body, self: Any, drafts: Any) -> Any:
    """All requests of a verify are taken to have as many drafts as the first."""
    outputs = original(self, drafts)
    slots = [self._find(draft.request).slot for draft in drafts]
    self.memory.table.pending[slots] = len(drafts[0].tokens)
    return outputs


@mutant(f"{ENGINE}.retract", bug="sglang#37103", killed_by=OWNED)
def state_left_at_retract(original: Body, self: Any, request: Any) -> Any:
    """A retracted request keeps its state slot for ever."""
    slot = self._find(request).slot
    self.memory.states.retain([self.memory.table.state[slot]])
    return original(self, request)


@mutant(f"{TREE}._remove", bug="own", killed_by=OWNED)
def evicted_checkpoint_not_freed(original: Body, self: Any, leaf: Any) -> Any:
    """Eviction frees a prefix's pages and keeps its state slots."""
    self.states.retain(list(leaf.checkpoints.values()))
    return original(self, leaf)


@mutant(
    f"{ENGINE}.abort",
    bug="TensorRT-LLM#12314",
    killed_by=(*OWNED, "containment"),
    target="slot_reuse",
)
def ring_row_left_at_abort(original: Body, self: Any, request: Any) -> None:
    """An aborted request keeps its row of the tail ring for ever."""
    self.memory.rings.retain([self._find(request).slot])
    original(self, request)
