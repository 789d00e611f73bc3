"""What a run of a whole transfer leaves behind for its report: P, D, and what goes between them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fuzz.explore.draw import name, name_key
from fuzz.handover import Handover
from fuzz.outcome import Operation, Outcome
from fuzz.report.aux_rows import aux_pool, changed_aux
from fuzz.report.blame import mark
from fuzz.report.contents import Contents
from fuzz.report.differences import changed_rows, wrong_table
from fuzz.report.messages import Messages, words
from fuzz.report.moment import Moment, layers_of
from fuzz.report.page_map import PageMap
from fuzz.report.parts import Deed, Lane, Mark, Pool, Recorded, Table, Timeline
from fuzz.report.wrong import Wrong, wrong_rows
from fuzz.stamps import Bytes
from fuzz.step import Client, World
from reference.contract import Component
from reference.protocol import Arrived, Moved, Observation, Peer, Posted, Sent, Settled, Side

ROW = re.compile(
    r"(?P<component>kv|index|tail|state) (?:row|word) (?P<row>\d+) of (?P<rank>\w+), "
    r"layer (?P<layer>\d+)"
)
"""How `fuzz.oracles.landing` names a row, or a word of a state."""
WORD = 4
"""Bytes of one."""
BETWEEN = {
    "network": Lane("network", "between"),
    "copy": Lane("copy streams", "between"),
    "produce": Lane("devices", "between"),
}
"""Lanes of what is neither a request nor a rank, by the operations that set it going."""


class TransferRecording:
    """Looks on at a run of `fuzz.handover`."""

    def begin(self, run: Handover) -> None:
        self._run = run
        wiring = run.setup.wiring
        self._worlds = {
            side: World(
                engine=run.router.lives[side].engine,
                geometry=wiring.geometries[side],
                shape=wiring.shape,
                options=wiring.options[side],
                stamper=run.router.stamper,
                clients={},
            )
            for side in Side
        }
        self._operations: list[tuple[Operation, Sequence[Observation]]] = []
        now, aux = self._look(), self._aux_rows()
        self._moments, self._aux = (now, now), (aux, aux)

    def after(self, operation: Operation, seen: Sequence[Observation] = ()) -> None:
        self._operations.append((operation, seen))
        self._moments = self._moments[1], self._look()
        self._aux = self._aux[1], self._aux_rows()

    def _look(self) -> dict[Peer, Moment]:
        """The memory of every rank of the present lives."""
        return {
            Peer(side, rank, life.incarnation): Moment.of(engine, self._worlds[side])
            for side, life in self._run.router.lives.items()
            for rank, engine in enumerate(life.engines)
        }

    def _aux_rows(self) -> dict[Peer, Bytes]:
        """Those of every rank of D's present life, [rows, row bytes] each."""
        life = self._run.router.lives[Side.DECODE]
        return {
            Peer(Side.DECODE, rank, life.incarnation): rows.numpy().copy()
            for rank, rows in enumerate(life.aux)
        }

    def recorded(self, outcome: Outcome) -> Recorded:
        """All that the report shows of the run."""
        clients = {
            asked.request: Client(
                asked.request, asked.tokens, asked.chain, length=len(asked.tokens)
            )
            for asked in self._run.router.asked.values()
        }
        pools: list[Pool] = []
        wrong: list[tuple[Peer, Wrong]] = []
        tables: list[Table] = []
        before, after = self._moments
        for peer, now in after.items():
            world = replace(self._worlds[peer.side], clients=clients)
            moments = before.get(peer, now), now
            contents = Contents(world.stamper, clients.values())
            found = [
                *wrong_rows(world, now, contents),
                *_named(outcome, peer, world, now, contents),
            ]
            wrong += [(peer, each) for each in found]
            pools += PageMap(world, moments, contents, found, name=name(peer)).pools()
            if found:
                tables.append(wrong_table(found, f"Rows of {name(peer)} that differ"))
            title = f"Rows of {name(peer)} that the last operation changed"
            changed = changed_rows(world, moments, contents, title)
            if peer in self._aux[1]:
                aux = self._aux[0].get(peer, self._aux[1][peer]), self._aux[1][peer]
                pools.append(aux_pool(peer, moments, aux, outcome))
                lines = tuple((f"aux row {row}", "", *said) for row, *said in changed_aux(aux))
                changed = replace(changed, lines=lines + changed.lines)
            tables.append(changed)
        return Recorded(
            deeds=tuple(
                Deed(operation.text, tuple(effects(seen))) for operation, seen in self._operations
            ),
            blamed=len(self._operations),
            timeline=self._timeline(wrong, outcome),
            pools=tuple(pools),
            tables=tuple(sorted(tables, key=lambda table: not table.marked)),
        )

    def _timeline(self, wrong: Sequence[tuple[Peer, Wrong]], outcome: Outcome) -> Timeline:
        wiring = self._run.setup.wiring
        lives = {side: [Peer(side, rank, 0) for rank in range(wiring.ranks[side])] for side in Side}
        requests = [
            Lane(asked.name, "requests", int(asked.request))
            for asked in self._run.router.asked.values()
        ]
        messages = Messages(
            lives[Side.PREFILL],
            lives[Side.DECODE],
            pieces=wiring.topology.pieces,
            lanes=requests,
        )
        timeline, last = messages.timeline, 0
        for number, (operation, seen) in enumerate(self._operations, start=1):
            last = timeline.row(f"{number}. {operation.text}", heading=True)
            lanes = [requests[request] for request in operation.requests]
            if between := BETWEEN.get(operation.text.partition(":")[0]):
                lanes.append(between)
            for lane in [] if operation.idle else lanes:
                timeline.marks.append(Mark((timeline.lane(lane), last), operation.text))
            for each in seen:
                if text := messages.says(each):
                    messages.draw(each, timeline.row(text))
        messages.finish()
        if outcome.failed:
            sentence = outcome.violations[0].sentence
            if at := sorted({messages.lane(peer) for peer, _ in wrong}):
                timeline.marks += [Mark((lane, last), sentence, "bad") for lane in at]
            else:
                mark(timeline, sentence, last)
        return timeline


