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


class Metamorphic:
    """Judges model runs on a batch-invariant path.  `fresh` builds an engine like the one under
    test, with room for one request of any length."""

    name = "metamorphic"

    def __init__(self, world: World, fresh: Callable[[], Engine]) -> None:
        self._world, self._fresh = world, fresh
        self._known: dict[Context, tuple[Tensor, Tensor, str]] = {}

    def check(self, step: Step) -> list[Violation]:
        """The step's outputs against those of the same contexts before."""
        if self._world.stamped:
            return []
        return [
            violation
            for context, output in step.outputs
            for violation in self._compare(context, output, f"'{step.text}'")
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
            found += self._compare(context, output, "a cold run in one chunk")
        return found

    def _after(self, context: Context) -> list[Context]:
        return [known for known in self._known if len(known) > len(context)]

    def _compare(self, context: Context, output: StepOutput, how: str) -> list[Violation]:
        found: list[Violation] = []
        for i in range(output.logits.shape[0]):
            position = output.start + i
            key = context[: position + 1]
            selected, logits = output.selected[:, i], output.logits[i]
            known = self._known.setdefault(key, (selected, logits, how))
            for component, ours, theirs in (
                ("selection", selected, known[0]),
                ("logits", logits, known[1]),
            ):
                if not torch.equal(ours, theirs):
                    sentence = (
                        f"The {component} of position {position} should be the same for the same "
                        f"tokens; {how} and {known[2]} differ."
                    )
                    found.append(Violation(self.name, component, sentence))
        return found
