"""Which backend a launcher may use, and the sentence when it may not."""

from __future__ import annotations

from torch import Tensor
from triton import JITFunction, KernelInterface

from optimized.kernels import interpreter


class BackendError(ValueError):
    """A kernel cannot run as asked; the message names the cure."""


def use_triton(backend: str, kernel: KernelInterface, tensor: Tensor) -> bool:
    """Whether `backend` asks for Triton's `kernel` on the device of `tensor`, or for torch.

    Raises:
        BackendError: for an unknown backend, or a compiled kernel on a CPU tensor.
        InterpreterError: if Triton interprets the kernel and converts numbers wrongly.
    """
    if backend == "torch":
        return False
    if backend != "triton":
        raise BackendError(
            f"there is no backend {backend!r} of this kernel: choose torch or triton."
        )
    if not isinstance(kernel, JITFunction):
        interpreter.self_check()
    elif not tensor.is_cuda:
        # Triton decides when it decorates a kernel, so the variable must be there before that
        raise BackendError(
            "Triton reaches CPU tensors only through its interpreter: set TRITON_INTERPRET=1 "
            "before triton is first imported, or choose backend torch."
        )
    return True
