"""Hellos: what fits, what is refused and with which words, and bytes that are none."""

from __future__ import annotations

import multiprocessing
import os
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optimized.transfer.hello import (
    Hello,
    Instance,
    Layout,
    Process,
    RegionLayout,
    check,
    decode,
    introduce,
)
from optimized.transfer.transport import Refused, Region
from reference.geometry import Geometry, RowFormat
from reference.protocol import Completion, Peer, Side

INSTANCE = Instance(2, Completion.STATUS, Geometry())


def hello(side: Side = Side.DECODE, items: int = 8) -> Hello:
    regions = [
        Region("kv", torch.zeros(items, 64, dtype=torch.uint8)),
        Region("index", torch.zeros(4, 32, dtype=torch.uint8)),
    ]
    return introduce(Peer(side, 1, 3), INSTANCE, regions, reach={"nixl": b"somewhere"})


MINE = hello()
THEIRS = hello(Side.PREFILL, items=20)
VALID = THEIRS.encode()


def test_peers_whose_pools_differ_in_size_fit() -> None:
    assert decode(VALID) == THEIRS
    check(MINE, decode(VALID))
    check(THEIRS, MINE)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"peer": Peer(Side.DECODE, 1, 3)}, "connect prefill with decode"),
        ({"peer": Peer(Side.PREFILL, 0, 3)}, "the rank is 0 at the peer and 1 here"),
        ({"ranks": 4}, "the tensor-parallel size is 4 at the peer and 2 here"),
        ({"completion": Completion.NOTIFY}, "the completion style is NOTIFY at the peer"),
        ({"layout": Layout(2, 64, RowFormat.BF16)}, "the kpool is 2 at the peer and 4 here"),
        ({"layout": Layout(4, 32, RowFormat.BF16)}, "the physical_page_size is 32 at the peer"),
        ({"layout": Layout(4, 64, RowFormat.FP8_RAW)}, "the row_format is fp8_raw at the peer"),
        ({"regions": THEIRS.regions[::-1]}, "the list of regions is ['index', 'kv'] at the peer"),
        ({"regions": THEIRS.regions[:1]}, "the list of regions is ['kv'] at the peer"),
        (
            {"regions": (RegionLayout("kv", 20, 128), THEIRS.regions[1])},
            "the item size in bytes of region 'kv' is 128 at the peer and 64 here",
        ),
    ],
)
def test_what_does_not_fit_is_named(changes: dict[str, Any], sentence: str) -> None:
    theirs = decode(msgspec.structs.replace(THEIRS, **changes).encode())
    with pytest.raises(Refused) as refused:
        check(MINE, theirs)
    assert sentence in str(refused.value)
    assert str(refused.value).endswith(".")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"version": 2}, "the peer speaks version 2 and this process version 1"),
        ({"peer": Peer(Side.PREFILL, 1, 2**63)}, "incarnations upwards, below 2"),
        ({"peer": Peer(Side.PREFILL, 2, 3)}, "number ranks from 0"),
        ({"peer": Peer(Side.PREFILL, -1, 3)}, "number ranks from 0"),
        ({"nonce": b"short"}, "cannot be read"),
        ({"ranks": 0}, "cannot be read"),
        ({"epoch": -1}, "cannot be read"),
        ({"regions": (RegionLayout("kv", 0, 64),)}, "cannot be read"),
        ({"regions": (RegionLayout("kv", 2**60, 64),)}, "cannot be read"),
        ({"regions": (RegionLayout("kv", 2, 64),) * 2}, "names two regions alike"),
    ],
)
def test_a_hello_out_of_its_limits_is_refused(changes: dict[str, Any], sentence: str) -> None:
    with pytest.raises(Refused, match=sentence):
        decode(msgspec.structs.replace(THEIRS, **changes).encode())


def test_another_version_is_named_though_its_fields_differ() -> None:
    with pytest.raises(Refused, match="speaks version 9"):
        decode(msgspec.msgpack.encode({"version": 9, "process": "named otherwise"}))


@given(st.binary(max_size=64) | st.just(b"\x91" * 100_000))
def test_any_bytes_are_a_hello_or_refused(data: bytes) -> None:
    with pytest.raises(Refused):
        decode(data)


@given(st.integers(0, len(VALID) - 1), st.binary(max_size=8), st.integers(0, 8), st.booleans())
def test_damage_is_refused_or_checked(at: int, put: bytes, cut: int, short: bool) -> None:
    damaged = VALID[:at] + put + (b"" if short else VALID[at + cut :])
    try:
        theirs = decode(damaged)
        check(MINE, theirs)
    except Refused:
        return
    assert theirs.regions[0].item_bytes == 64
    assert theirs.peer.rank == 1


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(4, 8),
        torch.zeros(32, dtype=torch.uint8),
        torch.zeros(8, 4, dtype=torch.uint8).T,
    ],
    ids=["float32", "flat", "transposed"],
)
def test_a_region_is_items_of_bytes(memory: torch.Tensor) -> None:
    with pytest.raises(ValueError, match=r"give a contiguous \[items, item bytes\] uint8 view"):
        introduce(Peer(Side.DECODE, 0, 0), INSTANCE, [Region("kv", memory)], reach={})


@pytest.mark.parametrize(
    ("names", "items", "sentence"),
    [
        (("kv", "kv"), 8, "give each a name of its own"),
        (("kv", ""), 8, "of 1 to 64 characters"),
        (("kv", "i" * 65), 8, "of 1 to 64 characters"),
        (("kv", "index"), 0, "region 'kv' is empty: leave it out"),
    ],
)
def test_regions_are_named_and_of_some_size(
    names: tuple[str, ...], items: int, sentence: str
) -> None:
    """Here, where it can be mended, and not at the peer, which would only see bytes."""
    regions = [Region(name, torch.zeros(items, 32, dtype=torch.uint8)) for name in names]
    with pytest.raises(ValueError, match=sentence):
        introduce(Peer(Side.DECODE, 0, 0), INSTANCE, regions, reach={})


def test_a_process_is_reaped_once_it_was_waited_for() -> None:
    assert not Process.current().is_reaped()
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_introduce_and_wait, args=(there,))
    process.start()
    there.close()
    assert here.poll(60)
    theirs: Process = here.recv()
    assert theirs.pid == process.pid
    elsewhere = msgspec.structs.replace(theirs, namespace=theirs.namespace + 1)
    successor = msgspec.structs.replace(theirs, started=theirs.started + 1)
    assert not theirs.is_reaped()
    assert successor.is_reaped(), "another process of that pid is not the one that was meant"
    process.kill()
    os.waitid(os.P_PID, theirs.pid, os.WEXITED | os.WNOWAIT)
    assert not theirs.is_reaped(), "a zombie still counts as there"
    process.join(60)
    assert theirs.is_reaped()
    assert not elsewhere.is_reaped(), "what cannot be seen is not known to be over"


def _introduce_and_wait(pipe: Any) -> None:
    pipe.send(Process.current())
    pipe.recv()
