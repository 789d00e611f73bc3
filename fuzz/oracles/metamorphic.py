"""Metamorphic: what a position computes depends on its tokens alone.

Whenever a context (all tokens up to a position) is computed, its selection and logits must be
bitwise those of any earlier time, whatever batch, chunk or cache history it came from.  In the
end every context is computed once more, alone, cold and in one chunk, by a fresh engine.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fuzz.step import Step, Violation, World
from reference.contract import Chunk, Engine, RequestId, StepOutput

Context = tuple[int, ...]
AUDITED = "when the run was audited after operation"
"""How a sentence says that it is about no single operation, but the run as a whole."""


class Metamorphic:
    """Judges model runs on a batch-invariant path.  `fresh` builds an engine like the one under
    test, with room for one request of any length."""

    name = "metamorphic"

    def __init__(self, world: World, fresh: Callable[[], Engine]) -> None:
        self._world, self._fresh = world, fresh
        self._known: dict[Context, tuple[Tensor, Tensor, RequestId, str]] = {}
        self._operations = 0

    def check(self, step: Step) -> list[Violation]:
        """The step's outputs against those of the same contexts before."""
        self._operations += 1
        if self._world.stamped:
            return []
        how = f"operation {self._operations}, '{step.text}',"
        return [
            violation
            for context, output in step.outputs
            for violation in self._compare(context, output, output.request, how)
        ]

    def close(self) -> list[Violation]:
        """All contexts again, the longest of each line of descent, on a fresh engine."""
        longest = [
            context
            for context in sorted(self._known)
            if not any(other[: len(context)] == context for other in self._after(context))
        ]
        found: list[Violation] = []
        for context in longest:
            engine = self._fresh()
            engine.submit(RequestId(0), context)
            (output,) = engine.extend(
                [Chunk(request=RequestId(0), stop=len(context), outputs_from=0)]
            )
            how = f"a cold run in one chunk, made {AUDITED} {self._operations},"
            request = self._known[context][2]
            found += self._compare(context, output, request, how, audit=True)
        return found

    def _after(self, context: Context) -> list[Context]:
        return [known for known in self._known if len(known) > len(context)]

    def _compare(
        self,
        context: Context,
        output: StepOutput,
        request: RequestId,
        how: str,
        *,
        audit: bool = False,
    ) -> list[Violation]:
        """Outputs for `request` against those known of the same contexts, whose request an audit
        accuses."""
        found: list[Violation] = []
        for i in range(output.logits.shape[0]):
            position = output.start + i
            key = context[: position + 1]
            selected, logits = output.selected[:, i], output.logits[i]
            *known, first, then = self._known.setdefault(key, (selected, logits, request, how))
            whose = first if audit else request
            other = "" if whose == first else f", for request {first},"
            for component, ours, theirs in (
                ("selection", selected, known[0]),
                ("logits", logits, known[1]),
            ):
                if not torch.equal(ours, theirs):
                    sentence = (
                        f"Request {whose}'s {component} of position {position} should be the "
                        f"same for the same tokens; {how} and{other} {then} differ."
                    )
                    found.append(Violation(self.name, component, sentence))
        return found
