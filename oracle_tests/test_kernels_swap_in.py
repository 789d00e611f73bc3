"""HiSparse's swap-in: every backend against the reference hot buffer, in every cell and byte."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from optimized.kernels.backends import BackendError
from optimized.kernels.swap_in import SwapPlan, backup, replay, swap_in
from oracle_tests.conftest import LAUNCHES
from oracle_tests.kernel_cases import POISON, differing_rows, poisoned
from reference.hisparse import HotBuffer, SwapIn

ROW_BYTES = 16
WAYS = [*LAUNCHES, ("tilelang", "cpu")]
EVERY_LAUNCH = pytest.mark.parametrize("launch", WAYS, ids="-".join)
FAR = torch.tensor([-(2**63), -7, 2**31, 2**62, 2**63 - 1])
"""Positions that no request has."""


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Fresh ids are -9, which no output holds, so that a cell left unwritten is seen."""
    fresh = torch.empty_like, torch.Tensor.new_empty

    def poison(tensor):
        return tensor.fill_(-9) if tensor.dtype in (torch.int32, torch.int64) else tensor

    def empty_like(*args, **options):
        return poison(fresh[0](*args, **options))

    def new_empty(*args, **options):
        return poison(fresh[1](*args, **options))

    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)


@dataclass(kw_only=True)
class State:
    """What the kernels read and write, for a batch of requests and one layer.

    Rows of the device have even ids and rows of the host odd ones, so a wrong kind of id names a
    poisoned row.  `truth` [batch, positions, row_bytes] holds what each position must be.
    """

    length: Tensor
    tags: Tensor
    lru: Tensor
    slot_rows: Tensor
    host_rows: Tensor
    host_pool: Tensor
    device_pool: Tensor
    truth: Tensor

    def tables(self) -> tuple[Tensor, ...]:
        return self.length, self.tags, self.lru, self.slot_rows, self.host_rows

    def pools(self) -> tuple[Tensor, Tensor]:
        return self.host_pool, self.device_pool

    def clone(self, requests: slice | Tensor = slice(None)) -> State:
        """A copy that holds these requests alone, and the whole pools."""
        parts = {name: x.clone() for name, x in vars(self).items()}
        own = ("length", "tags", "lru", "slot_rows", "host_rows", "truth")
        return State(**parts | {name: parts[name][requests].clone() for name in own})


def admitted(lengths, *, size, positions, row_bytes=ROW_BYTES) -> tuple[State, list[HotBuffer]]:
    """Requests just admitted, and the reference's buffers for them."""
    batch = len(lengths)
    device = (torch.randperm(batch * (size + 1)) * 2).view(batch, size + 1)
    host = (torch.randperm(batch * positions) * 2 + 1).view(batch, positions)
    state = State(
        length=torch.tensor(lengths),
        tags=torch.full((batch, size), -1),
        lru=torch.full((batch, size), -1),
        slot_rows=device,
        host_rows=host,
        host_pool=poisoned(2 * batch * positions, row_bytes),
        device_pool=poisoned(2 * batch * (size + 1), row_bytes),
        truth=torch.randint(0, POISON, (batch, positions, row_bytes), dtype=torch.uint8),
    )
    buffers = [HotBuffer(size) for _ in lengths]
    for b, (length, buffer) in enumerate(zip(lengths, buffers, strict=True)):
        buffer.admit(length)
        state.tags[b], state.lru[b] = torch.tensor(buffer.tags), torch.tensor(buffer.lru)
        for position, slot in buffer.resident(length).items():
            state.device_pool[device[b, slot]] = state.truth[b, position]
        state.host_pool[host[b, : length - 1]] = state.truth[b, : length - 1]
    return state, buffers


def selected(kind, state, width, size) -> Tensor:
    """[batch, width] int64: the newest position, and others as `kind` says, shuffled."""
    rows = []
    for length, tags in zip(state.length.tolist(), state.tags.tolist(), strict=True):
        newest, count = length - 1, min(width - 1, length - 1)
        if kind == "skewed":
            drawn = (newest * torch.rand(count) ** 3).long()
        elif kind == "repeated":
            drawn = torch.arange(count)
        elif kind == "new":
            drawn = torch.tensor(sorted(range(newest), key=lambda p: (p in tags, -p))[:count])
        elif kind == "duplicates":
            drawn = torch.randint(0, newest, (3,))[torch.randint(0, 3, (count,))]
        else:
            drawn = torch.randint(-3, length + 4, (count,))
            drawn[torch.rand(count) < 0.2] = FAR[torch.randint(0, len(FAR), ())]
        row = torch.full((width,), -1)
        row[: count + 1] = torch.cat((drawn, torch.tensor([newest])))
        rows.append(row[torch.randperm(width)])
    return torch.stack(rows)


