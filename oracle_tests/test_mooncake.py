"""Traces in Mooncake's format: malformed lines, the tokens behind hashes, the generator."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from fuzz.verify.mooncake import (
    BLOCK,
    OWN_TOKENS,
    TraceError,
    TraceRequest,
    generate_trace,
    output_tokens,
    prompt_tokens,
    read_trace,
    write_trace,
)

GOOD = {"timestamp": 0, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}


def write(tmp_path, *lines):
    path = tmp_path / "trace.jsonl"
    path.write_bytes(b"\n".join(lines) + b"\n")
    return path


def test_reads_what_it_writes(tmp_path):
    requests = generate_trace(50, seed=1)
    path = tmp_path / "trace.jsonl"
    write_trace(path, requests)
    assert read_trace(path) == requests


def test_ignores_fields_of_later_releases(tmp_path):
    path = write(tmp_path, json.dumps(GOOD | {"session": "x"}).encode())
    assert read_trace(path)[0].hash_ids == (0, 7)


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"{", "no request"),
        (b"", "no request"),
        (b"[]", "no request"),
        (b"\xff\xfe", "no request"),
        (b'{"x":' + b"[" * 100_000, "no request"),
        (json.dumps(GOOD | {"input_length": "600"}).encode(), "input_length"),
        (json.dumps(GOOD | {"input_length": 0}).encode(), "input_length"),
        (json.dumps(GOOD | {"input_length": 1 << 40}).encode(), "input_length"),
        (json.dumps(GOOD | {"output_length": -1}).encode(), "output_length"),
        (json.dumps(GOOD | {"hash_ids": [0, -1]}).encode(), "hash_ids"),
        (json.dumps(GOOD | {"hash_ids": [0]}).encode(), "give it 2"),
        (json.dumps({k: v for k, v in GOOD.items() if k != "timestamp"}).encode(), "timestamp"),
        (b" " * (1 << 21), "split or drop"),
    ],
)
def test_malformed_line_is_one_sentence_with_its_number(tmp_path, line, says):
    path = write(tmp_path, json.dumps(GOOD).encode(), line)
    with pytest.raises(TraceError, match=r"line 2\b") as error:
        read_trace(path)
    sentence = str(error.value)
    assert says in sentence
    assert sentence.endswith(".")
    assert "\n" not in sentence


def test_unreadable_and_empty_files_name_the_cure(tmp_path):
    with pytest.raises(TraceError, match="pass a readable file"):
        read_trace(tmp_path / "absent.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(TraceError, match="at least one JSON line"):
        read_trace(empty)


def test_what_has_no_end_or_cannot_be_read_again_is_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        with pytest.raises(TraceError, match="is no regular file: save the trace as one"):
            read_trace(path)


def test_a_line_without_an_end_is_not_read_whole(tmp_path):
    path = tmp_path / "trace.jsonl"
    with path.open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(TraceError, match="line 1 is over 1048576 bytes"):
        read_trace(path)


def test_equal_ids_give_equal_blocks_and_others_differ():
    requests = generate_trace(300, seed=3)
    prompts = [prompt_tokens(request, vocab=151_552) for request in requests]
    by_id: dict[int, bytes] = {}
    for request, tokens in zip(requests, prompts, strict=True):
        assert len(tokens) == request.input_length
        assert 0 <= tokens.min() <= tokens.max() < 151_552
        for number, block in enumerate(request.hash_ids):
            text = tokens[number * BLOCK : (number + 1) * BLOCK].tobytes()
            if len(text) == 8 * BLOCK:
                assert by_id.setdefault(block, text) == text
    assert len(set(by_id.values())) == len(by_id)


def test_prompts_part_inside_a_block():
    """Two prompts share more than their whole blocks, and never all of the next one."""
    places = []
    for shared in range(100):
        one, two = (
            prompt_tokens(
                TraceRequest(
                    timestamp=0,
                    input_length=2 * BLOCK,
                    output_length=1,
                    hash_ids=(shared, other),
                ),
                vocab=151_552,
            )
            for other in (1000, 1001)
        )
        places.append(int((one != two).argmax()))
        assert BLOCK <= places[-1] < 2 * BLOCK
        assert (one[-OWN_TOKENS:] != two[-OWN_TOKENS:]).all()
    assert len(set(places)) > 50


def test_outputs_belong_to_their_request():
    first, longer, second = (output_tokens(n, k, vocab=100) for n, k in ((1, 9), (1, 700), (2, 9)))
    assert np.array_equal(first, longer[:9])
    assert not np.array_equal(first, second)


def test_generator_is_a_function_of_its_seed():
    assert generate_trace(200, seed=5) == generate_trace(200, seed=5)
    assert generate_trace(200, seed=5) != generate_trace(200, seed=6)


def test_generator_has_the_published_statistics():
    """12,031 requests; each bound is some 15 % about the published figure."""
    requests = generate_trace(12_031, seed=0)
    inputs = np.array([request.input_length for request in requests])
    outputs = np.array([request.output_length for request in requests])
    seen: set[int] = set()
    blocks = known = deep = 0
    for request in requests:
        hit = 0
        while hit < len(request.hash_ids) and request.hash_ids[hit] in seen:
            hit += 1
        assert hit >= min(1, len(seen)), "every prompt opens with the common block"
        # a shared id stands for a shared prefix: nothing after the first new id is known
        assert seen.isdisjoint(request.hash_ids[hit:])
        seen.update(request.hash_ids)
        blocks += len(request.hash_ids)
        known += hit
        deep += hit > 1
    for share, published in ((10, 964), (50, 6_909), (90, 27_367), (99, 85_400)):
        assert np.percentile(inputs, share) == pytest.approx(published, rel=0.15)
    for share, published in ((10, 24), (50, 350), (90, 597), (99, 1_118)):
        assert np.percentile(outputs, share) == pytest.approx(published, rel=0.15)
    assert deep / len(requests) == pytest.approx(0.387, abs=0.04)
    assert known / blocks == pytest.approx(0.366, abs=0.04)
    assert (inputs % BLOCK == 0).mean() < 0.01, "prompts end anywhere in a block"
