"""P and D as 2R real processes, over real transports: D decodes with the bits of one engine.

Ranks meet over gloo, and P writes over NIXL or into shared memory.  All ranks of D have to compute
the same, and the run of all processes together is judged by the reference.
"""

from __future__ import annotations

import pytest

from oracle_tests.real_world import must_be_clean, world
from oracle_tests.transfer_runs import is_done, is_right, prompt
from reference.protocol import Completion

LENGTHS = [39, 5, 32, 17, 1, 48]
NOTIFY, STATUS = Completion


@pytest.mark.parametrize(
    ("ranks", "setting"),
    [
        pytest.param(1, {"completion": STATUS}, id="1-nixl-status"),
        pytest.param(2, {"completion": NOTIFY}, id="2-nixl-notify"),
        pytest.param(4, {"completion": STATUS}, id="4-nixl-status"),
        pytest.param(1, {"completion": NOTIFY, "tls": "tcp"}, id="1-tcp-notify"),
        pytest.param(2, {"completion": STATUS, "tls": "tcp"}, id="2-tcp-status"),
        pytest.param(1, {"completion": NOTIFY, "shared": True}, id="1-shm-notify"),
        pytest.param(2, {"completion": STATUS, "shared": True}, id="2-shm-status"),
        pytest.param(4, {"completion": NOTIFY, "shared": True}, id="4-shm-notify"),
        pytest.param(2, {"completion": STATUS, "hisparse": True}, id="2-nixl-hisparse"),
        pytest.param(2, {"shared": True, "hisparse": True}, id="2-shm-hisparse"),
    ],
)
def test_d_decodes_what_one_engine_would(ranks: int, setting: dict[str, object]) -> None:
    with world(ranks=ranks, **setting) as it:
        it.run()
        asked = [it.ask(prompt(n, length)) for n, length in enumerate(LENGTHS)]
        it.until(lambda: it.is_over)
        assert all(map(is_done, asked))
        assert all(map(is_right, asked))
        must_be_clean(it)
