"""The recurrent KDA step: every backend against the reference recurrence, within a bound that is
carried along."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import normalize

from optimized.kernels import kda_decode as module
from optimized.kernels.kda_decode import kda_decode
from oracle_tests.kernel_cases import UNIT, differing_rows, poisoned, spread_ids
from reference.kda import Steps, recur

SLOTS, BATCH, STEPS = 11, 4, 6
SIZES = pytest.mark.parametrize(
    ("heads", "key", "value"), [(1, 8, 256), (2, 16, 16), (3, 12, 40)], ids=lambda n: str(n)
)


def draw(heads, key, value):
    """The inputs of STEPS steps of BATCH requests, each [BATCH, STEPS, heads, ...] float32."""
    torch.manual_seed(heads * key)
    q, k = normalize(torch.randn(2, BATCH, STEPS, heads, key), dim=-1)
    v = torch.randn(BATCH, STEPS, heads, value)
    a = torch.rand(BATCH, STEPS, heads, key) * 0.5 + 0.5
    beta = torch.rand(BATCH, STEPS, heads)
    return Steps(q=q * key**-0.5, k=k, v=v, a=a, beta=beta)


def run(launch, inputs):
    """All steps through the kernel: the state pool, the slots, and the outputs."""
    backend, device = launch
    batch, heads, key = inputs.q.shape[0], *inputs.q.shape[2:]
    # a slot of the pool holds the layers' states one after another: heads are not its whole row
    pool = poisoned(SLOTS, 2, heads * key * inputs.v.shape[-1] + 3, dtype=torch.float32)
    torch.manual_seed(7)
    slots = spread_ids(BATCH, SLOTS)[:batch]
    pool[slots, 1, :-3] = 0.0
    pool = pool.to(device)
    state = pool[:, 1, :-3].unflatten(1, (heads, key, -1))
    outputs = [
        kda_decode(
            state, slots.to(device), *(x[:, t].to(device) for x in inputs), backend=backend
        ).cpu()
        for t in range(STEPS)
    ]
    return pool.cpu(), slots, torch.stack(outputs, dim=1)


def excess(inputs, states, outputs):
    """By how many times its bound the float32 kernel left the float64 recurrence, at worst.

    Frobenius norms per head.  A step is S <- (I - beta k k^T) diag(a) S + beta k v^T, whose
    matrices do not lengthen, so that errors only add up: each product or sum of `key` terms adds
    at most (key + 2) units of the norms that it works on.
    """
    worst = 0.0
    for request in range(len(outputs)):
        steps = Steps(*(x[request].double() for x in inputs))
        exact, exact_states = recur(steps, state_at=range(1, STEPS + 1))
        bound = torch.zeros(())
        for t in range(STEPS):
            key = steps.k.shape[-1]
            size = exact_states[t + 1].norm(dim=(1, 2)) + steps.v[t].norm(dim=-1)
            if t:
                size = size + exact_states[t].norm(dim=(1, 2))
            bound = bound + 2 * (key + 2) * UNIT * size
            reach = steps.q[t].norm(dim=-1) * (bound + (key + 2) * UNIT * size)
            error = (outputs[request, t].double() - exact[t]).norm(dim=-1)
            worst = max(worst, float((error / reach).max()))
        error = (states[request].double() - exact_states[STEPS]).norm(dim=(1, 2))
        worst = max(worst, float((error / bound).max()))
    return worst


@SIZES
def test_within_bound_of_reference(launch, heads, key, value):
    inputs = draw(heads, key, value)
    pool, slots, outputs = run(launch, inputs)
    states = pool[slots, 1, :-3].unflatten(1, (heads, key, value))
    assert excess(inputs, states, outputs) <= 1.0


@SIZES
def test_other_slots_are_untouched(launch, heads, key, value):
    pool, slots, _ = run(launch, draw(heads, key, value))
    rest = pool.clone()
    rest[slots, 1, :-3] = poisoned(*pool[slots, 1, :-3].shape, dtype=torch.float32)
    assert differing_rows(rest, poisoned(*pool.shape, dtype=torch.float32)) == []


@pytest.mark.parametrize("change", ["decay dropped", "slots exchanged", "key for query"])
def test_faults_leave_the_bound(launch, change):
    inputs = draw(2, 16, 16)
    pool, slots, outputs = run(launch, inputs)
    states = pool[slots, 1, :-3].unflatten(1, (2, 16, 16))
    if change == "decay dropped":
        inputs = inputs._replace(a=torch.ones_like(inputs.a))
    elif change == "slots exchanged":
        states = states.roll(1, dims=0)
    else:
        inputs = inputs._replace(q=inputs.k)
    assert excess(inputs, states, outputs) > 100.0


@SIZES
def test_batch_changes_no_bit(launch, heads, key, value):
    inputs = draw(heads, key, value)
    pool, slots, together = run(launch, inputs)
    for size in (1, 3):
        part, _, outputs = run(launch, Steps(*(x[:size] for x in inputs)))
        assert torch.equal(outputs, together[:size])
        assert torch.equal(part[slots[:size], 1, :-3], pool[slots[:size], 1, :-3])
    flipped = Steps(*(x.flip(0) for x in inputs))
    assert torch.equal(run(launch, flipped)[2].flip(0), together)


def test_step_is_the_launcher_without_slots():
    inputs = draw(2, 16, 16)
    pool, slots, outputs = run(("torch", "cpu"), inputs)
    state = torch.zeros(BATCH, 2, 16, 16)
    for t in range(STEPS):
        assert torch.equal(module.step(state, *(x[:, t] for x in inputs)), outputs[:, t])
    assert torch.equal(state.flatten(1), pool[slots, 1, :-3])


def test_output_goes_where_it_is_asked(launch):
    backend, device = launch
    inputs = Steps(*(x[:, 0].to(device) for x in draw(2, 16, 16)))
    slots = torch.tensor([5, 1, 3, 2], device=device)
    own = kda_decode(torch.zeros(6, 2, 16, 16, device=device), slots, *inputs, backend=backend)
    out = poisoned(BATCH, 2, 16, dtype=torch.float32, device=device)
    state = torch.zeros(6, 2, 16, 16, device=device)
    assert kda_decode(state, slots, *inputs, out=out, backend=backend) is out
    assert torch.equal(out, own)
