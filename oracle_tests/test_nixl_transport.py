"""Two NIXL transports in one process: bytes, messages, refusals, and what is left afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from nixl._api import nixl_agent, nixl_agent_config

from optimized.transfer.endpoint import REACH, Endpoint, Remote
from optimized.transfer.hello import Layout, introduce
from optimized.transfer.hello import decode as decode_hello
from optimized.transfer.nixl import NixlTransport
from optimized.transfer.transport import Received, Refused, Region, Write, WriteEnded
from oracle_tests.conftest import CUDA
from oracle_tests.nixl_child import INSTANCE, ITEM_BYTES, KEY, Node, decode, prefill, until
from reference.geometry import RowFormat
from reference.protocol import (
    Abort,
    Ack,
    Advertise,
    Completion,
    Landed,
    Message,
    Outcome,
    Peer,
    Side,
    Status,
)

ITEMS = 64
WORDS = ITEM_BYTES // 8


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NIXL_LOG_LEVEL", "ERROR")


@pytest.fixture
def strangers() -> Iterator[tuple[Node, Node]]:
    """P, whose rows are stamped with 1, and D, full of canaries."""
    p, d = Node(prefill(), ITEMS, stamp=1), Node(decode(), ITEMS)
    yield p, d
    p.close()
    d.close()


@pytest.fixture
def pair(strangers: tuple[Node, Node]) -> tuple[Node, Node]:
    """The same, and they know each other."""
    p, d = strangers
    p.connect(d.hello())
    d.connect(p.hello())
    return p, d


def scattered(rng: np.random.Generator, items: int, room: int) -> list[tuple[int, int, int]]:
    """`items` items cut into runs (here, there, items) that lie in any order, with gaps, in
    `items + room` places."""
    cuts = np.flatnonzero(np.r_[True, rng.random(items - 1) < 0.4, True])
    starts, lengths = cuts[:-1], np.diff(cuts)
    order = rng.permutation(len(starts))
    gaps = rng.multinomial(room, np.full(len(order), 1 / len(order)))
    ends = np.cumsum(lengths[order] + gaps)
    return list(zip(starts[order], ends - lengths[order], lengths[order], strict=True))


@pytest.mark.parametrize("device", ["cpu", "cuda"] if CUDA else ["cpu"])
@pytest.mark.parametrize("seed", range(5))
def test_runs_of_all_regions_land_where_they_should(seed: int, device: str) -> None:
    """On a GPU every pair of kinds of memory has its part, a host pool as under HiSparse too."""
    rng = np.random.default_rng(seed)
    shapes = {"kv": (40, 96), "index": (24, 33), "state": (5, 1000)}
    homes = ((0, (device, device, "cpu")), (7, ("cpu", device, device)))
    here, there = (
        [
            torch.from_numpy(rng.integers(0, 256, (items + room, size), dtype=np.uint8)).to(home)
            for (items, size), home in zip(shapes.values(), at, strict=True)
        ]
        for room, at in homes
    )
    runs = [
        (region, *run)
        for region, (items, _) in enumerate(shapes.values())
        for run in scattered(rng, items, 7)
    ]
    rng.shuffle(runs)
    expected = [memory.clone() for memory in there]
    for region, mine, theirs, n in runs:
        expected[region][theirs : theirs + n] = here[region][mine : mine + n].to(
            there[region].device
        )
    p = NixlTransport(prefill(), INSTANCE, list(map(Region, shapes, here)))
    d = NixlTransport(decode(), INSTANCE, list(map(Region, shapes, there)))
    p.connect(d.hello())
    d.connect(p.hello())
    note = Landed(KEY, prefill(), 2)
    p.post(Write(key=KEY, to=decode(), piece=2, runs=np.array(runs, dtype=np.int64), note=note))
    events: list[object] = []
    until(lambda: events.extend([*p.poll(), *d.poll()]) or len(events) == 2)
    assert set(events) == {WriteEnded(KEY, decode(), 2, Outcome.LANDED), Received(note)}
    assert all(map(torch.equal, there, expected))
    p.close()
    d.close()


def test_nixl_makes_one_descriptor_of_a_run() -> None:
    """The transport names each item of a run, and leaves it to NIXL to coalesce them."""
    memory = torch.zeros(2, ITEMS, 128, dtype=torch.uint8)
    agent = nixl_agent("a", nixl_agent_config(enable_prog_thread=False, capture_telemetry=True))
    other = nixl_agent("b", nixl_agent_config(enable_prog_thread=False))
    agent.register_memory(memory[0])
    other.register_memory(memory[1])
    agent.add_remote_agent(other.get_agent_metadata())
    ours, theirs = (
        agent.prep_xfer_dlist(
            name, np.array([(of.data_ptr(), 128, 0, 128, ITEMS)], dtype=np.uint64), "DRAM"
        )
        for name, of in (("", memory[0]), ("b", memory[1]))
    )
    here = np.array([0, 1, 2, 3, 4, 5, 9, 10], dtype=np.int32)
    there = np.array([7, 8, 9, 20, 21, 22, 23, 24], dtype=np.int32)
    handle = agent.make_prepped_xfer("WRITE", ours, here, theirs, there)
    agent.transfer(handle)
    until(lambda: other.get_new_notifs() or agent.check_xfer_state(handle) == "DONE")
    assert agent.get_xfer_telemetry(handle).descCount == 3


MESSAGES: tuple[Message, ...] = (
    Advertise(KEY, decode(), 3, 7, ((1, 2, 3), (), (2**40,))),
    Abort(KEY, decode()),
    Landed(KEY, prefill(), 4),
    Status(KEY, prefill()),
    Ack(KEY, prefill()),
)


def test_messages_arrive_as_they_were_sent(pair: tuple[Node, Node]) -> None:
    p, d = pair
    for message in MESSAGES:
        p.transport.send(decode(), message)
        d.transport.send(prefill(), message)
    for node in pair:
        until(lambda node=node: len(node.events) >= len(MESSAGES), *pair)
        assert sorted(map(repr, node.events)) == sorted(repr(Received(m)) for m in MESSAGES)


def test_what_is_no_message_is_ignored(pair: tuple[Node, Node]) -> None:
    p, d = pair
    ack = msgspec.msgpack.encode(Ack(KEY, prefill()))
    deep = b"\x94" + ack[1:] + b"\x91" * 20_000 + b"\x90"  # one more item, which none reads
    for garbage in (b"", b"\xc1", b"\xa3\xff\xff\xff", msgspec.msgpack.encode([1]), deep):
        p.transport.endpoint.agent.send_notif(p.transport._link(decode()).remote.name, garbage)
    p.transport.send(decode(), Ack(KEY, prefill()))
    until(lambda: d.events, p, d)
    assert d.events == [Received(Ack(KEY, prefill()))]


def test_a_note_says_that_its_bytes_are_there(pair: tuple[Node, Node]) -> None:
    p, d = pair
    p.write(decode(), 3, 10, 5)
    until(lambda: d.events, p, d)
    assert d.events == [Received(Status(KEY, prefill()))]
    assert d.landed(1, 3, 10, 5) == 5 * WORDS
    assert d.intruders(10, 5) == 0


def test_a_write_of_nothing_lands_with_its_note(pair: tuple[Node, Node]) -> None:
    p, d = pair
    nothing = np.empty((0, 4), dtype=np.int64)
    note = Landed(KEY, prefill(), 0)
    p.transport.post(Write(key=KEY, to=decode(), piece=0, runs=nothing, note=note))
    until(lambda: d.events, p, d)
    assert p.events == [WriteEnded(KEY, decode(), 0, Outcome.LANDED)]
    assert d.events == [Received(note)]
    assert d.intruders(0, 0) == 0


def test_strangers_reach_nobody(strangers: tuple[Node, Node]) -> None:
    p, d = strangers
    p.connect(d.hello())
    d.transport.send(prefill(), Abort(KEY, decode()))
    d.write(prefill(), 0, 0, 1)
    assert d.poll() == [WriteEnded(KEY, prefill(), 0, Outcome.BROKEN)]
    p.transport.send(decode(), Ack(KEY, prefill()))
    p.write(decode(), 0, 0, 1)
    until(lambda: p.events, p, d)
    d.poll()
    assert len(d.events) == 1, "P is a stranger to D, so what it says is not heard"
    p.write(decode(2), 0, 0, 1, piece=1)
    assert p.poll()[1:] == [WriteEnded(KEY, decode(2), 1, Outcome.BROKEN)]


@pytest.mark.parametrize(
    ("here", "there", "items"), [(-1, 0, 1), (ITEMS, 0, 1), (0, 0, 0), (1, 0, 2**63 - 1)]
)
def test_a_run_that_leaves_a_region_here_is_refused(
    pair: tuple[Node, Node], here: int, there: int, items: int
) -> None:
    p, d = pair
    with pytest.raises(ValueError, match="reads past a region"):
        p.write(decode(), here, there, items)
    assert d.intruders(0, 0) == 0


@pytest.mark.parametrize("there", [-1, ITEMS - 1, 2**63 - 1])
def test_a_run_that_leaves_a_region_there_is_broken(pair: tuple[Node, Node], there: int) -> None:
    p, d = pair
    p.write(decode(), 0, there, 2)
    assert p.poll() == [WriteEnded(KEY, decode(), 0, Outcome.BROKEN)]
    p.write(decode(), 0, 8, 2, piece=1)
    until(lambda: d.events, p, d)
    assert d.intruders(8, 2) == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"version": 2},
        {"peer": Peer(Side.DECODE, 1, 1)},
        {"peer": prefill()},
        {"ranks": 2},
        {"completion": Completion.NOTIFY},
        {"layout": Layout(2, 64, RowFormat.BF16)},
        {"regions": ()},
        {"reach": {}},
        {"reach": {"nixl": b"\xc1"}},
        {"reach": {"nixl": msgspec.msgpack.encode({"metadata": b"forged", "places": []})}},
        {
            "reach": {
                "nixl": msgspec.msgpack.encode(
                    {"metadata": b"forged", "places": [(4096, -1)] * 3},
                )
            }
        },
    ],
    ids=lambda changes: str(changes)[:24],
)
def test_who_does_not_fit_gets_nothing(
    strangers: tuple[Node, Node], changes: dict[str, Any]
) -> None:
    p, d = strangers
    with pytest.raises(Refused) as refused:
        p.connect(msgspec.structs.replace(decode_hello(d.hello()), **changes).encode())
    assert str(refused.value).endswith(".")
    p.write(decode(), 0, 0, ITEMS)
    assert p.poll() == [WriteEnded(KEY, decode(), 0, Outcome.BROKEN)]
    d.poll()
    assert d.intruders(0, 0) == 0
    p.connect(d.hello())
    d.connect(p.hello())
    p.write(decode(), 0, 0, 1, piece=1)
    until(lambda: d.events, p, d)
    assert d.landed(1, 0, 0, 1) == WORDS


def test_an_agent_under_another_name_is_refused(strangers: tuple[Node, Node]) -> None:
    p, d = strangers
    other = msgspec.structs.replace(decode_hello(d.hello()), nonce=bytes(16))
    with pytest.raises(Refused, match="it calls itself"):
        p.connect(other.encode())


def test_hellos_repeat_but_never_go_back(pair: tuple[Node, Node]) -> None:
    p, d = pair
    assert p.connect(d.hello()) == decode()
    later = Node(decode(2), ITEMS)
    p.connect(later.hello())
    with pytest.raises(Refused, match="old hello"):
        p.connect(d.hello())
    later.connect(p.hello())
    p.write(decode(2), 0, 0, 1)
    until(lambda: later.events, p, later)
    assert later.landed(1, 0, 0, 1) == WORDS
    later.close()


def test_no_other_process_takes_a_peers_name(pair: tuple[Node, Node]) -> None:
    """It would acknowledge what the first one wrote; in its own life it is welcome."""
    p, d = pair
    for incarnation in (1, 2):
        successor = Node(prefill(incarnation), ITEMS)
        if incarnation == 1:
            with pytest.raises(Refused, match="start this one with a higher incarnation"):
                d.connect(successor.hello())
            d.connect(p.hello())
        else:
            d.connect(successor.hello())
            with pytest.raises(Refused, match="sent an old hello"):
                d.connect(p.hello())
        successor.close()


def test_nobody_unknown_is_fenced(pair: tuple[Node, Node]) -> None:
    _, d = pair
    d.transport.fence(prefill(9))
    assert d.poll() == []
    assert d.transport.epoch == 0


def endpoints(items: int) -> tuple[Endpoint, Endpoint, Remote, list[torch.Tensor]]:
    """Two endpoints with one region each, the second as the first knows it, and their memory."""
    memory = [torch.full((items, ITEM_BYTES), fill, dtype=torch.uint8) for fill in (1, 0)]
    regions = [[Region("kv", of)] for of in memory]
    here, there = (Endpoint(name, of) for name, of in zip("ab", regions, strict=True))
    hello = introduce(decode(), INSTANCE, regions[1], reach={REACH: there.reach()})
    return here, there, here.add("b", hello), memory


def test_a_released_handle_writes_on_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Why the transport keeps handles: NIXL lets go of a write, and does not stop it."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    here, there, remote, (source, target) = endpoints(1024)
    [handle] = here.make(np.array([[0, 0, 0, 1024]], dtype=np.int64), remote, b"landed")
    assert here.agent.transfer(handle) == "PROC"
    assert not target.any()
    handle.release()
    notes: list[object] = []

    def all_there() -> bool:
        here.agent.get_new_notifs()
        notes.extend(there.agent.get_new_notifs())
        return torch.equal(source, target)

    until(all_there)
    for _ in range(100):
        all_there()
    assert notes == []
    del handle
    here.remove(remote)
    here.destroy()
    there.destroy()


def test_an_agent_that_is_still_held_is_not_called_destroyed() -> None:
    here, there, remote, _ = endpoints(1)
    handles = here.make(np.array([[0, 0, 0, 1]], dtype=np.int64), remote, b"")
    here.remove(remote)
    with pytest.raises(RuntimeError, match="drop every handle"):
        here.destroy()
    assert len(handles) == 1
    there.destroy()


def test_an_agent_held_by_a_cycle_is_destroyed() -> None:
    here, there, remote, _ = endpoints(1)
    cycle: list[object] = here.make(np.array([[0, 0, 0, 1]], dtype=np.int64), remote, b"")
    cycle.append(cycle)
    del cycle
    here.remove(remote)
    here.destroy()
    there.destroy()


def test_a_kept_refusal_does_not_keep_the_agent() -> None:
    here, there, remote, (_, target) = endpoints(1)
    reach = {REACH: msgspec.msgpack.encode({"metadata": b"forged", "places": [(4096, -1)]})}
    forged = introduce(decode(), INSTANCE, [Region("kv", target)], reach=reach)
    with pytest.raises(Refused) as refused:
        here.add("c", forged)
    here.remove(remote)
    here.destroy()
    assert str(refused.value).endswith(".")
    there.destroy()


def test_nothing_is_left_after_close() -> None:
    def held() -> tuple[int, int]:
        return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    def live() -> None:
        p, d = Node(prefill(), ITEMS, stamp=1), Node(decode(), ITEMS)
        p.connect(d.hello())
        d.connect(p.hello())
        p.write(decode(), 0, 0, ITEMS)
        until(lambda: d.events, p, d)
        p.write(decode(), 0, 0, ITEMS, piece=1)
        p.close()
        d.close()

    live()
    before = held()
    for _ in range(3):
        live()
    assert held() == before
