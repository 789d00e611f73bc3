"""Worker processes: they leave Ctrl-C to their parent, and end with it."""

from __future__ import annotations

import multiprocessing
import signal
import time

import pytest

from fuzz.workers import workers


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
