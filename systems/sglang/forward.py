"""What SGLang's model runner does with a batch of the scheduler, for rows that are given.

Planning and storing are SGLang's own, by its backend and its indexer; both are made without their
constructors, which want a model and a GPU, and get the few attributes that they then read.  The
model's projections are where the given rows come in.
"""

from __future__ import annotations

from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from reference.contract import Rows
from reference.geometry import Geometry, ModelShape
from systems.sglang.pools import Pools

ATTENTION = "sglang.srt.layers.attention"


class Forward:
    """The model runner of one engine.

    ape: [dsa_layers, kpool, index_dim] float32.
    head_gates: as of the release's `Differences`.
    """

    def __init__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        pools: Pools,
        ape: Tensor,
        *,
        head_gates: bool,
    ) -> None:
        self._geometry, self._shape, self._pools = geometry, shape, pools
        self._head_gates = head_gates
        self._modes = import_module("sglang.srt.model_executor.forward_batch_info").ForwardMode
        self._contexts = import_module("sglang.srt.model_executor.forward_context")
        self.backend = self._build_backend()
        self._indexers = [self._build_indexer(part) for part in ape]

    def extend(self, batch: Any, rows: Rows) -> None:
        """Store a chunk of each request of a batch that was prepared for it; `rows` are those of
        all chunks, one behind the other."""
        forward = self._forward_batch(batch)
        forward.extend_seq_lens_cpu = list(batch.extend_lens)
        forward.extend_seq_lens = torch.tensor(batch.extend_lens)
        forward.extend_prefix_lens_cpu = list(batch.prefix_lens)
        forward.extend_prefix_lens = torch.tensor(batch.prefix_lens)
        forward.extend_num_tokens = batch.extend_num_tokens
        starts = zip(batch.prefix_lens, batch.extend_lens, strict=True)
        forward.positions = torch.cat([torch.arange(at, at + n) for at, n in starts])
        self._run(forward, rows)

    def decode(self, batch: Any, rows: Rows) -> None:
        """Store the new position of each request of a batch that was prepared for it."""
        forward = self._forward_batch(batch)
        forward.positions = batch.seq_lens - 1
        self._run(forward, rows)

    def verify(self, batch: Any, rows: Rows) -> None:
        """Store the drafts of each request of a batch that was prepared for it, at the positions
        from its length on; `rows` are those of all requests, one behind the other."""
        forward = self._forward_batch(batch)
        ahead = torch.arange(self._geometry.max_drafts)
        forward.positions = (batch.seq_lens[:, None] + ahead).flatten()
        self._run(forward, rows)

    def _forward_batch(self, batch: Any) -> SimpleNamespace:
        return SimpleNamespace(
            forward_mode=batch.forward_mode,
            batch_size=len(batch.reqs),
            req_pool_indices=batch.req_pool_indices,
            req_pool_indices_cpu=batch.req_pool_indices_cpu,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            seq_lens_sum=int(batch.seq_lens.sum()),
            out_cache_loc=batch.out_cache_loc,
            token_to_kv_pool=self._pools.kv,
            extend_seq_lens_cpu=None,
            attn_cp_metadata=None,
            global_num_tokens_cpu=None,
            spec_info=None,
        )

    def _run(self, forward: SimpleNamespace, rows: Rows) -> None:
        """One forward: the plan, and then each layer's rows."""
        context = self._contexts.ForwardContext(attn_backend=self.backend)
        with self._contexts.forward_context(context):
            self.backend.init_forward_metadata(forward)
            for layer, number in enumerate(self._shape.dsa_layers):
                self._pools.kv.set_mla_kv_buffer(
                    SimpleNamespace(layer_id=number),
                    forward.out_cache_loc,
                    rows.kv[layer].bfloat16()[:, None],
                    None,
                )
                self._index(layer, number, forward, rows)

    def _index(self, layer: int, number: int, forward: SimpleNamespace, rows: Rows) -> None:
        """Pool the keys of a layer.  What is projected is the gates, by the identity, so that they
        are what the indexer works out."""
        indexer, key = self._indexers[layer], rows.key[layer].bfloat16()
        given = {
            "x": rows.gate[layer].bfloat16(),
            "positions": forward.positions,
            "forward_batch": forward,
            "layer_id": number,
            "metadata": self.backend.get_indexer_metadata(number, forward),
        }
        if not forward.forward_mode.is_target_verify():
            indexer._compress_write(key=key, **given)
            return
        projected = (None, key, None, None) if self._head_gates else (None, key, None)
        indexer._get_q_k_bf16 = lambda *_, **__: projected
        indexer._forward_cuda_target_verify(
            q_lora=None, act_quant=None, enable_dual_stream=False, return_indices=False, **given
        )

    def _build_backend(self) -> Any:
        module = import_module(f"{ATTENTION}.dsa_backend")
        backend = object.__new__(module.DeepseekSparseAttnBackend)
        geometry, pools = self._geometry, self._pools
        vars(backend).update(
            device="cpu",
            dsa_index_kpool=geometry.kpool,
            dsa_index_topk=geometry.topk,
            physical_page_size=geometry.physical_page_size,
            real_page_size=geometry.physical_page_size,
            req_to_token_pool=pools.requests,
            req_to_token=pools.requests.req_to_token,
            token_to_kv_pool=pools.kv,
            hisparse_coordinator=None,
            use_mha=False,
            use_fused_topk=False,
            supports_mha_one_shot=False,
            enable_auto_select_prefill_impl=False,
            dsa_kv_cache_store_fp8=False,
            dsa_prefill_impl="tilelang",
            dsa_decode_impl="tilelang",
            dsa_topk_backend=SimpleNamespace(should_use_topk_v2=lambda: False),
            speculative_num_draft_tokens=geometry.max_drafts,
            num_q_heads=self._shape.heads,
            device_sm_major=9,
            _kv_shard_pool=None,
            _arange_buf=torch.arange(1 << 14, dtype=torch.int32),
            _is_in_breakable_cuda_graph=lambda: False,
            _is_in_tc_piecewise_cuda_graph=lambda: False,
            _get_device_sm=lambda: 0,
            _is_blackwell=lambda: False,
        )
        return backend

    def _build_indexer(self, ape: Tensor) -> Any:
        """Of a layer with the position weights `ape` [kpool, index_dim]."""
        module = import_module(f"{ATTENTION}.dsa.dsa_indexer_kpool")
        indexer = object.__new__(module.IndexerKPool)
        torch.nn.Module.__init__(indexer)
        geometry, dim = self._geometry, self._shape.index_dim
        vars(indexer).update(
            index_kpool=geometry.kpool,
            index_kpool_compress=True,
            index_kpool_compress_ape=ape.contiguous(),
            index_kpool_compress_gate=torch.eye(dim, dtype=torch.bfloat16),
            index_topk=geometry.topk,
            head_dim=dim,
            scale_fmt="ue8m0" if geometry.round_scale else None,
            alt_stream=None,
            compress_gate_stream=None,
        )
        return indexer
