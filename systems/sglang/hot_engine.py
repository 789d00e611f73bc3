"""SGLang's HiSparse behind the contract: stamped runs without pooling, on a CPU.

What happens to a request is `hisparse.HotMemory`'s, which is SGLang's coordinator, allocators and
pools.  This says what the calls of the contract mean to it, refuses what SGLang's scheduler would
not begin, and reads what is where from SGLang's own tables.

A server has as many host rows, and logical ones, as a whole ratio of the device's.  Here pools are
built by a ratio that is large enough, and what is too much of them is taken off their free lists,
with page 0 of the host, so that 0 names padding in all three memories.

There is no KDA state, which HiSparse does not touch.  Index rows are quantised by the reference,
since SGLang's quantiser without pooling needs a GPU, and stored and found by SGLang.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace

import torch
from torch import Tensor

from reference.contract import (
    Admission,
    Capability,
    Chunk,
    Component,
    EngineFactory,
    EngineOptions,
    HiSparse,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Rows,
    Sizes,
    Snapshot,
    StepOutput,
    Tokens,
    Weights,
)
from reference.geometry import Geometry, ModelShape, RowFormat
from reference.pooling import pooled_rows
from systems.sglang import engine
from systems.sglang.adapter import NOT_OFFERED, Adapter, given
from systems.sglang.hisparse import INDEX_DIM, PAGE, HotMemory, Streams
from systems.sglang.hisparse_kernel import Kernel, kernel_of
from systems.sglang.hot_accounts import HotAccounts, Running
from systems.sglang.loader import Release

MOST_TOKENS = 1024
"""Positions of a request that the tables have room for."""
POISON = 0xFF
CAPABILITIES = frozenset({Capability.STAMPED, Capability.HISPARSE})
SHAPE = replace(engine.SHAPE, layers=4)
"""Two layers with rows on the host."""


def sizes() -> tuple[Sizes, ...]:
    """What the engine can be built with: hot buffers of one page, which a request has whole or not
    at all, of two, which grow, and of no more slots than are selected."""
    return tuple(
        Sizes(
            geometry=Geometry(
                kpool=1,
                physical_page_size=PAGE,
                topk=topk,
                mamba_track_interval=PAGE,
                device_buffer_size=slots,
            ),
            shape=SHAPE,
        )
        for topk, slots in ((16, PAGE), (16, 2 * PAGE), (PAGE, PAGE))
    )


def factory(release: Release) -> EngineFactory:
    """Builds engines of a release that this process has loaded.  Kernels are compiled, and one is
    built, here and now, so that processes forked from this one find all that it takes.

    Raises:
        CannotCompile: there is no compiler, or the release's kernel is not like the known ones.
    """
    kernel = cache(lambda topk, size: kernel_of(release.root, topk=topk, size=size))
    for each in sizes():
        kernel(each.geometry.topk, each.geometry.device_buffer_size)

    def build(
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None = None,
    ) -> HotEngine:
        if weights is not None:
            raise InvalidCall(NOT_OFFERED.format("model runs"))
        _require_fitting(geometry, shape, options)
        return HotEngine(
            kernel(geometry.topk, geometry.device_buffer_size), geometry, shape, options
        )

    least = HiSparse(device_pages=4, host_pages=4)
    options = EngineOptions(pages=4, state_slots=2, max_requests=1, hisparse=least)
    build(sizes()[0].geometry, SHAPE, options)
    return build


class HotEngine(Adapter[Running]):
    """`reference.contract.Engine` tells what each call does, takes and returns."""

    def __init__(
        self, kernel: Kernel, geometry: Geometry, shape: ModelShape, options: EngineOptions
    ) -> None:
        hisparse = options.hisparse
        assert hisparse is not None, "the factory has looked"
        super().__init__(geometry, shape, CAPABILITIES)
        device = hisparse.device_pages - 1
        self._memory = HotMemory(
            kernel,
            layers=len(shape.dsa_layers),
            latent=shape.latent,
            pages=device,
            ratio=-(-max(options.pages - 1, hisparse.host_pages - 1) // device),
            requests=options.max_requests,
            longest=MOST_TOKENS,
            streams=Streams(hisparse.copies, options.seed),
        )
        self._accounts = HotAccounts(self._memory, options)
        if options.poison:
            for pool in (self._memory.device, self._memory.host):
                for layer in self._memory.layers:
                    self._memory.rows(pool, layer).view(torch.uint8).fill_(POISON)

    # requests

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        prompt = self._prompt(request, tokens)
        if not self._memory.table.free_slots:
            raise OutOfMemory("no request slot is free: finish, abort or retract a request first.")
        self._running[request] = Running(slot=self._memory.table.free_slots.pop(), tokens=prompt)
        return Admission(hit=0)

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        running = [self._find(chunk.request) for chunk in chunks]
        for each, chunk in zip(running, chunks, strict=True):
            if each.length or chunk.stop != len(each.tokens):
                raise InvalidCall(
                    f"request {chunk.request} has {each.length} of {len(each.tokens)} tokens "
                    "stored: extend it once, by its whole prompt."
                )
        rows = [given(chunk.rows) for chunk in chunks]
        lengths = [chunk.stop for chunk in chunks]
        self._accounts.require_prompts(lengths)
        slots = [each.slot for each in running]
        where = self._memory.allocate(slots, lengths, direct=False)
        for parts, locs in zip(rows, where.split(lengths), strict=True):
            for layer in self._memory.layers:
                self._store(layer, locs, parts)
        self._memory.stage(slots, wait=True)
        for each in running:
            each.length = len(each.tokens)
        self._scrub()
        return [self._silent(chunk.request, 0) for chunk in chunks]

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        running, rows = [self._find(request) for request in requests], given(rows)
        for request, each in zip(requests, running, strict=True):
            if each.length < len(each.tokens):
                raise InvalidCall(f"request {request} is not prefilled yet: extend it first.")
        if rows.selected is None:
            raise InvalidCall("each layer's selection is missing: give `Rows.selected`.")
        self._accounts.require_step(running)
        slots = torch.tensor([each.slot for each in running])
        lengths = torch.tensor([each.length + 1 for each in running])
        where = self._memory.begin(slots, lengths)
        attended, misses = [], []
        for layer in self._memory.layers:
            self._store(layer, where, rows)
            cells = self._memory.coordinator.swap_in_selected_pages(
                slots, lengths, rows.selected[layer].int().contiguous(), layer
            )
            attended.append(self._attended(layer, cells.long()))
            misses.append(torch.tensor(self._memory.misses))
        for each, token in zip(running, tokens, strict=True):
            each.tokens.append(int(token))
            each.length += 1
        self._scrub()
        return [
            self._silent(
                request,
                each.length - 1,
                misses=torch.stack(misses)[:, [n]],
                attended=torch.stack(attended)[:, [n]],
            )
            for n, (request, each) in enumerate(zip(requests, running, strict=True))
        ]

    def finish(self, request: RequestId) -> None:
        self._leave(request, retracted=False)

    def abort(self, request: RequestId) -> None:
        self._leave(request, retracted=False)

    def retract(self, request: RequestId) -> tuple[int, ...]:
        return tuple(self._leave(request, retracted=True))

    def evict(self, pages: int) -> int:
        raise InvalidCall(NOT_OFFERED.format("a prefix cache"))

    def _leave(self, request: RequestId, *, retracted: bool) -> list[int]:
        each = self._find(request)
        coordinator = self._memory.coordinator
        if each.length:
            ended = coordinator.retract_req if retracted else coordinator.request_finished
            self._memory.release(each.slot, ended)
        self._memory.table.free_slots.append(each.slot)
        del self._running[request]
        self._scrub()
        return each.tokens

    # rows

    def _store(self, layer: int, locs: Tensor, rows: Rows) -> None:
        """The rows of a layer, at the logical `locs` that SGLang gave them."""
        pool = self._memory.device
        latent = rows.kv[layer].bfloat16()[:, None]
        pool.set_mla_kv_buffer(SimpleNamespace(layer_id=layer), locs, latent, None)
        keys, gates = rows.key[layer], torch.zeros_like(rows.gate[layer])
        index = pooled_rows(keys, gates, gates[:1], self.geometry)
        quantised, scales = index[:, :INDEX_DIM].contiguous(), index[:, INDEX_DIM:].contiguous()
        pool.set_index_k_scale_buffer(
            layer, locs, quantised.view(torch.float8_e4m3fn), scales.view(torch.float32)
        )

    def _attended(self, layer: int, cells: Tensor) -> Tensor:
        """[batch, width, row bytes] uint8: the device rows of cells; zeros of void ones, and
        poison of those that are no row."""
        device = self._memory.rows(self._memory.device, layer).view(torch.uint8)
        inside = (cells >= 0) & (cells < len(device))
        found = device[torch.where(inside, cells, 0)]
        found[~inside] = POISON
        found[cells == -1] = 0
        return found

    def _scrub(self) -> None:
        """Poison what has become free since the last call."""
        for pool, pages in self._accounts.freed():
            first = torch.tensor(pages, dtype=torch.int64)
            rows = (first[:, None] * PAGE + torch.arange(PAGE)).flatten()
            for layer in self._memory.layers:
                self._memory.rows(pool, layer).view(torch.uint8)[rows] = POISON

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        each, memory = self._find(request), self._memory
        device = memory.rows(memory.device, layer).view(torch.uint8)
        if component is Component.HOT:
            return device[memory.coordinator.req_to_device_buffer[each.slot, start:stop]]
        if component is Component.INDEX:
            locs = memory.table.req_to_token[each.slot, :stop].long()
            pages = locs[::PAGE, None].T // PAGE
            keys, scales = memory.device.get_index_k_scale_buffer(
                layer, torch.tensor([stop]), pages.int(), stop, stop
            )
            return torch.cat([part.view(torch.uint8) for part in (keys, scales)], dim=1)[start:]
        if component is not Component.KV:
            raise InvalidCall(NOT_OFFERED.format(f"{component.value} rows under HiSparse"))
        # the newest position's is on the device alone, until the next step
        saved = self._accounts.saved(each)
        host = memory.coordinator.req_to_host_pool[each.slot, start : min(stop, saved)]
        found = memory.rows(memory.host, layer).view(torch.uint8)[host]
        locs = memory.table.req_to_token[each.slot, max(start, saved) : stop].long()
        newest = memory.device.translate_loc_to_hisparse_device(locs)
        return torch.cat([found, device[newest]])

    def raw(self, component: Component, layer: int) -> Tensor:
        raise InvalidCall(NOT_OFFERED.format("its raw buffers under HiSparse"))

    def inspect(self) -> Snapshot:
        return self._accounts.snapshot(self._running)


def _require_fitting(geometry: Geometry, shape: ModelShape, options: EngineOptions) -> None:
    """Raises InvalidCall where SGLang's HiSparse, or this engine, wants another size."""
    slots = geometry.device_buffer_size or 0
    wants = {
        f"pages of {PAGE} tokens": geometry.physical_page_size == PAGE,
        "a kpool of 1": geometry.kpool == 1,
        "a hot buffer of whole pages": slots > 0 and slots % PAGE == 0,
        f"index keys of {INDEX_DIM} channels": shape.index_dim == INDEX_DIM,
        "bf16 rows": geometry.row_format is RowFormat.BF16,
        "HiSparse": options.hisparse is not None,
        "no host tier": options.host_tier is None,
        "a KV pool that it allocates": options.kv_memory is None,
    }
    for what, there in wants.items():
        if not there:
            raise InvalidCall(f"The SGLang engine with HiSparse needs {what}: build it so.")
