"""KDA over whole prompts: every backend against the reference recurrence, within a bound from
counted roundings; parts against the whole; states at checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from optimized.kernels.backends import BackendError
from optimized.kernels.kda_decode import kda_decode
from optimized.kernels.kda_prefill import kda_prefill, workspace
from oracle_tests import kda_bound
from oracle_tests.conftest import CUDA
from oracle_tests.kernel_cases import differing_rows, poisoned
from reference.kda import Steps, recur

SLOTS = (3, 9, 5, 1, 7)
POOL = 12
PASSES = ((1, 10, 16, 33, 0), (0, 7, 15, 37, 5))
"""Tokens of each request in each pass: one alone, none, and one under and over a chunk."""
SIZES = pytest.mark.parametrize(
    ("heads", "key", "value", "chunk"),
    [(2, 16, 32, 16), (1, 12, 40, 32), (1, 32, 16, 64)],
    ids=lambda n: str(n),
)


class Run(NamedTuple):
    pool: Tensor  # [POOL, heads * key * value + 3]
    states: Tensor  # [POOL, heads, key, value]
    outs: list[Tensor]  # of each request


def draw(kind, heads, key, value, lengths):
    """The inputs of each request [length, heads, ...] float32."""
    torch.manual_seed(heads * key)
    requests = []
    for n in lengths:
        q, k = normalize(torch.randn(2, n, heads, key), dim=-1)
        v, beta = torch.randn(n, heads, value), torch.rand(n, heads)
        a = torch.rand(n, heads, key) ** 0.3
        if kind == "extreme":
            # every decay between none and all, and keys that come back
            choice = torch.tensor([0.0, 1e-30, 1e-9, 1e-4, 0.5, 1 - 2**-20, 1.0, 1.0])
            a = choice[torch.randint(len(choice), a.shape)]
            beta = beta.round()
            k[n // 3 :] = k[n // 3 : n // 3 + 1]
        requests.append(Steps(q=q * key**-0.5, k=k, v=v, a=a, beta=beta))
    return requests


def run(
    launch,
    requests,
    *,
    chunk,
    passes=PASSES,
    precision="tf32x3",
    slots=SLOTS,
    checkpoints=None,
    interval=0,
):
    """All passes over the requests, one behind another in memory that is poisoned elsewhere."""
    backend, device = launch
    heads, key, value = *requests[0].k.shape[1:], requests[0].v.shape[-1]
    pool = poisoned(POOL, heads * key * value + 3, dtype=torch.float32)
    slots = torch.tensor(slots)
    pool[slots, :-3] = 0.0
    pool = pool.to(device)
    state = pool[:, :-3].unflatten(1, (heads, key, value))
    memory = workspace(
        tokens=200,
        sequences=len(slots),
        heads=heads,
        key=key,
        value=value,
        chunk=chunk,
        precision=precision,
        device=device,
    )
    for part in (memory.w, memory.u, memory.k, memory.q, memory.p, memory.d):
        part.fill_(torch.nan)
    done, outs = [0] * len(requests), [[] for _ in requests]
    for counts in passes:
        parts = [
            Steps(*(x[first : first + n] for x in request))
            for request, first, n in zip(requests, done, counts, strict=True)
        ]
        # behind the last token are rows that are nobody's
        inputs = [
            torch.cat((*rows, poisoned(3, *rows[0].shape[1:], dtype=rows[0].dtype)))
            for rows in zip(*parts, strict=True)
        ]
        out = poisoned(sum(counts) + 3, heads, value, dtype=torch.float32).to(device)
        kda_prefill(
            state,
            slots.to(device),
            *(x.to(device) for x in inputs),
            torch.tensor([0, *counts]).cumsum(0).to(device),
            torch.tensor(done).to(device),
            out=out,
            memory=memory,
            checkpoints=None if checkpoints is None else checkpoints.to(device),
            interval=interval,
            backend=backend,
        )
        assert out[-3:].isnan().all()
        for request, rows in enumerate(out[:-3].cpu().split(counts)):
            outs[request].append(rows)
        done = [first + n for first, n in zip(done, counts, strict=True)]
    pool = pool.cpu()
    states = pool[:, :-3].unflatten(1, (heads, key, value))
    return Run(pool=pool, states=states, outs=[torch.cat(rows) for rows in outs])


def lengths_of(passes):
    return [sum(counts) for counts in zip(*passes, strict=True)]


def ratio(error, bound):
    """The largest error / bound; none where both are 0."""
    quotient = torch.where(error == 0, 0.0, error / bound)
    return float(quotient.nan_to_num(nan=torch.inf).max())


def excess(requests, result, *, chunk, precision="tf32x3", native=False, passes=PASSES):
    """By how many times its bound any output or last state is off, at worst."""
    arithmetic, worst = kda_bound.arithmetic(precision, native=native), 0.0
    for request, (inputs, slot) in enumerate(zip(requests, SLOTS, strict=True)):
        steps = Steps(*(x.double() for x in inputs))
        borders = [sum(counts[request] for counts in passes[:i]) for i in range(len(passes) + 1)]
        ends = {0, *(stop for _, stop in kda_bound.pieces(borders, chunk))}
        exact, states = recur(steps, state_at=ends)
        bound, drifts = kda_bound.bounds(steps, states, borders, chunk, arithmetic)
        error = (result.outs[request].double() - exact).abs()
        worst = max(worst, ratio(error, bound))
        off = (result.states[slot].double() - states[borders[-1]]).norm(dim=1)
        worst = max(worst, ratio(off, drifts[borders[-1]]))
    return worst


@pytest.mark.parametrize("kind", ["usual", "extreme"])
@SIZES
def test_within_bound_of_reference(launch, kind, heads, key, value, chunk):
    requests = draw(kind, heads, key, value, lengths_of(PASSES))
    result = run(launch, requests, chunk=chunk)
    native = launch == ("triton", "cuda")
    assert excess(requests, result, chunk=chunk, native=native) <= 1.0


@pytest.mark.parametrize("change", ["decay of the row before", "key of the row before", "slots"])
def test_faults_leave_the_bound(launch, change):
    requests = draw("usual", 2, 16, 32, lengths_of(PASSES))
    result = run(launch, requests, chunk=16)
    if change == "slots":
        result.states[list(SLOTS)] = result.states[list(SLOTS[1:] + SLOTS[:1])]
    elif change == "key of the row before":
        requests = [request._replace(k=request.k.roll(1, dims=0)) for request in requests]
    else:
        requests = [request._replace(a=request.a.roll(1, dims=0)) for request in requests]
    assert excess(requests, result, chunk=16) > 10.0


def test_other_slots_are_untouched(launch):
    requests = draw("usual", 2, 16, 32, lengths_of(PASSES))
    pool = run(launch, requests, chunk=16).pool
    pool[list(SLOTS), :-3] = poisoned(len(SLOTS), pool.shape[1] - 3, dtype=torch.float32)
    assert differing_rows(pool, poisoned(*pool.shape, dtype=torch.float32)) == []


def test_parts_that_end_between_chunks_give_the_bits_of_the_whole(launch):
    requests = draw("usual", 2, 16, 32, [70, 33])
    options = {"chunk": 16, "slots": SLOTS[:2]}
    whole = run(launch, requests, passes=((70, 33),), **options)
    parts = run(launch, requests, passes=((32, 16), (16, 0), (22, 17)), **options)
    assert torch.equal(whole.pool.view(torch.int32), parts.pool.view(torch.int32))
    assert all(map(torch.equal, whole.outs, parts.outs))


def test_neighbours_change_no_bit(launch):
    requests = draw("extreme", 2, 16, 32, lengths_of(PASSES))
    together = run(launch, requests, chunk=16)
    for request in (1, 3):
        alone = run(
            launch,
            requests[request : request + 1],
            chunk=16,
            slots=SLOTS[request : request + 1],
            passes=tuple(counts[request : request + 1] for counts in PASSES),
        )
        slot = SLOTS[request]
        assert torch.equal(alone.states[slot], together.states[slot])
        assert torch.equal(alone.outs[0], together.outs[request])


def test_torch_is_the_decode_step_for_each_token():
    (inputs,) = requests = draw("usual", 2, 16, 32, [19])
    result = run(("torch", "cpu"), requests, chunk=16, passes=((19,),), slots=SLOTS[:1])
    state = torch.zeros(1, 2, 16, 32)
    for t in range(19):
        step = (x[t : t + 1] for x in inputs)
        out = kda_decode(state, torch.tensor([0]), *step, backend="torch")
        assert torch.equal(out[0], result.outs[0][t])
    assert torch.equal(state[0], result.states[SLOTS[0]])


def test_checkpoints_are_the_states_of_their_prefixes(launch):
    # positions 5 to 85 and 0 to 40: the multiples of 32 are 32, 64 in one and 32 in the other
    requests = draw("usual", 2, 16, 32, [85, 40])
    options = {"chunk": 16, "slots": SLOTS[:2], "interval": 32}
    unwanted = torch.zeros(2, 3, dtype=torch.int64)
    wanted = torch.tensor([[2, 4, 6], [8, 10, 11]])
    passes = ((5, 0), (80, 40))
    plain = run(launch, requests, passes=passes, checkpoints=unwanted, **options)
    kept = run(launch, requests, passes=passes, checkpoints=wanted, **options)
    for slot, request, prefix in ((2, 0, 32), (4, 0, 64), (8, 1, 32)):
        inputs = [Steps(*(x[:prefix] for x in requests[request]))]
        counts = ((5,), (prefix - 5,)) if request == 0 else ((prefix,),)
        short = run(launch, inputs, passes=counts, chunk=16, slots=SLOTS[:1])
        assert torch.equal(kept.states[slot], short.states[SLOTS[0]])
        kept.pool[slot] = plain.pool[slot]
    assert differing_rows(kept.pool, plain.pool) == []


def test_bfloat16_inputs_are_their_values(launch):
    requests = draw("usual", 2, 16, 32, [37])
    rounded = [Steps(*(x.bfloat16() for x in request)) for request in requests]
    raised = [Steps(*(x.float() for x in request)) for request in rounded]
    results = [
        run(launch, case, chunk=16, passes=((37,),), slots=SLOTS[:1]) for case in (rounded, raised)
    ]
    assert torch.equal(results[0].outs[0], results[1].outs[0])


def test_what_cannot_run_is_refused():
    with pytest.raises(BackendError, match="choose from 16, 32, 64 and"):
        workspace(tokens=1, sequences=1, heads=1, key=16, value=16, chunk=24, device="cpu")
    requests = draw("usual", 1, 16, 16, [4])
    options = {"passes": ((4,),), "slots": SLOTS[:1], "chunk": 32}
    with pytest.raises(BackendError, match="a multiple of the chunk"):
        run(("torch", "cpu"), requests, checkpoints=torch.zeros(1, 1), interval=48, **options)
    if not CUDA:
        with pytest.raises(BackendError, match="choose another precision"):
            run(("triton", "cpu"), requests, precision="bf16", **options)
        many = draw("usual", 1, 16, 16, [400])
        with pytest.raises(BackendError, match="for more tokens"):
            run(("triton", "cpu"), many, **(options | {"passes": ((400,),)}))


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("chunk", [32, 64])
@pytest.mark.parametrize("precision", ["tf32x3", "tf32", "bf16"])
def test_real_geometry_beyond_2_gib(precision, chunk):
    heads, key, value, slots = 16, 128, 128, (2500, 2049)
    lengths = [200, 65]
    requests = draw("extreme", heads, key, value, lengths)
    pool = torch.empty(slots[0] + 1, heads, key, value, device="cuda")
    assert slots[1] * pool.stride(0) * 4 > 2**31
    pool[list(slots)] = 0.0
    memory = workspace(
        tokens=sum(lengths),
        sequences=2,
        heads=heads,
        key=key,
        value=value,
        chunk=chunk,
        precision=precision,
        device="cuda",
    )
    inputs = [torch.cat(rows).cuda() for rows in zip(*requests, strict=True)]
    results = []
    for _ in range(2):
        pool[list(slots)] = 0.0
        out = torch.full((sum(lengths), heads, value), torch.nan, device="cuda")
        kda_prefill(
            pool,
            torch.tensor(slots).cuda(),
            *inputs,
            torch.tensor([0, *lengths]).cumsum(0).cuda(),
            torch.zeros(2, dtype=torch.int64).cuda(),
            out=out,
            memory=memory,
            backend="triton",
        )
        results.append((out.cpu(), pool[list(slots)].cpu()))
    assert all(map(torch.equal, *results))
    (outs, states), kind = results[0], kda_bound.arithmetic(precision, native=True)
    for inputs_of, got, state in zip(requests, outs.split(lengths), states, strict=True):
        steps = Steps(*(x.double() for x in inputs_of))
        ends = {0, *(stop for _, stop in kda_bound.pieces([0, len(steps.k)], chunk))}
        exact, exact_states = recur(steps, state_at=ends)
        bound, drifts = kda_bound.bounds(steps, exact_states, [0, len(steps.k)], chunk, kind)
        assert ((got.double() - exact).abs() <= bound).all()
        off = (state.double() - exact_states[len(steps.k)]).norm(dim=1)
        assert (off <= drifts[len(steps.k)]).all()
