"""The caller of a run: keeps its own account of every request and turns draws into operations.

Every operation takes WIDTH draws, whatever it needs: its kind, whom it concerns, and up to three
numbers.  So deleting an operation from a tape leaves the next one whole.  An operation that is
not possible where it stands does nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

from fuzz.step import Client, Step, World
from fuzz.tape import SplitMix, Tape
from fuzz.targets.candidates import Candidates
from fuzz.targets.moves import Moved, Mover
from fuzz.targets.setup import boundaries, outputs_from
from fuzz.targets.streams import LITTERED, STREAMS, Streams
from reference.contract import (
    Capability,
    Chunk,
    Drafts,
    OutOfMemory,
    RequestId,
    Rows,
    StepOutput,
)
from reference.restore import Step as TierStep

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
    "back_up",
    "restore",
)
"""Operations in the order of their tape values, after 0, which stops."""
WIDTH = 5
MOVES = (TierStep.BACK_UP, TierStep.RESTORE)
MOST_REQUESTS = 16
"""Submissions of one run."""
MOST_DECODES = 8
"""Decode steps of one operation."""
HUNGRY = {"submit", "resume", "extend", "decode", "verify", "accept", "restore"}
"""Operations that memory may run out for."""
NEEDS = {
    "verify": Capability.VERIFY,
    "evict": Capability.PREFIX_SHARING,
    "back_up": Capability.HOST_TIER,
    "restore": Capability.HOST_TIER,
}
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
        self._whom = Candidates(world, tape, max_length)
        self._most_running = world.options.max_requests
        if hot := self.snapshot.hot:
            self._most_running = min(self._most_running, len(hot.free_device) // world.hot_pages)
        self._lengths = boundaries(world.geometry, max_length)
        self._extras = [length - 1 for length in self._lengths]
        self._mover = Mover(world.engine, tape, self._lengths)
        # Only a stamped decode under HiSparse is told what to select.
        told = world.stamped and world.options.hisparse
        layers = len(world.shape.dsa_layers)
        self._streams = Streams(world.geometry, layers) if told else None
        any_cells = Capability.ANY_CELLS in world.engine.capabilities
        self._selections = len(STREAMS) if any_cells else LITTERED
        # For each kind: whom or what it could concern, and the operation on one of those.
        self._kinds: dict[str, tuple[Callable[[], Sequence[object]], Callable[[], Step]]] = {
            "submit": (lambda: range(MOST_REQUESTS - len(world.clients)), self._submit),
            "extend": (self._whom.unfilled, self._extend),
            "decode": (self._whom.decodable, self._decode),
            "finish": (lambda: self._whom.running, lambda: self._leave("finish")),
            "retract": (lambda: self._whom.running, lambda: self._leave("retract")),
            "resume": (self._whom.retracted, self._resume),
            "abort": (lambda: self._whom.running, lambda: self._leave("abort")),
            "evict": (lambda: self.snapshot.cached, self._evict),
            "verify": (self._whom.verifiable, self._verify),
            "accept": (self._whom.pending, self._accept),
            **{kind: (self._whom.tiered, partial(self._move, kind)) for kind in MOVES},
        }

    def step(self, weights: Sequence[float]) -> Step | None:
        """Draw and do one operation; None when the tape says stop.  `weights` are those of
        stopping and then of each of KINDS."""
        start = len(self.tape.values)
        with self.tape.span("operation"):
            if self.tape.generating:
                weights = [weights[0], *self._likely(weights[1:])]
            choice = self.tape.choose(weights)
            if choice == 0:
                return None
            kind = KINDS[choice - 1]
            if self.possible(kind):
                step = self._kinds[kind][1]()
                self._short = step.refused is not None
            else:
                step = self._begin(f"{kind}: nothing to do")
                step.idle = True
            while len(self.tape.values) < start + WIDTH:
                self.tape.draw(1)
        return self._ended(step)

    def possible(self, kind: str) -> bool:
        """Whether there is anything that an operation of `kind` could do."""
        who, _ = self._kinds[kind]
        return bool(who()) and self._able(kind)

    def _ended(self, step: Step) -> Step:
        step.after = self.snapshot = self.world.engine.inspect()
        self._whom.running = self.world.running()
        return step

    # whom an operation may concern

    def _likely(self, weights: Sequence[float]) -> Iterator[float]:
        """The weights of all kinds for generation: none for what is not possible, and little for
        what will be refused."""
        full = len(self._whom.running) >= self._most_running
        for weight, (kind, (who, _)) in zip(weights, self._kinds.items(), strict=True):
            if not (weight and who()):
                yield 0.0
                continue
            futile = (
                (full and kind in ("submit", "resume"))
                or (self._short and kind in HUNGRY)
                or (kind in MOVES and not self._promising(TierStep(kind)))
            )
            yield weight * 0.1 if futile else weight

    def _able(self, kind: str) -> bool:
        return kind not in NEEDS or NEEDS[kind] in self.world.engine.capabilities

    def _promising(self, kind: TierStep) -> list[Client]:
        return self._mover.promising(kind, self._whom.tiered(), self.snapshot)

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
        # The last shows where a host tier takes pages for others.
        deeper = 8 if world.options.host_tier else 1
        change = tape.choose((8, 1, deeper) if len(source) > 2 * page else (1,))
        total = 1 + tape.draw(self.max_tokens, favour=self._extras)
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
        client = self._whom.one(self._whom.retracted())
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
        clients = self._whom.some(self._whom.unfilled())
        first = clients[0]
        whole = len(first.tokens)
        left_out = self.tape.draw(whole - first.length, favour=[whole - n for n in self._lengths])
        others = self.tape.draw(max(len(c.tokens) - c.length for c in clients[1:] or [first]))
        stops = [whole - left_out] + [
            min(len(c.tokens), c.length + others) if others else len(c.tokens) for c in clients[1:]
        ]
        pairs = list(zip(clients, stops, strict=True))
        able = self.world.engine.capabilities
        if Capability.CHUNKS not in able:
            pairs = [(c, len(c.tokens)) for c in clients]
        elif Capability.ANY_CHUNK not in able:
            pairs = [(c, self._with_page(c, stop)) for c, stop in pairs]
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

    def _with_page(self, client: Client, stop: int) -> int:
        """The last end of a logical page up to `stop`, or of the prompt if there is none."""
        size, whole = self.world.geometry.logical_page_size, len(client.tokens)
        end = stop if stop == whole else stop // size * size
        return end if end > client.length else whole

    def _chunk(self, client: Client, stop: int) -> Chunk:
        if not self.world.stamped:
            first = outputs_from(self.world.options, client.length, stop)
            return Chunk(request=client.request, stop=stop, outputs_from=first)
        rows = self.world.stamper.extend_rows(client.chain, client.length, stop)
        return Chunk(request=client.request, stop=stop, rows=rows)

    def _decode(self) -> Step:
        clients = self._whom.some(self._whom.decodable())
        room = min(self.max_length - c.length for c in clients)
        count = 1 + self.tape.draw(min(room, MOST_DECODES))
        drawn = self.tape.draw(2 * self._selections if self._streams else 2)
        echo, stream = drawn % 2 == 1, drawn // 2
        step = self._begin(
            f"decode {count} tokens of {', '.join(c.name for c in clients)}"
            + (", the same after the same context" if echo else "")
            + (f", selecting {STREAMS[stream]}" if self._streams else "")
        )
        step.calls.update(c.request for c in clients)
        try:
            for _ in range(count):
                self._decode_once(clients, step, echo=echo, stream=stream)
        except OutOfMemory as refusal:
            self._refused(step, refusal)
        return step

    def _decode_once(
        self, clients: Sequence[Client], step: Step, *, echo: bool, stream: int
    ) -> None:
        world = self.world
        tokens = [self._echo(c) if echo else self._fresh() for c in clients]
        chains = world.stamper.append(
            np.array([c.chain[-1] for c in clients]),
            np.array([c.length for c in clients]),
            np.array(tokens),
        )
        rows = world.stamper.step_rows(chains) if world.stamped else None
        selections = []
        if rows and self._streams:
            selections = [
                self._streams.select(c.request, c.length + 1, int(chain), stream)
                for c, chain in zip(clients, chains, strict=True)
            ]
            rows = replace(rows, selected=torch.tensor(np.stack(selections, axis=1)))
        try:
            outputs = world.engine.decode([c.request for c in clients], tokens, rows)
        finally:
            _overwrite([rows])
        self.tokens += len(clients)
        for i, (client, output) in enumerate(zip(clients, outputs, strict=True)):
            client.tokens.append(tokens[i])
            client.chain = np.append(client.chain, chains[i])
            self._stored(step, client, client.length + 1, output)
        if world.options.hisparse:
            step.selections += selections or [_row(output) for output in outputs]

    def _stored(self, step: Step, client: Client, stop: int, output: StepOutput) -> None:
        start, _ = step.wrote.get(client.request, (client.length, 0))
        step.wrote[client.request] = (start, stop)
        step.outputs.append((tuple(client.tokens[:stop]), output))
        client.length = stop

    def _verify(self) -> Step:
        world = self.world
        clients = self._whom.some(self._whom.verifiable())
        room = min(self.max_length - c.length for c in clients)
        most = min(world.geometry.max_drafts, room)
        many = most > world.geometry.mamba_track_interval
        first = 1 + self.tape.draw(most, favour=[most - 1] if many else ())
        others = self.tape.draw(most + 1)
        counts = [first] + [others or first] * (len(clients) - 1)
        if fixed := self._whom.fixed_drafts:
            counts = [fixed] * len(clients)
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
        client = self._whom.one(self._whom.pending())
        drafts = len(client.drafts)
        many = drafts > self.world.geometry.mamba_track_interval
        kept = self.tape.draw(drafts + 1, favour=[drafts] if many else ())
        if self._whom.fixed_drafts:
            kept = max(kept, 1)
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
        return self._leave_by(how, self._whom.one(self._whom.running))

    def _leave_by(self, how: str, client: Client) -> Step:
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
        # Mostly leaves alone where there is a host tier: a part of a prefix may come back.
        few = range(2) if self.world.options.host_tier else ()
        cached = sum(len(node.pages) for node in self.snapshot.cached)
        asked = 1 + self.tape.draw(cached, favour=few)
        went = self.world.engine.evict(asked)
        step = self._begin(f"evict {asked} pages ({went} went)")
        step.evicted = asked, went
        return step

    def _move(self, kind: TierStep) -> Step:
        client = self._whom.one(self._whom.tiered(), favour=self._promising(kind))
        return self._moved(self._mover.draw(kind, client))

    def _moved(self, moved: Moved) -> Step:
        step = self._begin(moved.text)
        step.tier = moved.call
        if moved.refusal:
            self._refused(step, moved.refusal)
        return step

    def last_steps(self) -> Iterator[Step]:
        """Behind the operations of a run with a host tier: nothing runs any more, and all that
        the tier holds is restored, since its bytes show only then."""
        if self.snapshot.tier is None:
            return
        for client in self.world.running():
            yield self._ended(self._leave_by("abort", client))
        for prefix in self.snapshot.tier.prefixes:
            yield self._ended(self._moved(self._mover.move(TierStep.RESTORE, prefix.tokens)))


def _row(output: StepOutput) -> npt.NDArray[np.int64]:
    """[dsa_layers, selection_width]: what a model selected for a decoded position."""
    selected = output.selected.numpy()
    return selected.reshape(len(selected), -1)


def _overwrite(given: Iterable[Rows | None]) -> None:
    """Spoil the rows of a call that is over: they are the caller's, who may use them again."""
    for rows in given:
        if rows is not None:
            for values in (rows.kv, rows.key, rows.gate, rows.state):
                values.fill_(math.nan)
            if rows.selected is not None:
                rows.selected.fill_(0)
