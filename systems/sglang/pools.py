"""SGLang's own pools, allocators and hybrid prefix tree, built as its server builds them.

The allocators' free lists may be shuffled before the first use, and memory is poisoned at the
start and behind each call that frees; the pools themselves are SGLang's in every other respect.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reference.contract import Component, EngineOptions
from reference.geometry import Geometry, ModelShape
from systems.sglang.releases import Differences

POISON = 0xFF


class Pools:
    """The memory of one engine.

    Fields:
        kv: HybridLinearKVPool: latent rows, pooled index keys and tails of the DSA layers.
        requests: HybridReqToTokenPool: the page table, and with it the pool of KDA states.
        pages: PagedTokenToKVPoolAllocator; states: MambaSlotAllocator.
        tree: UnifiedRadixCache over full attention and KDA states.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        differences: Differences,
        *,
        max_length: int,
    ) -> None:
        self._geometry, self._shape, self._options = geometry, shape, options
        # An index page of several owners is not free when one of them lets go.
        self._whole_index_pages = differences.logical_pages
        self.requests = self._build_requests(max_length)
        self.states = self.requests.mamba_allocator
        self.kv = self._build_kv()
        allocators = import_module("sglang.srt.mem_cache.allocator.paged")
        self.pages = allocators.PagedTokenToKVPoolAllocator(
            (options.pages - 1) * geometry.logical_page_size,
            geometry.logical_page_size,
            torch.bfloat16,
            "cpu",
            self.kv,
            need_sort=False,
        )
        self.tree = self._build_tree()
        self._order()
        self.evicted = self.reused = 0
        self._taken: set[int] = set()
        self._free = list(self._free_ids())
        self._watch()
        for component, buffers in self._buffers():
            rows = torch.arange(len(buffers[0]))
            self._fill(component, rows, 1)

    def _build_requests(self, max_length: int) -> Any:
        memory = import_module("sglang.srt.mem_cache.memory_pool")
        states = import_module("sglang.srt.configs.mamba_utils")
        shape, options, drafts = self._shape, self._options, self._geometry.max_drafts
        params = states.KimiLinearCacheParams(
            shape=states.KimiLinearStateShape.create(
                tp_world_size=1,
                num_heads=shape.kda_heads,
                head_dim=shape.kda_value_dim,
                num_k_heads=shape.kda_heads,
                head_k_dim=shape.kda_key_dim,
                conv_kernel_size=shape.conv_width,
            ),
            layers=list(shape.kda_layers),
            dtype=states.Mamba2StateDType(conv=torch.float32, temporal=torch.float32),
        )
        return memory.HybridReqToTokenPool(
            size=options.max_requests,
            mamba_size=options.state_slots - 1,
            mamba_spec_state_size=options.max_requests,
            max_context_len=max_length,
            device="cpu",
            enable_memory_saver=False,
            cache_params=params,
            mamba_layer_ids=list(shape.kda_layers),
            enable_mamba_extra_buffer=True,
            speculative_num_draft_tokens=drafts or None,
            enable_overlap_schedule=False,
        )

    def _build_kv(self) -> Any:
        memory = import_module("sglang.srt.mem_cache.memory_pool")
        geometry, shape, options = self._geometry, self._shape, self._options
        return memory.HybridLinearKVPool(
            size=(options.pages - 1) * geometry.logical_page_size,
            dtype=torch.bfloat16,
            page_size=geometry.logical_page_size,
            head_num=1,
            head_dim=shape.latent,
            full_attention_layer_ids=list(shape.dsa_layers),
            device="cpu",
            mamba_pool=self.requests.mamba_pool,
            use_mla=True,
            kv_lora_rank=shape.latent,
            qk_rope_head_dim=0,
            use_dsa=True,
            index_head_dim=shape.index_dim,
            kv_cache_dim=shape.latent,
            index_kpool=geometry.kpool,
            index_kpool_compress=True,
            tail_extra_slots=geometry.max_drafts,
            max_running_requests=options.max_requests,
        )

    def _build_tree(self) -> Any:
        caches = import_module("sglang.srt.mem_cache.unified_radix_cache")
        parameters = import_module("sglang.srt.mem_cache.cache_init_params")
        kinds = import_module("sglang.srt.mem_cache.unified_cache.component_type").ComponentType
        return caches.UnifiedRadixCache(
            parameters.CacheInitParams(
                disable=False,
                req_to_token_pool=self.requests,
                token_to_kv_pool_allocator=self.pages,
                page_size=self._geometry.logical_page_size,
                enable_mamba_extra_buffer=True,
                tree_components=(kinds.FULL, kinds.MAMBA),
            )
        )

    def _order(self) -> None:
        """SGLang hands free ids out from the front of a list and puts freed ones back to its
        front (pages) or its end (states), whatever the order asked for; what an order decides is
        how both lists lie at the start."""
        order = self._options.page_order
        random = np.random.default_rng(self._options.seed)
        for allocator, name in ((self.pages, "free_pages"), (self.states, "free_slots")):
            free = getattr(allocator, name)
            if order == "high":
                setattr(allocator, name, free.flip(0))
            elif order == "permuted":
                setattr(allocator, name, free[torch.from_numpy(random.permutation(len(free)))])

    # what is free, and what it holds

    @property
    def free_pages(self) -> frozenset[int]:
        """Pages that the allocator would hand out."""
        return frozenset(self.pages.get_all_free_pages().tolist())

    @property
    def free_states(self) -> frozenset[int]:
        """State slots that the allocator would hand out."""
        return frozenset(self.states.free_slots.tolist())

    def _free_ids(self) -> tuple[frozenset[int], frozenset[int], frozenset[int]]:
        return self.free_pages, self.free_states, frozenset(self.requests.free_slots)

    def _watch(self) -> None:
        """Look at what the allocators hand out and what the tree evicts, from outside."""
        for name in ("alloc", "alloc_extend", "alloc_decode"):
            self._watch_one(self.pages, name, 0, lambda: self.free_pages, self._pages_taken)
        self._watch_one(self.states, "alloc", 1, lambda: self.free_states, self._states_taken)
        evict, size = self.tree._evict, self._geometry.logical_page_size

        @wraps(evict)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = evict(*args, **kwargs)
            self.evicted += result.num_tokens_evicted // size
            return result

        self.tree._evict = counted

    def _watch_one(
        self,
        allocator: Any,
        name: str,
        place: int,
        free: Callable[[], frozenset[int]],
        taken: Callable[[Tensor], None],
    ) -> None:
        call = getattr(allocator, name)

        @wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before = free()
            result = call(*args, **kwargs)
            if ids := before - free():
                self._free[place] -= ids
                taken(_ids(ids))
            return result

        setattr(allocator, name, watched)

    def _pages_taken(self, ids: Tensor) -> None:
        pages = set(ids.tolist())
        self.reused += len(pages & self._taken)
        self._taken |= pages
        self._poison_pages(ids)

    def _states_taken(self, ids: Tensor) -> None:
        self._fill(Component.STATE, ids, 1)

    def scrub(self) -> None:
        """Poison what has become free since the last call, be it that it was handed out since.
        What has been freed and handed out again was poisoned as it was handed out."""
        before, self._free = self._free, list(self._free_ids())
        pages, states, rows = (_ids(now - was) for now, was in zip(self._free, before, strict=True))
        self._poison_pages(pages)
        self._fill(Component.STATE, states, 1)
        self._fill(Component.TAIL, rows, 1)

    def _poison_pages(self, ids: Tensor) -> None:
        self._fill(Component.KV, ids, self._geometry.logical_page_size)
        if self._whole_index_pages:
            self._fill(Component.INDEX, ids, 1)

    def _fill(self, component: Component, ids: Tensor, each: int) -> None:
        """Poison `each` rows of each id in all buffers of a component."""
        if not self._options.poison or not len(ids):
            return
        rows = (ids[:, None] * each + torch.arange(each)).flatten()
        for owner, buffers in self._buffers():
            if owner is component:
                for buffer in buffers:
                    buffer.view(torch.uint8)[rows] = POISON

    def _buffers(self) -> list[tuple[Component, list[Tensor]]]:
        """All of SGLang's buffers, by what they store; the first dimension counts its rows."""
        return [
            (component, self.parts(component, layer))
            for component in (Component.KV, Component.INDEX, Component.TAIL, Component.STATE)
            for layer in range(len(self._layers(component)))
        ]

    def _layers(self, component: Component) -> tuple[int, ...]:
        states = component is Component.STATE
        return self._shape.kda_layers if states else self._shape.dsa_layers

    def parts(self, component: Component, layer: int) -> list[Tensor]:
        """SGLang's buffers that together hold a component's rows of one layer, as it keeps them:
        latent rows; index pages; a tail's keys and gates; a state's matrix and its window."""
        full = self.kv.full_kv_pool
        if component is Component.KV:
            return [full.kv_buffer[layer]]
        if component is Component.INDEX:
            return [full.index_k_with_scale_buffer[layer]]
        if component is Component.TAIL:
            return list(full.get_compress_tail_buffers(layer))
        return self.state_parts(layer)

    def state_parts(self, layer: int) -> list[Tensor]:
        """[slots, ...] float32 each: the matrices and the convolution windows of a KDA layer."""
        cache = self.requests.mamba_pool.mamba_cache
        return [cache.temporal[layer], *(window[layer] for window in cache.conv)]


def _ids(found: frozenset[int]) -> Tensor:
    return torch.tensor(sorted(found), dtype=torch.int64)
