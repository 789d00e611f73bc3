"""Worker processes: they leave Ctrl-C to their parent, and end with it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fuzz.workers import carried_out, processes, workers


def test_workers_leave_ctrl_c_to_their_parent():
    with workers(1) as pool:
        assert pool.submit(signal.getsignal, signal.SIGINT).result() == signal.SIG_IGN
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_workers_end_at_once_with_an_error(error):
    before = set(multiprocessing.active_children())
    began = time.monotonic()

    def fail_at_work():
        with workers(2) as pool:
            for _ in range(4):
                pool.submit(time.sleep, 200)
            raise error

    with pytest.raises(error):
        fail_at_work()
    assert time.monotonic() - began < 60
    assert set(multiprocessing.active_children()) <= before


PARENT = """
import os, sys, time
from fuzz.workers import workers

if __name__ == "__main__":
    with workers(2) as pool:
        for _ in range(2):
            pool.submit(time.sleep, 200)
        print(*pool._processes, flush=True)
        time.sleep(200)
"""


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM])
def test_workers_do_not_outlive_a_parent_that_is_killed(tmp_path, kill):
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2
    parent.send_signal(kill)
    parent.wait(30)
    parent.stdout.close()
    ends = time.monotonic() + 30
    while any(is_running(pid) for pid in pids):
        assert time.monotonic() < ends, "a worker waits for ever"
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process is there and no zombie, which in a container may have nobody to reap it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def die_at(job: tuple[int, Path]) -> int:
    """A job whose worker is killed, as often as there are ticks in its file."""
    number, ticks = job
    left = len(ticks.read_bytes()) if ticks.exists() else 0
    if left:
        ticks.write_bytes(b"." * (left - 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return number


@pytest.mark.parametrize(("times", "result", "deaths"), [(1, 3, 1), (2, None, 2)])
def test_a_killed_worker_costs_its_own_job_alone(tmp_path, times, result, deaths):
    ticks = tmp_path / "ticks"
    ticks.write_bytes(b"." * times)
    jobs = [(n, ticks if n == 3 else tmp_path / "none") for n in range(8)]
    with processes(2) as crew:
        done = {each.job[0]: each for each in carried_out(crew, die_at, jobs)}
    assert sorted(done) == list(range(8))
    assert (done.pop(3).result, times) == (result, deaths)
    assert all(each.result == n and not each.deaths for n, each in done.items())
