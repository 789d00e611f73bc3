"""Campaigns that go on: after any end, nothing is counted twice, and nothing done is lost."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import signal
import subprocess
import sys
from concurrent.futures import Future
from pathlib import Path

import msgspec
import pytest

from fuzz import campaign, cli, planted, targets
from fuzz.campaign import BATCH, Plan, run
from fuzz.corpus import Corpus, CorpusError
from fuzz.guidance import Garden
from fuzz.journal import Journal, Progress, journal
from fuzz.mutants import report
from fuzz.tally import gaps, merged
from fuzz.targets.setup import Pin

STAMPED = Pin(payload="stamped")
PLAN = Plan(target="multi_rank", executions=100, guided=0)


@pytest.fixture(scope="module")
def whole():
    """The campaign as it is in one call."""
    return run(PLAN)


def counts(summary):
    return summary.executions, summary.operations, summary.events, summary.planted


def test_ranges():
    assert merged([(5, 7), (0, 2), (2, 4), (6, 9)]) == [(0, 4), (5, 9)]
    assert gaps([(0, 4), (6, 9)], 0, 12) == [(4, 6), (9, 12)]
    assert gaps([(0, 4), (6, 9)], 0, 8) == [(4, 6)]
    assert gaps([], 3, 5) == [(3, 5)]
    assert gaps([(3, 9)], 3, 5) == []


def test_a_resumed_campaign_is_the_campaign(tmp_path, whole):
    assert whole.resumed == 0
    found = Corpus(tmp_path)
    short = msgspec.structs.replace(PLAN, executions=30)
    assert run(short, corpus=found).executions == 30
    rest = run(PLAN, corpus=found, resume=True)
    assert rest.resumed == 30
    assert counts(rest) == counts(whole)
    again = run(PLAN, corpus=found, resume=True)
    assert again.resumed == 100
    assert counts(again) == counts(whole)
    assert again.features == whole.features
    fresh = run(short, corpus=found)
    assert fresh.executions == 30
    assert fresh.resumed == 0


def test_a_killed_campaign_goes_on_where_it_was(tmp_path, whole):
    """kill -9 in the middle of a batch: what it had journaled is what counts."""
    script = (
        "import sys; from pathlib import Path; from fuzz.corpus import Corpus\n"
        "from oracle_tests.test_campaign_resume import PLAN, run\n"
        "def said(news): print(news.executions, flush=True)\n"
        "run(PLAN, corpus=Corpus(Path(sys.argv[1])), progress=said)\n"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    said = [int(line) for line in itertools.islice(child.stdout, 2)]
    os.kill(child.pid, signal.SIGKILL)
    child.wait(60)
    said += [int(line) for line in child.stdout]
    with journal(tmp_path / "campaigns", PLAN.identity) as log:
        done = log.load().total.executions
    # the journal is written before the news is told
    assert said[-1] <= done <= said[-1] + BATCH
    assert 50 <= done < 100 + BATCH
    rest = run(PLAN, corpus=Corpus(tmp_path), resume=True)
    assert rest.resumed == done
    assert counts(rest) == counts(whole)


def test_failures_outlive_the_campaign_that_found_them(tmp_path, monkeypatch):
    """They are in the corpus as soon as their batch is over, unshrunk."""
    monkeypatch.setattr(campaign, "_shrunk", lambda plan, failure: pytest.fail("too late"))
    plan = Plan(target="prefix_split", mutant="gather_by_loc", pin=STAMPED, executions=50)
    with pytest.raises(ZeroDivisionError):
        run(plan, corpus=Corpus(tmp_path), progress=lambda news: 1 // 0)
    monkeypatch.undo()
    found = {path.parent.name for path, _ in Corpus(tmp_path).failures()}
    assert found
    summary = run(plan, corpus=Corpus(tmp_path), resume=True)
    kept = Corpus(tmp_path).failures()
    assert {path.parent.name for path, _ in kept} >= found
    assert len(kept) == len(summary.failures)
    assert {case.violations[0].signature for _, case in kept} == {
        failure.signature for failure in summary.failures
    }
    # a planted fault may make any tape interesting
    assert not list(Corpus(tmp_path).tapes())


def test_guided_executions_begin_like_those_of_the_corpus(tmp_path):
    found = Corpus(tmp_path)
    plan = Plan(target="slot_reuse", pin=STAMPED, executions=BATCH, guided=100)
    first = run(plan, corpus=found)
    kept = Garden(found.grown("slot_reuse", "optimized", STAMPED))
    assert (first.guided, first.features, first.tapes) == (0, len(kept), len(list(kept)))
    later = run(msgspec.structs.replace(plan, seed=1000), corpus=found)
    assert later.guided == BATCH
    assert later.features > first.features > 0
    alone = run(msgspec.structs.replace(plan, seed=1000, guided=0), corpus=found)
    assert alone.guided == 0
    # of another pin they would be other runs
    pinned = msgspec.structs.replace(plan, pin=Pin(payload="stamped", kpool=2))
    assert run(pinned, corpus=found).guided == 0


def test_two_campaigns_of_one_plan_have_a_journal_each(tmp_path):
    with journal(tmp_path, PLAN.identity) as one, journal(tmp_path, PLAN.identity) as two:
        assert one.path != two.path
        one.save(Progress(done=[(0, 7)]))
        assert two.load().done == []
    with journal(tmp_path, PLAN.identity) as again:
        assert again.path == one.path
        assert again.load().done == [(0, 7)]
    with journal(tmp_path, msgspec.structs.replace(PLAN, seed=1).identity) as other:
        assert other.path not in (one.path, two.path)


@pytest.mark.parametrize(
    "content", [b"", b"[", b'{"version": 9}', b'{"done": [[1]]}', b'{"total": {"executions": "x"}}']
)
def test_a_damaged_journal_gets_a_sentence(tmp_path, content):
    with journal(tmp_path / "campaigns", PLAN.identity) as log:
        log.path.write_bytes(content)
    with pytest.raises(CorpusError, match=r"start .* anew without --resume"):
        run(PLAN, corpus=Corpus(tmp_path), resume=True)
    short = msgspec.structs.replace(PLAN, executions=2)
    assert run(short, corpus=Corpus(tmp_path)).executions == 2


def test_a_killed_worker_does_not_end_the_campaign(whole):
    """By the system, for memory for example: the batch is executed again, and counts once."""
    killed = []

    def progress(news):
        if not killed:
            victim = multiprocessing.active_children()[0]
            killed.append(victim.pid)
            os.kill(victim.pid, signal.SIGKILL)

    summary = run(msgspec.structs.replace(PLAN, processes=2), progress=progress)
    assert summary.deaths == 1
    assert summary.lost == []
    assert counts(summary) == counts(whole)
    memory = summary.memory
    for each in (memory.start, memory.end, memory.worker_start, memory.worker_end):
        assert 10 << 20 < each < 100 << 30


def test_seeds_that_kill_two_workers_are_told_of(monkeypatch):
    class Mortal(Exception):
        pass

    class Doomed:
        size, tries, deaths = 1, 2, (Mortal,)

        def submit(self, work, batch):
            future = Future()
            try:
                future.set_result(work(batch))
            except Mortal as error:
                future.set_exception(error)
            return future

    searched = campaign._search

    def search(plan, batch):
        if batch.start == 25:
            raise Mortal
        return searched(plan, batch)

    monkeypatch.setattr(campaign, "_search", search)
    summary = run(PLAN, crew=Doomed())
    assert summary.lost == [(25, 50)]
    assert summary.deaths == 2
    assert summary.executions == 75
    assert not summary.passed


@pytest.mark.parametrize("target", targets.names())
def test_planted_faults_are_found(target):
    assert planted.due(planted.AT)
    for seed in range(planted.AT, 3 * planted.EVERY, planted.EVERY):
        assert planted.missed(target, seed) is None
    for name in planted.EASY[target]:
        assert planted.mutants.find(name).target in (target, "drain")


def test_a_campaign_that_misses_what_it_plants_is_broken(monkeypatch, tmp_path):
    """Oracles that look at nothing: of the control, only what was planted tells."""
    plan = Plan(target="slot_reuse", pin=STAMPED, executions=60)
    sound = run(plan)
    assert (sound.planted, sound.missed) == (1, [])
    monkeypatch.setattr(report, "execute", lambda *_, **__: sound_outcome)
    sound_outcome = campaign.execute(
        campaign.systems.load("optimized"), targets.find("slot_reuse"), campaign.Tape(seed=1)
    )
    blind = run(plan)
    assert blind.planted == 1
    assert blind.missed
    assert set(blind.missed) <= set(planted.EASY["slot_reuse"])
    assert not blind.passed


@pytest.mark.parametrize("changed", [{"mutant": "gather_by_loc"}, {"system": "reference"}])
def test_nothing_is_planted_beside_a_fault_or_in_what_it_does_not_patch(changed):
    plan = Plan(target="prefix_split", pin=STAMPED, executions=51, **changed)
    assert run(msgspec.structs.replace(plan, seed=50, executions=1)).planted == 0
    sound = msgspec.structs.replace(plan, mutant=None, system="optimized", seed=50, executions=1)
    assert run(sound).planted == 1


def test_planting_leaves_no_trace():
    """The fault of one seed must not show in the next."""
    target = targets.find("prefix_split")
    system = campaign.systems.load("optimized")

    def digests():
        return [campaign.execute(system, target, campaign.Tape(seed=n)).digest for n in range(8)]

    before = digests()
    assert planted.missed("prefix_split", 50) is None
    assert digests() == before


def kvoracle(monkeypatch, capsys, *words: str | Path) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["kvoracle", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return stop.value.code, printed.out, printed.err


def test_the_command_over_several_targets(tmp_path, monkeypatch, capsys):
    folders = ("--corpus", tmp_path / "corpus", "--cases", tmp_path / "cases")
    file = tmp_path / "result.json"
    two = ("fuzz", "slot_reuse", "multi_rank", *folders, "--json", file)
    code, out, err = kvoracle(monkeypatch, capsys, *two, "--executions", "4")
    assert code == 1, "too little was seen in four executions"
    assert [each["executions"] for each in json.loads(file.read_bytes())] == [4, 4]
    assert "slot_reuse: 4 done, " in err
    assert " features, 0 failures" in err
    code, out, _ = kvoracle(monkeypatch, capsys, *two, "--executions", "6", "--resume")
    assert [each["resumed"] for each in json.loads(file.read_bytes())] == [4, 4]
    assert "of them by earlier calls" in out
    assert "resident MiB of this process, start and end" in out
    tapes = {saved.target for _, saved in Corpus(tmp_path / "corpus").tapes()}
    assert tapes == {"slot_reuse", "multi_rank"}
    code, _, err = kvoracle(monkeypatch, capsys, "fuzz")
    assert code == 2
    assert "name some of prefix_split" in err
    code, _, err = kvoracle(monkeypatch, capsys, "fuzz", "all", "--kpool", "2")
    assert code == 2
    assert "leave out --system" in err


def test_a_corpus_that_fills_up_ends_a_campaign_with_all_that_was_found(tmp_path, monkeypatch):
    """The journal takes two batches and no more; the third one's failures are told all the same."""
    saves = []

    def save(self, progress):
        saves.append(progress)
        if len(saves) > 2:
            raise CorpusError("the disk is full: name another folder by --corpus.")

    monkeypatch.setattr(Journal, "save", save)
    plan = Plan(target="prefix_split", mutant="gather_by_loc", executions=10 * BATCH)
    found = run(plan, corpus=Corpus(tmp_path))
    assert found.executions == 3 * BATCH
    assert found.unsaved.startswith("the disk is full")
    assert not found.passed
    assert found.failures
    assert found.failures[0].outcome.operations[-1].tokens <= 4
