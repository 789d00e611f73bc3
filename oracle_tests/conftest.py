"""Where kernels run in these tests.

Without a GPU Triton's kernels run under its interpreter, for which the variable must be there
before triton is first imported.  With one they run natively, marked `gpu`.
"""

from __future__ import annotations

import os
import signal
import uuid

import pytest
import torch

# a shell's background job ignores Ctrl-C, and hands that on; some tests send it
signal.signal(signal.SIGINT, signal.default_int_handler)

CUDA = torch.cuda.is_available()
LAUNCHES = [("torch", "cpu"), ("triton", "cpu")]
"""(backend, device) of every way in which a kernel can be launched on this machine."""
if CUDA:
    LAUNCHES = [("torch", "cpu"), ("torch", "cuda"), ("triton", "cuda")]
else:
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _own_corpus(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test's campaigns learn must not steer another's."""
    folder = tmp_path_factory.getbasetemp() / f"corpus-{uuid.uuid4().hex}"
    monkeypatch.setenv("KVORACLE_CORPUS", str(folder))


@pytest.fixture(params=LAUNCHES, ids="-".join)
def launch(request: pytest.FixtureRequest) -> tuple[str, str]:
    """A kernel backend, and the device of its tensors."""
    backend, device = request.param
    return backend, device


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what runs on a GPU, before -m looks at the marks."""
    for item in items:
        callspec = getattr(item, "callspec", None)
        parameters = callspec.params if callspec else {}
        if parameters.get("device") == "cuda" or "cuda" in parameters.get("launch", ()):
            item.add_marker(pytest.mark.gpu)
