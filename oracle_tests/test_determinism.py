"""One tape means one run, whatever the hash seed and the numbers of threads and workers."""

import os
import subprocess
import sys

import msgspec
import pytest
import torch

from fuzz import determinism
from fuzz.cli import app
from fuzz.determinism import Digests, digests
from fuzz.digest import Digest
from fuzz.terminal import UsageError

MUTANT = "source_pages_not_kept"
PROGRAM = f"""
import msgspec, sys
from fuzz import targets
from fuzz.determinism import digests

if __name__ == "__main__":
    processes = int(sys.argv[1])
    clean = digests(targets.names(), seeds=range(2, 8), processes=processes)
    faulty = digests(["transfer"], seeds=range(4), mutant="{MUTANT}")
    sys.stdout.buffer.write(msgspec.json.encode([clean, faulty]))
"""


def elsewhere(tmp_path, *, hash_seed, threads, processes=1):
    """The digests of another process, under another environment."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    # passive: threads that wait by spinning are slow where others want the cores
    environment = {
        "PYTHONHASHSEED": hash_seed,
        "OMP_NUM_THREADS": threads,
        "OMP_WAIT_POLICY": "passive",
    }
    done = subprocess.run(
        [sys.executable, str(program), str(processes)],
        env={**os.environ, **environment},
        capture_output=True,
        check=True,
        timeout=240,
    )
    return msgspec.json.decode(done.stdout, type=list[Digests])


def test_hash_seeds_threads_and_workers_make_no_difference(tmp_path):
    clean, faulty = elsewhere(tmp_path, hash_seed="0", threads="1")
    assert {run.payload for run in clean.runs} == {"stamped", "model"}
    others = [
        elsewhere(tmp_path, hash_seed="1", threads="2"),
        elsewhere(tmp_path, hash_seed="random", threads="1", processes=2),
    ]
    for other_clean, other_faulty in others:
        assert other_clean.runs == clean.runs
        assert other_faulty.runs == faulty.runs


def test_another_tape_and_a_fault_have_other_digests():
    """The control: a digest that anything could have shows nothing."""
    clean = digests(["transfer"], seeds=range(4))
    faulty = digests(["transfer"], seeds=range(4), mutant=MUTANT)
    assert len({run.exact for run in clean.runs}) == len(clean.runs)
    assert [run.exact for run in clean.runs] != [run.exact for run in faulty.runs]


def test_floats_are_no_part_of_the_exact_tier():
    one, other = Digest(), Digest()
    for digest, value in ((one, 1.0), (other, 2.0)):
        digest.add("the same")
        digest.add_tensor(torch.tensor([value]), exact=False)
    assert one.exact == other.exact
    assert one.full != other.full
    one.add_tensor(torch.tensor([1]), exact=True)
    assert one.exact != other.exact


@pytest.fixture
def saved(tmp_path):
    """Digests of three runs, the last one a model's, in a file."""
    path = tmp_path / "digests.json"
    assert run_app("slot_reuse", "--executions", "3", "--seed", "1", "--json", str(path)) == 0
    return path


def run_app(*arguments):
    return app(["digest", *arguments], result_action="return_value", exit_on_error=False)


def again(path):
    return run_app("slot_reuse", "--executions", "3", "--seed", "1", "--against", str(path))


def changed(path, run, *, torch="", **tiers):
    found = msgspec.json.decode(path.read_bytes(), type=Digests)
    found.runs[run] = msgspec.structs.replace(found.runs[run], **tiers)
    found = msgspec.structs.replace(found, torch=torch or found.torch)
    path.write_bytes(msgspec.json.encode(found))


def test_digests_of_another_machine_are_held_to(saved, capsys):
    assert again(saved) == 0
    assert "3 of 3 runs observed the same" in capsys.readouterr().out


def test_a_difference_is_named(saved, capsys):
    changed(saved, 1, exact="0" * 32)
    assert again(saved) == 1
    assert "slot_reuse, stamped, seed 2: the exact tier differs" in capsys.readouterr().out


def test_floats_are_held_to_those_of_the_same_torch(saved, capsys):
    changed(saved, 2, full="0" * 32)
    assert again(saved) == 1
    assert "slot_reuse, model, seed 3: the full tier differs" in capsys.readouterr().out
    changed(saved, 2, torch="1.0")
    assert again(saved) == 0
    assert "floats not compared" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"[]", b'{"python": 1}', b"\xff", b"[" * 100_000])
def test_a_file_of_no_use_gets_a_sentence(tmp_path, content):
    path = tmp_path / "digests.json"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=r"holds no digests .* write it with `kvoracle digest"):
        again(path)


def test_digests_of_other_tapes_get_a_sentence(saved):
    with pytest.raises(UsageError, match="holds digests of other tapes: name the targets"):
        run_app("slot_reuse", "--executions", "2", "--against", str(saved))
    with pytest.raises(UsageError, match=f"There is no {saved}x"):
        again(f"{saved}x")


def test_a_quarter_of_the_runs_computes_a_model():
    payloads = [determinism._payload("prefix_split", seed) for seed in range(8)]
    assert payloads == ["stamped", "stamped", "stamped", "model"] * 2
    assert {determinism._payload("transfer", seed) for seed in range(8)} == {"stamped"}
