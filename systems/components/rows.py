"""What a stored row looks like, and its way in and out: the reference's formats, row by row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from optimized.kernels import decode_update, kv_store, pool_store, pooled_key
from optimized.planner import ChunkPlan, DecodePlan
from optimized.store import Store
from reference import pooling, quant
from reference.addressing import index_byte_offsets
from reference.geometry import Geometry, RowFormat
from systems.components.component import Component

KV_STORE = Component("kernels.kv_store", "KV rows in their formats")
GATHER = Component("kernels.gather", "rows out of a pool")
POOLED_KEY = Component("kernels.pooled_key", "pooling, rotation, scales, layout of an index page")
POOL_STORE = Component("kernels.pool_store", "the groups that close in a chunk")
DECODE_UPDATE = Component("kernels.decode_update", "the tail ring and the group of a decode")
STORE = Component("store", "the order in which a step stores")


@KV_STORE.by("kv_store")
def store_kv(
    pool: Tensor, locs: Tensor, rows: Tensor, *, row_format: RowFormat, backend: str
) -> None:
    for loc, row in zip(locs.tolist(), rows, strict=True):
        pool[loc] = quant.encode_row(row.double(), row_format)


@KV_STORE.by("decode_rows")
def decode_rows(stored: Tensor, *, row_format: RowFormat, latent: int) -> Tensor:
    return quant.decode_row(stored, row_format, latent).float()


@KV_STORE.by("fp8_scale")
def fp8_scale(values: Tensor) -> Tensor:
    absmax = values.double().abs().amax(-1, keepdim=True)
    return quant.fp8_scale(absmax, round_scale=False).float()


@KV_STORE.by("encode_e4m3")
def encode_e4m3(values: Tensor) -> Tensor:
    return quant.e4m3_codes(values.double())


@GATHER.by("gather_rows")
def gather_rows(pool: Tensor, locs: Tensor, *, backend: str) -> Tensor:
    rows = [pool[loc].clone() for loc in locs.tolist()]
    return torch.stack(rows) if rows else pool[:0].clone()


@GATHER.by("gather_index")
def gather_index(
    index_pool: Tensor, slots: Tensor, *, index_page_size: int, backend: str
) -> Tensor:
    return index_pool.flatten()[_index_bytes(index_pool, slots, index_page_size)]


def _index_bytes(index_pool: Tensor, slots: Tensor, index_page_size: int) -> Tensor:
    """[slots, index_dim + 4] int64: the places of each slot's bytes in the flattened pool."""
    geometry = Geometry(
        kpool=1,
        physical_page_size=index_page_size,
        topk=1,
        mamba_track_interval=index_page_size,
    )
    dim = index_pool.shape[1] // index_page_size - pooled_key.SCALE_BYTES
    return torch.from_numpy(index_byte_offsets(slots.numpy(), geometry, dim))


@POOLED_KEY.by("store_groups")
def store_groups(
    index_pool: Tensor,
    slots: Tensor,
    keys: Tensor,
    gates: Tensor,
    ape: Tensor,
    *,
    index_page_size: int,
    round_scale: bool,
) -> None:
    flat = index_pool.view(-1)
    where = _index_bytes(index_pool, slots, index_page_size)
    for group, at in enumerate(where):
        one = keys[None, :, group].double(), gates[None, :, group].double()
        pooled = pooling.rotate(pooling.pool(*one, ape.double()))
        flat[at] = quant.encode_key(pooled, round_scale=round_scale)[0]


@POOLED_KEY.by("rotate")
def rotate(rows: Tensor) -> Tensor:
    return pooling.rotate(rows.double()).float()


