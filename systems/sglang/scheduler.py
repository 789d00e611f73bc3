"""What SGLang's scheduler does with a request between its pools, its tree and a forward.

Matching, allocation, tracking of KDA states, caching and release are SGLang's own; this is the
order in which its scheduler calls them, and the budget that it checks before it does, without
which SGLang would end in an assertion.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from systems.sglang import setting
from systems.sglang.pools import Pools
from systems.sglang.releases import Differences

MANAGERS = "sglang.srt.managers"
SPECULATIVE = "sglang.srt.speculative"
UNKNOWN = 0
"""Stands for the token that was sampled last: SGLang appends it with the step that samples it, our
caller names it with the next."""


class Scheduler:
    """Drives the requests (SGLang's Req) of one engine."""

    def __init__(self, pools: Pools, differences: Differences, *, drafts: int) -> None:
        self._pools, self._differences, self._drafts = pools, differences, drafts
        self._batches = import_module(f"{MANAGERS}.schedule_batch")
        self._common = import_module("sglang.srt.mem_cache.common")
        self._parameters = import_module("sglang.srt.sampling.sampling_params")
        self._modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self._locs = import_module("sglang.kernels.ops.speculative.cache_locs")
        self._verifying = import_module(f"{SPECULATIVE}.spec_utils")
        self._commit = import_module("sglang.kernels.ops.mamba.mamba_state_scatter_triton")
        self._grid = import_module("sglang.srt.runtime_context").mamba_track_grid
        algorithms = import_module(f"{SPECULATIVE}.spec_info").SpeculativeAlgorithm
        self._algorithm = algorithms.from_string("EAGLE" if drafts else None)
        self._samplings = import_module("sglang.srt.sampling.sampling_batch_info")
        self._model = setting.model_config()
        self._results = self._build_results()

    def admit(self, name: str, tokens: Sequence[int], again: Any | None) -> tuple[Any, int]:
        """A request of these tokens, and how many of them are cached; those are locked.  `again`:
        the request that was retracted under that name, which then goes on."""
        if again is None:
            request = self._batches.Req(
                rid=name,
                origin_input_text="",
                origin_input_ids=array("q", tokens),
                sampling_params=self._parameters.SamplingParams(max_new_tokens=1 << 30),
                vocab_size=self._model.vocab_size,
            )
        else:
            request = again
        tree = self._pools.tree
        request.init_next_round_input(tree)
        if self._differences.locks:
            request.lock = tree.lock(request.last_node)
            return request, request.prefix_len
        request.lock_receipt = tree.inc_lock_ref(request.last_node).to_dec_params()
        return request, len(request.prefix_indices)

    def prefill(self, requests: Sequence[Any], stops: Sequence[int]) -> Any:
        """The batch that extends each request to its stop, its memory allocated."""
        for request, stop in zip(requests, stops, strict=True):
            if request.extend_batch_idx:
                request.init_next_round_input()
            if self._differences.locks:
                request.extend_end = stop
            else:
                request.set_extend_range(len(request.prefix_indices), stop)
        batch = self._batch(requests)
        batch.prepare_for_extend()
        return batch

    def prefilled(self, request: Any, *, whole: bool) -> None:
        """What follows a forward that has extended a request, to the end of its prompt or not."""
        if whole:
            request.output_ids.append(UNKNOWN)
        if self._differences.locks:
            self._common.checkpoint_kv_cache(request, self._pools.tree)
        else:
            chunked = {} if whole else {"chunked": True}
            self._common.maybe_cache_unfinished_req(request, self._pools.tree, **chunked)

    def step(self, requests: Sequence[Any], tokens: Sequence[int]) -> Any:
        """The batch that decodes a token of each request, its memory allocated."""
        for request, token in zip(requests, tokens, strict=True):
            request.output_ids[-1] = token
        batch = self._grown(requests)
        batch.prepare_for_decode()
        return batch

    def drafted(self, requests: Sequence[Any]) -> Any:
        """The batch that verifies drafts of each request, its memory allocated: as much as SGLang
        reserves, which is whole pages."""
        batch = self._grown(requests)
        batch.prepare_for_decode()
        batch.out_cache_loc = self._locs.assign_extend_cache_locs_uniform_func(
            req_pool_indices=batch.req_pool_indices,
            req_to_token=self._pools.requests.req_to_token,
            start_offset=batch.seq_lens,
            batch_size=len(requests),
            draft_token_num=self._drafts,
            device="cpu",
        )
        batch.forward_mode = self._modes.TARGET_VERIFY
        return batch

    def accepted(
        self, requests: Sequence[Any], drafts: Sequence[Sequence[int]]
    ) -> tuple[Any, list[int], list[int]]:
        """Commit the first drafts of each request, one at least.  Which of the states behind its
        drafts SGLang then keeps, by number: the last, and the one for its cache or -1.  The batch
        says where that one goes."""
        width, counts = self._drafts, torch.tensor([len(kept) for kept in drafts])
        batch = self._grown(requests)
        self._verifying.prepare_mamba_track_for_verify(batch)
        # numbered through the batch
        number = torch.arange(len(requests) * width).view(-1, width)
        index = number.masked_fill(torch.arange(width) >= counts[:, None], -1)
        last, cached = self._commit.fused_commit_track_indices(
            index, counts, batch.seq_lens, width, self._grid(self._pools.tree.page_size)
        )
        # what SGLang calls the first draft is our caller's second: its first was sampled before
        after = [[*kept[1:], *[UNKNOWN] * (width - len(kept) + 1)] for kept in drafts]
        result = SimpleNamespace(
            next_token_ids=torch.tensor(after).flatten(),
            accept_lens=counts,
            num_non_draft_tokens_per_req=1,
            speculative_output_stride=width,
            speculative_num_draft_tokens=width,
            block_accept_lens=None,
            cap_lens=None,
            grammar_advanced=True,
            grammar_retained_tokens=None,
        )
        tokens = self._results._resolve_spec_v2_tokens(result, batch)
        for place, request in enumerate(requests):
            request.output_ids[-1] = drafts[place][0]
            request.output_ids.extend(tokens[place])
            self._results._handle_finish_state_updated_req(request, batch, result, place, None)
        return batch, last.tolist(), cached.tolist()

    def _grown(self, requests: Sequence[Any]) -> Any:
        """The batch of requests that go on from what they have stored."""
        batch = self._batch(requests)
        lengths = torch.tensor([request.kv.kv_committed_len for request in requests])
        rows = torch.tensor([request.kv.req_pool_idx for request in requests])
        batch.seq_lens, batch.seq_lens_cpu = lengths, lengths.clone()
        batch.orig_seq_lens = lengths.int()
        batch.req_pool_indices, batch.req_pool_indices_cpu = rows, rows.clone()
        batch.sampling_info = self._samplings.SamplingBatchInfo.from_schedule_batch(
            batch, self._model.vocab_size
        )
        return batch

    def stepped(self, batch: Any) -> None:
        """What follows a forward that has decoded a batch."""
        for place, request in enumerate(batch.reqs):
            request.output_ids.append(UNKNOWN)
            self._results._handle_finish_state_updated_req(request, batch, None, place, None)

    def release(self, request: Any, *, keep: bool) -> None:
        """Give back what a request holds; its whole pages stay in the tree, with `keep`."""
        request.finished_reason = self._batches.FINISH_LENGTH(length=len(request.output_ids))
        tree = self._pools.tree
        if not request.kv.holds_kv:
            if self._differences.locks:
                tree.unlock(request.lock)
            else:
                tree.dec_lock_ref(request.last_node, request.lock_receipt)
        name = "checkpoint" if self._differences.locks else "is_insert"
        self._common.release_kv_cache(request, tree, **{name: keep})

    def retract(self, request: Any, *, sampled: bool) -> None:
        """Give back what a request holds, and make it ready to be admitted again; without its next
        token, if one was sampled since it was admitted."""
        self.release(request, keep=False)
        request.finished_reason = None
        if sampled:
            request.output_ids.pop()
        request.reset_for_retract()

    def evict(self, tokens: int) -> int:
        """Evict at least so many cached tokens, if there are so many that nobody holds; how many
        went."""
        parameters = import_module("sglang.srt.mem_cache.base_prefix_cache").EvictParams
        return int(self._pools.tree.evict(parameters(num_tokens=tokens)).num_tokens_evicted)

    def _batch(self, requests: Sequence[Any]) -> Any:
        pools = self._pools
        return self._batches.ScheduleBatch.init_new(
            list(requests),
            pools.requests,
            pools.pages,
            pools.tree,
            self._model,
            False,
            self._algorithm,
        )

    def _build_results(self) -> Any:
        """The scheduler's part that looks at what a decode has brought."""
        module = import_module(f"{MANAGERS}.scheduler_components.batch_result_processor")
        # frozen, and of a server's many parts only these are asked for
        parts = {
            "tree_cache": self._pools.tree,
            "draft_worker": None,
            "model_worker": SimpleNamespace(on_verify_complete_cpu=lambda *_, **__: None),
            "metrics_reporter": SimpleNamespace(snapshot_spec_decode_metrics=lambda *_: None),
            "_maybe_collect_customized_info": lambda *_: None,
        }
        return object.__new__(type("Results", (module.SchedulerBatchResultProcessor,), parts))


def tracked(batch: Any) -> list[tuple[int, int, int]]:
    """The KDA states to keep of a prefill: each with its place in the batch, the position behind
    which SGLang takes it, and the state slot that it goes to."""
    forward = import_module("sglang.srt.model_executor.forward_batch_info").ForwardBatch
    prefixes = torch.tensor(batch.prefix_lens)
    lengths = forward.mamba_track_aligned_lens(
        SimpleNamespace(
            mamba_track_mask=batch.mamba_track_mask,
            mamba_track_seqlens=batch.mamba_track_seqlens,
            extend_prefix_lens=prefixes,
        )
    )
    return [
        (place, int(prefixes[place] + lengths[place]), int(batch.mamba_track_indices[place]))
        for place, taken in enumerate(batch.mamba_track_mask.tolist())
        if taken
    ]
