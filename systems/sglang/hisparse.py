"""SGLang's HiSparse on a CPU: its pools, its allocators, its coordinator, and its kernel's text.

Three things are not SGLang's.  Streams are a queue (`Streams`), in which a copy may wait until
somebody waits for it, as late as a GPU may be.  Copies between pools are plain assignments, and
the swap-in kernel is compiled for a CPU (`hisparse_kernel`).  And `HotMemory` does what the
scheduler and the model runner do between these parts: allocate, prepare a step, release.

`HotRequests` drives it alone, and `hot_engine` behind the contract.  This supports: a prompt in one
chunk (staging) or, in `HotRequests`, straight into host rows (direct), decode of a batch, finish,
and retract or abort, also while the prompt is copied to the host.  It does not support a prompt in
several chunks, which SGLang stages only at its end, and drafts, for which SGLang has a kernel of
its own.  There is no prefix sharing under HiSparse (SGLang demands that the tree be off), and no
tier below it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reference.contract import CopyOrder
from reference.geometry import Geometry
from systems.sglang import setting
from systems.sglang.hisparse_kernel import UNWRITTEN, Kernel

PAGE, INDEX_DIM = 64, 128
LATENT, LAYERS = 64, 2
RATIO = 2
"""Host rows, and logical ones, to a device row."""


class Streams:
    """What SGLang uses of `torch.cuda`: work on a stream happens when its event is waited for, or
    before: at once ("early"), or piece by piece as other work is put there ("random")."""

    def __init__(self, copies: CopyOrder = "late", seed: int = 0) -> None:
        self._waiting: list[Callable[[], None]] = []
        self._copies, self._random = copies, random.Random(seed)
        self.Stream = self.Event = self._self

    def later(self, work: Callable[[], None]) -> None:
        """Put work on a stream."""
        self._waiting.append(work)
        if self._copies == "early":
            self.wait()
        elif self._copies == "random":
            self._do(self._random.randint(0, len(self._waiting)))

    def _self(self, *_: Any, **__: Any) -> Streams:
        return self

    current_stream = _self

    def stream(self, _: Any) -> nullcontext[None]:
        return nullcontext()

    def record(self, *_: Any) -> None:
        """Each event stands for all work before."""

    def wait_stream(self, _: Any) -> None:
        """What is put behind other work runs behind it in any case."""

    def wait(self, *_: Any) -> None:
        self._do(len(self._waiting))

    def _do(self, count: int) -> None:
        work, self._waiting = self._waiting[:count], self._waiting[count:]
        for each in work:
            each()

    def query(self) -> bool:
        self.wait()
        return True

    synchronize = wait


class HotMemory:
    """SGLang's pools, allocators and coordinator of requests with hot buffers of `kernel.size`
    slots, and what its scheduler does with them.

    Fields:
        table: SGLang's page table; device, host: its pools; allocator, coordinator: its own.
        requests: what SGLang knows of each request that has memory, by slot of the table.
        misses: rows that the last swap-in of a layer loaded, for each request of its batch.
    """

    def __init__(
        self,
        kernel: Kernel,
        *,
        layers: int,
        latent: int,
        pages: int,
        ratio: int,
        requests: int,
        longest: int,
        streams: Streams | None = None,
    ) -> None:
        """`pages`: of the device, padding not counted; `ratio`: host pages and logical ones to
        each of them; `longest`: positions of a request."""
        self.kernel, self.streams = kernel, streams or Streams()
        self.layers = range(layers)
        self.requests: dict[int, Any] = {}
        self.misses: list[int] = []
        setting.publish(Geometry(kpool=1, topk=kernel.topk, device_buffer_size=kernel.size))
        memory = import_module("sglang.srt.mem_cache.memory_pool")
        pools = import_module("sglang.srt.mem_cache.hisparse_memory_pool")
        allocators = import_module("sglang.srt.mem_cache.allocator.hisparse")
        self._module = import_module("sglang.srt.managers.hisparse_coordinator")
        self._replace()
        self.table = memory.ReqToTokenPool(
            size=requests, max_context_len=longest, device="cpu", enable_memory_saver=False
        )
        self.device = pools.HiSparseDSATokenToKVPool(
            size=pages * PAGE, page_size=PAGE, kv_lora_rank=latent, dtype=torch.bfloat16,
            qk_rope_head_dim=0, layer_num=layers, device="cpu", index_head_dim=INDEX_DIM,
            enable_memory_saver=False, kv_cache_dim=latent, max_running_requests=requests,
            host_to_device_ratio=ratio,
        )  # fmt: skip
        self.allocator = allocators.HiSparseTokenToKVPoolAllocator(
            pages * PAGE, PAGE, torch.bfloat16, "cpu", self.device, False, ratio
        )
        self.coordinator = self._module.HiSparseCoordinator(
            self.table, self.allocator, kernel.topk, kernel.size, "cpu", None,
            host_to_device_ratio=ratio,
        )  # fmt: skip
        self.host = self.coordinator.mem_pool_host
        self.host.backup_from_device_all_layer = self._backup
        self.host.load_to_device_per_layer = self._load

    def _replace(self) -> None:
        """Streams, the kernel, and memory that need not be pinned."""
        self._module.device_module = self.streams
        self._module.load_cache_to_device_buffer_mla = self._swap_in
        torch.distributed.get_world_size = lambda group=None: 1
        host = import_module("sglang.srt.mem_cache.pool_host.mla")
        host.ALLOC_MEMORY_FUNCS = {
            "cpu": lambda dims, dtype, device, *_, **__: torch.empty(dims, dtype=dtype)
        }

    @staticmethod
    def rows(pool: Any, layer: int) -> Tensor:
        """A pool's rows of one layer: [rows, latent]."""
        return pool.kv_buffer[layer].flatten(1)

    # copies

    def _backup(self, device: Any, host_rows: Tensor, rows: Tensor, **_: Any) -> None:
        def copy() -> None:
            for layer in self.layers:
                self.rows(self.host, layer)[host_rows] = self.rows(device, layer)[rows]

        self.streams.later(copy)

    def _load(self, device: Any, host_rows: Tensor, rows: Tensor, layer: int, **_: Any) -> None:
        self.rows(device, layer)[rows] = self.rows(self.host, layer)[host_rows]

    def _swap_in(self, *, host_cache: Tensor, device_buffer: Tensor, **tables: Any) -> None:
        """The kernel, and the copies that it planned.

        Raises:
            ValueError: it is asked for another size than it was compiled for.
        """
        built = {
            "hot_buffer_size": self.kernel.size,
            "num_top_k": self.kernel.topk,
            "page_size": 1,
            "item_size_bytes": device_buffer[0].nbytes,
        }
        if asked := {name: tables[name] for name, size in built.items() if tables[name] != size}:
            raise ValueError(f"the swap-in kernel should be given {built}; it is given {asked}.")
        requests, width = tables["top_k_tokens"].shape[0], self.kernel.topk
        answer = tables["top_k_device_locs"]
        plan = {
            "miss_src_out": torch.zeros(requests, width, dtype=torch.int64),
            "miss_dst_out": torch.zeros(requests, width, dtype=torch.int32),
            "miss_count_out": torch.zeros(requests, dtype=torch.int32),
        }
        whole = torch.full((requests, width), UNWRITTEN, dtype=torch.int32)
        names = (
            *("device_buffer_tokens", "host_cache_locs", "device_buffer_locs", "lru_slots"),
            *("req_pool_indices", "seq_lens", "num_real_reqs"),
        )
        given = {name: tables[name] for name in names}
        self.kernel.launch(
            requests, top_k=tables["top_k_tokens"], top_k_device_locs=whole, **given, **plan
        )
        answer.copy_(whole)
        self.misses = plan["miss_count_out"].tolist()
        for b, count in enumerate(self.misses):
            to = plan["miss_dst_out"][b, :count].long()
            device_buffer[to] = host_cache[plan["miss_src_out"][b, :count]]

    # what the scheduler does

    def allocate(self, slots: Sequence[int], lengths: Sequence[int], *, direct: bool) -> Tensor:
        """Memory for whole prompts: [positions of all] locs.  `direct`: no device rows."""
        zero, full = torch.zeros(len(slots), dtype=torch.int64), torch.tensor(lengths)
        allocate = self.allocator.alloc_logical_only if direct else self.allocator.alloc_extend
        where = allocate(zero, zero, full, full, zero - 1, sum(lengths))
        for slot, length, part in zip(slots, lengths, where.split(list(lengths)), strict=True):
            self.table.req_to_token[slot, :length] = part
            self.requests[slot] = SimpleNamespace(
                rid=slot, hisparse_staging=False, extend_end=length,
                extend_range=SimpleNamespace(end=length), req_pool_idx=slot,
                kv=SimpleNamespace(req_pool_idx=slot, kv_allocated_len=length),
                kv_allocated_len=length,
            )  # fmt: skip
        return where

    def stage(self, slots: Sequence[int], *, wait: bool) -> None:
        """Copy prompts, whose rows are on the device, to the host; after a `wait` they are there,
        and the requests have their hot buffers."""
        for slot in slots:
            self.coordinator.admit_request_into_staging(self.requests[slot])
        if wait:
            ready = self.coordinator.collect_ready_reqs()
            assert ready == [self.requests[slot] for slot in slots]

    def begin(self, slots: Tensor, lengths: Tensor) -> Tensor:
        """A step in which requests come to `lengths`, up to where their new rows are written:
        [batch] their locs."""
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.requests[slot].kv.kv_allocated_len = length
            self.requests[slot].kv_allocated_len = length
        last = self.table.req_to_token[slots, lengths - 2].long()
        where = self.allocator.alloc_decode(lengths, lengths, last)
        self.table.req_to_token[slots, lengths - 1] = where.to(torch.int32)
        self.coordinator.map_last_loc_to_buffer(lengths, where, slots, lengths, slots)
        self.coordinator.wait_for_pending_backup()
        self.coordinator.num_real_reqs.fill_(len(slots))
        return where

    def release(self, slot: int, ended: Callable[[Any], None]) -> None:
        """End a request by `ended`, one of the coordinator's ways."""
        request = self.requests.pop(slot)
        ended(request)
        self.allocator.free(self.table.req_to_token[slot, : request.kv_allocated_len].long())


