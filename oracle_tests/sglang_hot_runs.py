"""What the tests do with SGLang's HiSparse behind the contract; each function runs in the process
of one release."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

from fuzz.run import for_target
from fuzz.stamps import stamper_of
from fuzz.tape import Tape
from fuzz.targets import find
from oracle_tests.sglang_cases import campaign, executed, refused
from reference.contract import (
    Capability,
    Chunk,
    Component,
    Engine,
    EngineOptions,
    HiSparse,
    InvalidCall,
    OutOfMemory,
    RequestId,
    System,
)


def hot(system: System, seeds: Sequence[int]) -> dict[str, Any]:
    """All of this module in one process, since loading a release takes longer than most of it."""
    return {
        "clean": campaign(system, "hot_buffer", seeds),
        "faults": hot_faults(system, seeds),
        "any cells": any_cells(system, seeds),
        "refusals": hot_refusals(system),
    }


def any_cells(system: System, seeds: Sequence[int]) -> list[str]:
    """What `hot_buffer` says first if it selects void and repeated cells too."""
    driven = for_target(system, find("hot_buffer"))

    def promising(*args: Any, **kwargs: Any) -> Engine:
        engine = driven.factory(*args, **kwargs)
        engine.capabilities |= {Capability.ANY_CELLS}
        return engine

    return _first(replace(driven, factory=promising), seeds)


def _first(system: System, seeds: Sequence[int]) -> list[str]:
    """Signature and sentence of the first violation of `hot_buffer`, if there is one."""
    runs = (executed(system, "hot_buffer", Tape(seed=seed)) for seed in seeds)
    said = (violation for run in runs for violation in run.violations)
    return next(([each.signature, each.sentence] for each in said), [])


def hot_faults(system: System, seeds: Sequence[int]) -> dict[str, list[str]]:
    """What `hot_buffer` says first with each of some faults in SGLang's coordinator; the first of
    `seeds` that shows it counts."""
    found = {}
    for name, (owner, method, faulty) in _hot_faults().items():
        with patch.object(owner, method, faulty):
            found[name] = _first(system, seeds)
    return found


def hot_refusals(system: System) -> dict[str, Any]:
    """What an engine with HiSparse refuses, in words, and whether it then is as it was."""
    hot = for_target(system, find("hot_buffer"))
    size = hot.sizes[0]
    stamper = stamper_of(size.geometry, size.shape)
    least = EngineOptions(
        pages=5, state_slots=2, max_requests=2, hisparse=HiSparse(device_pages=3, host_pages=5)
    )
    half = replace(size.geometry, device_buffer_size=size.geometry.physical_page_size // 2)
    engine = hot.factory(size.geometry, size.shape, least)
    prompts = {0: list(range(1, 11)), 1: list(range(1, 200))}
    for name, tokens in prompts.items():
        engine.submit(RequestId(name), tokens)

    def extend(name: int, stop: int) -> None:
        rows = stamper.extend_rows(stamper.chain(prompts[name]), 0, stop)
        engine.extend([Chunk(request=RequestId(name), stop=stop, rows=rows)])

    extend(0, 10)
    before = engine.inspect()
    bare, states = replace(least, hisparse=None), Component.STATE
    step = stamper.step_rows(stamper.chain([7]))
    build = partial(hot.factory, size.geometry, size.shape)
    return {
        "without HiSparse": refused(InvalidCall, lambda: build(bare)),
        "a buffer of half a page": refused(
            InvalidCall, lambda: hot.factory(half, size.shape, least)
        ),
        "a model": refused(InvalidCall, lambda: build(least, {})),
        "in two chunks": refused(InvalidCall, lambda: extend(1, 64)),
        "no selection": refused(InvalidCall, lambda: engine.decode([RequestId(0)], [7], step)),
        "states": refused(InvalidCall, lambda: engine.read(RequestId(0), states, 0, 0, 1)),
        "too long": refused(OutOfMemory, lambda: extend(1, 199)),
        "unchanged": engine.inspect() == before,
    }


def _hot_faults() -> dict[str, tuple[Any, str, Callable[..., Any]]]:
    """By what goes wrong: a class of SGLang's, a method, and the one that takes its place."""
    module = import_module("sglang.srt.managers.hisparse_coordinator")
    coordinator = module.HiSparseCoordinator
    allocator = import_module("sglang.srt.mem_cache.allocator.hisparse")
    finish, buffer = coordinator.request_finished, coordinator.alloc_device_buffer
    grow = coordinator._grow_device_buffers
    paged = import_module("sglang.srt.mem_cache.allocator.paged").PagedTokenToKVPoolAllocator
    take = paged.alloc_decode

    def tags_stay(self: Any, request: Any) -> None:
        tags, order = self.req_device_buffer_tokens.clone(), self.lru_slots.clone()
        finish(self, request)
        self.req_device_buffer_tokens.copy_(tags)
        self.lru_slots.copy_(order)

    def newest_over_another(self: Any, lengths: Any, slots: Any, *others: Any) -> Any:
        grow(self, lengths, slots, *others)
        last = (lengths - 1).clamp(max=self.device_buffer_size - 1)
        return self.req_to_device_buffer[slots, last]

    def first_tags_swapped(self: Any, request: Any) -> None:
        buffer(self, request)
        tags = self.req_device_buffer_tokens[:, request.kv.req_pool_idx]
        tags[:, :2] = tags[:, :2].flip(1).clone()

    def whole_at_once(self: Any, request: Any) -> None:
        with patch.object(self.mem_pool_device, "page_size", self.device_buffer_size):
            buffer(self, request)

    def taken_off_the_wrong_end(self: Any, *args: Any) -> Any:
        before = self.free_pages
        locs = take(self, *args)
        self.free_pages = before[: len(self.free_pages)]
        return locs

    def kept(self: Any, rows: Any) -> None:
        """Device rows are not given back."""

    return {
        "no wait for a copy": (coordinator, "wait_for_pending_backup", lambda self: None),
        "the LRU order outlives its request": (coordinator, "request_finished", tags_stay),
        "the newest row lies over another": (
            coordinator,
            "_grow_device_buffers",
            newest_over_another,
        ),
        "two tags are swapped": (coordinator, "alloc_device_buffer", first_tags_swapped),
        "a short prompt has a whole buffer": (coordinator, "alloc_device_buffer", whole_at_once),
        "a page that was taken stays free": (paged, "alloc_decode", taken_off_the_wrong_end),
        "device rows are kept": (
            allocator.HiSparseTokenToKVPoolAllocator,
            "free_hisparse_indices",
            kept,
        ),
    }