@POOLED_KEY.by("quantise")
def quantise(rows: Tensor, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    values, scale = quant.fp8(rows.double(), round_scale=round_scale)
    return quant.e4m3_codes(values), scale[..., None].float()


@POOLED_KEY.by("page_views")
def page_views(index_pool: Tensor, *, index_page_size: int) -> tuple[Tensor, Tensor]:
    """Copies: with `store_groups` replaced, nothing writes through them."""
    slots = torch.arange(len(index_pool) * index_page_size)
    rows = index_pool.flatten()[_index_bytes(index_pool, slots, index_page_size)]
    keys, scales = rows.view(len(index_pool), index_page_size, -1).tensor_split((-4,), dim=2)
    return keys, scales


@POOL_STORE.by("pool_store")
def store_pooled(
    index_pool: Tensor,
    slots: Tensor,
    src: Tensor,
    ring: Tensor,
    chunk: Tensor,
    ape: Tensor,
    *,
    index_page_size: int,
    round_scale: bool,
    backend: str,
) -> None:
    for slot, members in zip(slots, src.tolist(), strict=True):
        rows = [ring[at] if at < len(ring) else chunk[at - len(ring)] for at in members]
        keys, gates = torch.stack(rows)[:, None].chunk(2, dim=2)
        pooled_key.store_groups(
            index_pool,
            slot[None],
            keys,
            gates,
            ape,
            index_page_size=index_page_size,
            round_scale=round_scale,
        )


@DECODE_UPDATE.by("decode_update")
def update(
    index_pool: Tensor,
    ring_key: Tensor,
    ring_gate: Tensor,
    key: Tensor,
    gate: Tensor,
    ring_slot: Tensor,
    position: Tensor,
    index_slot: Tensor,
    ape: Tensor,
    *,
    kpool: int,
    index_page_size: int,
    round_scale: bool,
    backend: str,
) -> None:
    for request, (ring, newest) in enumerate(
        zip(ring_slot.tolist(), position.tolist(), strict=True)
    ):
        ring_key[ring, newest % ring_key.shape[1]] = key[request]
        ring_gate[ring, newest % ring_key.shape[1]] = gate[request]
        if int(index_slot[request]) == 0:
            continue
        members = [at % ring_key.shape[1] for at in range(newest - kpool + 1, newest + 1)]
        pooled_key.store_groups(
            index_pool,
            index_slot[request][None],
            ring_key[ring, members][:, None],
            ring_gate[ring, members][:, None],
            ape,
            index_page_size=index_page_size,
            round_scale=round_scale,
        )


@STORE.by("Store.chunk")
def chunk(self: Store, plan: ChunkPlan, layer: int, kv: Tensor, key: Tensor, gate: Tensor) -> None:
    """Rows, then groups, then the ring, which the groups read as it was."""
    _store_rows(self, layer, kv)
    ring, rows = self.pools.ring[layer].flatten(0, 1), torch.cat((key, gate), dim=1)
    if len(plan.index_slots):
        pool_store.pool_store(
            self.pools.index[layer],
            plan.index_slots,
            plan.sources,
            ring.clone(),
            rows,
            self.ape[layer],
            **_formats(self),
        )
    for target, source in zip(plan.ring_rows.tolist(), plan.ring_sources.tolist(), strict=True):
        ring[target] = rows[source]


@STORE.by("Store.decode")
def decode(
    self: Store, plan: DecodePlan, layer: int, kv: Tensor, key: Tensor, gate: Tensor
) -> None:
    """Row, then ring and group, which the new key is part of."""
    _store_rows(self, layer, kv)
    ring_key, ring_gate = self.pools.ring[layer].chunk(2, dim=-1)
    decode_update.decode_update(
        self.pools.index[layer],
        ring_key,
        ring_gate,
        key,
        gate,
        plan.rings,
        plan.positions,
        plan.index_slots,
        self.ape[layer],
        kpool=self.geometry.kpool,
        **_formats(self),
    )


def _store_rows(store: Store, layer: int, kv: Tensor) -> None:
    pool, rows = store.kv_rows.targets(layer)
    kv_store.kv_store(pool, rows, kv, row_format=store.geometry.row_format, backend=store.backend)


def _formats(store: Store) -> dict[str, Any]:
    return {
        "index_page_size": store.geometry.index_page_size,
        "round_scale": store.geometry.round_scale,
        "backend": store.backend,
    }
