"""What the model experiments ask of an engine: prefill a prompt, force an answer, leave."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from reference.contract import Chunk, Engine, RequestId, StepOutput, Tokens

CHUNK = 8192
"""Tokens of one prefill chunk, as production servers cut them."""


@dataclass(slots=True)
class Client:
    """One client of `engine`; numbers its requests itself."""

    engine: Engine
    hits: list[int] = field(default_factory=list)
    """Tokens found in the cache, for each prompt so far."""

    def prefill(self, tokens: Tokens) -> tuple[RequestId, StepOutput]:
        """Run a prompt through prefill; the output is its last chunk's."""
        request = RequestId(len(self.hits))
        hit = self.engine.submit(request, tokens).hit
        self.hits.append(hit)
        stops = [*range(hit + CHUNK, len(tokens), CHUNK), len(tokens)]
        outputs = [self.engine.extend([Chunk(request=request, stop=stop)]) for stop in stops]
        return request, outputs[-1][0]

    def ingest(self, document: Tokens) -> None:
        """Prefill a document and leave it in the cache."""
        request, _ = self.prefill(document)
        self.engine.finish(request)

    def forced_logprob(self, prompt: Tokens, answer: Tokens) -> float:
        """Mean logprob (nats) of `answer` after `prompt`, teacher-forced by decode steps.

        The request is aborted, so that the same question finds the same cache again.
        """
        request, output = self.prefill(prompt)
        total = 0.0
        for number, token in enumerate(answer):
            total += torch.log_softmax(output.logits[-1].double(), 0)[int(token)].item()
            if number + 1 < len(answer):
                output = self.engine.decode([request], [token])[0]
        self.engine.abort(request)
        return total / len(answer)
