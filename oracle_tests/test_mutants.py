"""Every mutant is found from an empty corpus, by an oracle that its entry names; the faithful
engine passes the same tape."""

from __future__ import annotations

import io
import pkgutil
from dataclasses import replace

import msgspec
import pytest
from rich.console import Console

from fuzz import mutants, targets
from fuzz.mutants.registry import planted
from fuzz.mutants.report import Kill, kill, report, table
from fuzz.run import execute
from fuzz.stamps import Stamper
from fuzz.tape import Tape
from fuzz.targets.setup import STAMPED_SHAPE
from reference.contract import Chunk, Component, EngineOptions, RequestId
from reference.drain import Clause
from reference.geometry import Geometry
from systems import load

EXECUTIONS = 1500
"""Most executions of one search."""
ORACLES = {
    "drain",
    "exact",
    "provenance",
    "containment",
    "metamorphic",
    "numeric",
    "residency",
    "restore",
}
EVERY = [mutants.find(name) for name in mutants.names()]
FOUND = [mutant for mutant in EVERY if not mutant.equivalence]
RUN = [mutant for mutant in FOUND if not mutant.needs and mutant.target != "drain"]
CLAUSES = {clause.value for clause in Clause}


def names(found):
    return [mutant.name for mutant in found]


@pytest.mark.parametrize("mutant", RUN, ids=names(RUN))
def test_mutant_is_killed_and_the_faithful_engine_passes_its_tape(mutant):
    found = kill(mutant, seed=1, executions=EXECUTIONS)
    assert found.oracle in mutant.killed_by, found.sentence
    assert found.crashes == 0, "a mutant must be well behaved"
    tape = Tape(found.outcome.values)
    clean = execute(load("optimized"), targets.find(mutant.target), tape, pin=mutant.pin)
    assert not clean.failed, clean.violations[0].sentence


@pytest.mark.parametrize("mutant", EVERY, ids=names(EVERY))
def test_patch_is_undone(mutant):
    def functions():
        return [pkgutil.resolve_name(name) for name in mutant.patches]

    before = functions()
    with mutant.applied():
        assert all(a is not b for a, b in zip(before, functions(), strict=True))
    assert functions() == before


def test_patch_is_undone_after_an_error():
    mutant = mutants.find("tail_one_short")
    (name,) = mutant.patches
    before = pkgutil.resolve_name(name)
    with pytest.raises(ZeroDivisionError), mutant.applied():
        raise ZeroDivisionError
    assert pkgutil.resolve_name(name) is before


def test_registry_is_complete():
    assert len(FOUND) >= 230
    assert {mutant.bug for mutant in EVERY} > {"sglang#42178", "sglang#38815", "own"}
    for mutant in EVERY:
        assert mutant.sentence.endswith(".")
        assert bool(mutant.killed_by) != bool(mutant.equivalence)
        drain = mutant.target == "drain"
        assert set(mutant.killed_by) <= (CLAUSES if drain else ORACLES), "a crash is no kill"
        assert drain or mutant.target in targets.names()


def test_wrong_addresses_are_found_where_no_pool_reaches():
    (mutant,) = [mutant for mutant in EVERY if mutant.needs == "address"]
    found = kill(mutant, seed=1)
    assert (found.oracle, found.component) == ("exact", "address")


def test_41494_is_the_reference_while_nothing_is_shared():
    """Three requests without a common prefix, prefilled in turns: every pooled key is right."""
    geometry = Geometry(kpool=4, physical_page_size=4, topk=8, mamba_track_interval=16)
    with mutants.find("page_table_41494").applied():
        factory = load("optimized").factory
        options = EngineOptions(pages=20, state_slots=30, max_requests=3)
        faulty = factory(geometry, STAMPED_SHAPE, options).geometry
        assert faulty.logical_page_size == geometry.physical_page_size
        stamper = Stamper(faulty, STAMPED_SHAPE)
        engine = factory(geometry, STAMPED_SHAPE, replace(options, ape=stamper.ape))
        lengths = {RequestId(0): 70, RequestId(1): 45, RequestId(2): 33}
        chains = {}
        for request, length in lengths.items():
            tokens = range(100 * request, 100 * request + length)
            chains[request] = stamper.chain(list(tokens))
            engine.submit(request, list(tokens))
        for start in range(0, max(lengths.values()), 7):
            engine.extend(
                [
                    Chunk(request=request, stop=stop, rows=stamper.extend_rows(chain, start, stop))
                    for request, chain in chains.items()
                    if start < (stop := min(start + 7, len(chain)))
                ]
            )
        for request, chain in chains.items():
            groups = len(chain) // 4
            stored = engine.read(request, Component.INDEX, 0, 0, groups).numpy()
            assert (stored == stamper.expected_index(chain, 0, groups, 0)).all()


def test_unknown_mutant_is_one_sentence():
    with pytest.raises(
        mutants.UnknownMutant, match=r"^There is no mutant 'ape_droped': .*ape_dropped"
    ):
        mutants.find("ape_droped")


def test_report_tells_kills_from_survivors_and_equivalents():
    wanted = ("ape_dropped", "ring_not_reset", "loc_in_32_bits")
    steps = []
    rows = report(wanted, seeds=2, budget_s=5, progress=lambda *step: steps.append(step))
    assert [row.name for row in rows] == list(wanted)
    assert [row.verdict for row in rows] == ["killed", "equivalent", "killed"]
    assert all(row.passed for row in rows)
    assert rows[0].oracles == {"provenance": 2}
    assert rows[0].operations == len(rows[0].case) == 2
    assert steps == [(i, 6) for i in range(1, 7)]
    assert table(rows).row_count == 3


def test_report_says_what_is_amiss_with_a_kill():
    [row] = report(["tail_one_short"], seeds=1, budget_s=20, progress=lambda *_: None)
    assert row.passed
    other = msgspec.structs.replace(row, oracles={"exact": 1}, survived=2)
    crashed = msgspec.structs.replace(
        row, verdict="survived", oracles={}, survived=1, crashes=7, operations=0
    )
    assert not other.passed
    assert not crashed.passed
    printed = io.StringIO()
    Console(file=printed, width=200).print(table([other, crashed]))
    said = " ".join(printed.getvalue().split())
    assert "killed, but not 2 times, but its entry does not name exact" in said
    assert "7 crashes, which count for nothing" in said


def test_search_without_a_finding_is_a_survivor(monkeypatch):
    """The faithful engine in a mutant's place: nothing is found, so nothing is killed."""
    mutant = mutants.find("ape_dropped")
    monkeypatch.setitem(mutant.patches, *idle(mutant))
    assert kill(mutant, seed=1, executions=3) == Kill(
        executions=3, cpu_seconds=pytest.approx(0, abs=60)
    )


def idle(mutant):
    """The mutant's first patch, replaced by one that calls what it stands in for."""
    (name, *_) = mutant.patches
    return name, lambda original, *args, **kwargs: original(*args, **kwargs)


@pytest.mark.parametrize("name", ["optimized.addressing.nothing", "optimized.nowhere.locs", "locs"])
def test_a_function_that_is_not_there_is_named_in_a_sentence(name):
    with (
        pytest.raises(mutants.UnknownFunction, match=f"^A fault stands in for '{name}'.*correct"),
        planted({name: print}),
    ):
        pass
