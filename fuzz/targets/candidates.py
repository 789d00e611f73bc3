"""Whom an operation may concern, and how the tape names one of them."""

from __future__ import annotations

from collections.abc import Sequence

from fuzz.step import Client, World
from fuzz.tape import Tape
from reference.contract import Capability


class Candidates:
    """The clients of one run, by what may happen to them next.

    Fields:
        running: those that ran when the present operation began.
        fixed_drafts: those of every verify, of an engine that then does not decode; 0 for any.
    """

    def __init__(self, world: World, tape: Tape, max_length: int) -> None:
        self._world, self._tape, self._max_length = world, tape, max_length
        self.running: list[Client] = []
        self._drafts = world.geometry.max_drafts
        any_drafts = Capability.ANY_DRAFTS in world.engine.capabilities
        self.fixed_drafts = 0 if any_drafts else self._drafts

    def unfilled(self) -> list[Client]:
        return [c for c in self.running if c.length < len(c.tokens)]

    def decodable(self) -> list[Client]:
        return [] if self.fixed_drafts else self._growing(1)

    def verifiable(self) -> list[Client]:
        return self._growing(self.fixed_drafts or 1) if self._drafts else []

    def _growing(self, room: int) -> list[Client]:
        return [
            c
            for c in self.running
            if c.length == len(c.tokens) <= self._max_length - room and not c.drafts
        ]

    def pending(self) -> list[Client]:
        return [c for c in self.running if c.drafts]

    def retracted(self) -> list[Client]:
        return [c for c in self._world.clients.values() if c.status == "retracted"]

    def tiered(self) -> list[Client]:
        return list(self._world.clients.values()) if self._world.options.host_tier else []

    def one(self, candidates: Sequence[Client], *, favour: Sequence[Client] = ()) -> Client:
        """The one drawn; generation prefers those in `favour`."""
        return candidates[self._who(candidates, favour)]

    def some(self, candidates: Sequence[Client], most: int = 3) -> list[Client]:
        """One to `most` different candidates: the one drawn, and those that follow it."""
        first = self._who(candidates, ())
        count = 1 + self._tape.draw(min(most, len(candidates)))
        return [candidates[(first + i) % len(candidates)] for i in range(count)]

    def _who(self, candidates: Sequence[Client], favour: Sequence[Client]) -> int:
        """Index of a candidate.  The tape names requests, not candidates, so that it means the
        same when another operation goes: the next candidate, where the one named is none."""
        ids = [int(c.request) for c in candidates]
        favoured = [int(c.request) for c in favour]
        drawn = self._tape.draw(len(self._world.clients), favour=favoured or ids)
        return next((i for i, request in enumerate(ids) if request >= drawn), 0)
