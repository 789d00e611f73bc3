"""What a server sets before its caches are built: configuration, parallel context, host memory.

SGLang reads its configuration from one published place.  A release publishes arguments of a dummy
model for its own tests, and so do we.
"""

from __future__ import annotations

import os
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from reference.geometry import Geometry

STATE_CHUNK = 64
"""Tokens between two states that the KDA kernels hand out; mamba_chunk_size of the model."""


def publish(geometry: Geometry) -> None:
    """Publish the arguments of a server with this geometry, for the releases' own caches to read.

    The last one published holds; engines of one process must agree, since a process runs one case.
    """
    # the tree's other core is compiled, and cannot be looked into
    os.environ["SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND"] = "python"
    page = geometry.logical_page_size
    drafts = geometry.max_drafts
    context = import_module("sglang.srt.runtime_context")
    context.get_context().override_server_args(
        device="cpu",
        page_size=page,
        mamba_track_interval=geometry.mamba_track_interval,
        mamba_radix_cache_strategy="extra_buffer",
        attention_backend="dsa",
        disable_overlap_schedule=True,
        # a chain of drafts, by whatever model: the target's caches do not see it
        speculative_algorithm="EAGLE" if drafts else None,
        speculative_eagle_topk=1 if drafts else None,
        speculative_num_steps=max(drafts - 1, 1) if drafts else None,
        speculative_num_draft_tokens=drafts or None,
        _mamba_cache_chunk_size=max(STATE_CHUNK, page),
    ).install()
    _without_parallel(context.get_parallel())
    if not torch.cuda.is_available():
        _without_pinned_memory()
        if drafts:
            _with_verify_kernels()


def model_config() -> Any:
    """What the scheduler asks of the model's configuration."""
    return SimpleNamespace(
        is_encoder_decoder=False,
        vocab_size=1 << 30,
        hf_text_config=SimpleNamespace(mamba_chunk_size=STATE_CHUNK),
    )


def _without_parallel(parallel: Any) -> None:
    """One rank, alone.  Where a release lets it be said once for all, that is done."""
    alone = {"attn_dcp_size": 1, "attn_dcp_rank": 0}
    if hasattr(parallel, "override_permanently"):
        parallel.override_permanently(**alone)
    else:
        parallel.override(**alone).__enter__()


def _with_verify_kernels() -> None:
    """What plans and stores drafts are Triton kernels, which run here too; their modules ask for
    a GPU before they launch them.  So does the function that says how long the context of each
    draft is, which is for the selection: it is replaced."""
    attention = "sglang.srt.layers.attention"
    for name in ("kpool_plan", "dsa_indexer_kpool"):
        import_module(f"{attention}.dsa.{name}").is_cuda = lambda: True
    import_module("sglang.kernels.ops.speculative.cache_locs")._is_cuda = True
    import_module(f"{attention}.dsa_backend").seqlens_expand_triton = _context_lengths


def _context_lengths(added: torch.Tensor, whole: torch.Tensor, *_: int) -> torch.Tensor:
    """[sum of added] int32: how much each added position sees, of requests that are then `whole`
    long."""
    spans = zip(added.tolist(), whole.tolist(), strict=True)
    return torch.cat([torch.arange(stop - n + 1, stop + 1) for n, stop in spans]).int()


def _without_pinned_memory() -> None:
    """Pinned memory is for copies to a GPU; without one torch refuses to give any."""
    if getattr(torch.tensor, "pins_nothing", False):
        return
    make = torch.tensor

    def tensor(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:
        return make(*args, **kwargs)

    tensor.pins_nothing = True  # type: ignore[attr-defined]
    torch.tensor = tensor
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
