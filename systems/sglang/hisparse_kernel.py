"""SGLang's swap-in kernel, compiled from the release's own text for a CPU.

The text is CUDA.  What of it plans a swap-in (lookup, eviction, LRU order, the list of misses) is
read from the release, put behind `cuda_block.h`, and compiled by the host's C++ compiler; a block
then runs as so many threads.  The kernel is instantiated so that it records its misses and moves no
bytes, since that part is assembly for a GPU; `HotRows.swap_in` moves them by the recorded plan.
"""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from reference.hisparse import EMPTY, SwapIn

UNWRITTEN = -777
"""What lies in the output before a launch, so that a cell which the kernel leaves out is seen."""
THREADS = 64

_SOURCES = (
    "kernels/jit/csrc/kvcacheio/hisparse.cuh",
    "kernels/jit/csrc/hisparse.cuh",
    "jit_kernel/csrc/hisparse.cuh",
)
_PARTS = ("hash_slot", "popc_mask", "warp_inclusive_scan", "resolve_selected_token")
_KERNEL = "load_cache_to_device_buffer_kernel"


class CannotCompile(RuntimeError):
    """The release's kernel cannot be compiled here; the message says why."""


def source_of(root: Path) -> str:
    """The text of the kernel in the SGLang in `root`.

    Raises:
        CannotCompile: it is not where it was in the releases that are known.
    """
    for name in _SOURCES:
        if (file := root / "sglang" / name).is_file():
            return file.read_text()
    raise CannotCompile(f"The SGLang in {root} has no hisparse.cuh: name a release from 0.5.20 on.")