def run(launch, selection, state) -> SwapPlan:
    """Launch on the device of `launch`; the state is updated, the plan returned, on the CPU."""
    backend, device = launch
    tables = [x.to(device) for x in state.tables()]
    host, hot = state.host_pool, state.device_pool.to(device)
    if device == "cuda":
        host = host.pin_memory()
    plan = swap_in(selection.to(device), *tables, host, hot, backend=backend)
    for table, moved in zip(state.tables(), tables, strict=True):
        table.copy_(moved)
    state.device_pool.copy_(hot)
    assert torch.equal(host, state.host_pool), "a swap-in wrote to the host"
    return SwapPlan(**{name: getattr(plan, name).cpu() for name in SwapPlan.__slots__})


def expected(selection, state, buffers) -> tuple[State, SwapPlan, list[SwapIn]]:
    """State and plan as the reference leaves them; its buffers go on."""
    after = state.clone()
    rows, positions, slots = (torch.full_like(selection, -1) for _ in range(3))
    results = []
    for b, (buffer, length) in enumerate(zip(buffers, state.length.tolist(), strict=True)):
        present = {p for p, row in enumerate(state.host_rows[b].tolist()) if row >= 0}
        result = buffer.swap_in(selection[b].tolist(), length, present)
        results.append(result)
        after.tags[b], after.lru[b] = torch.tensor(buffer.tags), torch.tensor(buffer.lru)
        for column, slot in enumerate(result.slots):
            rows[b, column] = state.slot_rows[b, slot] if slot >= 0 else -1
        for i, (position, slot) in enumerate(result.misses):
            positions[b, i], slots[b, i] = position, slot
            after.device_pool[state.slot_rows[b, slot]] = state.truth[b, position]
    counts = (torch.tensor([len(getattr(r, n)) for r in results]) for n in ("misses", "absent"))
    misses, absent = counts
    plan = SwapPlan(
        rows=rows, misses=misses, absent=absent, miss_position=positions, miss_slot=slots
    )
    return after, plan, results


def differences(state, plan, wanted_state, wanted_plan) -> set[str]:
    """Names of the tensors, whole pools among them, that are not as wanted in every element."""
    pairs = {n: (getattr(plan, n), getattr(wanted_plan, n)) for n in SwapPlan.__slots__}
    pairs |= {n: (x, getattr(wanted_state, n)) for n, x in vars(state).items()}
    return {name for name, (ours, theirs) in pairs.items() if not torch.equal(ours, theirs)}


def step_forward(launch, state, buffers) -> None:
    """One decode step up to the swap-in: back the newest position up, then append one."""
    backend, device = launch
    size = state.tags.shape[1]
    batch, newest = torch.arange(len(buffers)), state.length - 1
    sources = state.slot_rows[batch, newest.clamp_max(size)].to(device)
    targets = state.host_rows[batch, newest].to(device)
    host = state.host_pool.pin_memory() if device == "cuda" else state.host_pool
    backup(state.device_pool.to(device), host, sources, targets, backend=backend)
    if device == "cuda":
        torch.cuda.synchronize()
        state.host_pool.copy_(host)
    state.length += 1
    for b, (buffer, length) in enumerate(zip(buffers, state.length.tolist(), strict=True)):
        slot = buffer.grow(length)
        if slot < size:
            state.tags[b, slot] = length - 1
        state.device_pool[state.slot_rows[b, slot]] = state.truth[b, length - 1]


@EVERY_LAUNCH
@pytest.mark.parametrize(("size", "width"), [(10, 11), (64, 35)], ids=["least", "roomy"])
@pytest.mark.parametrize("kind", ["skewed", "repeated", "new", "duplicates", "void"])
def test_stream_equals_reference(launch, kind, size, width):
    """Decode steps of short and long requests in one batch, two of them growing past the buffer,
    which in the first case is as small as topk 8 and kpool 4 allow."""
    torch.manual_seed(size)
    steps, lengths = 5, [3, size - 2, size, size + 1, 3 * size]
    state, buffers = admitted(lengths, size=size, positions=3 * size + steps)
    misses, cells = 0, 0
    for _ in range(steps):
        step_forward(launch, state, buffers)
        selection = selected(kind, state, width, size)
        wanted_state, wanted_plan, _ = expected(selection, state, buffers)
        plan = run(launch, selection, state)
        assert differences(state, plan, wanted_state, wanted_plan) == set()
        known = (selection >= 0) & (selection < state.length[:, None])
        request, column = known.nonzero(as_tuple=True)
        read = state.device_pool[plan.rows[request, column]]
        assert differing_rows(read, state.truth[request, selection[request, column]]) == []
        misses, cells = misses + int(plan.misses.sum()), cells + len(request)
    assert bool(misses) == (kind != "repeated")
    assert misses < cells


