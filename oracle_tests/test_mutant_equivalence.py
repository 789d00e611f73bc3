"""Mutants that cannot matter, proved so: once as lemmas for every length, once by running all.

`ring_not_reset`: a request may find another's keys in its tail ring.  The lemmas say why it
never reads them; the enumeration says that the engine is what the lemmas speak of.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import pytest
import torch
import z3

from fuzz import mutants
from fuzz.stamps import Stamper
from fuzz.targets.setup import STAMPED_SHAPE
from reference.contract import Chunk, Component, Drafts, Engine, EngineOptions, RequestId
from reference.geometry import Geometry
from systems import load

OLD, NEW = RequestId(0), RequestId(1)


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
