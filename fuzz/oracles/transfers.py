"""All that judges a run of transfers: the drain contract, what landed, and what is left."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuzz.oracles.landing import Landing
from fuzz.router import Asked, Router, landed
from fuzz.step import Violation
from reference import drain
from reference.prefix import judge_snapshot
from reference.protocol import Arrived, Observation, Outcome, Settled


class Transfers:
    """The oracles *drain* and those of `fuzz.oracles.landing`.

    Fields:
        excused: something went wrong by choice for which a transfer may fail.
    """

    def __init__(self, router: Router) -> None:
        self.excused = router.setup.write_faults > 0
        self._router, self._landing = router, Landing(router)
        # what goes through shared memory arrives unseen
        self._arrivals = router.sharing is None
        self._drain = drain.Judge(router.wiring.topology, arrivals=self._arrivals)

    def watch(self) -> None:
        """Bytes are about to land, and nothing else is to happen until `contained`."""
        self._landing.watch()

    def contained(self, came: Sequence[Arrived]) -> list[Violation]:
        """What changed since `watch`, in which that came."""
        return list(self._landing.contained(came))

    def check(
        self, seen: Sequence[Observation], *, fresh: Sequence[Asked], moved: bool
    ) -> Iterator[Violation]:
        """After an operation in which that was noted and those went live; `moved` says whether it
        may have changed memory of D."""
        try:
            for each in seen:
                if self._arrivals or not isinstance(each, Arrived):
                    self._drain.observe(each)
        except drain.Violation as bad:
            yield Violation("drain", bad.clause.value, bad.sentence)
        yield from self._landing.check(seen, landed(seen))
        if not self.excused:
            yield from _broken(seen)
        if moved:
            yield from self._landing.live()
        for asked in fresh:
            yield from self._landing.read(asked)

    def handshake(self) -> Iterator[Violation]:
        """Both ends of each pair share memory where they must, and neither where they must not."""
        router, shared = self._router, self._router.setup.shared
        if shared is None:
            return
        for writer, reader in router.pairs():
            for one, other in ((writer, reader), (reader, writer)):
                why = one.transport.why_not(other.me)
                if (why is None) is not shared.is_shared:
                    should = "share" if shared.is_shared else "not share"
                    sentence = (
                        f"{one.me} and {other.me} should {should} memory, as "
                        f"{shared.hostility.value}; the former says: {why or 'shared.'}"
                    )
                    yield Violation("exact", "handshake", sentence)

    def finish(self) -> Iterator[Violation]:
        """The run has come to rest."""
        self._router.count()
        try:
            for each in self._router.taken():
                self._drain.observe(each)
            self._drain.finish()
        except drain.Violation as bad:
            yield Violation("drain", bad.clause.value, bad.sentence)
        for side, life in self._router.lives.items():
            options = self._router.wiring.options[side]
            for sentence in judge_snapshot(
                life.engine.inspect(),
                self._router.wiring.geometries[side],
                pages=options.pages,
                state_slots=options.state_slots,
            ):
                yield Violation("exact", "memory", f"{'PD'[side]}: {sentence}")
        for asked in self._router.asked.values():
            if not (self.excused or asked.was_live or asked.given_up):
                sentence = f"{asked.name} should have become live, as nothing went wrong."
                yield Violation("exact", "live", sentence)


def _broken(seen: Sequence[Observation]) -> Iterator[Violation]:
    """Writes that ended otherwise than they should."""
    for each in seen:
        if isinstance(each, Settled) and each.outcome is not Outcome.LANDED:
            sentence = (
                f"Piece {each.piece} of room {each.key.room} should land, as nothing went wrong; "
                f"it ended as {each.outcome.name}."
            )
            yield Violation("exact", "outcome", sentence)
