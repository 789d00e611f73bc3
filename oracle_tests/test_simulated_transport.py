"""The simulated network by itself: what may happen to messages and writes, and who decides it."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from optimized.transfer.simulated import Network, SimulatedTransport
from optimized.transfer.transport import (
    PeerFenced,
    PeerLost,
    Received,
    Refused,
    Region,
    Write,
    WriteEnded,
)
from reference.protocol import (
    Ack,
    Arrived,
    Died,
    Landed,
    Observation,
    Outcome,
    Peer,
    Side,
    TransferKey,
)

P, D = Peer(Side.PREFILL, 0, 0), Peer(Side.DECODE, 0, 0)
KEY = TransferKey(3, 1, 0)
ACK, NOTE = Ack(KEY, P), Landed(KEY, P, 0)
RUNS = np.array([[0, 2, 5, 3], [1, 0, 3, 1]])


def regions(fill: int, item_bytes: int = 4) -> list[Region]:
    return [
        Region(name, torch.full((8, item_bytes), fill, dtype=torch.uint8)) for name in ("kv", "aux")
    ]


def pair(**how: int) -> tuple[Network, SimulatedTransport, SimulatedTransport]:
    """A network with a writer whose memory is all 1 and a reader whose memory is all 0, and
    nothing noted yet."""
    network = Network(**how)
    p, d = network.attach(P, regions(1)), network.attach(D, regions(0))
    assert p.connect(d.hello()) == D
    assert d.connect(p.hello()) == P
    return network, p, d


def observed(network: Network) -> list[Observation]:
    log: list[Observation] = []
    network.observe = log.append
    return log


def write(runs: np.ndarray = RUNS) -> Write:
    return Write(key=KEY, to=D, piece=0, runs=runs, note=NOTE)


def written(d: SimulatedTransport) -> int:
    """Items of D's memory that hold P's bytes, each whole or not at all."""
    rows = torch.cat([region.memory for region in d.regions])
    assert torch.equal(rows.amin(1), rows.amax(1))
    return int(rows[:, 0].sum())


def test_nothing_happens_without_a_step() -> None:
    network, p, d = pair()
    p.send(D, ACK)
    p.post(write())
    assert (list(p.poll()), list(d.poll()), written(d)) == ([], [], 0)
    network.settle()
    assert list(d.poll()) == [Received(ACK), Received(NOTE)]
    assert list(p.poll()) == [WriteEnded(KEY, D, 0, Outcome.LANDED)]
    assert not network.step()


def test_a_write_lands_in_parts_where_it_is_to_land() -> None:
    network, p, d = pair(parts=3)
    log = observed(network)
    p.post(write())
    landed = []
    while network.step():
        landed.append(written(d))
    assert landed[:3] == [2, 3, 4]
    assert d.regions[0].memory[5:].min() == 1
    assert d.regions[1].memory[3].min() == 1
    assert log == [Arrived(D, KEY, P, 0, part, 3) for part in (1, 2, 3)]


def test_a_write_of_nothing_lands_too() -> None:
    network, p, d = pair()
    p.post(write(RUNS[:0]))
    network.settle()
    assert list(d.poll()) == [Received(NOTE)]
    assert list(p.poll()) == [WriteEnded(KEY, D, 0, Outcome.LANDED)]


def test_bytes_are_those_of_the_moment_at_which_they_land() -> None:
    network, p, d = pair()
    p.post(write())
    network.step()
    p.regions[0].memory[:] = p.regions[1].memory[:] = 9
    network.settle()
    assert written(d) == 1 + 1 + 9 + 9


def test_messages_overtake_one_another() -> None:
    network, p, d = pair()
    network.choose = lambda possibilities: possibilities - 1
    p.send(D, ACK)
    p.send(D, NOTE)
    while network.step():
        pass
    assert list(d.poll()) == [Received(NOTE), Received(ACK)]


@pytest.mark.parametrize(("fault", "times"), [(0, 1), (1, 2), (2, 0)])
def test_a_message_comes_once_twice_or_never(fault: int, times: int) -> None:
    network, p, d = pair(message_faults=1)
    network.choose = lambda possibilities: fault
    p.send(D, ACK)
    while network.step():
        pass
    assert list(d.poll()) == [Received(ACK)] * times
    assert network.message_faults == (fault == 0)


@pytest.mark.parametrize("outcome", [Outcome.BROKEN, Outcome.UNKNOWN])
def test_a_write_that_failed_goes_on(outcome: Outcome) -> None:
    network, p, d = pair(write_faults=1)
    network.choose = lambda possibilities: int(outcome) if possibilities == 3 else 0
    p.post(write())
    network.step()
    assert list(p.poll()) == [WriteEnded(KEY, D, 0, outcome)]
    assert written(d) == 0
    network.settle()
    assert written(d) == 4
    assert list(d.poll()) == [Received(NOTE)]
    assert list(p.poll()) == []


def test_a_process_that_stands_still_gets_nothing_and_writes_nothing() -> None:
    network, p, d = pair()
    p.post(write())
    d.send(P, ACK)
    network.stop(P)
    network.settle()
    assert (list(p.poll()), written(d)) == ([], 0)
    network.resume(P)
    network.settle()
    assert Received(ACK) in p.poll()
    assert written(d) == 4


@pytest.mark.parametrize("fenced", [False, True])
def test_a_dead_writers_write_lands_until_it_is_fenced(fenced: bool) -> None:
    network, p, d = pair()
    log = observed(network)
    p.post(write())
    network.step()
    d.fence(P)
    network.kill(P)
    assert log[-1] == Died(P)
    if fenced:
        network.choose = lambda possibilities: possibilities - 1
        while PeerFenced not in map(type, d.inbox):
            network.step()
    network.settle()
    assert written(d) == (2 if fenced else 4)
    kinds = {type(event) for event in d.poll()}
    assert kinds == {PeerLost, PeerFenced, *(() if fenced else (Received,))}
    d.send(P, ACK)
    assert not network.step()


def test_no_fence_holds_against_the_living() -> None:
    network, _, d = pair()
    d.fence(P)
    network.settle()
    assert list(d.poll()) == []


def test_a_write_to_a_dead_process_is_broken() -> None:
    network, p, _ = pair()
    p.post(write())
    network.kill(D)
    p.post(write())
    network.settle()
    broken = WriteEnded(KEY, D, 0, Outcome.BROKEN)
    assert sorted(map(str, p.poll())) == sorted(map(str, [broken, broken, PeerLost(D)]))


@pytest.mark.parametrize("run", [[0, 6, 0, 3], [0, 0, 6, 3]], ids=["here", "there"])
def test_what_lies_outside_of_the_memory_is_not_written(run: list[int]) -> None:
    network, p, d = pair()
    p.post(write(np.array([run])))
    network.settle()
    assert list(p.poll()) == [WriteEnded(KEY, D, 0, Outcome.BROKEN)]
    assert written(d) == 0


def test_a_new_life_takes_the_place_of_the_old_one() -> None:
    network, p, d = pair()
    network.kill(D)
    again = network.attach(D._replace(incarnation=1), regions(0))
    assert p.connect(again.hello()) == again.me
    p.send(D, ACK)
    p.send(again.me, NOTE)
    network.settle()
    assert list(again.poll()) == [Received(NOTE)]
    assert list(d.poll()) == []


def test_what_a_process_that_leaves_has_posted_is_over() -> None:
    network, p, d = pair()
    p.post(write())
    network.step()
    p.close()
    network.settle()
    assert written(d) == 2
    assert [type(event) for event in d.poll()] == [PeerLost]
    p.close()


@pytest.mark.parametrize("fault", ["side", "item size"])
def test_a_peer_that_does_not_fit_is_refused(fault: str) -> None:
    network, p, _ = pair()
    other = Peer(Side.PREFILL if fault == "side" else Side.DECODE, 1, 0)
    stranger = network.attach(other, regions(0, 4 if fault == "side" else 5))
    with pytest.raises(Refused, match=r": connect prefill with decode, of one model and one"):
        p.connect(stranger.hello())
    p.send(other, ACK)
    assert not network.step()


def test_who_gave_first_does_not_matter() -> None:
    """Between two steps all ranks run at once, in any order."""
    logs = []
    for turned in (False, True):
        network, p, d = pair(message_faults=2, write_faults=1)
        log = observed(network)
        network.choose = random.Random(5).randrange
        gifts = [lambda d=d: d.send(P, ACK), lambda p=p: (p.post(write()), p.send(D, ACK))]
        for give in reversed(gifts) if turned else gifts:
            give()
        while network.step():
            pass
        logs.append((log, p.poll(), d.poll()))
    assert logs[0][0]
    assert logs[0] == logs[1]