def _named(
    outcome: Outcome, peer: Peer, world: World, now: Moment, contents: Contents
) -> Iterator[Wrong]:
    """The rows of a rank that the oracles have named, whether or not they can be read yet."""
    for violation in outcome.violations:
        told = ROW.fullmatch(violation.row)
        if told is None or told["rank"] != name(peer._replace(incarnation=0)):
            continue
        component, row, layer = Component(told["component"]), int(told["row"]), int(told["layer"])
        if component is Component.STATE:
            row = row * WORD // now.rows[component, layer].shape[1]
        yield Wrong(
            component=component,
            row=row,
            layer=layers_of(world, component)[layer],
            reader=name(peer),
            should=violation.expected,
            holds=contents.of(now, (component, layer), row),
        )


def effects(seen: Sequence[Observation]) -> Iterator[str]:
    """What came of an operation, in a few sentences."""
    sent = Counter(words(each.message) for each in seen if isinstance(each, Sent))
    for message, count in sent.items():
        yield f"{message} is sent" + (f" {count} times." if count > 1 else ".")
    for peer, posted in Counter(each.at for each in seen if isinstance(each, Posted)).items():
        yield f"{name(peer)} posts {posted} {'piece' if posted == 1 else 'pieces'}."
    for peer, came in Counter(each.at for each in seen if isinstance(each, Arrived)).items():
        yield f"{came} {'part lands' if came == 1 else 'parts land'} at {name(peer)}."
    ended = Counter((each.at, each.outcome) for each in seen if isinstance(each, Settled))
    for (peer, outcome), count in ended.items():
        pieces = "piece ends" if count == 1 else "pieces end"
        yield f"{count} {pieces} as {outcome.name} for {name(peer)}."
    for each in seen:
        if isinstance(each, Moved):
            yield f"{name_key(each.key)} is {each.phase.name} at {name(each.at)}."
