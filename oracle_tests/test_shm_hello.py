"""What keeps two processes from sharing memory: both find it, say it, and go the other way."""

from __future__ import annotations

import msgspec
import pytest

from optimized.transfer import hello as hellos
from optimized.transfer import shm_hello
from optimized.transfer.shm_hello import NAME, VARIABLE, Offer, Place, Setup, offer_of, unmet, visit
from optimized.transfer.transport import Refused
from oracle_tests.shm_cases import (
    OPTED_IN,
    D,
    P,
    assert_falls_back,
    both_ends,
    decode,
    footprint,
    join,
    poll_until,
    prefill,
    untouched,
)
from reference.protocol import Peer, Side


@pytest.fixture
def ends():
    with both_ends() as pair:
        yield pair


SETUPS = {
    "not opted in": (Setup(opted_in=False), f"did not opt in: set {VARIABLE}=1"),
    "not linux": (Setup(opted_in=True, linux=False), "does not run on Linux"),
    "pp": (Setup(opted_in=True, pp_size=2), "pp_size to 1"),
    "dcp": (Setup(opted_in=True, dcp_size=2), "dcp_size to 1"),
    "not flat": (Setup(opted_in=True, flat_pools=False), "not flat"),
    "staging": (Setup(opted_in=True, staging=True), "staging buffer off"),
    "drafts": (Setup(opted_in=True, draft_kv=True), "draft model's KV"),
}


@pytest.mark.parametrize(("setup", "sentence"), SETUPS.values(), ids=SETUPS)
@pytest.mark.parametrize("side", Side)
def test_a_condition_that_one_end_fails_sends_both_the_other_way(setup, sentence, side):
    before = footprint()
    source = prefill(setup=setup if side is Side.PREFILL else OPTED_IN)
    target = decode(setup=setup if side is Side.DECODE else OPTED_IN)
    join(source, target)
    assert footprint().mappings == before.mappings + 1, "D's own, and none of P's"
    assert untouched(target)
    at_source, at_target = source.transport.why_not(D), target.transport.why_not(P)
    assert sentence in at_source
    assert sentence in at_target
    assert at_source.startswith("this process") is (side is Side.PREFILL)
    assert at_target.startswith("this process") is (side is Side.DECODE)
    assert_falls_back(source, target)
    source.close()
    target.close()
    assert footprint() == before


def test_each_failed_condition_is_one_sentence(ends):
    mine, theirs = (hellos.decode(end.transport.hello()) for end in ends)
    assert unmet(mine, theirs) == []
    bad = Setup(
        opted_in=False,
        linux=False,
        pp_size=2,
        dcp_size=2,
        flat_pools=False,
        staging=True,
        draft_kv=True,
    )
    offer = msgspec.msgpack.encode(Offer(setup=bad))
    elsewhere = msgspec.structs.replace(theirs.process, boot="another")
    theirs = msgspec.structs.replace(theirs, reach={NAME: offer}, ranks=4, process=elsewhere)
    sentences = unmet(mine, theirs)
    assert len(set(sentences)) == 9
    assert all(s.endswith(".") and ": " in s for s in sentences)


def test_a_peer_without_this_transport_did_not_opt_in(ends):
    source, target = ends
    hello = target.transport._rest.hello()
    source.transport.connect(hello)
    assert "the peer did not opt in" in source.transport.why_not(D)
    target.transport.connect(source.transport._rest.hello())
    assert "the peer did not opt in" in target.transport.why_not(P)
    assert_falls_back(source, target)


def test_the_environment_opts_in_and_is_read_once(monkeypatch):
    shm_hello.opted_in.cache_clear()
    monkeypatch.setenv(VARIABLE, "1")
    assert shm_hello.opted_in()
    monkeypatch.delenv(VARIABLE)
    assert shm_hello.opted_in()
    shm_hello.opted_in.cache_clear()
    assert not shm_hello.opted_in()
    shm_hello.opted_in.cache_clear()


def tampered(hello: bytes, **changes) -> bytes:
    """A hello with another offer."""
    parsed = hellos.decode(hello)
    offer = msgspec.structs.replace(offer_of(parsed), **changes)
    reach = parsed.reach | {NAME: msgspec.msgpack.encode(offer)}
    return msgspec.structs.replace(parsed, reach=reach).encode()


