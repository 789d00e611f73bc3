"""Landing: what a transfer puts into D's memory, and where.

Four oracles, all by the reference's addressing and by stamps alone:

exact        the places that D advertises, its aux rows, and how writes and requests end.
containment  bytes that land change the cells of their own piece, and nothing else.
provenance   a live request's cells hold what its tokens wrote there, in every component; and so
             do those of a piece whose writer was told that it has landed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fuzz.oracles.placing import Cells, Image, Layer, Placing
from fuzz.oracles.readers import Ints
from fuzz.router import Asked, Router
from fuzz.stamps import Bytes, Registry, Stamper, unit_of
from fuzz.step import Violation
from reference.contract import Component, Places, RequestId, Snapshot
from reference.protocol import (
    Advertise,
    Arrived,
    Moved,
    Observation,
    Outcome,
    Peer,
    Phase,
    Sent,
    Settled,
    Side,
    TransferKey,
)
from reference.transfer import AUX_BYTES, Aux, aux_row, places_of

CLEARED = b"\xff" * AUX_BYTES


class Placement(NamedTuple):
    """Where a transfer lands on one rank of D."""

    asked: Asked
    places: Places
    cells: dict[Layer, Cells]


class Landing:
    """Judges what lands in the present life of D."""

    def __init__(self, router: Router) -> None:
        self._router, self._wiring = router, router.wiring
        self._stamper: Stamper = router.stamper
        self._life: Any = None
        self._images: list[Image] = []
        self._coming: dict[tuple[Peer, TransferKey], Placement] = {}
        self._aux: dict[tuple[Peer, TransferKey], bool] = {}
        self._placing = Placing(router.wiring)
        self._before: list[tuple[dict[Layer, Bytes], Bytes]] = []

    def watch(self) -> None:
        """Look at D's memory before something lands there."""
        self._follow_life()
        self._before = [
            (image.copied(), aux.numpy().copy())
            for image, aux in zip(self._images, self._life.aux, strict=True)
        ]

    def check(self, seen: Sequence[Observation], landed: Sequence[Arrived]) -> list[Violation]:
        """After a step in which that was noted and that landed."""
        self._follow_life()
        found = self._advertised(seen)
        self._aux.update({(a.at, a.key): True for a in landed if self._is_aux(a.piece)})
        for each in seen:
            if isinstance(each, Settled):
                found += self._settled(each)
            elif isinstance(each, Moved) and each.phase in (Phase.LIVE, Phase.FREE):
                self._aux.pop((each.at, each.key), None)
                if each.phase is Phase.FREE:
                    self._coming.pop((each.at, each.key), None)
        return found + list(self._aux_rows())

    def live(self) -> list[Violation]:
        """The first wrong row of each component of a live request."""
        asked = self._router.live()
        if not asked:
            return []
        snapshot = self._life.engine.inspect()
        return [
            violation
            for one in asked
            for rank in range(len(self._images))
            for violation in self._judge(
                rank,
                one,
                self._placing.cells(rank, self._places(snapshot, one)),
                self._saved(snapshot, one),
            )
        ]

    def read(self, asked: Asked) -> list[Violation]:
        """What the engine reads of a request that has just become live."""
        engine, length = self._life.engine, len(asked.tokens)
        kpool = self._wiring.geometries[Side.DECODE].kpool
        tail = length // kpool * kpool
        spans = {
            Component.KV: (0, length, self._stamper.expected_kv),
            Component.INDEX: (0, length // kpool, self._stamper.expected_index),
            Component.TAIL: (tail, length, self._stamper.expected_tail),
        }
        found = []
        for component, (start, stop, expected) in spans.items():
            for layer in range(len(self._wiring.shape.dsa_layers)):
                rows = engine.read(asked.request, component, layer, start, stop).numpy()
                wrong = _first(rows != expected(asked.chain, start, stop, layer))
                if wrong is not None:
                    place = f"What {asked.name} reads as {component.value} row {start + wrong}"
                    found.append(self._wrong(place, component, asked, start + wrong, rows[wrong]))
        for layer in range(len(self._wiring.shape.kda_layers)):
            row = engine.read(asked.request, Component.STATE, layer, 0, 1).numpy()
            if (row != self._stamper.expected_state(asked.chain, np.array([length]), layer)).any():
                place = f"What {asked.name} reads as its state"
                found.append(self._wrong(place, Component.STATE, asked, length, row[0]))
        return found

    # where things are

    def _follow_life(self) -> None:
        life = self._router.lives[Side.DECODE]
        if life is self._life:
            return
        self._life = life
        self._images = [
            Image(engine, self._wiring.geometries[Side.DECODE], self._wiring.shape)
            for engine in life.engines
        ]
        self._coming, self._aux = {}, {}

    def _places(self, snapshot: Snapshot, asked: Asked) -> Places:
        geometry = self._wiring.geometries[Side.DECODE]
        return places_of(snapshot, asked.request, len(asked.tokens), geometry)

    # what is wrong

    def _advertised(self, seen: Sequence[Observation]) -> list[Violation]:
        """Places that D tells its writers are those of the request."""
        offers = {
            (each.at, each.message.key): each.message
            for each in seen
            if isinstance(each, Sent) and isinstance(each.message, Advertise)
        }
        fresh = {at: offer for at, offer in offers.items() if at not in self._coming}
        if not fresh:
            return []
        snapshot, found = self._life.engine.inspect(), []
        for (at, key), offer in fresh.items():
            asked = self._router.asked[RequestId(offer.request)]
            if asked.request not in snapshot.holders:
                continue
            places = self._places(snapshot, asked)
            told = places.kv, places.index, places.tail, (places.state, places.length)
            if offer.places != told:
                sentence = (
                    f"{_name(at)} should advertise the places {told} of {asked.name}; it tells "
                    f"{offer.places}."
                )
                found.append(Violation("exact", "places", sentence))
            self._coming[at, key] = Placement(asked, places, self._placing.cells(at.rank, places))
            self._aux[at, key] = False
        return found

    def contained(self, landed: Sequence[Arrived]) -> Iterator[Violation]:
        """Changes since `watch`, when that and nothing else has landed."""
        allowed: Mapping[tuple[int, Layer], list[list[int]]] = defaultdict(list)
        aux: Mapping[int, set[int]] = defaultdict(set)
        for arrived in {(a.at, a.key, a.writer, a.piece): a for a in landed}.values():
            placement = self._coming.get((arrived.at, arrived.key))
            if placement is None:
                continue
            if self._is_aux(arrived.piece):
                aux[arrived.at.rank].add(placement.places.state)
            sent = self._placing.sent(arrived.at.rank, placement.places, arrived.writer.rank)
            for at, cells in sent.items():
                items = cells.at[cells.piece == arrived.piece]
                allowed[arrived.at.rank, at].append(items.tolist())
        what = ", ".join(f"piece {a.piece} of room {a.key.room}" for a in landed) or "nothing"
        for rank, (image, (before, aux_before)) in enumerate(
            zip(self._images, self._before, strict=True)
        ):
            for at, was in before.items():
                if (changed := image.changed(at, was)).size:
                    rogue = set(changed.tolist()).difference(*allowed[rank, at])
                    for item in sorted(rogue)[:1]:
                        yield self._strayed(rank, at, item, what)
            moved = np.flatnonzero((self._life.aux[rank].numpy() != aux_before).any(axis=1))
            for row in sorted(set(moved.tolist()) - aux[rank])[:1]:
                sentence = f"Aux row {row} of D{rank} changed as {what} came, which is not its own."
                yield Violation("containment", "aux", sentence)

    def _strayed(self, rank: int, at: Layer, item: int, what: str) -> Violation:
        unit = {Component.INDEX: "page", Component.STATE: "word"}.get(at[0], "row")
        where = f"{at[0].value} {unit} {item} of D{rank}, layer {at[1]}"
        sentence = f"{where}, changed as {what} came, in whose places it is not."
        actual = f"changed as {what} came"
        return Violation("containment", at[0].value, sentence, where, "what was there", actual)

    def _aux_rows(self) -> Iterator[Violation]:
        """The row of a transfer that has not gone live names it once it has come, and no transfer
        before."""
        for (at, key), has_come in self._aux.items():
            placement = self._coming[at, key]
            row = self._life.aux[at.rank][placement.places.state].numpy().tobytes()
            asked, wanted = placement.asked, CLEARED
            if has_come:
                assert asked.first_token is not None, "P sends the aux row last"
                wanted = aux_row(Aux(key, asked.length, asked.first_token))
            if row != wanted:
                said = "hold what P says of it" if has_come else "be clear until it comes"
                sentence = (
                    f"Aux row {placement.places.state} of {_name(at)} should {said}, for "
                    f"{asked.name}; it holds {np.frombuffer(row, '<i8').tolist()}."
                )
                yield Violation("exact", "aux", sentence)

    def _settled(self, settled: Settled) -> Iterator[Violation]:
        """The bytes of a piece of which its writer knows that it has landed are there."""
        placement = self._coming.get((settled.to, settled.key))
        whole = len(self._wiring.topology.writers[settled.to.rank]) == 1
        if placement is None or settled.outcome is not Outcome.LANDED or not whole:
            return
        if len(placement.asked.tokens) > placement.places.length:
            return  # decoded on meanwhile, and judged as a live request
        mine = {
            at: some
            for at, cells in placement.cells.items()
            if (some := cells.some(cells.piece == settled.piece)).at.size
        }
        yield from self._judge(settled.to.rank, placement.asked, mine, placement.places.length)

    def _judge(
        self, rank: int, asked: Asked, cells: Mapping[Layer, Cells], saved: int
    ) -> Iterator[Violation]:
        """The first wrong row of each layer of a request's cells; of KV up to position `saved`."""
        for at, (_, unit, items) in self._placing.rowed(cells, len(asked.tokens)).items():
            if at[0] is Component.KV and saved < len(asked.tokens):
                unit, items = unit[unit < saved], items[unit < saved]
            actual = self._images[rank].rows(at, items)
            wrong = _first(actual != self._expected(at, asked, unit))
            if wrong is not None:
                where = f"{at[0].value} row {items[wrong]} of D{rank}, layer {at[1]},"
                start = len(asked.tokens) - (len(asked.tokens) % self._stamper.geometry.kpool)
                named = int(unit[wrong]) + (start if at[0] is Component.TAIL else 0)
                yield self._wrong(where, at[0], asked, named, actual[wrong])

    def _expected(self, at: Layer, asked: Asked, unit: Ints) -> Bytes:
        (component, layer), length, stamper = at, len(asked.tokens), self._stamper
        kpool = stamper.geometry.kpool
        if component is Component.KV:
            return stamper.expected_kv(asked.chain, 0, length, layer)[unit]
        if component is Component.INDEX:
            return stamper.expected_index(asked.chain, 0, length // kpool, layer)[unit]
        if component is Component.TAIL:
            start = length // kpool * kpool
            return stamper.expected_tail(asked.chain, start, length, layer)[unit]
        state = stamper.expected_state(asked.chain, np.array([length]), layer)
        return state.reshape(-1, 4)[unit]

    def _wrong(
        self, where: str, component: Component, asked: Asked, unit: int, row: Bytes
    ) -> Violation:
        if component is Component.STATE:
            what, holds = f"word {unit} of its state", f"{row.view(np.float32).tolist()[:4]}"
        else:
            chains = {one.name: one.chain for one in self._router.asked.values()}
            what = unit_of(component, unit, self._stamper.geometry.kpool)
            holds = Registry(self._stamper, chains).writer(component, row)
        should = f"{asked.name}'s {what}"
        sentence = f"{where} should hold {should}; it holds {holds}."
        return Violation("provenance", component.value, sentence, where.rstrip(","), should, holds)

    def _saved(self, snapshot: Snapshot, asked: Asked) -> int:
        """Positions of which KV rows are in the pool: under HiSparse all but a newest one."""
        length = len(asked.tokens)
        return min(length, snapshot.hot.buffers[asked.request].saved) if snapshot.hot else length

    def _is_aux(self, piece: int) -> bool:
        return piece == self._wiring.topology.pieces


def _first(wrong: npt.NDArray[np.bool_]) -> int | None:
    """The first row of [n, bytes] in which something is."""
    rows = np.flatnonzero(wrong.any(axis=1))
    return int(rows[0]) if rows.size else None


def _name(peer: Peer) -> str:
    return f"{'PD'[peer.side]}{peer.rank}"
