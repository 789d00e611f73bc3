"""The caller of a run: keeps its own account of every request and turns draws into operations.

Every operation takes WIDTH draws, whatever it needs: its kind, whom it concerns, and up to three
numbers.  So deleting an operation from a tape leaves the next one whole.  An operation that is
not possible where it stands does nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np

from fuzz.step import Client, Step, World
from fuzz.tape import SplitMix, Tape
from fuzz.targets.setup import boundaries, outputs_from
from reference.contract import (
    Capability,
    Chunk,
    Drafts,
    OutOfMemory,
    RequestId,
    Rows,
    StepOutput,
)

KINDS = (
    "submit",
    "extend",
    "decode",
    "finish",
    "retract",
    "resume",
    "abort",
    "evict",
    "verify",
    "accept",
)
"""Operations in the order of their tape values, after 0, which stops."""
WIDTH = 5
MOST_REQUESTS = 16
"""Submissions of one run."""
MOST_DECODES = 8
"""Decode steps of one operation."""
HUNGRY = {"submit", "resume", "extend", "decode", "verify", "accept"}
"""Operations that memory may run out for."""
NEEDS = {"verify": Capability.VERIFY, "evict": Capability.PREFIX_SHARING}
"""What an engine must be able to do for an operation."""


class Session:
    """Drives one engine by a tape.

    Fields:
        tokens: tokens of all prompts, decodes and drafts, a measure of a case's size.
        seen: counts of events, for the campaign's proof that it was not vacuous.
    """

    def __init__(self, world: World, tape: Tape, *, max_tokens: int, max_length: int) -> None:
        self.world, self.tape = world, tape
        self.max_tokens, self.max_length = max_tokens, max_length
        self.seen: Counter[str] = Counter()
        self.tokens = 0
        self.snapshot = world.engine.inspect()
        self._fresh_tokens = 0
        self._short = False
        self._running: list[Client] = []
        self._lengths = boundaries(world.geometry, max_length)
        # For each kind: whom or what it could concern, and the operation on one of those.
        self._kinds: dict[str, tuple[Callable[[], Sequence[object]], Callable[[], Step]]] = {
            "submit": (lambda: range(MOST_REQUESTS - len(world.clients)), self._submit),
            "extend": (self._unfilled, self._extend),
            "decode": (self._decodable, self._decode),
            "finish": (lambda: self._running, lambda: self._leave("finish")),
            "retract": (lambda: self._running, lambda: self._leave("retract")),
            "resume": (self._retracted, self._resume),
            "abort": (lambda: self._running, lambda: self._leave("abort")),
            "evict": (lambda: self.snapshot.cached, self._evict),
            "verify": (self._verifiable, self._verify),
            "accept": (self._pending, self._accept),
        }

    def step(self, weights: Sequence[float]) -> Step | None:
        """Draw and do one operation; None when the tape says stop.  `weights` are those of
        stopping and then of each of KINDS."""
        start, self._running = len(self.tape.values), self.world.running()
        with self.tape.span("operation"):
            if self.tape.generating:
                weights = [w * p for w, p in zip(weights, self._likelihoods(), strict=True)]
            choice = self.tape.choose(weights)
            if choice == 0:
                return None
            kind = KINDS[choice - 1]
            who, operate = self._kinds[kind]
            if who() and self._able(kind):
                step = operate()
                self._short = step.refused is not None
            else:
                step = self._begin(f"{kind}: nothing to do")
                step.idle = True
            while len(self.tape.values) < start + WIDTH:
                self.tape.draw(1)
        step.after = self.snapshot = self.world.engine.inspect()
        return step

    # whom an operation may concern

    def _likelihoods(self) -> Iterator[float]:
        """Of stopping and of each kind: generation leaves out what is not possible, and mostly
        what will be refused."""
        full = len(self._running) >= self.world.options.max_requests
        yield 1.0
        for kind, (who, _) in self._kinds.items():
            futile = (full and kind in ("submit", "resume")) or (self._short and kind in HUNGRY)
            yield bool(who()) * (0.1 if futile else 1.0)

    def _able(self, kind: str) -> bool:
        return kind not in NEEDS or NEEDS[kind] in self.world.engine.capabilities

    def _unfilled(self) -> list[Client]:
        return [c for c in self._running if c.length < len(c.tokens)]

    def _decodable(self) -> list[Client]:
        return [
            c for c in self._running if c.length == len(c.tokens) < self.max_length and not c.drafts
        ]

    def _verifiable(self) -> list[Client]:
        return self._decodable() if self.world.geometry.max_drafts else []

    def _pending(self) -> list[Client]:
        return [c for c in self._running if c.drafts]

    def _retracted(self) -> list[Client]:
        return [c for c in self.world.clients.values() if c.status == "retracted"]

    def _one(self, candidates: Sequence[Client]) -> Client:
        return candidates[self._who(candidates)]

    def _some(self, candidates: Sequence[Client], most: int = 3) -> list[Client]:
        """One to `most` different candidates: the one drawn, and those that follow it."""
        first = self._who(candidates)
        count = 1 + self.tape.draw(min(most, len(candidates)))
        return [candidates[(first + i) % len(candidates)] for i in range(count)]

    def _who(self, candidates: Sequence[Client]) -> int:
        """Index of a candidate.  The tape names requests, not candidates, so that it means the
        same when another operation goes: the next candidate, where the one named is none."""
        ids = [int(c.request) for c in candidates]
        drawn = self.tape.draw(len(self.world.clients), favour=ids)
        return next((i for i, request in enumerate(ids) if request >= drawn), 0)

    # tokens

    def _fresh(self, *, not_this: int = -1) -> int:
        """A token that nobody has used; out of a model's vocabulary one that differs from
        `not_this`."""
        self._fresh_tokens += 1
        if self.world.stamped:
            return self._fresh_tokens
        token = SplitMix(self._fresh_tokens).below(self.world.shape.vocab - 1)
        return token + (0 <= not_this <= token)

    def _echo(self, client: Client) -> int:
        """A token that all who share the context of `client` decode next."""
        token = int(client.chain[-1]) >> 32
        return token if self.world.stamped else token % self.world.shape.vocab

    # operations

    def _begin(self, text: str) -> Step:
        return Step(text, self.snapshot, self.snapshot)

    def _refused(self, step: Step, refusal: OutOfMemory) -> None:
        step.refused = refusal
        step.text += " (out of memory)"

    def _submit(self) -> Step:
        world, tape = self.world, self.tape
        parents = list(world.clients.values())
        parent = tape.draw(len(parents) + 1, favour=range(1, len(parents) + 1))
        source = parents[parent - 1].tokens if parent else []
        page = world.geometry.logical_page_size
        # Behind what is shared: all fresh, one fresh token and then the parent's again, or the
        # parent's from a page on, at another depth.  It takes two pages to meet it again.
        change = tape.choose((8, 1, 1) if len(source) > 2 * page else (1,))
        total = 1 + tape.draw(self.max_tokens, favour=[n - 1 for n in self._lengths])
        shared = tape.draw(min(len(source), total) + 1, favour=self._lengths)
        tokens = source[:shared]
        if change == 2:
            tokens += source[shared + page :][: total - shared]
        elif shared < total:
            tokens.append(self._fresh(not_this=source[shared] if shared < len(source) else -1))
            if change == 1:
                tokens += source[shared + 1 : total]
        tokens += [self._fresh() for _ in range(total - len(tokens))]
        client = Client(RequestId(len(world.clients)), tokens, world.stamper.chain(tokens))
        origin = f", the first {shared} as in request {parent - 1}" if shared else ""
        step = self._begin(f"submit {client.name} with {total} tokens{origin}")
        step.shared = shared
        self.tokens += total
        world.clients[client.request] = client
        return self._admit(client, step)

    def _resume(self) -> Step:
        client = self._one(self._retracted())
        step = self._begin(f"resume {client.name} with {len(client.tokens)} tokens")
        return self._admit(client, step)

    def _admit(self, client: Client, step: Step) -> Step:
        step.calls.add(client.request)
        try:
            step.hit = self.world.engine.submit(client.request, list(client.tokens)).hit
        except OutOfMemory as refusal:
            client.status = "retracted"
            self._refused(step, refusal)
            return step
        client.status, client.length = "running", step.hit
        step.submitted = client
        return step

    def _extend(self) -> Step:
        clients = self._some(self._unfilled())
        first = clients[0]
        rest = len(first.tokens) - first.length
        left_out = self.tape.draw(rest, favour=[len(first.tokens) - n for n in self._lengths])
        others = self.tape.draw(max(len(c.tokens) - c.length for c in clients[1:] or [first]))
        stops = [len(first.tokens) - left_out] + [
            min(len(c.tokens), c.length + others) if others else len(c.tokens) for c in clients[1:]
        ]
        pairs = list(zip(clients, stops, strict=True))
        step = self._begin("extend " + ", ".join(f"{c.name} to {stop}" for c, stop in pairs))
        step.calls.update(c.request for c in clients)
        chunks = [self._chunk(c, stop) for c, stop in pairs]
        try:
            outputs = self.world.engine.extend(chunks)
        except OutOfMemory as refusal:
            self._refused(step, refusal)
            return step
        finally:
            _overwrite(chunk.rows for chunk in chunks)
        for (client, stop), output in zip(pairs, outputs, strict=True):
            self._stored(step, client, stop, output)
            if stop == len(client.tokens):
                step.inserted.append(client)
        return step

    def _chunk(self, client: Client, stop: int) -> Chunk:
        if not self.world.stamped:
            first = outputs_from(self.world.options, client.length, stop)
            return Chunk(request=client.request, stop=stop, outputs_from=first)
        rows = self.world.stamper.extend_rows(client.chain, client.length, stop)
        return Chunk(request=client.request, stop=stop, rows=rows)

    def _decode(self) -> Step:
        clients = self._some(self._decodable())
        room = min(self.max_length - c.length for c in clients)
        count = 1 + self.tape.draw(min(room, MOST_DECODES))
        echo = bool(self.tape.draw(2))
        step = self._begin(
            f"decode {count} tokens of {', '.join(c.name for c in clients)}"
            + (", the same after the same context" if echo else "")
        )
        step.calls.update(c.request for c in clients)
        try:
            for _ in range(count):
                self._decode_once(clients, step, echo=echo)
        except OutOfMemory as refusal:
            self._refused(step, refusal)
        return step

    def _decode_once(self, clients: Sequence[Client], step: Step, *, echo: bool) -> None:
        world = self.world
        tokens = [self._echo(c) if echo else self._fresh() for c in clients]
        chains = world.stamper.append(
            np.array([c.chain[-1] for c in clients]),
            np.array([c.length for c in clients]),
            np.array(tokens),
        )
        rows = world.stamper.step_rows(chains) if world.stamped else None
        try:
            outputs = world.engine.decode([c.request for c in clients], tokens, rows)
        finally:
            _overwrite([rows])
        self.tokens += len(clients)
        for i, (client, output) in enumerate(zip(clients, outputs, strict=True)):
            client.tokens.append(tokens[i])
            client.chain = np.append(client.chain, chains[i])
            self._stored(step, client, client.length + 1, output)

    def _stored(self, step: Step, client: Client, stop: int, output: StepOutput) -> None:
        start, _ = step.wrote.get(client.request, (client.length, 0))
        step.wrote[client.request] = (start, stop)
        step.outputs.append((tuple(client.tokens[:stop]), output))
        client.length = stop

    def _verify(self) -> Step:
        world = self.world
        clients = self._some(self._verifiable())
        room = min(self.max_length - c.length for c in clients)
        most = min(world.geometry.max_drafts, room)
        many = most > world.geometry.mamba_track_interval
        first = 1 + self.tape.draw(most, favour=[most - 1] if many else ())
        others = self.tape.draw(most + 1)
        counts = [first] + [others or first] * (len(clients) - 1)
        drafts = (f"{n} drafts of {c.name}" for c, n in zip(clients, counts, strict=True))
        step = self._begin("verify " + ", ".join(drafts))
        step.calls.update(c.request for c in clients)
        asked, chains = [], []
        for client, count in zip(clients, counts, strict=True):
            tokens = [self._fresh() for _ in range(count)]
            chain = world.stamper.chain(client.tokens + tokens)
            rows = world.stamper.step_rows(chain[client.length :]) if world.stamped else None
            asked.append(Drafts(request=client.request, tokens=tokens, rows=rows))
            chains.append(chain)
        try:
            outputs = world.engine.verify(asked)
        except OutOfMemory as refusal:
            self._refused(step, refusal)
            return step
        finally:
            _overwrite(drafts.rows for drafts in asked)
        self.tokens += sum(counts)
        for client, drafts, chain, output in zip(clients, asked, chains, outputs, strict=True):
            client.drafts, client.chain = list(drafts.tokens), chain
            stop = client.length + len(client.drafts)
            step.wrote[client.request] = (client.length, stop)
            step.outputs.append((tuple(client.tokens + client.drafts), output))
        return step

    def _accept(self) -> Step:
        client = self._one(self._pending())
        drafts = len(client.drafts)
        many = drafts > self.world.geometry.mamba_track_interval
        kept = self.tape.draw(drafts + 1, favour=[drafts] if many else ())
        step = self._begin(f"accept {kept} of {drafts} drafts of {client.name}")
        step.calls.add(client.request)
        try:
            self.world.engine.accept(client.request, kept)
        except OutOfMemory as refusal:
            self._refused(step, refusal)
            return step
        kpool = self.world.geometry.kpool
        closed, stays = ((client.length + n) // kpool for n in (drafts, kept))
        self.seen["rejected_draft_closed_group"] += closed > stays
        client.tokens += client.drafts[:kept]
        client.length, client.drafts = client.length + kept, []
        client.chain = client.chain[: client.length]
        return step

    def _leave(self, how: str) -> Step:
        client = self._one(self._running)
        step = self._begin(f"{how} {client.name} at {client.length} of {len(client.tokens)} tokens")
        step.calls.add(client.request)
        returned = getattr(self.world.engine, how)(client.request)
        if how == "retract":
            step.retracted = client, tuple(returned)
        if how != "abort":
            step.inserted.append(client)
        client.status = "retracted" if how == "retract" else "gone"
        client.chain, client.drafts = client.chain[: len(client.tokens)], []
        return step

    def _evict(self) -> Step:
        asked = 1 + self.tape.draw(sum(len(node.pages) for node in self.snapshot.cached))
        went = self.world.engine.evict(asked)
        step = self._begin(f"evict {asked} pages ({went} went)")
        step.evicted = asked, went
        return step


def _overwrite(given: Iterable[Rows | None]) -> None:
    """Spoil the rows of a call that is over: they are the caller's, who may use them again."""
    for rows in given:
        if rows is not None:
            for values in (rows.kv, rows.key, rows.gate, rows.state):
                values.fill_(math.nan)
