"""Mutants that cannot matter, proved so: once as lemmas for every length, once by running all.

`ring_not_reset`: a request may find another's keys in its tail ring.  The lemmas say why it
never reads them; the enumeration says that the engine is what the lemmas speak of.

Under HiSparse four more make no difference.  Positions behind a request's length are void before
anything asks for their host rows; no one looks for the host page of a free page; and as a step
waits for the copies that it ordered, of different rows, before it returns, their order is free
and a release finds none.  All runs of a tiny engine are the same, byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import permutations, product
from typing import Any, Literal

import numpy as np
import pytest
import torch
import z3

from fuzz import mutants
from fuzz.stamps import Stamper, stamper_of
from fuzz.targets.setup import STAMPED_SHAPE
from optimized.kernels.swap_in import swap_in
from reference.contract import (
    Chunk,
    Component,
    Drafts,
    Engine,
    EngineOptions,
    HiSparse,
    RequestId,
    Snapshot,
    components,
)
from reference.geometry import Geometry
from systems import load

Copies = Literal["late", "random"]
OLD, NEW = RequestId(0), RequestId(1)
Seen = list[Snapshot | torch.Tensor]
"""An engine's account, what its outputs hold, and all its buffers."""


@pytest.mark.parametrize("kpool", [1, 2, 4, 8])
def test_ring_needs_no_reset(kpool):
    """Every ring row that is read was written before, by the request that reads it.

    A row is read for a position m below a step's start: as a member of a group that the step
    closes, or as the tail.
    """
    hit, start, stop, m, drafts = z3.Ints("hit start stop m drafts")
    first, after, verified, other = z3.Ints("first after verified other")

    def tail_start(length):
        return length / kpool * kpool

    def holds(claim, *given):
        solver = z3.Solver()
        solver.add(*given, z3.Not(claim))
        return solver.check() == z3.unsat

    reader = [hit >= 0, hit <= start, start < stop, m >= 0, m < start]
    on_a_group = hit % kpool == 0
    read = z3.And(m / kpool >= start / kpool, m / kpool < stop / kpool)
    in_tail = m >= tail_start(start)
    # what is read belongs to the tail, and the whole tail is the request's own work: none of it
    # lies in the hit, which ends on a group
    assert holds(in_tail, *reader, read)
    assert holds(m >= hit, *reader, in_tail, on_a_group)
    # the step [first, after) that stored m kept it: an extend keeps its tail, others keep all
    stored = [first <= m, m < after, after <= start]
    assert holds(m >= tail_start(after), *reader, in_tail, *stored)
    # no later position of the request falls on m's row before it is read, drafts included
    later = [m < verified, verified <= start, m < other, other < verified + drafts, drafts >= 1]
    assert holds(other - m < kpool + drafts, *reader, in_tail, *later)
    # each lemma leans on its premise
    if kpool > 1:
        assert not holds(m >= hit, *reader, in_tail)
    assert not holds(other - m < kpool + drafts, *reader, *later)


@dataclass(frozen=True)
class History:
    """What a request does: chunks that make up its prompt, then steps that each run `drafts`
    tokens and keep `kept`; a decode runs one, and keeps it without a verify."""

    chunks: tuple[int, ...]
    steps: tuple[tuple[int, int | None], ...]


def histories(*, longest: int, drafts: int, steps: int) -> Iterator[History]:
    """Every way to chunk a prompt of up to `longest` tokens, and every sequence of `steps`."""
    options = [(1, None), *((n, kept) for n in range(1, drafts + 1) for kept in range(n + 1))]
    for cuts in product([False, True], repeat=longest - 1):
        for length in range(1, longest + 1):
            if any(cuts[length - 1 :]):
                continue
            ends = [i + 1 for i, cut in enumerate(cuts[: length - 1]) if cut] + [length]
            chunks = tuple(b - a for a, b in zip([0, *ends[:-1]], ends, strict=True))
            for sequence in product(options, repeat=steps):
                yield History(chunks, sequence)


@pytest.mark.parametrize(
    ("kpool", "drafts", "longest", "steps"), [(2, 1, 3, 3), (2, 2, 2, 3), (4, 1, 5, 2)]
)
def test_all_runs_of_a_tiny_engine_are_the_same_without_a_reset(kpool, drafts, longest, steps):
    geometry = Geometry(
        kpool=kpool,
        physical_page_size=kpool,
        topk=kpool,
        mamba_track_interval=kpool**2 * 4,
        max_drafts=drafts,
    )
    stamper = Stamper(geometry, STAMPED_SHAPE)
    count = 0
    for history in histories(longest=longest, drafts=drafts, steps=steps):
        with mutants.find("ring_not_reset").applied():
            dirty = run(geometry, stamper, history)
        clean = run(geometry, stamper, history)
        assert not torch.equal(dirty[0], clean[0]), "the old request must have left its keys"
        for found, expected in zip(dirty[1:], clean[1:], strict=True):
            assert torch.equal(found, expected), history
        count += 1
    assert count > 100


