"""Optimized engines with a host tier, prefixes for it, and all that is cached, by prefix.

Rows are stamped by token and position (`contract_cases.rows`), so that the bytes of a cached
page depend on its prefix alone: wherever a prefix stands, and however often it went to the host
and back, they must be the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from oracle_tests.contract_cases import GEOMETRY, SHAPE, layers_of, rows
from reference.contract import (
    Chunk,
    Component,
    Engine,
    EngineOptions,
    HiSparse,
    HostTier,
    RequestId,
    Snapshot,
    Weights,
)
from systems import load

A, B, PROBE = RequestId(1), RequestId(2), RequestId(3)
PAGE = GEOMETRY.logical_page_size
P = tuple(range(24))  # three pages
Q = (*P[:8], *range(40, 56))  # shares the first of them
U = tuple(range(30, 54))  # shares none
STORED = (Component.KV, Component.INDEX, Component.STATE)
Prefix = tuple[int, ...]
KINDS = ("device", "hisparse")
"""Where the KV rows of an engine are: on the device, or on the host and hot on the device."""
Contents = dict[Prefix, bytes]


class Build(Protocol):
    """`build` for one kind of engine."""

    def __call__(
        self,
        *,
        tier: tuple[int, int] | None = ...,
        weights: Weights | None = ...,
        interval: int = ...,
        **options: Any,
    ) -> Engine: ...


def build(
    kind: str,
    *,
    tier: tuple[int, int] | None = (20, 20),
    weights: Weights | None = None,
    interval: int = PAGE,
    **options: Any,
) -> Engine:
    """An engine with a tier of so many pages and states, and a checkpoint every `interval`
    tokens; `options` override those of a roomy one."""
    sizes: dict[str, Any] = {"pages": 40, "state_slots": 40, "max_requests": 4}
    sizes |= {"page_order": "permuted"} | options
    geometry = replace(GEOMETRY, mamba_track_interval=interval, max_drafts=0)
    if kind == "hisparse":
        geometry = replace(geometry, device_buffer_size=geometry.topk)
        sizes["hisparse"] = HiSparse(device_pages=24, host_pages=sizes["pages"])
        sizes["pages"] += 1  # host pages run short first
    if tier is not None:
        sizes["host_tier"] = HostTier(pages=tier[0], states=tier[1])
    return load("optimized").factory(geometry, SHAPE, EngineOptions(**sizes), weights)


def prefill(engine: Engine, request: RequestId, tokens: Sequence[int]) -> int:
    """Admit and prefill a stamped request; returns its hit."""
    hit, stop = engine.submit(request, tokens).hit, len(tokens)
    marks = engine.geometry.state_positions(hit, stop)
    stamped = rows(tokens[hit:], range(hit, stop), marks)
    engine.extend([Chunk(request=request, stop=stop, rows=stamped)])
    return hit


def cache(engine: Engine, *prompts: Sequence[int]) -> None:
    """Let requests come, be prefilled, and leave their pages in the cache."""
    for tokens in prompts:
        prefill(engine, A, tokens)
        engine.finish(A)


def hit_of(engine: Engine, tokens: Sequence[int]) -> int:
    """What a request with these tokens and one more finds."""
    hit = engine.submit(PROBE, [*tokens, 99]).hit
    engine.abort(PROBE)
    return hit


def contents(engine: Engine) -> Contents:
    """The raw bytes of all that is cached: of a page by the tokens up to its end, of a
    checkpoint by the tokens before it and a -1."""
    seen, found = engine.inspect(), Contents()
    kv, index, state = ([engine.raw(c, n) for n in range(layers_of(c))] for c in STORED)
    paths: dict[int | None, tuple[int, ...]] = {None: ()}
    for node in seen.cached:
        path = paths[node.node] = paths[node.parent] + node.tokens
        start = len(path) - len(node.tokens) + PAGE
        for page, end in zip(node.pages, range(start, len(path) + 1, PAGE), strict=True):
            row = PAGE * (seen.hot.backing[page] if seen.hot else page)
            parts = [*(layer[row : row + PAGE] for layer in kv), *(layer[page] for layer in index)]
            found[path[:end]] = _joined(parts)
        for end, slot in node.checkpoints.items():
            found[(*path[:end], -1)] = _joined([layer[slot] for layer in state])
    return found


def _joined(parts: Sequence[torch.Tensor]) -> bytes:
    return b"".join(part.numpy().tobytes() for part in parts)


def part_of(stored: Contents, prefix: Sequence[int]) -> Contents:
    """The pages of a prefix, and the checkpoint at its end."""
    pages = {tuple(prefix[:end]) for end in range(PAGE, len(prefix) + 1, PAGE)}
    return {key: stored[key] for key in {*pages, (*prefix, -1)}}


def tiered(engine: Engine) -> list[Prefix]:
    """The prefixes in the tier, the least recently used first."""
    tier = engine.inspect().tier
    assert tier is not None
    return [prefix.tokens for prefix in tier.prefixes]


def check_conserved(engine: Engine, tier: tuple[int, int] = (20, 20)) -> Snapshot:
    """Nothing is lost, and nothing both free and held, on the device and in the tier."""
    seen = engine.inspect()
    assert seen.tier is not None
    views = [*seen.requests.values(), *seen.cached]
    slots = [slot for view in views for slot in view.checkpoints.values()]
    slots += [view.state_slot for view in seen.requests.values()]
    states = [prefix.state for prefix in seen.tier.prefixes]
    pages = {page for view in views for page in view.pages}
    hosts = {page for prefix in seen.tier.prefixes for page in prefix.pages}
    rows_there = [len(engine.raw(c, 0)) for c in (Component.INDEX, Component.STATE)]
    assert pages == set(seen.ref_counts)
    assert len(set(slots)) == len(slots)
    assert len(set(states)) == len(states)
    for held, free, total in (
        (pages, seen.free_pages, rows_there[0] - 1),
        (set(slots), seen.free_states, rows_there[1] - 1),
        (hosts, seen.tier.free_pages, tier[0]),
        (set(states), seen.tier.free_states, tier[1]),
    ):
        assert not held & free
        assert len(held) + len(free) == total
    return seen


def buffers(engine: Engine) -> list[torch.Tensor]:
    return [engine.raw(c, n).clone() for c in STORED for n in range(layers_of(c))]


def truth(build: Build, *prompts: Sequence[int], **options: Any) -> Contents:
    """What an engine that evicts nothing caches."""
    engine = build(**options)
    cache(engine, *prompts)
    return contents(engine)
