"""Fixed scenes: a few calls of one stamped engine, or a few requests between two, judged by the
oracles of a fuzzed run.

A scene's geometry is plain: logical pages of PAGE tokens, a checkpoint at each of their ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import cast

import torch

import systems
from fuzz.oracles.containment import Containment
from fuzz.oracles.exact import Exact
from fuzz.oracles.provenance import Provenance
from fuzz.oracles.tiering import Tiering
from fuzz.oracles.transfers import Transfers
from fuzz.oracles.view import Viewer
from fuzz.router import Asked, Router, landed
from fuzz.stamps import stamper_of
from fuzz.step import Client, EngineCrash, Guarded, Oracle, Step, TierCall, Violation, World
from fuzz.tape import Tape
from fuzz.targets.setup import STAMPED_SHAPE
from fuzz.targets.transfer import draw_setup
from reference.contract import (
    Chunk,
    Component,
    ContractError,
    Engine,
    EngineOptions,
    HostTier,
    RequestId,
)
from reference.geometry import Geometry
from reference.protocol import Side
from reference.restore import Step as TierStep

GEOMETRY = Geometry(kpool=2, physical_page_size=4, topk=8, mamba_track_interval=8)
PAGE = GEOMETRY.logical_page_size
OPTIONS = EngineOptions(
    pages=17, state_slots=17, max_requests=2, host_tier=HostTier(pages=8, states=8)
)
TURNS = 40
"""Of both ends, after which a scene of transfers is at rest."""


class Found(Exception):
    """An oracle objects, which ends a scene."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__(violations[0].sentence)
        self.violations = list(violations)


def played(scene: Callable[[], None]) -> list[Violation]:
    """What is wrong with a scene; nothing where it comes to its end."""
    try:
        with torch.inference_mode(False):  # the ranks' threads are not in it
            scene()
    except Found as found:
        return found.violations
    except EngineCrash as crash:
        return [crash.violation]
    except ContractError as refusal:
        return [Violation("exact", "refused", f"The engine refused a legal call: {refusal}")]
    except Exception as cause:
        return [Violation("crash", type(cause).__name__, f"The product raised {cause!r}.")]
    return []


def require(holds: bool, component: str, sentence: str) -> None:
    """What a scene itself knows to hold: found by the exact oracle where it does not."""
    if not holds:
        raise Found([Violation("exact", component, sentence)])


class Scene:
    """One stamped engine, and the caller's account of it.  Each method is an operation, judged when
    it is done; Found ends the scene."""

    def __init__(self, options: EngineOptions = OPTIONS) -> None:
        stamper = stamper_of(GEOMETRY, STAMPED_SHAPE)
        factory = systems.load("optimized").factory
        engine = Guarded(factory(GEOMETRY, STAMPED_SHAPE, replace(options, ape=stamper.ape)))
        self.engine = cast(Engine, engine)
        self.world = World(
            engine=self.engine,
            geometry=GEOMETRY,
            shape=STAMPED_SHAPE,
            options=options,
            stamper=stamper,
            clients={},
        )
        viewer = Viewer(self.world)
        self._oracles: list[Oracle] = [
            Tiering(self.world),
            Exact(self.world),
            Provenance(self.world, viewer),
            Containment(self.world, viewer),
        ]
        self._last = self.engine.inspect()

    def submit(self, tokens: Sequence[int]) -> Client:
        """Admit a request of these tokens."""
        request = RequestId(len(self.world.clients))
        client = Client(request, list(tokens), self.world.stamper.chain(list(tokens)))
        step = self._begin(f"submit {client.name}", client)
        self.world.clients[request] = client
        step.submitted, step.hit = client, self.engine.submit(request, client.tokens).hit
        client.length = step.hit
        self._judge(step)
        return client

    def extend(self, client: Client, stop: int | None = None) -> None:
        """Prefill a request, all of it or up to a position."""
        stop = len(client.tokens) if stop is None else stop
        step = self._begin(f"extend {client.name} to {stop}", client)
        (output,) = self.engine.extend([self.chunk(client, client.length, stop)])
        step.wrote[client.request] = client.length, stop
        step.outputs.append((tuple(client.tokens[:stop]), output))
        client.length = stop
        if stop == len(client.tokens):
            step.inserted.append(client)
        self._judge(step)

    def prompt(self, tokens: Sequence[int]) -> Client:
        """Admit a request and prefill all of it."""
        client = self.submit(tokens)
        self.extend(client)
        return client

    def finish(self, client: Client) -> None:
        """End a request, whose whole pages stay in the cache."""
        step = self._begin(f"finish {client.name}", client)
        step.inserted.append(client)
        self.engine.finish(client.request)
        client.status = "gone"
        self._judge(step)

    def abort(self, client: Client) -> None:
        """End a request at once."""
        step = self._begin(f"abort {client.name}", client)
        self.engine.abort(client.request)
        client.status = "gone"
        self._judge(step)

    def evict(self, pages: int) -> None:
        """Evict so many pages."""
        step = self._begin(f"evict {pages} pages")
        step.evicted = pages, self.engine.evict(pages)
        self._judge(step)

    def move(self, kind: TierStep, client: Client) -> None:
        """Back up or restore what there is of a request's tokens."""
        moves: list[str] = []
        step = self._begin(f"{kind} of the tokens of {client.name}")
        step.tier = TierCall(
            step=kind,
            request=client.request,
            tokens=tuple(client.tokens),
            returned=getattr(self.engine, kind)(client.tokens, before=moves.append),
            moves=len(moves),
            failed_at=None,
            raised=False,
        )
        self._judge(step)

    def nothing(self, text: str) -> None:
        """Judge the engine after something that must have changed nothing."""
        self._judge(self._begin(text))

    def chunk(self, client: Client, start: int, stop: int) -> Chunk:
        """A request's positions from `start` to `stop`, stamped."""
        rows = self.world.stamper.extend_rows(client.chain, start, stop)
        return Chunk(request=client.request, stop=stop, rows=rows)

    def _begin(self, text: str, client: Client | None = None) -> Step:
        step = Step(text, self._last, self._last)
        if client:
            step.calls.add(client.request)
        return step

    def _judge(self, step: Step) -> None:
        step.after = self._last = self.engine.inspect()
        found = [violation for oracle in self._oracles for violation in oracle.check(step)]
        if found:
            raise Found(found)


