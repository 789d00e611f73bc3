"""Residency: under HiSparse every row is where the model of hot buffers has it, and is right there.

Tags, LRU orders and misses follow from the calls alone: from where prompts end, and from what is
selected (`reference.hisparse`).  So they are judged exactly, as is the account of device pages,
host pages and logical pages.  In stamped runs the rows that attention finds, and those that the
tags name, are told apart by their writers.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import numpy as np

from fuzz.oracles.hot_account import Said, judge_account
from fuzz.oracles.readers import Ints
from fuzz.stamps import Bytes, Registry
from fuzz.step import SPOILT, Client, Step, Violation, World
from reference.contract import Capability, Component, HotBufferView, RequestId, StepOutput
from reference.hisparse import HotBuffer


class Residency:
    """Judges runs with HiSparse.

    `_models` are the hot buffers of each running request, one a layer; `_decoded` are the
    requests whose newest position a decode wrote; `_rows` [dsa_layers, positions, row bytes] is
    what each request's KV rows must be, as far as that was needed."""

    name = "residency"

    def __init__(self, world: World) -> None:
        self._world, self._layers = world, world.shape.dsa_layers
        self._size = world.geometry.device_buffer_size or 0
        self._models: dict[RequestId, list[HotBuffer]] = {}
        self._decoded: set[RequestId] = set()
        self._rows: dict[RequestId, Bytes] = {}
        self._ahead = Capability.HOT_AHEAD in world.engine.capabilities
        self._device: list[Bytes] = []
        if Capability.RAW in world.engine.capabilities:
            each = range(len(self._layers))
            self._device = [world.engine.raw(Component.HOT, layer).numpy() for layer in each]

    def check(self, step: Step) -> list[Violation]:
        """The engine's account, then what its decodes returned, then the hot buffers."""
        said = list(judge_account(self._world, step.after)) or list(self._follow(step))
        if not said and step.after.hot:
            views = step.after.hot.buffers
            clients = [c for c in self._world.running() if c.request in views]
            for client in clients:
                said += self._buffer(client, views[client.request])
            for client in clients:
                if client.request in step.calls and self._filled(client):
                    said += self._resident(client, self._slots(client, views[client.request]))
        return [Violation(self.name, *each) for each in said]

    def close(self) -> list[Violation]:
        """The device rows of all running requests, as the engine reads them."""
        said: list[tuple[str, ...]] = []
        for client in self._world.running():
            if self._filled(client):
                slots = self._read_slots(client)
                said += self._resident(client, slots)
                for rows in slots:
                    rows.fill(SPOILT)
                said += self._newest(client)
        return [Violation(self.name, *each) for each in said]

    # what the calls mean

    def _follow(self, step: Step) -> Said:
        """Do to the models what the step did to the engine; judge what each decode returned."""
        if step.submitted:
            request = step.submitted.request
            self._models[request] = [HotBuffer(self._size) for _ in self._layers]
            self._decoded.discard(request)
            self._rows.pop(request, None)
        for client in step.inserted:
            # Its prompt is complete; if it wrote nothing it has just left.
            if client.request in step.wrote:
                for model in self._models[client.request]:
                    model.admit(client.length)
        for (context, output), cells in zip(step.outputs, step.selections, strict=False):
            self._decoded.add(output.request)
            yield from self._decode(output, len(context), cells)

    def _decode(self, output: StepOutput, length: int, cells: Ints) -> Said:
        """The newest of `length` positions came, and each layer looked up its row of cells."""
        where = f"request {output.request}, position {length - 1}"
        misses = []
        for model, row in zip(self._models[output.request], cells.tolist(), strict=True):
            model.grow(length)
            misses.append(len(model.swap_in(row, length, range(length)).misses))
        is_ = None if output.misses is None else output.misses.reshape(-1).tolist()
        if is_ != misses:
            yield "misses", f"{where}: {misses} rows should be swapped in, by layer; it says {is_}."
        if self._world.stamped:
            yield from self._attended(output, length, cells)

    def _attended(self, output: StepOutput, length: int, cells: Ints) -> Said:
        """Attention finds the row of each position selected, and zeros in void cells."""
        client = self._world.clients[output.request]
        valid = (cells >= 0) & (cells < length)
        layers = np.arange(len(self._layers))[:, None]
        should = self._expected(client)[layers, np.where(valid, cells, 0)]
        should[~valid] = 0
        is_ = np.zeros(0) if output.attended is None else output.attended.numpy()[:, 0]
        if is_.shape != should.shape:
            sentence = f"rows of shape {should.shape} should be attended; {is_.shape} are given."
            yield "attended", f"{client.name}, position {length - 1}: {sentence}"
            return
        for at in np.argwhere((is_ != should).any(axis=2))[:1].tolist():
            layer, cell = self._layers[at[0]], at[1]
            named = f"position {cells[*at]}" if valid[*at] else "zeros"
            where = f"{client.name}, position {length - 1}, layer {layer}: cell {cell}"
            yield "attended", *self._wrong(where, named, is_[*at])
        is_.fill(SPOILT)

    # where the rows are

    def _buffer(self, client: Client, view: HotBufferView) -> Said:
        """Tags and LRU orders are the models', and all but a newest position is saved."""
        models = self._models[client.request]
        # A newest position that a decode wrote is on the device alone.
        saved = client.length - (client.request in self._decoded)
        if view.saved != saved:
            yield (
                "saved",
                f"{client.name} should have saved {saved} positions; it has {view.saved}.",
            )
        if len(view.tags) != len(models) or len(view.lru) != len(models):
            yield "tags", f"{client.name} should have tags and LRU orders of {len(models)} layers."
        for layer, model, tags, lru in zip(self._layers, models, view.tags, view.lru, strict=False):
            for slot, (is_, should) in enumerate(zip_longest(tags, model.tags)):
                if is_ != should:
                    where = f"{client.name}, layer {layer}: slot {slot}"
                    sentence = f"{where} should hold position {should}; its tag is {is_}."
                    yield "tags", sentence, where, f"position {should}", f"position {is_}"
                    break
            if list(lru) != model.lru:
                yield (
                    "lru",
                    f"{client.name}, layer {layer}: the slots should be, the least recently used "
                    f"first, {model.lru}; they are {list(lru)}.",
                )

    def _filled(self, client: Client) -> bool:
        """Whether the hot buffer of a request holds stamped rows: its whole prompt is there."""
        return self._world.stamped and client.length == len(client.tokens)

    def _resident(self, client: Client, slots: Sequence[Bytes]) -> Said:
        """Each layer's slots hold the positions that they should; `slots`: [slots and newest, row
        bytes] of each layer."""
        models = self._models[client.request]
        for model, layer, is_, rows in zip(
            models, self._layers, slots, self._expected(client), strict=True
        ):
            resident = model.resident(client.length)
            if client.length > self._size and not (self._ahead or client.request in self._decoded):
                # a prompt's newest position, which no step will read there
                del resident[client.length - 1]
            wrong = (is_[list(resident.values())] != rows[list(resident)]).any(axis=1)
            if wrong.any():
                position, slot = list(resident.items())[int(wrong.argmax())]
                where = f"{client.name}, layer {layer}: slot {slot}"
                yield "hot rows", *self._wrong(where, f"position {position}", is_[slot])

    def _newest(self, client: Client) -> Said:
        """The newest position is read from wherever it is."""
        start, stop = client.length - 1, client.length
        for i, (layer, rows) in enumerate(zip(self._layers, self._expected(client), strict=True)):
            row = self._world.engine.read(client.request, Component.KV, i, start, stop).numpy()[0]
            if row.tobytes() != rows[start].tobytes():
                yield (
                    "hot rows",
                    f"What {client.name} reads in layer {layer} as its newest position {start} "
                    f"holds {self._writer(row)}.",
                )

    def _slots(self, client: Client, view: HotBufferView) -> list[Bytes]:
        """[slots and newest, row bytes] for each layer, where the raw buffers have them."""
        if not self._device:
            return self._read_slots(client)
        rows = list(view.rows)
        return [device[rows] for device in self._device]

    def _read_slots(self, client: Client) -> list[Bytes]:
        """The same as the engine reads them."""
        read, stop = self._world.engine.read, self._size + 1
        layers = range(len(self._layers))
        return [read(client.request, Component.HOT, i, 0, stop).numpy() for i in layers]

    def _expected(self, client: Client) -> Bytes:
        """[dsa_layers, positions, row bytes]: what the KV rows of a request must be."""
        known = self._rows.get(client.request)
        start = 0 if known is None else known.shape[1]
        if start < client.length:
            news = np.stack(
                [
                    self._world.stamper.expected_kv(client.chain, start, client.length, layer)
                    for layer in range(len(self._layers))
                ]
            )
            known = news if known is None else np.concatenate([known, news], axis=1)
            self._rows[client.request] = known
        assert known is not None, "a request with its whole prompt has a position"
        return known

    def _wrong(self, where: str, named: str, row: Bytes) -> tuple[str, ...]:
        """The sentence, the place, what it should hold and what it holds."""
        holds = self._writer(row)
        return f"{where} should hold {named}; it holds {holds}.", where, named, holds

    def _writer(self, row: Bytes) -> str:
        chains = {client.name: client.chain for client in self._world.clients.values()}
        return Registry(self._world.stamper, chains).writer(Component.KV, row)
