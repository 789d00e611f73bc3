"""What differs: stored rows from what their readers expect, and outputs from the reference's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

import systems
from fuzz.oracles.view import PLACES
from fuzz.outcome import Outcome
from fuzz.report.contents import Contents
from fuzz.report.moment import Moment, layers_of
from fuzz.report.parts import Table
from fuzz.report.wrong import Wrong
from fuzz.step import Step, World
from reference.contract import Chunk, RequestId, StepOutput

MOST_LINES = 60
TOP = 3
"""Tokens shown of an output."""
Context = tuple[int, ...]


def named(outcome: Outcome) -> list[Table]:
    """The rows that the oracles have named, with their owners; no table where they name none."""
    lines = [
        (each.row, each.expected, each.actual, f"{each.oracle}/{each.component}")
        for each in outcome.violations
        if each.row
    ]
    table = Table(
        title="What the oracles name",
        note="Of each layer or memory the first row that is wrong.",
        columns=("row", "expected owner", "actual owner", "oracle"),
        lines=tuple(lines[:MOST_LINES]),
        marked=frozenset(range(len(lines[:MOST_LINES]))),
        more=max(0, len(lines) - MOST_LINES),
    )
    return [table] if lines else []


def wrong_table(wrong: Sequence[Wrong], title: str = "Rows that differ") -> Table:
    """What each row should hold and what it holds."""
    return Table(
        title=title,
        note="Every row that a running request or a cached prefix may read, where its stamp is not "
        "the one that its reader's tokens wrote.",
        columns=("place", "layer", "reader", "expected stamp", "found stamp"),
        lines=tuple(
            (each.place, str(each.layer), each.reader, each.should, each.holds.words)
            for each in wrong[:MOST_LINES]
        ),
        marked=frozenset(range(len(wrong[:MOST_LINES]))),
        more=max(0, len(wrong) - MOST_LINES),
    )


def changed_rows(
    world: World, moments: tuple[Moment, Moment], contents: Contents, title: str = ""
) -> Table:
    """Every row whose bytes the last operation has changed."""
    before, after = moments
    lines = []
    for at, now in after.rows.items():
        then, layer = before.rows.get(at), layers_of(world, at[0])[at[1]]
        differs = np.ones(len(now), dtype=bool) if then is None else (now != then).any(axis=1)
        for row in np.flatnonzero(differs & after.seen[at]).tolist():
            was, is_ = (contents.of(moment, at, row).words for moment in moments)
            lines.append((PLACES[at[0]].format(row), str(layer), was, is_))
    return Table(
        title=title or "Rows that the last operation changed",
        note="In all buffers, whoever may read them.",
        columns=("place", "layer", "before", "after"),
        lines=tuple(lines[:MOST_LINES]),
        more=max(0, len(lines) - MOST_LINES),
    )


def outputs(world: World, steps: Sequence[Step], outcome: Outcome) -> Iterator[Table]:
    """Of a model run: the engine's outputs beside the reference's, and errors by their bounds."""
    computed = [*_computed(steps)]
    yield _compared(computed, _cold(world, [one.context for one in computed]))
    yield Table(
        title="Largest error by its bound",
        note="Of the request that was audited when the run had ended; an engine that is right "
        "stays at 1 or below in every stage.",
        columns=("stage", "error / bound"),
        lines=tuple((stage, f"{ratio:.3g}") for stage, ratio in sorted(outcome.ratios.items())),
        marked=frozenset(
            n for n, (_, ratio) in enumerate(sorted(outcome.ratios.items())) if not ratio <= 1
        ),
    )


class _One(NamedTuple):
    """An output of one position: in which operation, of which request, after which tokens."""

    operation: int
    request: RequestId
    context: Context
    selected: Tensor
    logits: Tensor


def _computed(steps: Sequence[Step]) -> Iterator[_One]:
    for number, step in enumerate(steps, start=1):
        for context, output in step.outputs:
            for i in range(output.logits.shape[0]):
                tokens = context[: output.start + i + 1]
                yield _One(number, output.request, tokens, output.selected[:, i], output.logits[i])


def _cold(world: World, contexts: Sequence[Context]) -> dict[Context, tuple[Tensor, Tensor]]:
    """What the reference computes for them, [dsa_layers, columns] and [vocab]: each line of
    descent alone, cold, and in one chunk."""
    options = replace(
        world.options, pages=64, state_slots=64, max_requests=1, hisparse=None, host_tier=None
    )
    known: dict[Context, tuple[Tensor, Tensor]] = {}
    for tokens in sorted(set(contexts), key=len, reverse=True):
        if tokens in known:
            continue
        engine = systems.load("reference").factory(
            world.geometry, world.shape, options, world.weights
        )
        engine.submit(RequestId(0), tokens)
        output: StepOutput
        (output,) = engine.extend([Chunk(request=RequestId(0), stop=len(tokens), outputs_from=0)])
        for i in range(len(tokens)):
            known[tokens[: i + 1]] = output.selected[:, i], output.logits[i]
    return known


def _compared(computed: Sequence[_One], cold: dict[Context, tuple[Tensor, Tensor]]) -> Table:
    """One line for each output; those that differ in what they select or in the likeliest token
    come first where there are too many."""
    lines = []
    for one in computed:
        selected, logits = cold[one.context]
        ours, theirs = (torch.log_softmax(x.double(), dim=0) for x in (one.logits, logits))
        same = torch.equal(one.selected, selected)
        argmax = int(ours.argmax()) == int(theirs.argmax())
        delta = float((ours - theirs).abs().max())
        line = (
            str(one.operation),
            f"request {one.request}",
            str(len(one.context) - 1),
            _top(ours),
            _top(theirs),
            f"{delta:.2e}",
            "the same" if same else "other positions",
        )
        lines.append((not (same and argmax), delta, line))
    order = sorted(range(len(lines)), key=lambda n: (not lines[n][0], -lines[n][1]))
    shown = sorted(order[:MOST_LINES])
    return Table(
        title="Outputs beside the reference's",
        note="The likeliest tokens with their log-probabilities. The reference computes each "
        "context alone, cold and in one chunk. Marked is what selects other positions, or has "
        "another likeliest token.",
        columns=(
            "operation",
            "request",
            "position",
            "engine",
            "reference",
            "largest |Δ logprob|",
            "selected",
        ),
        lines=tuple(lines[n][2] for n in shown),
        marked=frozenset(i for i, n in enumerate(shown) if lines[n][0]),
        more=len(lines) - len(shown),
    )


def _top(logprobs: Tensor) -> str:
    if logprobs.isnan().any():
        return "no numbers"
    values, tokens = logprobs.topk(min(TOP, len(logprobs)))
    pairs = zip(tokens.tolist(), values.tolist(), strict=True)
    return ", ".join(f"{token} ({value:.3f})" for token, value in pairs)
