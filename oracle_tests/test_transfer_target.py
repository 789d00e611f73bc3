"""Requests that move between engines by the tape: what is drawn, what the oracles see, and what a
small case of a fault looks like."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch

import systems
from fuzz import handover, mutants
from fuzz.handover import WIDTH, Handover
from fuzz.mutants.report import kill
from fuzz.oracles.landing import Landing
from fuzz.oracles.placing import Image
from fuzz.shrink import cost, minima
from fuzz.stamps import stamper_of
from fuzz.tape import Tape
from fuzz.targets.transfer import RANKS, SHAPE, TRANSFER, draw_setup
from reference.contract import Component
from reference.geometry import RowFormat
from reference.protocol import Arrived, Completion, Outcome, Peer, Settled, Side

PLAIN = [0] * 22
"""A tape of the plainest setup: one rank a side, no pooling, ordinary rings."""
DRAFTING = [0, 1, 0, 0, 0, 0, 0, 3]
"""D has the larger rings; kpool 2."""


def execute(values=(), *, seed=None):
    tape = Tape(values, seed=seed) if seed is not None else Tape(values)
    return handover.execute(TRANSFER, tape, most=TRANSFER.operations)


@contextmanager
def started(values=PLAIN):
    """A run of a setup, of which nothing has happened yet."""
    with torch.inference_mode(False):
        run = Handover(draw_setup(Tape(values)), Tape(values))
        run.begin()
        try:
            yield run
        finally:
            run.close()


@contextmanager
def gone_live(tokens=7, values=DRAFTING):
    """A run with one request that has just become live, and the oracle that looks at it."""
    with started(values) as run:
        router = run.router
        asked = router.submit(range(1, tokens + 1), room=3)
        router.compute(asked, tokens, first_token=99)
        landing, seen = Landing(router), []
        for _ in range(10):
            router.tick(Side.PREFILL)
            router.tick(Side.DECODE)
            seen = router.taken()
            assert landing.check(seen, []) == []
            if asked.live:
                break
            landing.watch()
            router.steps(100, 0)
            came = [each for each in router.log if isinstance(each, Arrived)]
            assert list(landing.contained(came)) == []
            assert landing.check([], came) == []
        assert asked.live
        yield run, landing, asked


def test_a_tape_replayed_observes_the_same():
    digests = set()
    for seed in range(12):
        outcome = execute(seed=seed)
        again = execute(outcome.values)
        assert again.digest == outcome.digest
        assert again.values == outcome.values
        digests.add(outcome.digest)
    assert len(digests) == 12


def test_the_setup_covers_both_ends():
    seen = Counter()
    for seed in range(400):
        setup = draw_setup(Tape(seed=seed))
        wiring = setup.wiring
        here, there = (wiring.geometries[side] for side in Side)
        assert here.logical_page_size == there.logical_page_size
        rings = np.sign(here.ring_size - there.ring_size)
        seen.update(
            [
                ("ranks", tuple(wiring.ranks.values())),
                ("kpool", here.kpool),
                ("format", here.row_format),
                ("rings", int(rings)),
                ("chunks", wiring.chunks),
                ("completion", wiring.completion),
                ("hot", wiring.options[Side.DECODE].hisparse is not None),
                ("parts", setup.parts),
                ("orders", tuple(o.page_order for o in wiring.options.values())),
            ]
        )
    kinds = {kind: {v for k, v in seen if k == kind} for kind, _ in seen}
    assert kinds["ranks"] == set(RANKS)
    assert kinds["kpool"] == {1, 2, 4}
    assert kinds["format"] == set(RowFormat)
    assert kinds["rings"] == {-1, 0, 1}
    assert kinds["chunks"] == kinds["parts"] == {1, 2, 3}
    assert kinds["completion"] == set(Completion)
    assert kinds["hot"] == {False, True}
    assert len(kinds["orders"]) == 9


def test_every_operation_takes_the_same_room_on_the_tape():
    outcome = execute(seed=3)
    spans = [span for span in outcome.spans if span.label == "operation"]
    assert {span.stop - span.start for span in spans[:-1]} == {WIDTH}


def test_an_empty_tape_is_a_run_in_which_nothing_moves():
    outcome = execute(PLAIN)
    assert [o.text for o in outcome.operations] == ["meet", "end"]
    assert not outcome.failed


def test_what_has_landed_is_right_in_every_component():
    with gone_live() as (_, landing, asked):
        assert list(landing.live()) == []
        assert landing.read(asked) == []


@pytest.mark.parametrize("component", [c for c in Component if c is not Component.HOT])
@pytest.mark.parametrize("layer", [0, 1])
def test_one_wrong_byte_is_named(component, layer):
    """The control: any byte that a live request may read, in any component and layer."""
    with gone_live() as (run, landing, asked):
        engine = run.router.lives[Side.DECODE].engine
        view = engine.inspect().requests[asked.request]
        raw = engine.raw(component, layer)
        geometry = engine.geometry
        row = {
            Component.KV: (view.pages[0] * geometry.logical_page_size + 2, 3),
            Component.INDEX: (view.pages[0], 5),
            Component.TAIL: (view.slot, 6 % geometry.ring_size, 1),
            Component.STATE: (view.state_slot, 4),
        }[component]
        raw[row] ^= 1
        (wrong,) = landing.live()
        assert wrong.signature == f"provenance/{component.value}"
        assert f"layer {layer}" in wrong.sentence
        assert "request 0's" in wrong.sentence
        (read,) = landing.read(asked)
        assert read.signature == wrong.signature


def test_a_byte_that_lands_elsewhere_is_named():
    """The control of containment: nothing came, and a free page, a ring, a state and an aux row
    changed."""
    with gone_live() as (run, landing, asked):
        life = run.router.lives[Side.DECODE]
        engine = life.engine
        free = min(engine.inspect().free_pages)
        slot = 3 - engine.inspect().requests[asked.request].slot
        for change, component in (
            (lambda: engine.raw(Component.KV, 1)[free * engine.geometry.logical_page_size], "kv"),
            (lambda: engine.raw(Component.INDEX, 0)[free], "index"),
            (lambda: engine.raw(Component.TAIL, 0)[slot, 0], "tail"),
            (lambda: engine.raw(Component.STATE, 1)[min(engine.inspect().free_states)], "state"),
            (lambda: life.aux[0][0], "aux"),
        ):
            landing.watch()
            change()[0] ^= 1
            (strayed,) = landing.contained([])
            assert strayed.signature == f"containment/{component}"


def test_a_writer_that_is_told_too_soon_is_named():
    """A piece that counts as landed, of which a row is not there."""
    with started(DRAFTING) as run:
        router, landing = run.router, Landing(run.router)
        router.submit(range(1, 8), room=0)
        router.tick(Side.DECODE)
        offer = router.taken()
        assert landing.check(offer, []) == []
        (key,) = {each.key for each in offer if hasattr(each, "key")}
        settled = Settled(Peer(Side.PREFILL, 0, 0), key, Peer(Side.DECODE, 0, 0), 0, Outcome.LANDED)
        found = landing.check([settled], [])
        assert found[0].signature == "provenance/kv"
        assert "it holds poison" in found[0].sentence
        broken = msgspec.structs.replace(settled, outcome=Outcome.BROKEN)
        assert landing.check([broken], []) == []


def test_places_that_are_not_the_requests_are_named(monkeypatch):
    with started() as run:
        router, landing = run.router, Landing(run.router)
        router.submit(range(1, 8), room=0)
        router.tick(Side.DECODE)
        seen = router.taken()
        offers = [each for each in seen if hasattr(each, "message")]
        engine = router.lives[Side.DECODE].engine
        snapshot = engine.inspect()
        (request,) = snapshot.reserved
        moved = replace(snapshot.reserved[request], pages=snapshot.reserved[request].pages[::-1])
        monkeypatch.setattr(engine, "inspect", lambda: replace(snapshot, reserved={request: moved}))
        (wrong,) = landing.check(offers, [])
        assert wrong.signature == "exact/places"


def test_an_image_looks_into_the_engine():
    """It shows what is stored after it was made, states word by word."""
    with started() as run:
        engine = run.router.lives[Side.DECODE].engine
        image = Image(engine, engine.geometry, SHAPE)
        for (component, layer), memory in image.layers.items():
            raw = engine.raw(component, layer)
            before = memory.copy()
            raw[(0,) * raw.ndim] ^= 1
            assert image.changed((component, layer), before).tolist() == [0]


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("tail_left_out", {"submit", "compute"}),
        ("merged_across_a_gap", {"submit", "compute", "tick", "finish", "network"}),
        ("aux_row_not_cleared", {"submit", "compute", "tick", "finish", "network"}),
    ],
)
def test_a_fault_is_found_and_made_short(name, kinds):
    mutant = mutants.find(name)
    found = kill(mutant, seed=1, executions=300)
    assert found.oracle in mutant.killed_by
    with mutant.applied():
        smallest = minima(execute, found.outcome)
    same = smallest[found.outcome.signature]
    assert same.signature == found.outcome.signature
    assert len(same.operations) < len(found.outcome.operations)
    small = min(smallest.values(), key=cost)
    assert small.violations[0].oracle in mutant.killed_by
    chosen = {operation.text.split(":")[0].split()[0] for operation in small.operations}
    assert chosen <= kinds | {"meet", "rest"}
    assert not execute(small.values).failed, "the faithful engines pass the same tape"


def test_a_crash_of_a_node_is_a_finding_of_no_oracle(monkeypatch):
    node = systems.load_transfer().DecodeNode

    def broken(self, waiting):
        raise KeyError("room")

    monkeypatch.setattr(node, "_reserve", broken)
    outcome = next(o for seed in range(20) if (o := execute(seed=seed)).failed)
    assert outcome.violations[0].oracle == "crash"


def test_stampers_of_both_ends_agree():
    """One stamper speaks for both, as rings do not enter a stamp."""
    for seed in range(20):
        here, there = draw_setup(Tape(seed=seed)).wiring.geometries.values()
        chain = stamper_of(here, SHAPE).chain(range(20))
        for component in (Component.KV, Component.INDEX, Component.TAIL, Component.STATE):
            ours, theirs = (
                stamper_of(end, SHAPE).expected(component, chain, 1) for end in (here, there)
            )
            assert (ours == theirs).all()
