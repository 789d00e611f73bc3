"""SGLang's transfer over NIXL under the scenarios of the drain contract, as the evidence says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from reference.drain import Clause
from reference.protocol import Peer, Side, TransferKey
from systems.sglang.transfer_log import Asked, Ledger
from systems.sglang.transfer_wire import WAIT_S, Gate, Mail
from systems.sglang.wheels import unpacked

P, D = Peer(Side.PREFILL, 0, 0), Peer(Side.DECODE, 0, 0)
ROOM = 5
EVIDENCE = Path(__file__).parent.parent / "docs/evidence/2026-11-30-sglang-transfer.json"
ROWS = json.loads(EVIDENCE.read_text())["rows"]
RELEASES = sorted({row["release"] for row in ROWS})

METADATA = [b"NixlMsgGuard", b"5", b"", b""]
STATUS = [b"KV_STATUS", b"5", b"4", b"0", b""]
ABORT = [b"ABORT", b"5", b"", b"", b"1"]
ABORT_ACK = [b"ABORT_ACK", b"5", b"0", b"1"]


@pytest.mark.sglang
@pytest.mark.timeout(300)
@pytest.mark.parametrize("release", RELEASES)
def test_scenarios(release: str) -> None:
    command = [sys.executable, "-m", "systems.sglang.transfer_scenarios", str(unpacked(release))]
    environment = os.environ | {"UCX_TLS": "tcp", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert json.loads(done.stdout) == [row for row in ROWS if row["release"] == release]


def test_every_scenario_has_a_control() -> None:
    """What is found is not what the harness brings along: without an event every release is
    clean, and so it is with one that it handles."""
    for release in RELEASES:
        rows = {row["scenario"]: row for row in ROWS if row["release"] == release}
        for name in ("nothing_happens", "memory_that_is_given_up_waits_for_its_write"):
            assert rows[name]["clauses"] == {}
            assert rows[name]["served"] == "own data"
        assert set(rows["another_room_is_used"]["clauses"]) == {"S8"}
        assert rows["another_room_is_used"]["served"] == "own data"
        assert rows["a_room_is_used_again"]["served"] == "nothing"


# What stands between SGLang and the network, without SGLang.


class Agent:
    """NIXL as far as a gate uses it: writes are done at once."""

    def __init__(self) -> None:
        self.posted: list[object] = []

    def transfer(self, handle: object) -> str:
        self.posted.append(handle)
        return "DONE"

    def check_xfer_state(self, handle: object) -> str:
        return "DONE"


def test_a_message_is_handled_before_the_next_one() -> None:
    mail, handled = Mail(7000), []

    def receive() -> None:
        while (frames := mail.take()) != [b"end"]:
            handled.append(frames)
        mail.note("ended")

    receiver = threading.Thread(target=receive)
    receiver.start()
    for frames in ([b"1"], [b"2"]):
        mail.deliver(frames)
        assert handled[-1] == frames
    with pytest.raises(TimeoutError, match="did not handle"):
        mail.deliver([b"end"], bound_s=0.1)
    receiver.join(WAIT_S)
    assert mail.drain() == [("ended",)]


def test_a_shut_gate_holds_writes_back() -> None:
    agent, mail = Agent(), Mail(7000)
    gate = Gate(agent, mail)
    handles = [object(), object()]
    gate.is_shut = True
    gate.dequeued(ROOM)
    assert [gate.transfer(handle) for handle in handles] == ["PROC", "PROC"]
    assert gate.check_xfer_state(handles[0]) == "PROC"
    assert agent.posted == []
    gate.open()
    assert agent.posted == handles
    assert [gate.check_xfer_state(handle) for handle in handles] == ["DONE", "DONE"]
    gate.dequeued(ROOM)
    gate.idle()
    assert mail.drain() == [
        *(("taken", 0, ROOM), ("posted", 0), ("settled", 0, "LANDED")),
        *(("taken", 1, ROOM), ("dropped", 1)),
    ]


def test_a_refused_post_is_of_unknown_outcome() -> None:
    mail = Mail(7000)
    gate = Gate(Agent(), mail)
    gate.refuses = True
    gate.dequeued(ROOM)
    with pytest.raises(RuntimeError, match="refused"):
        gate.transfer(object())
    assert mail.drain()[1:] == [("posted", 0), ("settled", 0, "UNKNOWN")]


# How SGLang's doings are told, without SGLang.


def ledger(*, notifies: bool = False) -> tuple[Ledger, Asked]:
    """A request that was offered, and whose write was posted."""
    it = Ledger(1, notifies=notifies)
    asked = it.asked[1] = Asked(TransferKey(ROOM, 1, 0), 1, [1], [1])
    it.held(P, asked)
    it.reserved(D, asked)
    it.take(Side.DECODE, [(D, "sent", 7000, METADATA)])
    arrive(it)
    it.take(Side.PREFILL, [(P, "taken", 0, ROOM), (P, "posted", 0)])
    return it, asked


def arrive(it: Ledger, *, changed: bool = True) -> None:
    """Let all messages arrive."""
    for letter in it.letters:
        it.arriving(letter)
        it.arrived(letter, changed)
    it.letters = []


def turn(it: Ledger, at: Peer, *entries: tuple[object, ...]) -> None:
    """A turn of one side's scheduler."""
    number = it.next_round(at.side)
    it.take(at.side, [(at, "round_of", number, 1), *((at, *entry) for entry in entries)])


def clauses(it: Ledger) -> list[Clause]:
    return [violation.clause for violation in it.violations()]


def give_up(it: Ledger) -> None:
    turn(it, D, ("failed", 1), ("sent", 7000, ABORT))
    arrive(it)


@pytest.mark.parametrize("notifies", [False, True])
def test_a_transfer_that_goes_well_is_clean(notifies: bool) -> None:
    it, asked = ledger(notifies=notifies)
    it.take(Side.PREFILL, [(P, "settled", 0, "LANDED")])
    if not notifies:
        it.take(Side.PREFILL, [(P, "sent", 8000, STATUS)])
        arrive(it)
    turn(it, D, ("live", 1, 1001))
    turn(it, P, ("released", 1))
    it.finished(D, asked)
    assert clauses(it) == []
    assert it.tokens == {1: 1001}


def test_success_before_the_data_is_named() -> None:
    it, _ = ledger()
    it.take(Side.PREFILL, [(P, "sent", 8000, STATUS)])
    assert clauses(it)[0] is Clause.S6


def test_what_waits_for_its_ack_is_clean() -> None:
    it, _ = ledger()
    give_up(it)
    it.take(Side.PREFILL, [(P, "settled", 0, "LANDED"), (P, "sent", 8000, ABORT_ACK)])
    turn(it, P, ("released", 1))
    arrive(it)
    turn(it, D, ("released", 1))
    assert clauses(it) == []


def test_what_is_released_without_an_ack_is_named() -> None:
    it, _ = ledger()
    give_up(it)
    turn(it, D, ("released", 1))
    assert clauses(it)[0] is Clause.S2


def test_an_ack_before_the_write_ended_is_named() -> None:
    it, _ = ledger()
    give_up(it)
    it.take(Side.PREFILL, [(P, "sent", 8000, ABORT_ACK)])
    assert clauses(it)[0] is Clause.S3


def test_a_source_that_is_read_is_named() -> None:
    it, _ = ledger()
    give_up(it)
    turn(it, P, ("released", 1))
    assert clauses(it)[0] is Clause.S8


def test_a_request_without_an_end_is_named() -> None:
    it, asked = ledger()
    assert clauses(it) == [Clause.L5]
    assert it.violations(but=asked) == []