@EVERY_LAUNCH
def test_absent_rows_are_reported_and_not_read(launch):
    """A position without a host row takes no slot, is counted once, and leaves the others be."""
    torch.manual_seed(0)
    size, width = 10, 11
    state, buffers = admitted([40, 8, 25], size=size, positions=40)
    state.host_rows[torch.rand(state.host_rows.shape) < 0.4] = -1
    lost = 0
    for _ in range(4):
        selection = selected("new", state, width, size)
        selection[:, :2] = selection[:, 2:4]
        wanted_state, wanted_plan, _ = expected(selection, state, buffers)
        plan = run(launch, selection, state)
        assert differences(state, plan, wanted_state, wanted_plan) == set()
        lost += int(plan.absent.sum())
    assert lost > 0


@EVERY_LAUNCH
def test_positions_beyond_the_slots_are_absent(launch):
    """No legal geometry selects so many; if one did, nothing outside the buffer is touched."""
    torch.manual_seed(0)
    state, _ = admitted([30], size=4, positions=30)
    before = state.clone()
    plan = run(launch, torch.tensor([[2, 20, 11, 12, 20, 13, 14, 29, 2]]), state)
    own = state.slot_rows[0]
    rows = own[[2, 0, 1, 3, 0, -1, -1, 4, 2]]
    rows[5:7] = -1
    assert plan.rows.tolist() == [rows.tolist()]
    assert (plan.misses.tolist(), plan.absent.tolist()) == ([3], [2])
    assert state.tags.tolist() == [[20, 11, 2, 12]]
    assert state.lru.tolist() == [[0, 1, 3, 2]]
    changed = differing_rows(state.device_pool, before.device_pool)
    assert changed == sorted(own[[0, 1, 3]].tolist())


@EVERY_LAUNCH
@pytest.mark.parametrize("row_bytes", [7, 16, 20, 528, 1024])
def test_any_row_bytes(launch, row_bytes):
    torch.manual_seed(row_bytes)
    state, buffers = admitted([30, 25], size=10, positions=30, row_bytes=row_bytes)
    selection = selected("new", state, 11, 10)
    wanted_state, wanted_plan, _ = expected(selection, state, buffers)
    plan = run(launch, selection, state)
    assert differences(state, plan, wanted_state, wanted_plan) == set()
    assert plan.misses.min() > 0


@EVERY_LAUNCH
def test_real_sizes(launch):
    """Topk 2048 and kpool 4, a buffer of 4096: a short and two long requests."""
    torch.manual_seed(0)
    state, buffers = admitted([4096, 4097, 9000], size=4096, positions=9000)
    for _ in range(2):
        selection = selected("skewed", state, 2051, 4096)
        wanted_state, wanted_plan, _ = expected(selection, state, buffers)
        plan = run(launch, selection, state)
        assert differences(state, plan, wanted_state, wanted_plan) == set()
    assert plan.misses[-1] > 100


@EVERY_LAUNCH
def test_batch_changes_nothing(launch):
    """A request's cells, tags, order and rows are the same alone, and in another place."""
    torch.manual_seed(0)
    state, _ = admitted([40, 10, 33, 11], size=10, positions=40)
    selection = selected("skewed", state, 11, 10)
    together, apart = state.clone(), state.clone()
    plan = run(launch, selection, together)
    for b in range(4):
        alone = state.clone(slice(b, b + 1))
        part = run(launch, selection[b : b + 1], alone)
        for name in SwapPlan.__slots__:
            assert torch.equal(getattr(part, name)[0], getattr(plan, name)[b]), name
        apart.tags[b], apart.lru[b] = alone.tags[0], alone.lru[0]
        own = state.slot_rows[b]
        apart.device_pool[own] = alone.device_pool[own]
    assert differences(apart, plan, together, plan) == set()
    order = torch.tensor([2, 0, 3, 1])
    moved = state.clone(order)
    replaced = run(launch, selection[order], moved)
    assert torch.equal(replaced.rows, plan.rows[order])
    assert torch.equal(moved.lru, together.lru[order])
    assert torch.equal(moved.device_pool, together.device_pool)


