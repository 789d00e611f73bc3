"""What the tests do with SGLang's HiSparse; each run is in the process of one release.

`python -m oracle_tests.sglang_hot_cases RELEASE FUNCTION [ARGUMENTS]` prints what that returns, as
JSON.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import Counter
from typing import Any

import torch

from reference.hisparse import HotBuffer, judge_backup
from systems.sglang.hisparse import LAYERS, HotRequests
from systems.sglang.hisparse_kernel import HotRows, Kernel, kernel_of
from systems.sglang.loader import load
from systems.sglang.wheels import unpacked

TOPK, SIZE, LONGEST = 16, 64, 400
STEPS = 40


def on(release: str, function: str, *arguments: str) -> dict[str, Any]:
    """What a function of this module returns, with requests on that release."""
    command = [sys.executable, "-m", __name__, release, function, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return dict(json.loads(done.stdout.splitlines()[-1]))


# The kernel alone.


def selected(draw: random.Random, length: int, width: int) -> list[int]:
    """Distinct positions, the newest among them, skewed to the first ones."""
    rest: set[int] = set()
    while len(rest) < width - 1:
        rest.add(int((length - 1) * draw.random() ** 2))
    row = [*rest, length - 1]
    draw.shuffle(row)
    return row


def differences(kernel: Kernel, seed: int, change: Any = None, steps: int = 100) -> list[str]:
    """Where the kernel first departs from the reference, for selections that `change` changes;
    and how much it had to do before."""
    draw = random.Random(seed)
    theirs, ours = HotRows(kernel, LONGEST), HotBuffer(kernel.size)
    theirs.admit(kernel.size + 9)
    ours.admit(kernel.size + 9)
    for step in range(steps):
        length = kernel.size + 10 + step
        row = selected(draw, length, kernel.topk)
        if change is not None:
            change(row)
        found, should = theirs.swap_in(row, length), ours.swap_in(row, length, range(length))
        pairs = {
            "slots": (found.slots, should.slots),
            "misses": (found.misses, should.misses),
            "tags": (theirs.tags, ours.tags),
            "LRU": (theirs.lru, ours.lru),
        }
        if wrong := [f"{name}: {a}, not {b}" for name, (a, b) in pairs.items() if a != b]:
            return wrong
    return []


# The coordinator.


def plant(it: HotRequests, fault: str) -> None:
    """A fault, by name; none for the empty one."""
    coordinator = it.coordinator
    if fault == "no wait for the backup":
        coordinator.wait_for_pending_backup = lambda: None
    elif fault == "no backup":
        coordinator._eager_backup_previous_token = lambda *_: None
    elif fault == "tags outlive their request":
        finish = coordinator.request_finished

        def finished(request: Any) -> None:
            tags = coordinator.req_device_buffer_tokens.clone()
            order = coordinator.lru_slots.clone()
            finish(request)
            coordinator.req_device_buffer_tokens.copy_(tags)
            coordinator.lru_slots.copy_(order)

        coordinator.request_finished = finished
    elif fault == "rows are kept":
        it.allocator.free_hisparse_indices = lambda rows: None
    else:
        assert fault == "", fault


class Life:
    """Requests that come, decode and go, each beside the reference's hot buffer."""

    def __init__(self, it: HotRequests) -> None:
        self.it, self.draw = it, random.Random(7)
        self.buffers: dict[int, list[HotBuffer]] = {}
        self.wrong: list[str] = []
        self.events: Counter[str] = Counter()

    def admit(self, length: int, *, direct: bool = False) -> int:
        slot = self.it.admit(length, direct=direct)
        self.events["a slot is used again"] += slot in self.buffers
        self.buffers[slot] = [HotBuffer(SIZE) for _ in range(LAYERS)]
        for buffer in self.buffers[slot]:
            # SGLang preloads no row of a long prompt that P sent
            buffer.admit(0 if direct and length > SIZE else length)
        return slot

    def step(self, slots: list[int]) -> None:
        """Decode a batch, and compare cells, rows, tags, LRU order and host rows."""
        rows = {s: selected(self.draw, self.it.lengths[s] + 1, TOPK) for s in slots}
        answers = self.it.decode(rows)
        for slot in slots:
            for layer in range(LAYERS):
                self._compare(slot, layer, rows[slot], answers[slot][layer])

    def _compare(self, slot: int, layer: int, row: list[int], cells: list[int]) -> None:
        it, length, buffer = self.it, self.it.lengths[slot], self.buffers[slot][layer]
        truth = [tuple(r) for r in it.truth(slot, length)[layer].tolist()]
        where = f"request {slot}, layer {layer}, length {length}"
        for position, cell in zip(row, cells, strict=True):
            if cell < 0 or tuple(it.row(layer, cell).tolist()) != truth[position]:
                self.wrong.append(f"{where}: cell {cell} should hold position {position}")
        buffer.grow(length)
        plan = buffer.swap_in(row, length, range(length))
        self.events["a miss"] += len(plan.misses)
        self.events["a short step"] += length <= SIZE
        self.events["a first long step"] += length == SIZE + 1
        if length > SIZE:
            tags = it.coordinator.req_device_buffer_tokens[layer, slot, :SIZE].tolist()
            order = it.coordinator.lru_slots[layer, slot].tolist()
            if (tags, order) != (buffer.tags, buffer.lru):
                self.wrong.append(f"{where}: tags or LRU order are not the reference's")
        if length % 8:
            return
        host = {p: tuple(r.tolist()) for p, r in it.host_rows(slot, layer).items()}
        self.wrong += [f"{where}: {sentence}" for sentence in judge_backup(host, truth)]


def live(it: HotRequests, fault: str = "") -> dict[str, Any]:
    """Three kinds of prompts, decoded together; then all end, and others take their slots.  Before
    them one is taken back while its prompt is copied."""
    before, life = it.free(), Life(it)
    it.retract(it.admit(100, wait=False))
    if it.free() != before:
        return {"wrong": ["a prompt that was taken back keeps rows"], "events": {}, "conserved": 0}
    for turn in range(2):
        slots = [life.admit(40 + turn), life.admit(150), life.admit(100, direct=True)]
        if turn == 0:
            plant(it, fault)
        for _ in range(STEPS if turn == 0 else 5):
            life.step(slots)
            if life.wrong:
                return {"wrong": life.wrong, "events": life.events, "conserved": False}
        for slot, end in zip(slots, (it.finish, it.retract, it.finish), strict=True):
            end(slot)
    return {"wrong": life.wrong, "events": life.events, "conserved": it.free() == before}


def tail(it: HotRequests) -> dict[str, Any]:
    """A selection as a k-pool indexer of 4 gives it: TOPK positions of closed groups, then those
    behind the last closed group, the newest among them."""
    slot = it.admit(150)
    groups = [group * 4 + offset for group in range(TOPK // 4) for offset in range(4)]
    open_group = [148, 149, 150]
    [cells] = {tuple(cells) for cells in it.decode({slot: groups + open_group})[slot]}
    held = {tuple(row.tolist()): p for p, row in enumerate(it.truth(slot, 151)[0])}
    return {
        "asked": groups + open_group,
        "given": [held[tuple(it.row(0, cell).tolist())] for cell in cells],
    }


def main(release: str, function: str, *arguments: str) -> None:
    root = unpacked(release)
    load(root)
    kernel = kernel_of(root, topk=TOPK, size=SIZE)
    it = HotRequests(kernel, pages=24, requests=3, longest=LONGEST)
    print(json.dumps(globals()[function](it, *arguments)))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
