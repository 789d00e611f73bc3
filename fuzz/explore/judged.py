"""A world whose every run is judged: a state that can only be reached by breaking the drain
contract is never reached, since the event that leads to it raises.

The judge's own value becomes the last part of a state.  `reference.drain` says what it keeps of
each transfer and of the instances; both functions are pure, and computed once for each argument.
"""

from __future__ import annotations

from collections.abc import Iterable

from fuzz.explore.words import Event
from fuzz.explore.world import State, World
from reference.drain import Instance, Judge, Transfer, Violation, observe, observe_instance
from reference.drain_instance import Lockstep
from reference.drain_state import Write
from reference.protocol import (
    Delivered,
    Died,
    Fenced,
    Observation,
    Phase,
    Sent,
    Side,
    TransferKey,
)

Judged = tuple[tuple[TransferKey, int], ...]
"""The number of the `Transfer` of each key, in the order in which they were reserved."""


class Court:
    """Judges what happens in a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.memo = world.memo
        self.topology = world.bounds.topology
        ranks = tuple((rank.rank, 0) for rank in world.decoders)
        self._lockstep = (Lockstep(Side.DECODE, 0, ranks),)

    def start(self) -> State:
        """The world's start, and nothing seen."""
        return (
            *self.world.start(),
            self.memo.id(((), self.memo.id(Instance(lockstep=self._lockstep)))),
        )

    def happen(self, state: State, event: Event) -> State:
        """The state after `event`.

        Raises:
            Violation: of the first clause that it breaks.
        """
        after, seen = self.world.happen(state[:-1], event)
        return (*after, self.judged(state[-1], seen) if seen else state[-1])

    def judged(self, judge: int, observations: Iterable[Observation]) -> int:
        """The judge's value after it has seen these."""
        transfers, instance = self.memo.values[judge]
        of_key: dict[TransferKey, int] = dict(transfers)
        for seen in observations:
            instance = self._instance(instance, seen)
            for key in self._keys(of_key, seen):
                number = of_key.get(key)
                if number is None:
                    number = self.memo.id(self._fresh(instance, key.incarnation))
                of_key[key] = self._transfer(number, seen)
        return self.memo.id((tuple(of_key.items()), instance))

    def finish(self, judge: int) -> Violation | None:
        """What is wrong with a run that comes to rest with this value."""
        transfers, instance = self.memo.values[judge]
        values = {key: self.memo.values[number] for key, number in transfers}
        of_run = Judge(self.topology, transfers=values, instance=self.memo.values[instance])
        try:
            of_run.finish()
        except Violation as violation:
            return violation
        return None

    def _keys(self, known: dict[TransferKey, int], seen: Observation) -> Iterable[TransferKey]:
        """The transfers that an observation is about."""
        if isinstance(seen, Sent | Delivered):
            return (seen.message.key,)
        key = getattr(seen, "key", None)
        if key is not None:
            return (key,)
        if not isinstance(seen, Died | Fenced):
            return ()
        peer = seen.peer if isinstance(seen, Died) else seen.at
        ends = peer.side is Side.PREFILL
        return tuple(key for key in known if ends or key.incarnation == peer.incarnation)

    def _transfer(self, number: int, seen: Observation) -> int:
        memo = self.memo
        return memo.once(
            ("transfer", number, seen),
            lambda: memo.id(_told_apart(observe(memo.values[number], seen, self.topology))),
        )

    def _instance(self, number: int, seen: Observation) -> int:
        memo = self.memo
        return memo.once(
            ("instance", number, seen),
            lambda: memo.id(
                self._rounded(observe_instance(memo.values[number], seen, self.topology))
            ),
        )

    def _rounded(self, instance: Instance) -> Instance:
        """Every round of a world takes all ranks, and is the first since the last one."""
        apart = instance.relative()
        together = all(not done for life in apart.lockstep for _, done in life.done)
        return apart._replace(lockstep=self._lockstep) if together else apart

    def _fresh(self, instance: int, life: int) -> Transfer:
        """The value of a key of that life of D of which nothing has been seen."""
        value: Instance = self.memo.values[instance]
        fenced = frozenset(line for line in value.fenced if line[0].incarnation == life)
        dead = (peer for peer in value.dead if peer.side is Side.DECODE)
        gone = frozenset(peer for peer in dead if peer.incarnation == life)
        return Transfer((None,) * len(self.topology.writers), fenced=fenced, gone=gone)


def _told_apart(transfer: Transfer) -> Transfer:
    """The value without what no clause asks for once a rank has failed: pieces of a writer that
    has closed the key, if they are known to have ended.  Runs that differ in no more are one."""

    def matters(write: Write) -> bool:
        line, phase = write[:2], transfer.phases[write[0].rank]
        needed = phase in (Phase.ADVERTISED, Phase.LANDED, Phase.LIVE)
        return needed or line not in transfer.closed or write in transfer.posted

    return transfer._replace(
        landed=frozenset(filter(matters, transfer.landed)),
        parts=frozenset(part for part in transfer.parts if matters(part[0])),
    )