class Handed:
    """P and D, in the plainest setup that a transfer of so many ranks has, and the network between
    them."""

    def __init__(self, *, ranks: tuple[int, int] = (1, 1)) -> None:
        setup = draw_setup(Tape(()), ranks=[ranks])
        wiring = setup.wiring
        self.page = wiring.geometries[Side.PREFILL].mamba_track_interval
        self.router = Router(setup, stamper_of(wiring.geometries[Side.PREFILL], wiring.shape))
        self._oracles = Transfers(self.router)

    def __enter__(self) -> Handed:
        return self

    def __exit__(self, *error: object) -> None:
        self.router.close()

    def submit(self, tokens: Sequence[int]) -> Asked:
        """A request in a room of its own, which P prefills at once."""
        asked = self.router.submit(tokens, room=len(self.router.asked))
        self.router.compute(asked, asked.length, first_token=1)
        self._judge([], moved=False)
        return asked

    def abort(self, asked: Asked) -> None:
        """Give a request up at both ends."""
        self.router.abort(asked)
        self._judge([], moved=True)

    def turn(self) -> None:
        """All that is on its way comes, and both ends tick."""
        self._oracles.watch()
        self.router.steps(1000, 0)
        self._raise(self._oracles.contained(landed(self.router.log)))
        fresh = []
        for side in Side:
            fresh += [self.router.asked[request] for request in self.router.tick(side).live]
        self._judge(fresh, moved=True)

    def retract(self, asked: Asked) -> tuple[Asked, tuple[int, ...]]:
        """D decodes a token of a live request, takes its memory back, and keeps its tokens to
        submit them again."""
        require(asked.live, "live", f"{asked.name} should have become live; it did not.")
        self.router.decode([asked], [1])
        return asked, self.router.lives[Side.DECODE].engine.retract(asked.request)

    def resume(self, asked: Asked, tokens: tuple[int, ...]) -> None:
        """D submits a request again, and what it hits must be that request's."""
        engine = self.router.lives[Side.DECODE].engine
        hit = engine.submit(asked.request, tokens).hit
        stored = engine.read(asked.request, Component.KV, 0, 0, hit).numpy()
        wanted = self.router.stamper.expected_kv(asked.chain, 0, hit, 0)
        wrong = (stored != wanted).any(axis=1).nonzero()[0]
        if wrong.size:
            at = int(wrong[0])
            sentence = f"KV row of {asked.name}'s position {at} should be its own; it is not."
            raise Found([Violation("provenance", "kv", sentence)])
        engine.abort(asked.request)

    def rest(self) -> None:
        """Turns until nothing is left to do, with what is live ended; then the whole is judged."""
        for _ in range(TURNS):
            for asked in self.router.live():
                self.router.finish(asked)
            self.turn()
        self._raise(list(self._oracles.finish()))

    def _judge(self, fresh: Sequence[Asked], *, moved: bool) -> None:
        self._raise(list(self._oracles.check(self.router.taken(), fresh=fresh, moved=moved)))

    def _raise(self, found: Sequence[Violation]) -> None:
        if found:
            raise Found(found)
