"""Parts (a) and (b) of `kvoracle verify`: experiments with the closed-form retrieval model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

import torch

from fuzz.verify import copying, niah
from fuzz.verify.client import Client
from fuzz.verify.part import (
    FAULT,
    PAGE,
    SEED,
    Check,
    Part,
    PartFunction,
    Plan,
    Tick,
    engine_with,
    plain,
)
from reference.contract import EngineOptions, HostTier, Weights
from reference.geometry import Geometry, ModelShape
from reference.weights import retrieval_weights
from systems import load

LOGIT_SCALE = 8.0
"""One scale for all arms of the NIAH and copy experiments."""
REFERENCE_SAMPLES = 3


def _retrieval(topk: int) -> tuple[Geometry, ModelShape, Weights]:
    geometry = Geometry(topk=topk)
    return geometry, *retrieval_weights(geometry, SEED, LOGIT_SCALE)


def _haystacks(plan: Plan, order: niah.Order, *, shared: bool) -> list[niah.Sample]:
    length = niah.LENGTH // 4 if plan.quick else niah.LENGTH
    return niah.samples(order=order, shared=shared, seed=SEED, length=length)


def needles(order: niah.Order, *, faulty: bool, shared: bool = True) -> PartFunction:
    """(a): one arm of the needle experiment."""

    def part(plan: Plan, tick: Tick) -> Part:
        geometry, shape, weights = _retrieval(niah.TOPK)
        samples = _haystacks(plan, order, shared=shared)
        tokens = sum(len(sample.question) + PAGE for sample in samples)
        with engine_with(FAULT if faulty else None) as factory:
            arm = niah.run_arm(
                factory,
                geometry=geometry,
                shape=shape,
                weights=weights,
                options=_pools(tokens),
                samples=samples,
                progress=tick,
            )
        name = f"needles found of {len(samples)}, {len(samples[0].document):,} tokens"
        if faulty and shared:
            check = Check.at_most(name, arm.score, len(samples) * 3 // 4)
        else:
            check = Check.exactly(name, arm.score, len(samples))
        remainders = _remainders(arm.hits)
        figures = {
            "found": arm.found,
            "depths": [sample.needle.depth for sample in samples],
            "hit_remainders": remainders,
        }
        return Part(
            checks=(check,),
            columns=("hit length mod 256", *remainders),
            rows=(("prompts", *(str(n) for n in remainders.values())),),
            figures=figures,
        )

    return part


def needles_by_reference(plan: Plan, tick: Tick) -> Part:
    """(a): the reference answers some of the questions, from the same selection."""
    geometry, shape, weights = _retrieval(niah.TOPK)
    samples = _haystacks(plan, "random", shared=True)[:REFERENCE_SAMPLES]
    options = _pools(len(samples) * (len(samples[0].question) + PAGE))
    slow, fast = (
        Client(load(name).factory(geometry, shape, options, weights))
        for name in ("reference", "optimized")
    )
    found = same = 0
    for number, sample in enumerate(samples):
        outputs = []
        for client in (slow, fast):
            request, output = client.prefill(sample.question)
            client.engine.finish(request)
            outputs.append(output)
        found += all(int(o.logits[-1].argmax()) == sample.needle.value for o in outputs)
        same += torch.equal(outputs[0].selected[:, -1], outputs[1].selected[:, -1])
        tick(number + 1, len(samples))
    return Part(
        checks=(
            Check.exactly("needles found by reference and engine", found, len(samples)),
            Check.exactly("equal selections", same, len(samples)),
        )
    )


def copied_span(meanwhile: copying.Meanwhile, *, fault: str) -> PartFunction:
    """(b): the copy experiment, faithful and with the mutant `fault`."""

    def part(plan: Plan, tick: Tick) -> Part:
        geometry, shape, weights = _retrieval(copying.TOPK)
        cases = copying.cases(geometry=geometry, seed=SEED, vocab=shape.vocab)
        options = replace(
            _pools(2 * len(cases) * copying.CONTEXT),
            host_tier=HostTier(pages=copying.CONTEXT // PAGE, states=1),
        )
        arms: dict[str, list[copying.Copy]] = {}
        for done, (name, faulty) in enumerate((("faithful", False), ("with the fault", True))):
            with engine_with(fault if faulty else None) as factory:
                arms[name] = copying.run_arm(
                    factory,
                    geometry=geometry,
                    shape=shape,
                    weights=weights,
                    options=options,
                    cases=cases,
                    meanwhile=meanwhile,
                )
            tick(done + 1, 2)
        before = [copy.before for arm in arms.values() for copy in arm]
        change = max(abs(copy.fall) for copy in arms["faithful"])
        fall = min(copy.fall for copy in arms["with the fault"])
        return Part(
            checks=(
                Check(
                    name="mean logprob before, all spans",
                    measured=f"{min(before):.3f} .. {max(before):.3f} nats",
                    bar="-0.5 .. -0.1",
                    passed=-0.5 <= min(before) <= max(before) <= -0.1,
                ),
                Check(
                    name="largest change, faithful",
                    measured=f"{change:.4f} nats",
                    bar="below 0.05",
                    passed=change < 0.05,
                ),
                Check(
                    name="smallest fall, with the fault",
                    measured=f"{fall:.2f} nats",
                    bar="at least 5",
                    passed=fall >= 5,
                ),
            ),
            columns=("engine", "span", "before (nats)", "after (nats)", "reused (tokens)"),
            rows=tuple(
                (name, str(i), f"{copy.before:.3f}", f"{copy.after:.3f}", str(copy.reused))
                for name, arm in arms.items()
                for i, copy in enumerate(arm)
            ),
            figures={name: [plain(copy) for copy in arm] for name, arm in arms.items()},
        )

    return part


def _pools(tokens: int) -> EngineOptions:
    """Pools for `tokens` tokens in all and a few requests at once."""
    pages = -(-tokens // PAGE) + 1
    return EngineOptions(pages=pages, state_slots=pages + 4, max_requests=4)


def _remainders(hits: Iterable[int]) -> dict[str, int]:
    """Hit lengths modulo the logical page, counted."""
    return {str(rest): n for rest, n in sorted(Counter(hit % PAGE for hit in hits).items())}