OFFERS = {
    "nonce": ({"nonce": bytes(16)}, "wrong nonce", "wrong nonce"),
    "size": ({"total_bytes": 1 << 20}, "announced 1048576 bytes", "announced 1048576 bytes"),
    "no room": ({"total_bytes": 100}, "its shared memory has 100", None),
    "overlap": ({"places": (Place(0, 0), Place(1, 64))}, "overlaps another", None),
    "region": ({"places": (Place(3, 0),)}, "unknown", None),
    "socket": ({"socket": "kvoracle-nobody"}, "could not be reached", None),
    "long": ({"socket": "\u1234" * 64}, "could not be reached", None),
    "none": ({"socket": ""}, "offers no shared memory", None),
}


@pytest.mark.parametrize(("changes", "here", "there"), OFFERS.values(), ids=OFFERS)
def test_an_offer_that_does_not_hold_is_left(ends, changes, here, there):
    source, target = ends
    before = footprint()
    target.transport.connect(source.transport.hello())
    source.transport.connect(tampered(target.transport.hello(), **changes))
    assert here in source.transport.why_not(D)
    poll_until(lambda _: (there or "has not asked") in target.transport.why_not(P))
    poll_until(lambda _: footprint() == before)
    assert_falls_back(source, target)


DEEP = b"\x81\xa1z" + b"\x91" * 100_000 + b"\x90"
"""An unknown field, nested more deeply than any decoder goes."""


@pytest.mark.parametrize("offer", [b"", b"\xc1", msgspec.msgpack.encode([1]), DEEP])
def test_an_offer_that_cannot_be_read_is_left(ends, offer):
    source, target = ends
    parsed = hellos.decode(target.transport.hello())
    broken = msgspec.structs.replace(parsed, reach=parsed.reach | {NAME: offer})
    source.transport.connect(broken.encode())
    assert "cannot be read" in source.transport.why_not(D)


VISITORS = {
    "rank": ({"peer": Peer(Side.PREFILL, 0, 7)}, "rank is 0"),
    "side": ({"peer": Peer(Side.DECODE, 1, 7)}, "both ends are on the decode side"),
    "ranks": ({"ranks": 4}, "tensor-parallel size is 4"),
    "layout": ({"layout": hellos.Layout(4, 4, "bf16")}, "kpool is 4"),
    "item size": (
        {"regions": tuple(hellos.RegionLayout(name, 24, 99) for name in ("kv.0", "kv.1", "index"))},
        "item size in bytes of region 'kv.0' is 99",
    ),
    "process": ({"process": hellos.Process("boot", 1, 1, 1)}, "is not the one"),
}


@pytest.mark.parametrize(("changes", "sentence"), VISITORS.values(), ids=VISITORS)
def test_the_owner_hands_nothing_to_a_visitor_that_does_not_fit(
    ends, monkeypatch, changes, sentence
):
    _, target = ends
    before = footprint()
    handed = []
    monkeypatch.setattr(shm_hello.socket, "send_fds", lambda *a: handed.append(a))
    mine, theirs = (hellos.decode(end.transport.hello()) for end in ends)
    visitor = msgspec.structs.replace(mine, **changes)
    monkeypatch.setattr(shm_hello, "unmet", lambda *_: [])  # the visitor looks over nothing
    with pytest.raises(Refused, match=sentence):
        visit(visitor, theirs, cuda=False)
    assert sentence in target.transport.why_not(visitor.peer)
    assert not handed
    poll_until(lambda _: footprint() == before)
    assert untouched(target)


def test_garbage_at_the_socket_stops_nobody(ends):
    source, target = ends
    name = offer_of(hellos.decode(target.transport.hello())).socket
    for garbage in (b"\xc1", b"", msgspec.msgpack.encode(["Visit"]), DEEP):
        with shm_hello.socket.socket(1, shm_hello.socket.SOCK_SEQPACKET) as stranger:
            stranger.settimeout(60)
            stranger.connect("\0" + name)
            stranger.send(garbage)
            assert stranger.recv(100) == b"", "the owner hangs up"
    join(source, target)
    assert source.transport.why_not(D) is None


def test_an_owner_that_refuses_at_last_leaves_nothing_mapped(ends, monkeypatch):
    source, target = ends
    before = footprint()

    def refuse(connection, message, send=shm_hello._send):
        if connection in target.transport._host.guests.values():
            message = shm_hello.Verdict("changed my mind: ask again.")
        send(connection, message)

    monkeypatch.setattr(shm_hello, "_send", refuse)
    join(source, target)
    assert source.transport.why_not(D) == "changed my mind: ask again."
    poll_until(lambda _: target.transport.why_not(P) is not None, target.transport)
    assert "unmapped" in target.transport.why_not(P)
    poll_until(lambda _: footprint() == before)
    assert_falls_back(source, target)
