"""Numeric: a model run stays within the reference's derived error bound.

The reference reads the engine's own stored bytes and outputs and judges them in float64
(`reference.bounds`).  One request a run is audited, the longest of which all outputs are known:
what depends on history, batch or chunking is the metamorphic oracle's to find, and faults that do
not show in any request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuzz.step import Client, Step, Violation, World
from reference.addressing import tail_start
from reference.bounds import Stored, audit
from reference.contract import Component, RequestId, StepOutput

Context = tuple[int, ...]


class Numeric:
    """Judges a model run when it has ended.

    `_stored` keeps what each request had stored when it last took part in an operation; outputs
    are kept by their tokens, since those of a hit's positions are another request's.  `ratios`
    are the audit's largest errors by bound."""

    name = "numeric"

    def __init__(self, world: World) -> None:
        self._world = world
        self.ratios: dict[str, float] = {}
        self._outputs: dict[Context, tuple[Tensor, Tensor]] = {}
        self._stored: dict[RequestId, tuple[Context, Stored]] = {}

    def check(self, step: Step) -> list[Violation]:
        """Keep what the step computed and stored."""
        if self._world.stamped:
            return []
        for context, output in step.outputs:
            for i in range(output.logits.shape[0]):
                key = context[: output.start + i + 1]
                self._outputs[key] = output.selected[:, i], output.logits[i]
        for client in self._world.running():
            if client.request in step.calls and client.length and not client.drafts:
                tokens = tuple(client.tokens[: client.length])
                self._stored[client.request] = tokens, self._read(client)
        return []

    def close(self) -> list[Violation]:
        """Audit the longest request that can be."""
        world, weights = self._world, self._world.weights
        audited = max(filter(self._known, self._stored.values()), key=_length, default=None)
        if audited is None or weights is None:
            return []
        tokens, stored = audited
        computed = [self._outputs[tokens[: i + 1]] for i in range(len(tokens))]
        output = StepOutput(
            request=RequestId(0),
            start=0,
            selected=torch.stack([selected for selected, _ in computed], dim=1),
            logits=torch.stack([logits for _, logits in computed]),
        )
        found = audit(weights, world.shape, world.geometry, tokens, stored, [output])
        self.ratios = found.max_ratio
        return [
            Violation(self.name, sentence.partition(":")[0], sentence)
            for sentence in found.violations
        ]

    def _known(self, kept: tuple[Context, Stored]) -> bool:
        """Whether the outputs of all its positions were wanted: the rows of a layer depend on
        the selections of the layers below it, all of which the audit takes from the engine."""
        return all(kept[0][: i + 1] in self._outputs for i in range(len(kept[0])))

    def _read(self, client: Client) -> Stored:
        """All that the engine reads for the request."""
        world, request, length = self._world, client.request, client.length
        tail = int(tail_start(length, world.geometry))
        dsa, kda = range(len(world.shape.dsa_layers)), range(len(world.shape.kda_layers))

        def rows(component: Component, layer: int, start: int, stop: int) -> Tensor:
            return world.engine.read(request, component, layer, start, stop).clone()

        return Stored(
            kv=[rows(Component.KV, i, 0, length) for i in dsa],
            index=[rows(Component.INDEX, i, 0, tail // world.geometry.kpool) for i in dsa],
            tail=[rows(Component.TAIL, i, tail, length) for i in dsa],
            state=[rows(Component.STATE, i, 0, 1) for i in kda],
        )


def _length(kept: tuple[Context, Stored]) -> int:
    return len(kept[0])
