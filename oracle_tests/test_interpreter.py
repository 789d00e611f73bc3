"""The kernels' casts equal torch's; the self-check notices when they do not, and then refuses."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from optimized.kernels import interpreter
from optimized.kernels.backends import BackendError, use_triton
from optimized.kernels.gather import gather_rows
from oracle_tests.conftest import CUDA

DEVICES = ["cuda" if CUDA else "cpu"]


@triton.jit
def truncating_casts(values, bf16, e4m3, from_bf16, from_e4m3, COUNT: tl.constexpr):
    """What a cast without rounding gives: the high bits of a float32."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(values + at)
    high = x.to(tl.int32, bitcast=True) >> 16
    code = tl.where(tl.abs(x) < 0.015625, 0, (high >> 4) - (120 << 3)) & 0x7F
    tl.store(bf16 + at, high.to(tl.int16))
    tl.store(e4m3 + at, code.to(tl.uint8))
    tl.store(from_bf16 + at, (high << 16).to(tl.float32, bitcast=True))
    tl.store(from_e4m3 + at, x)


@triton.jit
def native_casts(values, bf16, e4m3, from_bf16, from_e4m3, COUNT: tl.constexpr):
    """Triton's own casts."""
    at = tl.program_id(0) * COUNT + tl.arange(0, COUNT)
    x = tl.load(values + at)
    bits = x.to(tl.bfloat16)
    code = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL).to(tl.float8e4nv)
    tl.store(bf16 + at, bits.to(tl.int16, bitcast=True))
    tl.store(e4m3 + at, code.to(tl.uint8, bitcast=True))
    tl.store(from_bf16 + at, bits.to(tl.float32))
    tl.store(from_e4m3 + at, code.to(tl.float32))


@pytest.mark.parametrize("device", DEVICES)
def test_casts_equal_torch(device):
    wrong = interpreter.mismatches(interpreter.casts_kernel, torch.device(device))
    assert not any(wrong.values()), wrong


@pytest.mark.parametrize("device", DEVICES)
def test_truncation_is_noticed(device):
    wrong = interpreter.mismatches(truncating_casts, torch.device(device))
    assert all(wrong.values()), wrong


@pytest.mark.parametrize("device", DEVICES)
def test_native_casts_are_right_on_a_gpu_and_wrong_in_the_interpreter(device):
    """Should this fail on a CPU, the interpreter was mended and `casts` may go."""
    wrong = interpreter.mismatches(native_casts, torch.device(device))
    assert any(wrong.values()) == (device == "cpu"), wrong


def test_probe_values_cover_the_hard_cases():
    values = interpreter.probe_values()
    bits = values.view(torch.int32)
    odd = (bits >> 16) & 1
    for low in (0x0000, 0x8000, 0x7FFF, 0x8001):
        parities = odd[(bits & 0xFFFF) == low].unique()
        assert parities.tolist() == [0, 1], "ties to even need both parities beside every low half"
    magnitude = values.abs()
    assert values.isnan().any()
    assert magnitude.isinf().any()
    assert ((magnitude > 0) & (magnitude < 2.0**-126)).any()
    assert ((magnitude > 0) & (magnitude < 2.0**-6)).any()
    assert ((magnitude > 448) & (magnitude < 1000)).any()


@pytest.mark.skipif(CUDA, reason="kernels are compiled here, not interpreted")
def test_a_wrong_interpreter_is_refused(monkeypatch):
    interpreter.self_check.cache_clear()
    monkeypatch.setattr(interpreter, "casts_kernel", truncating_casts)
    pool, locs = torch.zeros(2, 16, dtype=torch.uint8), torch.tensor([1])
    with pytest.raises(interpreter.InterpreterError, match="use a release of Triton"):
        gather_rows(pool, locs, backend="triton")
    monkeypatch.undo()
    assert torch.equal(gather_rows(pool, locs, backend="triton"), pool[locs])


def test_compiled_kernel_on_the_cpu_is_an_error():
    compiled = triton.JITFunction(truncating_casts.fn)
    with pytest.raises(BackendError, match="set TRITON_INTERPRET=1 before triton"):
        use_triton("triton", compiled, torch.zeros(1))


def test_unknown_backend_is_an_error():
    pool, locs = torch.zeros(2, 16, dtype=torch.uint8), torch.tensor([1])
    with pytest.raises(BackendError, match="choose torch or triton"):
        gather_rows(pool, locs, backend="cuda")
