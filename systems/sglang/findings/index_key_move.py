"""Moving a token's row in SGLang's DSA pool, and what becomes of the index keys.

    python -m systems.sglang.findings.index_key_move ROOT

Every index slot holds a key of its own; then one token is moved as speculative decoding with a
tree of drafts moves an accepted one, and every slot is read back by the layout of
`reference.geometry`: an index page stores all its keys first, then all their scales.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import Tensor

from reference.geometry import Geometry
from systems.sglang import setting
from systems.sglang.loader import Release, load
from systems.sglang.releases import Differences

DIM, SCALE_BYTES = 128, 4
PAGES = 64
NEAR = (7, 9)
"""A move within the token rows that are also numbers of index pages."""
FAR = (7, 65 * 64 - 1)
"""A move to a token row of a high number."""


class Moved(msgspec.Struct, frozen=True):
    """What a move did.

    Fields:
        refused: the sentence with which SGLang turned it down, if it did.
        target: whether the target's slot holds the source's key and scale; with pooling a token
            alone has no key, so that nothing is right but a refusal.
        intruded: index slots other than the target's that no longer hold their own.
    """

    release: str
    kpool: int
    source: int
    target_loc: int
    refused: str | None = None
    target: bool = False
    intruded: int = 0


def pool(kpool: int, differences: Differences) -> Any:
    """A pool of PAGES physical pages and the padding page, with one DSA layer."""
    memory = import_module("sglang.srt.mem_cache.memory_pool")
    geometry = Geometry(physical_page_size=64, kpool=kpool, topk=4 * kpool)
    setting.publish(geometry)
    page = geometry.logical_page_size if differences.logical_pages else 64
    return memory.DSATokenToKVPool(
        size=PAGES * 64,
        page_size=page,
        kv_lora_rank=64,
        dtype=torch.bfloat16,
        qk_rope_head_dim=0,
        layer_num=1,
        device="cpu",
        index_head_dim=DIM,
        enable_memory_saver=False,
        kv_cache_dim=64,
        index_kpool=kpool,
        index_kpool_compress=kpool > 1,
        max_running_requests=2,
    )


def rows(buffer: Tensor) -> Tensor:
    """Key and scale of every index slot: [slots, DIM + SCALE_BYTES] uint8."""
    pages = buffer.view(torch.uint8).reshape(-1, 64 * (DIM + SCALE_BYTES))
    keys = pages[:, : 64 * DIM].reshape(-1, DIM)
    return torch.cat((keys, pages[:, 64 * DIM :].reshape(-1, SCALE_BYTES)), dim=1)


def move(release: Release, kpool: int, source: int, target: int) -> Moved:
    """Move the row of `source` to `target`, in token rows."""
    it = pool(kpool, release.differences)
    [buffer] = it.index_key_cache.buffer
    flat = buffer.view(torch.uint8).view(-1)
    flat.copy_(torch.randint(0, 255, flat.shape, generator=torch.Generator().manual_seed(1)))
    before = rows(buffer).clone()
    case = {"release": release.version, "kpool": kpool, "source": source, "target_loc": target}
    try:
        it.move_kv_cache(torch.tensor([target]), torch.tensor([source]))
    except (AssertionError, IndexError) as error:
        return Moved(**case, refused=f"{type(error).__name__}: {error}")
    after = rows(buffer)
    changed = (after != before).any(dim=1)
    changed[target // kpool] = False
    return Moved(
        **case,
        target=bool((after[target // kpool] == before[source // kpool]).all()),
        intruded=int(changed.sum()),
    )


def main(root: str) -> None:
    """Move near and far, without and with pooling, and print what it did."""
    release = load(Path(root))
    found = [move(release, kpool, *where) for kpool in (1, 4) for where in (NEAR, FAR)]
    print(msgspec.json.format(msgspec.json.encode(found), indent=2).decode())


if __name__ == "__main__":
    main(*sys.argv[1:])