def run(geometry: Geometry, stamper: Stamper, history: History) -> list[torch.Tensor]:
    """The new request's ring row at its start, and then all that it reads after each step, in an
    engine with one request slot, whose ring an old request has filled."""
    options = EngineOptions(pages=8, state_slots=4, max_requests=1, ape=stamper.ape)
    engine = load("optimized").factory(geometry, STAMPED_SHAPE, options)
    every_row = History((1,), ((1, None),) * geometry.ring_size)
    list(play(engine, stamper, OLD, every_row, first_token=1))
    engine.abort(OLD)
    steps = play(engine, stamper, NEW, history, first_token=100)
    next(steps)
    ring = engine.raw(Component.TAIL, 0)[engine.inspect().requests[NEW].slot].clone()
    return [ring, *steps]


def play(
    engine: Engine, stamper: Stamper, request: RequestId, history: History, *, first_token: int
) -> Iterator[torch.Tensor]:
    """Admit a request and lead it through its history; yields once after the admission, and all
    that it reads after each step."""
    tokens = list(range(first_token, first_token + sum(history.chunks)))
    chain, length = stamper.chain(tokens), 0
    engine.submit(request, tokens)
    yield torch.empty(0)
    for chunk in history.chunks:
        stop = length + chunk
        rows = stamper.extend_rows(chain, length, stop)
        engine.extend([Chunk(request=request, stop=stop, rows=rows)])
        length = stop
        yield all_read(engine, request)
    fresh = first_token + 50
    for count, kept in history.steps:
        appended = list(range(fresh, fresh + count))
        fresh += count
        rows = stamper.step_rows(stamper.chain(tokens + appended)[length:])
        if kept is None:
            engine.decode([request], appended, rows)
        else:
            engine.verify([Drafts(request=request, tokens=appended, rows=rows)])
            yield all_read(engine, request)
            engine.accept(request, kept)
        tokens += appended[:kept]
        length = len(tokens)
        yield all_read(engine, request)


