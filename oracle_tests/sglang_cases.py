"""What the tests do with SGLang's engine; each function runs in the process of one release."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from fuzz.outcome import Outcome
from fuzz.run import execute, execute_here
from fuzz.shrink import shrink
from fuzz.stamps import mix, stamper_of
from fuzz.tape import Tape
from fuzz.targets import find
from fuzz.targets.setup import Pin
from reference.contract import (
    Capability,
    Chunk,
    Component,
    ContractError,
    Drafts,
    Engine,
    EngineFactory,
    EngineOptions,
    InvalidCall,
    OutOfMemory,
    RequestId,
    Snapshot,
    System,
)
from reference.prefix import cached_prefixes, judge_snapshot

PROMPT = list(range(1, 321))


class Caller:
    """An engine, and what its requests' rows must be."""

    def __init__(self, system: System, *, drafts: bool = False, **options: Any) -> None:
        size = system.sizes[drafts]
        given = {"pages": 13, "state_slots": 16, "max_requests": 4} | options
        self.stamper = stamper_of(size.geometry, size.shape)
        asked = EngineOptions(**given, ape=self.stamper.ape)
        self.engine: Engine = system.factory(size.geometry, size.shape, asked)
        # its geometry may go by other pages
        self.stamper = stamper_of(self.engine.geometry, size.shape)
        self.tokens: dict[int, list[int]] = {}

    def submit(self, name: int, tokens: Sequence[int]) -> int:
        self.tokens[name] = list(tokens)
        return self.engine.submit(RequestId(name), tokens).hit

    def extend(self, *names: int) -> None:
        """Each of these to the end of its prompt, in one step."""
        chunks = []
        for name in names:
            tokens, start = (
                self.tokens[name],
                self.engine.inspect().requests[RequestId(name)].length,
            )
            rows = self.stamper.extend_rows(self.stamper.chain(tokens), start, len(tokens))
            chunks.append(Chunk(request=RequestId(name), stop=len(tokens), rows=rows))
        self.engine.extend(chunks)

    def decode(self, *names: int, token: int) -> None:
        """A token more of each of these, in one step."""
        for name in names:
            self.tokens[name].append(token + name)
        chains = np.array([self.stamper.chain(self.tokens[name])[-1] for name in names])
        added = [self.tokens[name][-1] for name in names]
        self.engine.decode([RequestId(n) for n in names], added, self.stamper.step_rows(chains))

    def draft(self, first: dict[int, int]) -> list[Drafts]:
        """Drafts of each of these in one step, which count up from a first one."""
        width, asked = self.engine.geometry.max_drafts, []
        for name, token in first.items():
            tokens = [token + i for i in range(width)]
            chain = self.stamper.chain(self.tokens[name] + tokens)
            rows = self.stamper.step_rows(chain[len(self.tokens[name]) :])
            asked.append(Drafts(request=RequestId(name), tokens=tokens, rows=rows))
        self.engine.verify(asked)
        return asked

    def verify(self, kept: dict[int, int], *, token: int) -> None:
        """Drafts of each of these in one step, of which so many are kept."""
        asked = self.draft({name: token + 100 * name for name in kept})
        for (name, count), drafts in zip(kept.items(), asked, strict=True):
            self.engine.accept(RequestId(name), count)
            self.tokens[name] += drafts.tokens[:count]

    def states(self, chains: Sequence[Any]) -> list[tuple[int, bool]]:
        """Of each cached prefix its length, and whether its KDA state is that of its last
        position in one of these chains."""
        stored = self.engine.raw(Component.STATE, 0).numpy()
        return sorted(
            (
                length,
                any(
                    (stored[slot] == self.stamper.expected(Component.STATE, ends, 0)[0]).all()
                    for ends in (mix(chain[length - 1 : length]) for chain in chains)
                ),
            )
            for node in self.engine.inspect().cached
            for length, slot in node.checkpoints.items()
        )

    def wrong(self, name: int) -> dict[str, list[int]]:
        """Of each component the rows of a request that it reads and that are not its own."""
        tokens, kpool = self.tokens[name], self.engine.geometry.kpool
        mixed, length = mix(self.stamper.chain(tokens)), len(tokens)
        whole = length // kpool * kpool
        spans = {
            Component.KV: (0, length, mixed),
            Component.INDEX: (0, whole // kpool, mixed[:whole]),
            Component.TAIL: (whole, length, mixed[whole:]),
            Component.STATE: (0, 1, mixed[-1:]),
        }
        found = {}
        for component, (start, stop, stamps) in spans.items():
            read = self.engine.read(RequestId(name), component, 0, start, stop).numpy()
            differs = (read != self.stamper.expected(component, stamps, 0)).any(axis=1)
            found[component.value] = (differs.nonzero()[0] + start).tolist()
        return found


def life(system: System) -> dict[str, Any]:
    """Three requests that share a prefix: extend, decode together, and leave in each way."""
    caller = Caller(system, page_order="permuted")
    engine = caller.engine
    fresh = engine.inspect()
    hits = []
    for name in range(3):
        hits.append(
            caller.submit(name, [*PROMPT, *range(1000 * (name + 1), 1000 * (name + 1) + 66)])
        )
        caller.extend(name)
    for token in (7000, 8000, 9000):
        caller.decode(0, 1, 2, token=token)
    wrong = [caller.wrong(name) for name in range(3)]
    running = engine.inspect()
    engine.finish(RequestId(0))
    kept = tuple(engine.retract(RequestId(1))) == tuple(caller.tokens[1])
    again = caller.submit(1, caller.tokens[1])
    caller.extend(1)
    resumed = caller.wrong(1)
    engine.abort(RequestId(1))
    engine.abort(RequestId(2))
    left = engine.inspect()
    went = engine.evict(len(left.ref_counts))
    empty = engine.inspect()
    return {
        "hits": hits,
        "wrong": wrong,
        "kept": kept,
        "again": again,
        "resumed": resumed,
        "judged": [*judged(caller, fresh, running), *judged(caller, fresh, left)],
        "evicted": went == len(left.ref_counts),
        "conserved": (empty.free_pages, empty.free_states) == (fresh.free_pages, fresh.free_states),
    }


def retracted_twice(system: System) -> dict[str, list[int]]:
    """What a request reads wrong that was retracted, and again before it had begun anew."""
    caller = Caller(system)
    caller.submit(0, PROMPT)
    caller.extend(0)
    caller.decode(0, token=7000)
    for _ in range(2):
        caller.engine.retract(RequestId(0))
        caller.submit(0, caller.tokens[0])
    caller.extend(0)
    return caller.wrong(0)


def evicted_after_a_cut(system: System, cut: bool) -> list[int]:
    """Two prefixes are cached, and one is evicted: how much is left of the older and of the newer
    one, if a third request has shared a page of the older one meanwhile, and without."""
    caller = Caller(system)
    engine = caller.engine
    prompts = [list(range(5000 * name, 5000 * name + 769)) for name in range(3)]
    for name in (0, 1):
        caller.submit(name, prompts[name])
        caller.extend(name)
        engine.finish(RequestId(name))
    if cut:
        caller.submit(2, prompts[0][:256] + prompts[2])
    engine.evict(1)
    paths = [path.tokens for path in cached_prefixes(engine.inspect().cached).values()]
    return [
        max([len(tokens) for tokens in paths if tokens[0] == prompt[0]], default=0)
        for prompt in prompts[:2]
    ]


def judged(caller: Caller, fresh: Snapshot, snapshot: Snapshot) -> list[str]:
    sizes = {"pages": len(fresh.free_pages) + 1, "state_slots": len(fresh.free_states) + 1}
    return judge_snapshot(snapshot, caller.engine.geometry, **sizes)


def refusals(system: System) -> dict[str, Any]:
    """What an engine refuses, in words, and that it then is as it was."""
    size = system.sizes[0]
    least = EngineOptions(pages=3, state_slots=8, max_requests=2)
    other = replace(size.geometry, physical_page_size=32, mamba_track_interval=128)
    caller = Caller(system, pages=2, state_slots=8, max_requests=2)
    engine = caller.engine
    caller.submit(0, range(1, 600))
    before = engine.inspect()
    said = {
        "another page": refused(InvalidCall, lambda: system.factory(other, size.shape, least)),
        "a model": refused(
            InvalidCall, lambda: system.factory(size.geometry, size.shape, least, {})
        ),
        "twice": refused(InvalidCall, lambda: engine.submit(RequestId(0), [1])),
        "nobody": refused(InvalidCall, lambda: engine.finish(RequestId(9))),
        "too long": refused(OutOfMemory, lambda: caller.extend(0)),
        "too early": refused(InvalidCall, lambda: caller.decode(0, token=1)),
    }
    return {"said": said, "unchanged": engine.inspect() == before}


def refused(kind: type[ContractError], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as refusal:
        return str(refusal)
    return ""


def campaign(
    system: System, target: str, seeds: Sequence[int], drafts: bool = False
) -> list[list[str]]:
    """The signatures that each seed of a target ends with, with drafts or without."""
    outcomes = [executed(system, target, Tape(seed=seed), drafts) for seed in seeds]
    return [[violation.signature for violation in outcome.violations] for outcome in outcomes]


def killed(system: System, runs: Sequence[tuple[str, int]], drafts: bool = False) -> dict[str, Any]:
    """What the first of these targets and seeds that fails ends with, and how many were tried.
    A crash kills nothing: the oracles are to say what is wrong.  Each run has a process of its own,
    since a mutant may write anywhere."""
    system, crashes = of_one_size(system, drafts), set()
    for tried, (target, seed) in enumerate(runs, 1):
        for violation in execute(system, find(target), Tape(seed=seed)).violations:
            if violation.oracle != "crash":
                said = {"by": violation.signature, "sentence": violation.sentence}
                return {**said, "executions": tried, "crashes": sorted(crashes)}
            crashes.add(violation.sentence)
    return {"by": None, "sentence": "", "executions": len(runs), "crashes": sorted(crashes)}


def hunt(system: System, executions: int) -> dict[str, Any]:
    """The first failure of `prefix_split`, by seeds that count up from 0, shrunk in at most so
    many executions."""

    def run(values: Sequence[int]) -> Outcome:
        return executed(system, "prefix_split", Tape(values))

    outcomes = (executed(system, "prefix_split", Tape(seed=seed)) for seed in itertools.count())
    failing = next(outcome for outcome in outcomes if outcome.failed)
    return _told(shrink(run, failing, executions=executions))


def replayed(system: System, values: Sequence[int]) -> dict[str, Any]:
    """A tape of `prefix_split`."""
    return _told(executed(system, "prefix_split", Tape(values)))


def executed(system: System, target: str, tape: Tape, drafts: bool = False) -> Outcome:
    return execute_here(of_one_size(system, drafts), find(target), tape, pin=Pin())


def of_one_size(system: System, drafts: bool) -> System:
    """So that a seed means the same whatever other sizes there are."""
    return replace(system, sizes=(system.sizes[drafts],))


def _told(outcome: Outcome) -> dict[str, Any]:
    return {
        "signatures": [violation.signature for violation in outcome.violations],
        "sentences": [violation.sentence for violation in outcome.violations],
        "requests": outcome.requests,
        "values": outcome.values,
        "operations": [operation.text for operation in outcome.operations],
    }


# Faults planted in SGLang, each of which one measure of the harness shows and no other.


def first_row_for_all(system: System, together: bool) -> dict[str, list[int]]:
    """What the second of two requests reads wrongly after a decode of both, `together` or one
    after the other, if the decode kernel looks every request up in the page table of the first."""
    caller = Caller(system)
    for name in (0, 1):
        caller.submit(name, range(1000 * name + 1, 1000 * name + 4))
    caller.extend(0, 1)
    kernels = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index")
    store = kernels.kpool_decode_update_and_maybe_write_cache

    def faulty(*, block_tables: Any, **others: Any) -> None:
        store(block_tables=block_tables[:1].expand_as(block_tables), **others)

    with patch.object(kernels, store.__name__, faulty):
        for step in [(0, 1)] if together else [(0,), (1,)]:
            caller.decode(*step, token=7000)
    return caller.wrong(1)


def neighbouring_pages(system: System, page_order: str) -> dict[str, list[int]]:
    """What a request of two pages reads wrongly, if its pooled keys are looked up as though its
    pages lay side by side."""
    kernels = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index")
    table = kernels.build_pooled_page_table_64

    def faulty(pages: Any, kpool: int) -> Any:
        right = table(pages, kpool)
        return right[..., :1] + torch.arange(right.shape[-1], dtype=right.dtype)

    caller = Caller(system, page_order=page_order, seed=3)
    caller.submit(0, PROMPT)
    caller.extend(0)
    with patch.object(kernels, table.__name__, faulty):
        return caller.wrong(0)


def stray_row(system: System, whole_buffers: bool) -> list[str]:
    """The signatures of a run in which each prefill stores one pooled key more, in a page that
    nobody has, with comparison of whole buffers or without."""
    kernels = import_module("sglang.srt.layers.attention.dsa.kpool_fp8_index")
    store = kernels.kpool_assemble_softmax_rotate_write_cache

    def faulty(*, buf: Any, **others: Any) -> None:
        store(buf=buf, **others)
        buf[-1, :4] = 0

    seen = system.capabilities
    if not whole_buffers:
        seen -= {Capability.RAW}
        system = replace(system, factory=_without(system, Capability.RAW), capabilities=seen)
    with patch.object(kernels, store.__name__, faulty):
        return campaign(system, "prefix_split", [14])[0]


def _without(system: System, capability: Capability) -> EngineFactory:
    """Builds a system's engines without something that they can do."""

    def build(*args: Any, **kwargs: Any) -> Engine:
        engine = system.factory(*args, **kwargs)
        engine.capabilities -= {capability}
        return engine

    return build


def mixed_chunks(system: System, decodes: int) -> dict[str, Any]:
    """A prompt prefilled in chunks of 512 tokens, less one for each of `decodes` requests that
    decode in the same batch, as SGLang's scheduler cuts them with --enable-mixed-chunk.  Its
    first chunk ends with a page, as the scheduler sees to.

    Returns where the chunks ended, and of each cached prefix whether its KDA state is its own."""
    policies = import_module("sglang.srt.managers.schedule_policy")
    caller = Caller(system)
    engine, prompt = caller.engine, list(range(1, 1601))
    chain = caller.stamper.chain(prompt)
    caller.submit(0, prompt)
    ends = [0]
    for stop in itertools.chain([512], itertools.repeat(None)):
        if stop is None:
            stop = _chunk_end(policies, engine, 512, decodes)
        rows = caller.stamper.extend_rows(chain, ends[-1], stop)
        engine.extend([Chunk(request=RequestId(0), stop=stop, rows=rows)])
        ends.append(stop)
        if stop == len(prompt):
            break
    return {"ends": ends[1:], "right": caller.states([chain])}


def _chunk_end(policies: Any, engine: Any, budget: int, decodes: int) -> int:
    """Where SGLang ends the next chunk of request 0."""
    request, pools = engine._running[RequestId(0)].req, engine.pools
    request.init_next_round_input()
    adder = policies.PrefillAdder(
        engine.geometry.logical_page_size,
        pools.tree,
        pools.pages,
        None,
        0.5,
        1 << 20,
        budget,
        num_mixed_decode_tokens=decodes,
    )
    adder.add_chunked_req(request)
    return int(request.extend_end if hasattr(request, "extend_end") else request.extend_range.end)