def compile_kernel(source: str, folder: Path, *, topk: int, size: int) -> ctypes.CDLL:
    """The kernel for selections of `topk` cells and hot buffers of `size` slots, as a library
    with one function `run`.

    Raises:
        CannotCompile: there is no compiler, or it does not take the text.
    """
    compiler = shutil.which("g++")
    if compiler is None:
        raise CannotCompile("SGLang's kernel needs a C++ compiler here: install g++.")
    text, library = folder / "swap_in.cpp", folder / f"swap_in_{topk}_{size}.so"
    text.write_text(_program(source, topk, size))
    header = Path(__file__).parent
    command = [compiler, "-std=c++20", "-O1", "-shared", "-fPIC", "-pthread", f"-I{header}"]
    done = subprocess.run(
        [*command, str(text), "-o", str(library)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise CannotCompile(f"g++ does not take the release's kernel: {done.stderr[:2000]}")
    return ctypes.CDLL(str(library))


def _program(source: str, topk: int, size: int) -> str:
    """Our header, the parts of the release's text that plan, and a launcher.

    Raises:
        CannotCompile: the text is not like that of the releases that are known.
    """
    constants = _found(r"(?:#else\n)?(constexpr int WARP_SIZE = 32;.*?)\n\n", source)
    layout = _found(r"(template <[^>]*>\nstruct SmemLayout \{.*?\n\};\n)", source)
    parts = [found for name in _PARTS if (found := _definition(source, name))]
    kernel = _definition(source, _KERNEL) or ""
    flags = _found(r"template <(.*?)>", kernel).split(",")
    parameters = _found(rf"{_KERNEL}\(\n(.*?)\) \{{", kernel).split(",")
    given = _FLAGS | {"NUM_TOP_K": topk, "HOT_BUFFER_SIZE": size}
    try:
        template = [str(given[flag.split()[-1]]) for flag in flags]
        arguments = [_ARGUMENTS[re.split(r"\W", it.strip())[-1]] for it in parameters]
    except KeyError as name:
        raise CannotCompile(
            f"The release's swap-in kernel has a parameter {name}: see to it in "
            "systems/sglang/hisparse_kernel.py."
        ) from name
    return _LAUNCHER.format(
        constants=constants.replace("#endif", ""), layout=layout, parts="\n".join(parts),
        kernel=kernel, name=_KERNEL, template=", ".join(template),
        arguments=", ".join(arguments), threads=THREADS,
    )  # fmt: skip


def _found(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.S)
    if found is None:
        raise CannotCompile("The release's hisparse.cuh is not like that of the known releases.")
    return found.group(1)


def _definition(source: str, name: str) -> str | None:
    """A function of the text, from its template or first word to its last brace."""
    head = re.search(
        rf"(?:template <[^>]*>\n)?(?:__\w+__[^\n;]*\s)+?[^\n;=]*\b{name}\([^;{{]*?\)\s*\{{", source
    )
    if head is None:
        return None
    depth, at = 1, head.end()
    while depth:
        depth += {"{": 1, "}": -1}.get(source[at], 0)
        at += 1
    return source[head.start() : at]


_FLAGS: dict[str, object] = {
    "BLOCK_SIZE": THREADS, "IsMLA": "true", "IsDsv4Layout": "false", "SPARSE_BLOCK_SIZE": 1,
    "TopKIsBlocks": "false", "RecordMissPlan": "true", "SkipIO": "true",
    "SeqLensT": "int64_t", "ReqPoolIndicesT": "int64_t",
}  # fmt: skip
_TABLES = {
    "top_k": torch.int32, "device_buffer_tokens": torch.int32, "host_cache_locs": torch.int64,
    "device_buffer_locs": torch.int32, "top_k_device_locs": torch.int32,
    "req_pool_indices": torch.int64, "seq_lens": torch.int64, "lru_slots": torch.int16,
    "num_real_reqs": torch.int32, "miss_src_out": torch.int64, "miss_dst_out": torch.int32,
    "miss_count_out": torch.int32,
}  # fmt: skip
_ARGUMENTS: dict[str, str] = {
    **{name: name for name in _TABLES},
    "top_k_tokens": "top_k", "top_k_tokens_stride": "width",
    "host_cache_k": "nullptr", "host_cache_v": "nullptr", "device_buffer_k": "nullptr",
    "device_buffer_v": "nullptr", "buffer_stride_0": "slots", "host_stride": "positions",
    "lru_slot_stride_0": "size", "top_k_stride": "width", "top_k_device_locs_stride": "answers",
    "page_size": "1", "item_size_bytes": "0", "plan_stride": "planned",
}  # fmt: skip
_LAUNCHER = """
#include "cuda_block.h"
namespace sglang {{
alignas(16) char smem_raw[block::kShared];
{constants}
{layout}
{parts}
{kernel}
}}
extern "C" void run(
    int rows, int64_t width, int64_t answers, int64_t size, int64_t slots, int64_t positions,
    int64_t planned, const int32_t* top_k, int32_t* device_buffer_tokens,
    const int64_t* host_cache_locs,
    const int32_t* device_buffer_locs, int32_t* top_k_device_locs,
    const int64_t* req_pool_indices, const int64_t* seq_lens, int16_t* lru_slots,
    const int32_t* num_real_reqs, int64_t* miss_src_out, int32_t* miss_dst_out,
    int32_t* miss_count_out) {{
  block::launch(rows, {threads}, [=] {{ sglang::{name}<{template}>({arguments}); }});
}}
"""


class Kernel:
    """The kernel, compiled for one size, over tables in memory.  All tables are contiguous."""

    def __init__(self, library: ctypes.CDLL, *, topk: int, size: int) -> None:
        self._run, self.topk, self.size = library.run, topk, size

    def launch(self, requests: int, **tables: Tensor) -> None:
        """Swap in what `requests` requests selected; `tables` are the kernel's, by its names.

        Raises:
            ValueError: a table is missing, of another type, or not contiguous.
        """
        pointers = []
        for name, dtype in _TABLES.items():
            table = tables[name]
            if table.dtype is not dtype or not table.is_contiguous():
                raise ValueError(f"{name} must be contiguous {dtype}; it is {table.dtype}.")
            pointers.append(ctypes.c_void_p(table.data_ptr()))
        tokens, host = tables["device_buffer_tokens"], tables["host_cache_locs"]
        widths = (
            *(tables["top_k"].shape[1], tables["top_k_device_locs"].shape[1], self.size),
            *(tokens.shape[1], host.shape[1], tables["miss_src_out"].shape[1]),
        )
        self._run(requests, *(ctypes.c_int64(width) for width in widths), *pointers)


class HotRows:
    """One request's hot buffer, swapped in by SGLang's kernel; `reference.hisparse.HotBuffer` is
    its twin.  Its slots are rows 100, 101, .. of the device, and positions rows of the host."""

    def __init__(self, kernel: Kernel, positions: int) -> None:
        self._kernel, size = kernel, kernel.size
        self.tokens = torch.full((1, size + 1), EMPTY, dtype=torch.int32)
        self.order = torch.arange(size, dtype=torch.int16)[None].clone()
        self.rows = torch.arange(100, 101 + size, dtype=torch.int32)[None].clone()
        self.host = torch.arange(positions)[None].clone()

    @property
    def tags(self) -> list[int]:
        return self.tokens[0, : self._kernel.size].tolist()

    @property
    def lru(self) -> list[int]:
        return self.order[0].tolist()

    def admit(self, length: int) -> None:
        """The first positions lie in the first slots."""
        held = min(length, self._kernel.size)
        self.tokens[0, :held] = torch.arange(held, dtype=torch.int32)

    def swap_in(self, selection: Sequence[int], length: int) -> SwapIn:
        """What the kernel answers; a cell that it does not write has the slot UNWRITTEN."""
        width = self._kernel.topk
        answer = torch.full((1, width), UNWRITTEN, dtype=torch.int32)
        source = torch.zeros(1, width, dtype=torch.int64)
        target, count = torch.zeros(1, width, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
        self._kernel.launch(
            1,
            top_k=torch.tensor([selection], dtype=torch.int32),
            device_buffer_tokens=self.tokens,
            host_cache_locs=self.host,
            device_buffer_locs=self.rows,
            top_k_device_locs=answer,
            req_pool_indices=torch.zeros(1, dtype=torch.int64),
            seq_lens=torch.tensor([length]),
            lru_slots=self.order,
            num_real_reqs=torch.ones(1, dtype=torch.int32),
            miss_src_out=source,
            miss_dst_out=target,
            miss_count_out=count,
        )
        slots = {row: slot for slot, row in enumerate(self.rows[0].tolist())}
        done = int(count)
        misses = zip(source[0, :done].tolist(), target[0, :done].tolist(), strict=True)
        return SwapIn(
            slots=tuple(slots.get(row, row) for row in answer[0].tolist()),
            misses=tuple((position, slots[row]) for position, row in misses),
        )


def kernel_of(root: Path, *, topk: int, size: int) -> Kernel:
    """The kernel of the release in `root`, compiled in a folder that is gone afterwards.

    Raises:
        CannotCompile: as `source_of` and `compile_kernel`.
    """
    with tempfile.TemporaryDirectory() as folder:
        library = compile_kernel(source_of(root), Path(folder), topk=topk, size=size)
    return Kernel(library, topk=topk, size=size)