class HotRequests(HotMemory):
    """Requests whose rows name their position and request.

    Fields:
        lengths: of each request that is admitted, by its slot.
    """

    def __init__(self, kernel: Kernel, *, pages: int, requests: int, longest: int) -> None:
        super().__init__(
            kernel, layers=LAYERS, latent=LATENT, pages=pages, ratio=RATIO, requests=requests,
            longest=longest,
        )  # fmt: skip
        self.lengths: dict[int, int] = {}

    # operations

    def admit(self, length: int, *, direct: bool = False, wait: bool = True) -> int:
        """A prompt of `length` in one chunk; `direct`, as P sends it, into host rows alone; else
        it decodes only after a `wait` for its copies to the host.  Returns the request's slot."""
        slot = self.table.free_slots.pop()
        where = self.allocate([slot], [length], direct=direct)
        self.lengths[slot] = length
        truth = self.truth(slot, length)
        if direct:
            rows = self.host.alloc_paged_token_slots(
                self.coordinator.req_to_host_pool,
                self.coordinator.req_to_host_pool_allocated_len,
                *(slot, 0, length),
            )
            for layer in self.layers:
                self.rows(self.host, layer)[rows] = truth[layer]
            self.coordinator.admit_request_direct(self.requests[slot])
            return slot
        rows = self.device.translate_loc_to_hisparse_device(where)
        for layer in self.layers:
            self.rows(self.device, layer)[rows] = truth[layer]
        self.stage([slot], wait=wait)
        return slot

    def decode(self, selections: dict[int, Sequence[int]]) -> dict[int, list[list[int]]]:
        """A step of a batch: one more position each, and its selection by slot.  Returns by slot
        and layer the device row of each cell."""
        slots = list(selections)
        for slot in slots:
            self.lengths[slot] += 1
        indices, lengths = torch.tensor(slots), torch.tensor([self.lengths[s] for s in slots])
        where = self.begin(indices, lengths)
        rows = self.device.translate_loc_to_hisparse_device(where)
        chosen = torch.tensor([list(selections[slot]) for slot in slots], dtype=torch.int32)
        answers: dict[int, list[list[int]]] = {slot: [] for slot in slots}
        for layer in self.layers:
            for slot, row in zip(slots, rows.tolist(), strict=True):
                self.rows(self.device, layer)[row] = self.truth(slot, self.lengths[slot])[layer, -1]
            found = self.coordinator.swap_in_selected_pages(indices, lengths, chosen, layer)
            for slot, cells in zip(slots, found.tolist(), strict=True):
                answers[slot].append(cells)
        return answers

    def finish(self, slot: int) -> None:
        """End a request; everything of it is free again."""
        self._end(slot, self.coordinator.request_finished)

    def retract(self, slot: int) -> None:
        """Take a request back, wherever it stands."""
        self._end(slot, self.coordinator.retract_req)

    def _end(self, slot: int, ended: Callable[[Any], None]) -> None:
        del self.lengths[slot]
        self.release(slot, ended)
        self.table.free_slots.append(slot)

    # what is there

    @staticmethod
    def truth(slot: int, length: int) -> Tensor:
        """The rows that the positions of a request have: [LAYERS, length, LATENT], exact in bf16
        for 256 positions a number."""
        position = torch.arange(length)
        marks = torch.stack((position % 128, position // 128, torch.full_like(position, slot)))
        rows = marks.T.repeat(1, LATENT // 3 + 1)[:, :LATENT].expand(LAYERS, -1, -1).clone()
        rows[:, :, -1] = torch.arange(LAYERS)[:, None]
        return rows.to(torch.bfloat16)

    def row(self, layer: int, row: int) -> Tensor:
        """A device row: [LATENT]."""
        return self.rows(self.device, layer)[row]

    def host_rows(self, slot: int, layer: int) -> dict[int, Tensor]:
        """The host row of each position below the newest that has one; SGLang takes the rows of
        a page at once, and does not say which of them hold something."""
        where = self.coordinator.req_to_host_pool[slot, : self.lengths[slot] - 1].tolist()
        return {p: self.rows(self.host, layer)[row] for p, row in enumerate(where) if row >= 0}

    def free(self) -> tuple[int, int, int]:
        """Free device rows, logical rows and host rows."""
        return (
            self.allocator.hisparse_attn_allocator.available_size(),
            self.allocator.logical_attn_allocator.available_size(),
            self.host.available_size(),
        )
