"""The same campaign over a Ray cluster: started here, joined, and losing workers in the middle."""

from __future__ import annotations

import builtins
import json
import os
import signal
import sys

import pytest

from fuzz import cli
from fuzz.campaign import Plan, run
from fuzz.corpus import Corpus
from fuzz.fleet import fleet
from fuzz.workers import carried_out

PLAN = Plan(target="multi_rank", executions=100, guided=0)


def counts(summary):
    return summary.executions, summary.operations, summary.events, summary.planted


def pid(_: object) -> int:
    return os.getpid()


def killed_at(job: tuple[int, str]) -> int:
    """A job whose worker is killed, as often as there are ticks in its file."""
    number, ticks = job
    if ticks and os.path.getsize(ticks):
        os.truncate(ticks, os.path.getsize(ticks) - 1)
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_a_campaign_on_two_workers_that_are_killed(tmp_path):
    """It is the campaign of one process, whoever dies in it; and it resumes."""
    alone = run(PLAN)
    found = Corpus(tmp_path / "corpus")
    with fleet("local", processes=2) as crew:
        assert crew.size == 2
        first = run(Plan(target="multi_rank", executions=50, guided=0), corpus=found, crew=crew)
        assert first.deaths == 0
        victims = {each.result for each in carried_out(crew, pid, range(8))}
        assert os.getpid() not in victims

        def progress(news):
            while victims:
                os.kill(victims.pop(), signal.SIGKILL)

        rest = run(PLAN, corpus=found, crew=crew, resume=True, progress=progress)
        assert rest.resumed == 50
        assert counts(rest) == counts(alone)
        assert rest.lost == []

        for times, result in ((1, 1), (crew.tries, None)):
            ticks = tmp_path / f"ticks{times}"
            ticks.write_bytes(b"." * times)
            jobs = [(0, ""), (1, str(ticks)), (2, "")]
            done = {each.job[0]: each for each in carried_out(crew, killed_at, jobs)}
            assert done[1].result == result
            assert times <= done[1].deaths <= crew.tries
            assert [done[0].result, done[2].result] == [0, 2]


def kvoracle(monkeypatch, capsys, *words):
    monkeypatch.setattr(sys, "argv", ["kvoracle", *map(str, words)])
    with pytest.raises(SystemExit) as stop:
        cli.main()
    printed = capsys.readouterr()
    assert "Traceback" not in printed.err
    return stop.value.code, printed.out, printed.err


def test_the_command_on_a_local_cluster(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = ("fuzz", "multi_rank", "--executions", "60", "--json", "s.json", "--ray", "local")
    code, _, _ = kvoracle(monkeypatch, capsys, *words, "--mutant", "released_twice")
    assert code == 1
    summary = json.loads((tmp_path / "s.json").read_bytes())
    assert summary["executions"] == 60
    assert summary["failures"]


def test_without_ray_there_is_a_sentence(tmp_path, monkeypatch, capsys):
    known = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "ray":
            raise ModuleNotFoundError("No module named 'ray'")
        return known(name, *args, **kwargs)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "__import__", without)
    code, _, err = kvoracle(monkeypatch, capsys, "fuzz", "multi_rank", "--ray", "local")
    assert code == 2
    assert "pip install kvoracle[fleet]" in err


@pytest.mark.parametrize("address", ["127.0.0.1:1", "nowhere at all", "ray://127.0.0.1:1"])
def test_a_cluster_that_does_not_answer_gets_a_sentence(tmp_path, monkeypatch, capsys, address):
    monkeypatch.chdir(tmp_path)
    code, _, err = kvoracle(monkeypatch, capsys, "fuzz", "multi_rank", "--ray", address)
    assert code == 2
    assert f"No Ray cluster answers at {address!r}" in err