@EVERY_LAUNCH
def test_follower_replays_the_leader(launch):
    """Another layer's bytes land in the same rows; nothing else of it changes."""
    backend, device = launch
    torch.manual_seed(0)
    state, buffers = admitted([30, 10, 22], size=10, positions=30)
    follower = replace(
        state.clone(), truth=state.truth ^ 0x55, host_pool=poisoned(*state.host_pool.shape)
    )
    follower.host_pool[follower.host_rows] = follower.truth
    selection = selected("new", state, 11, 10)
    wanted, _, results = expected(selection, follower, buffers)
    plan = run(launch, selection, state)
    moved = SwapPlan(**{name: getattr(plan, name).to(device) for name in SwapPlan.__slots__})
    hot = follower.device_pool.to(device)
    host = follower.host_pool.pin_memory() if device == "cuda" else follower.host_pool
    tables = (follower.slot_rows.to(device), follower.host_rows.to(device))
    replay(moved, *tables, host, hot, backend=backend)
    assert sum(len(r.misses) for r in results) > 0
    assert differing_rows(hot, wanted.device_pool) == []
    assert differing_rows(state.device_pool, wanted.device_pool) != []


@EVERY_LAUNCH
@pytest.mark.parametrize("row_bytes", [7, 16, 1024])
def test_backup_skips_pairs_without_a_row(launch, row_bytes):
    """Row 0 is a row like any other, -1 is none, and -1 is never the last row."""
    backend, device = launch
    torch.manual_seed(0)
    pool = torch.randint(0, POISON, (40, row_bytes), dtype=torch.uint8)
    sources, targets = torch.tensor([7, 0, -1, 39, 5, -1]), torch.tensor([3, 21, 9, 0, -1, -1])
    wanted = poisoned(23, row_bytes)
    wanted[[3, 21, 0]] = pool[[7, 0, 39]]
    host = poisoned(23, row_bytes)
    host = host.pin_memory() if device == "cuda" else host
    moved = pool.to(device), host, sources.to(device), targets.to(device)
    backup(*moved, backend=backend)
    if device == "cuda":
        torch.cuda.synchronize()
    assert differing_rows(host, wanted) == []
    assert torch.equal(moved[0].cpu(), pool)


@EVERY_LAUNCH
def test_rows_beyond_two_gigabytes(launch):
    backend, device = launch
    row_bytes, last = 1024, 2**31 // 1024 + 1
    far = torch.empty(last + 1, row_bytes, dtype=torch.uint8, device=device)
    near = torch.randint(0, 256, (3, row_bytes), dtype=torch.uint8, device=device)
    there, back = torch.tensor([2, 0], device=device), torch.tensor([last, 5], device=device)
    backup(near, far, there, back, backend=backend)
    read = torch.zeros_like(near)
    backup(far, read, back, there, backend=backend)
    assert torch.equal(far[last], near[2])
    assert torch.equal(read[there], near[there])


FAULTS = {
    "most recent evicted": (lambda s: s.lru.copy_(s.lru.flip(1)), {"tags", "device_pool"}),
    "tags of a neighbour": (lambda s: s.tags.copy_(s.tags.roll(1, 0)), {"rows", "misses"}),
    "newest one short": (lambda s: s.length.sub_(1), {"rows"}),
    "host rows of a neighbour": (
        lambda s: s.host_rows.copy_(s.host_rows.roll(1, 0)),
        {"device_pool"},
    ),
    "slots of a neighbour": (
        lambda s: s.slot_rows.copy_(s.slot_rows.roll(1, 0)),
        {"rows", "device_pool"},
    ),
}
"""What is done to a state, and what must differ after the swap-in in consequence."""


@EVERY_LAUNCH
@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_noticed(launch, fault):
    """The comparison sees a state that is wrong before the swap-in, and in its consequences."""
    torch.manual_seed(0)
    state, buffers = admitted([40, 31, 23], size=10, positions=40)
    for kind in ("skewed", "new"):
        selection = selected(kind, state, 11, 10)
        wanted, wanted_plan, _ = expected(selection, state, buffers)
        assert differences(state, run(launch, selection, state), wanted, wanted_plan) == set()
    selection = selected("new", state, 11, 10)
    wanted, wanted_plan, _ = expected(selection, state, buffers)
    tamper, seen_in = FAULTS[fault]
    tamper(state)
    plan = run(launch, selection, state)
    assert differences(state, plan, wanted, wanted_plan) >= seen_in


def test_tilelang_without_a_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr("optimized.kernels.swap_in_tilelang.get_cplus_compiler", lambda: None)
    state, _ = admitted([30], size=10, positions=30)
    with pytest.raises(BackendError, match=r"apt-get install g\+\+"):
        run(("tilelang", "cpu"), selected("new", state, 11, 10), state)
