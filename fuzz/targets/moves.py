"""Back-ups and restores of a run, in which any one allocation or copy may fail."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fuzz.oracles.standings import in_tier, longest, on_device
from fuzz.step import Client, InjectedFailure, InjectedInterrupt, TierCall
from fuzz.tape import Tape
from reference.contract import Engine, OutOfMemory, Snapshot
from reference.restore import Step

MOST_MOVES = 64
"""Allocations and copies of one call, of which one may fail."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """A call, in words, as the oracles see it, and the engine's OutOfMemory if it raised one."""

    text: str
    call: TierCall
    refusal: OutOfMemory | None


class Mover:
    """Does the back-ups and restores of one engine."""

    def __init__(self, engine: Engine, tape: Tape, lengths: Sequence[int]) -> None:
        """`lengths`: those at which a client's tokens are cut by preference, of which the ones
        before the first checkpoint leave nothing to move."""
        first = engine.geometry.mamba_track_interval
        self._engine, self._tape = engine, tape
        self._lengths = [length for length in lengths if length >= first - 1]
        # Moves of the last call of each kind that made any, to aim failures at.
        self._last = dict.fromkeys(Step, 0)

    def promising(self, kind: Step, clients: Collection[Client], now: Snapshot) -> list[Client]:
        """Those of whose tokens a prefix stands where it is to come from, but not where it is to
        go to."""
        device, tier = on_device(now), in_tier(now)
        source, goal = (device, tier) if kind is Step.BACK_UP else (tier, device)
        found = {client.request: longest(tuple(client.tokens), source) for client in clients}
        return [c for c in clients if found[c.request] and found[c.request] not in goal]

    def draw(self, kind: Step, client: Client) -> Moved:
        """Move the first tokens of a client; how many, and which move fails, is drawn."""
        whole, last = len(client.tokens), self._last[kind]
        # As often none as one; a failure that is aimed behind the last move is none.
        failing = self._tape.draw(MOST_MOVES, favour=[*[0] * last, *range(1, last + 1)])
        # As often whole as cut.
        cuts = [whole - n for n in self._lengths]
        length = whole - self._tape.draw(whole, favour=[*[0] * len(cuts), *cuts])
        return self.move(kind, tuple(client.tokens[:length]), of=client, failing=failing)

    def move(
        self, kind: Step, tokens: tuple[int, ...], *, of: Client | None = None, failing: int = 0
    ) -> Moved:
        """Move what there is of `tokens`, the first ones of a client; the move of the number
        `failing`, counted from 1, fails."""
        moves: list[str] = []
        returned, refusal, raised = None, None, False
        # Half of the failures are no Exception; each move fails in either way.
        failure = (InjectedFailure, InjectedInterrupt)[(failing + len(tokens)) % 2]

        def before(what: str) -> None:
            moves.append(what)
            if len(moves) == failing:
                raise failure(what)

        try:
            returned = getattr(self._engine, kind)(tokens, before=before)
        except failure:
            raised = True
        except OutOfMemory as exhausted:
            refusal = exhausted
        failed_at = moves[failing - 1] if 0 < failing <= len(moves) else None
        self._last[kind] = len(moves) or self._last[kind]
        owner = of.name if of else "what the tier holds"
        fails = f", which fails before '{failed_at}'" if failed_at else ""
        call = TierCall(
            step=kind,
            request=of.request if of else None,
            tokens=tokens,
            returned=returned,
            moves=len(moves),
            failed_at=failed_at,
            raised=raised,
        )
        text = f"{kind} of the first {len(tokens)} tokens of {owner}{fails}"
        return Moved(text=text, call=call, refusal=refusal)
