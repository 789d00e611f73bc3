"""The report of `verify`: its bars, its tables, and its plain data."""

from __future__ import annotations

import io
import json
import math

import msgspec
import pytest

from fuzz.terminal import Terminal, json_of
from fuzz.verify import numeric, parts
from fuzz.verify.mooncake import TraceError, generate_trace, write_trace
from fuzz.verify.part import FAULT, Check, Part, Plan, engine_with
from fuzz.verify.report import Report, run_verify, tables
from fuzz.verify.trace import TraceCounts, TraceRunner
from reference.contract import OutOfMemory
from reference.weights import random_weights


def rendered(report):
    out = Terminal()
    out.width, out.file = 200, io.StringIO()
    out.show(tables(report))
    return out.file.getvalue()


def test_parts_run_in_processes_and_report(tmp_path):
    path = tmp_path / "trace.jsonl"
    write_trace(path, generate_trace(10, seed=0))
    seen = {}
    names = ("(d) capacity", "(e) trace, #41494")
    report = run_verify(
        path,
        quick=True,
        only=names,
        processes=2,
        progress=lambda part, done, total: seen.__setitem__(part, (done, total)),
    )
    assert report.passed
    assert tuple(part.name for part in report.parts) == names
    assert seen["(e) trace, #41494"] == (parts.FAULTY_REQUESTS,) * 2
    assert report.peak_mib > 100
    text = rendered(report)
    assert "8,877,568" in text
    assert "FAIL" not in text
    plain = msgspec.json.decode(msgspec.json.encode(report), type=Report)
    assert plain.parts[1].figures["mismatches"] > 0


def test_a_missed_bar_fails_the_report():
    check = Check.at_least("hits", 3, 5)
    assert not check.passed
    part = Part(name="x", checks=(check,))
    report = Report(
        passed=False, seconds=1.0, peak_mib=1, quick=True, trace="generated", parts=(part,)
    )
    assert "FAIL" in rendered(report)


def test_what_the_data_holds_is_printed_as_it_is():
    hostile = "[red]row[/] \\[a] [/x] :smile:"
    check = Check(name=hostile, measured=hostile, bar=hostile, passed=True)
    part = Part(name="x", checks=(check,), columns=("found",), rows=((hostile,),))
    report = Report(passed=True, seconds=1.0, peak_mib=1, quick=True, trace="x", parts=(part,))
    assert rendered(report).count(hostile) == 4


def test_a_part_that_breaks_down_has_failed(monkeypatch):
    def part(plan, tick):
        raise OutOfMemory("no pages")

    monkeypatch.setitem(parts.PARTS, "(d) capacity", part)
    (check,) = parts.run("(d) capacity", Plan(), lambda done, total: None).checks
    assert not check.passed
    assert check.measured == "OutOfMemory: no pages"


def test_the_clock_judges_the_trace_and_the_cpu_is_shown(monkeypatch):
    counts = TraceCounts(requests=400, wall_s=300.2, cpu_s=100.0, mismatches=2)
    counts.first_mismatch = "Row 3 should hold [kv]."
    monkeypatch.setattr(TraceRunner, "run", lambda self: counts)
    part = parts.run("(c, e) trace", Plan(quick=True), lambda done, total: None)
    (clock,) = (check for check in part.checks if check.name == "wall seconds")
    assert (clock.measured, clock.bar, clock.passed) == ("301", "at most 300", False)
    shown = dict(part.rows)
    assert shown["wall seconds"] == "300.2"
    assert shown["CPU seconds"] == "100.0"
    assert shown["first mismatch"] == "Row 3 should hold [kv]."


def test_json_says_infinity_in_words():
    part = Part(checks=(), figures={"ratios": {"kv": math.inf}, "list": [-math.inf, math.nan, 1.5]})
    figures = msgspec.json.decode(json_of(part))["figures"]
    assert figures == {"ratios": {"kv": "inf"}, "list": ["-inf", "nan", 1.5]}


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (Check.exactly("", 0, 0), True),
        (Check.exactly("", 1, 0), False),
        (Check.at_least("", 5, 5), True),
        (Check.at_least("", 4, 5), False),
        (Check.at_most("", 5, 5), True),
        (Check.at_most("", 6, 5), False),
    ],
)
def test_bars_at_their_boundary(check, passed):
    assert check.passed is passed


def test_wrong_trace_is_found_before_anything_runs(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("{}\n")
    with pytest.raises(TraceError, match="line 1"):
        run_verify(path)
    blocks = list(range(8192))
    request = {"timestamp": 0, "input_length": 8192 * 512, "output_length": 1, "hash_ids": blocks}
    path.write_text(json.dumps(request) + "\n")
    with pytest.raises(TraceError, match=r"line 1 needs room .* drop the line"):
        run_verify(path)


def test_every_part_has_its_letter():
    letters = {letter for name in parts.PARTS for letter in name[1 : name.index(")")].split(", ")}
    assert letters == set("abcdef")
    assert set(parts.LONGEST_FIRST) <= set(parts.PARTS)


def test_numeric_sample_is_audited_and_the_fault_is_out_of_bounds():
    requests = numeric.sample(Plan(quick=True).requests(), count=6, longest=2500)
    assert len(requests) == 6
    assert all(request.input_length <= 2500 for _, request in requests)
    weights = random_weights(numeric.SHAPE, numeric.GEOMETRY, 0)
    verdicts = []
    for faulty in (False, True):
        with engine_with(FAULT if faulty else None) as factory:
            verdicts.append(numeric.run(factory, requests, weights=weights))
    clean, faulty = verdicts
    assert clean.wrong == 0, clean.violations
    assert clean.hits > 0
    assert max(clean.max_ratio.values()) <= 1
    assert faulty.wrong > 0