def all_read(engine: Engine, request: RequestId) -> torch.Tensor:
    """[bytes] uint8: every row that the request may read, drafts included."""
    view, kpool = engine.inspect().requests[request], engine.geometry.kpool
    stored = view.length + view.pending
    rows = (
        engine.read(request, Component.KV, 0, 0, stored),
        engine.read(request, Component.INDEX, 0, 0, stored // kpool),
        engine.read(request, Component.TAIL, 0, view.length // kpool * kpool, stored),
        engine.read(request, Component.STATE, 0, 0, 1),
    )
    return torch.cat([row.flatten() for row in rows])


@dataclass(frozen=True)
class Event:
    """Something that happens to the requests in these places: "enter", "decode" or a way out."""

    what: str
    places: tuple[int, ...]


EVENTS = (
    *(Event("decode", places) for places in ((0,), (1,), (0, 1))),
    *(Event(what, (0,)) for what in ("enter", "finish", "abort")),
)


def legal_events(*, count: int) -> Iterator[tuple[Event, ...]]:
    """Every sequence of so many events behind two admissions, of requests that are there."""
    for events in product(EVENTS, repeat=count):
        there = {0, 1}
        for event in events:
            if (event.what == "enter") == (event.places[0] in there):
                break
            there ^= set() if event.what == "decode" else set(event.places)
        else:
            yield events


def test_host_rows_beyond_the_length_are_not_read():
    """A swap-in with a buffer of two slots, for every legal selection of three cells, every length
    and every pair of tags: it comes to the same whatever host rows the void positions have."""
    size, positions = 2, 5
    cases = [
        (cells, length, tags, lru)
        for cells in product(range(-1, positions + 1), repeat=3)
        for length in range(1, positions)
        if len(set(cells) & set(range(length - 1))) <= size
        for tags in ([(0, 1)] if length <= size else permutations(range(length - 1), size))
        for lru in permutations(range(size))
    ]
    cells, length, tags, lru = (torch.tensor(column) for column in zip(*cases, strict=True))
    slot_rows = torch.arange(10, 13).repeat(len(cases), 1)
    found: list[dict[str, Any]] = []
    for beyond in (-1, 7):
        host_rows = torch.arange(20, 20 + positions).repeat(len(cases), 1)
        host_rows[torch.arange(positions) >= length[:, None]] = beyond
        pool = torch.zeros(30, 4, dtype=torch.uint8)
        tables = tags.clone(), lru.clone()
        plan = swap_in(
            cells, length, *tables, slot_rows, host_rows, pool, pool.clone(), backend="torch"
        )
        found.append({**{f.name: getattr(plan, f.name) for f in fields(plan)}, "tables": tables})
    without, padding = found
    assert without["misses"].any()
    assert not without["absent"].any()
    for name, values in without.items():
        assert all(map(torch.equal, values, padding[name])), name


UNFELT = ("host_rows_not_filtered", "backing_not_zeroed", "copies_in_reverse",
          "hot_buffer_freed_undrained")  # fmt: skip


@pytest.mark.parametrize("copies", ["late", "random"])
@pytest.mark.parametrize("name", UNFELT)
def test_all_runs_of_a_tiny_hot_buffer_are_the_same(name, copies):
    histories = list(legal_events(count=3))
    assert len(histories) > 60
    for events in histories:
        assert same_with(name, events, copies), events


def test_a_mutant_that_matters_is_seen_in_a_tiny_hot_buffer():
    twice = (Event("decode", (0,)),) * 2
    assert not same_with("backup_not_waited_for", twice, "late")
    assert same_with("backup_not_waited_for", twice[:1], "late")


def same_with(name: str, events: tuple[Event, ...], copies: Copies) -> bool:
    """Whether a mutant changes nothing that is seen."""
    with mutants.find(name).applied():
        faulty = live(events, copies)
    steps = zip(faulty, clean(events, copies), strict=True)
    return all(all(map(equal, found, expected)) for found, expected in steps)


@cache
def clean(events: tuple[Event, ...], copies: Copies) -> list[Seen]:
    return live(events, copies)


def live(events: tuple[Event, ...], copies: Copies) -> list[Seen]:
    """What is seen after each event in an engine with hot buffers of two slots, for two requests
    that have begun with the same tokens: its account, what a decode found, and all its bytes."""
    geometry = Geometry(
        kpool=1, physical_page_size=2, topk=2, mamba_track_interval=2, device_buffer_size=2
    )
    shape = replace(STAMPED_SHAPE, layers=4)
    stamper = stamper_of(geometry, shape)
    sizes = HiSparse(device_pages=5, host_pages=10, copies=copies)
    options = EngineOptions(
        pages=12, state_slots=14, max_requests=2, ape=stamper.ape, hisparse=sizes
    )
    engine = load("optimized").factory(geometry, shape, options)
    crowd, seen = Crowd(engine, stamper), []
    for event in (Event("enter", (0,)), Event("enter", (1,)), *events):
        outputs = crowd.do(event)
        raw = [
            engine.raw(component, layer).clone()
            for component in components(options)
            for layer in range(2)
        ]
        seen.append([engine.inspect(), *outputs, *raw])
    return seen


def equal(found: Snapshot | torch.Tensor, expected: Snapshot | torch.Tensor) -> bool:
    if isinstance(found, torch.Tensor):
        return torch.equal(found, expected)
    return found == expected


class Crowd:
    """The requests in two places, which come and go; each has the same first three tokens."""

    def __init__(self, engine: Engine, stamper: Stamper) -> None:
        self.engine, self.stamper = engine, stamper
        self.ids: dict[int, RequestId] = {}
        self.tokens: dict[int, list[int]] = {}
        self.fresh = 10

    def do(self, event: Event) -> list[torch.Tensor]:
        """Let an event happen; what a decode swapped in and found."""
        if event.what == "decode":
            return self.decode(event.places)
        for place in event.places:
            if event.what == "enter":
                self.enter(place)
            else:
                getattr(self.engine, event.what)(self.ids.pop(place))
        return []

    def next(self) -> int:
        self.fresh += 1
        return self.fresh

    def enter(self, place: int) -> None:
        request = self.ids[place] = RequestId(self.next())
        tokens = self.tokens[place] = [1, 2, 3, self.next()]
        hit = self.engine.submit(request, tokens).hit
        rows = self.stamper.extend_rows(self.stamper.chain(tokens), hit, len(tokens))
        self.engine.extend([Chunk(request=request, stop=len(tokens), rows=rows)])

    def decode(self, places: tuple[int, ...]) -> list[torch.Tensor]:
        """One token more for each; its layers select positions from either end, and void ones."""
        for place in places:
            self.tokens[place].append(self.next())
        every = [self.tokens[place] for place in places]
        rows = self.stamper.step_rows(np.array([self.stamper.chain(t)[-1] for t in every]))
        cells = [[[len(t) % 3 - 1, len(t) - 2], [len(t) % 3, len(t)]] for t in every]
        rows = replace(rows, selected=torch.tensor(cells).transpose(0, 1).contiguous())
        outputs = self.engine.decode(
            [self.ids[place] for place in places], [t[-1] for t in every], rows
        )
        return [seen for output in outputs for seen in (output.misses, output.attended)]
