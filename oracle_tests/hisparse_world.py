"""What the tests of HiSparse's coordinator share: random operations, each judged afterwards."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from optimized.hisparse.backups import BackupQueue
from optimized.hisparse.coordinator import preloaded
from optimized.hisparse.memory import occupancy
from oracle_tests.hisparse_cases import LEADERS, SHAPE, as_bytes, build, rows_of
from oracle_tests.kernel_cases import POISON
from reference.contract import EngineOptions, HiSparse, Occupancy, OutOfMemory
from reference.geometry import Geometry
from reference.hisparse import (
    Residency,
    Saved,
    Wrote,
    judge_backup,
    judge_buffer,
    judge_overwrites,
    judge_resident,
    newest_slot,
)
from reference.occupancy import admits, hot_rows, judge_occupancy, judge_owners


@dataclass
class Prompt:
    """Pages and what their rows must be: truth [dsa_layers, positions, row_bytes] uint8."""

    pages: list[int]
    truth: Tensor


@dataclass
class Running(Prompt):
    """A request; the first `shared` pages are those of `prefix`, in the cache."""

    length: int
    shared: int
    prefix: Prompt | None
    residency: Residency
    events: list[list[Wrote | Saved]] = field(default_factory=list)


class World:
    """A coordinator, a prefix cache of whole prompts, and the reference's view of each request.

    Every public method is one operation, after which all that it touched has been judged.
    """

    def __init__(
        self,
        geometry: Geometry,
        seed: int,
        *,
        order: str = "permuted",
        launch: tuple[str, str] = ("torch", "cpu"),
        host_pages: int | None = None,
    ) -> None:
        """Device memory for three requests, and host memory for three of three buffers' length
        unless told otherwise; four may ask."""
        self.rng = random.Random(seed)
        self.bytes = torch.Generator().manual_seed(seed)
        self.geometry, self.size = geometry, geometry.device_buffer_size
        self.page = geometry.logical_page_size
        rows_each = hot_rows(self.size, geometry.physical_page_size)
        host_pages = host_pages or 9 * self.size // self.page + 1
        self.logical, self.engine = build(
            geometry,
            HiSparse(
                device_pages=3 * rows_each // geometry.physical_page_size + 1,
                host_pages=host_pages,
            ),
            EngineOptions(
                pages=2 * host_pages,
                state_slots=1,
                max_requests=4,
                page_order=order,
                seed=seed,
                backend=launch[0],
            ),
            device=launch[1],
        )
        self.running: dict[int, Running] = {}
        self.cached: list[Prompt] = []
        self.found: list[str] = []
        self.used: dict[str, set[int]] = {"device": set(), "host": set(), "logical": set()}
        events = ("misses", "no_device", "no_host", "grown", "stuck", "hits", "past", "crossed")
        self.seen = dict.fromkeys(events, 0)

    def fresh(self, count: int) -> Tensor:
        row_bytes = self.geometry.row_format.row_bytes(SHAPE.latent)
        shape = (len(LEADERS), count, row_bytes)
        return torch.randint(0, POISON, shape, dtype=torch.uint8, generator=self.bytes)

    def occupancy(self) -> Occupancy:
        cached = {page for prompt in self.cached for page in prompt.pages}
        return occupancy(self.geometry, self.engine.device, self.logical, cached=len(cached))

    def admit(self, slot: int, length: int, prefix: Prompt | None = None) -> bool:
        """Admit a prompt that shares whole pages with a cached one; False when it is refused."""
        shared = prefix.pages[: (length - 1) // self.page] if prefix else []
        count = -(-length // self.page) - len(shared)
        fits = admits(
            self.occupancy(),
            length,
            self.geometry,
            page_size=self.geometry.physical_page_size,
            shared=len(shared) * self.page,
        )
        before = self.memory()
        try:
            self.engine.require_room()
            self.logical.require(count)
        except OutOfMemory as error:
            assert self.memory() == before, "a refused admission changed something"
            assert not fits, "an admission that fits was refused"
            self.seen["no_device" if "raise device_pages" in str(error) else "no_host"] += 1
            self.judge()
            return False
        assert fits, "an admission that does not fit was granted"
        own = self.logical.allocate(count).tolist()
        self.engine.admit(slot)
        self.logical.retain(shared)
        truth = self.fresh(length)
        if shared:
            known = len(shared) * self.page
            truth[:, :known] = prefix.truth[:, :known]
            self.seen["hits"] += 1
        rows = self.backing_rows(own)[: length - len(shared) * self.page]
        self.engine.pools.host[:, rows] = truth[:, len(shared) * self.page :]
        sources = np.array(self.backing_rows(shared + own))[preloaded(length, self.size)]
        self.engine.preload(slot, length, sources)
        residency = Residency(self.size, LEADERS)
        residency.admit(length)
        request = Running(shared + own, truth, length, len(shared), prefix, residency)
        self.running[slot] = request
        for held in residency.held:
            saved = [Saved(p) for p in range(length)]
            request.events.append(saved + [Wrote(s, p) for s, p in enumerate(held) if p >= 0])
        self.seen["past"] += length > self.size
        self.judge()
        return True

    def decode(self, slots: list[int], kind: str) -> None:
        """One step: grow, append, store the new rows, select in every layer."""
        slots = [slot for slot in slots if self.make_room(slot)]
        if not slots:
            return
        positions = np.array([self.running[slot].length for slot in slots])
        table = np.full((len(slots), positions.max() + 1), -1)
        for row, slot in zip(table, slots, strict=True):
            own = self.backing_rows(self.running[slot].pages)[: len(row)]
            row[: len(own)] = own
        step = self.engine.begin(np.array(slots), positions, table)
        for slot in slots:
            request = self.running[slot]
            request.residency.start_backup()
            request.residency.finish_backup()
            request.residency.append()
            request.truth = torch.cat((request.truth, self.fresh(1)), dim=1)
            request.length += 1
            self.seen["crossed"] += request.length == self.size + 1
        self.schedule()
        self.write(slots, step.targets(0)[1])
        leader = None
        for layer in range(len(LEADERS)):
            selections = [self.select(slot, layer, kind) for slot in slots]
            if LEADERS[layer] == layer:
                leader = step.locate(layer, torch.tensor(selections).to(step.slots.device))
            else:
                step.follow(layer, leader)
            for i, slot in enumerate(slots):
                self.compare(layer, slot, selections[i], leader, i)
        self.judge()

    def make_room(self, slot: int) -> bool:
        """Give the request a page if it has no place for one more position, if there is one."""
        request = self.running[slot]
        if request.length < len(request.pages) * self.page:
            return True
        if not self.logical.available:
            self.seen["stuck"] += 1
            return False
        request.pages += self.logical.allocate(1).tolist()
        self.seen["grown"] += 1
        return True

    def schedule(self) -> None:
        """Let the backups come forward, as far as it happens."""
        if isinstance(self.engine.backups, BackupQueue):
            for _ in range(self.rng.randint(0, len(self.engine.backups.pending))):
                self.engine.backups.copy_oldest()

    def write(self, slots: list[int], rows: Tensor) -> None:
        """Store the newest rows of every layer; what the host had by then is noted first."""
        host = self.host()
        for slot, row in zip(slots, rows.tolist(), strict=True):
            request = self.running[slot]
            newest = request.length - 1
            target = newest_slot(request.length, self.size)
            if row != int(self.engine.slot_rows[slot, target]):
                self.found.append(f"The newest row of slot {slot} is not that of slot {target}.")
            for layer, events in enumerate(request.events):
                position = newest - 1
                if torch.equal(host[slot][layer, position], request.truth[layer, position]):
                    events.append(Saved(position))
                events.append(Wrote(target, newest))
            values = request.truth[:, newest].to(self.engine.pools.device.device)
            self.engine.pools.device[:, row] = values

    def select(self, slot: int, layer: int, kind: str) -> list[int]:
        """One selection row: whole topk positions, or those, a tail and the newest."""
        rng, request, geometry = self.rng, self.running[slot], self.geometry
        newest, tags = request.length - 1, self.engine.tags[layer, slot].tolist()
        with_newest = rng.random() < 0.7 and geometry.kpool > 1
        count = geometry.selection_width - 1 if with_newest else geometry.topk
        if kind == "skewed":
            row = [int(newest * rng.random() ** 3) for _ in range(count)]
        elif kind == "repeated":
            row = list(range(min(count, newest)))
        elif kind == "new":
            row = sorted(range(newest), key=lambda p: (p in tags, -p))[:count]
        elif kind == "duplicates":
            row = rng.choices([rng.randint(0, newest) for _ in range(3)], k=count)
        else:
            row = rng.choices([-1, -5, newest + 1, 2**40, *range(newest + 1)], k=count)
        row = [*row, *[newest] * with_newest]
        rng.shuffle(row)
        return row + [-1] * (geometry.selection_width - len(row))

    def compare(self, layer: int, slot: int, selection: list[int], plan, i: int) -> None:
        """The plan of one request and layer is the reference's."""
        request = self.running[slot]
        if LEADERS[layer] == layer:
            result = request.residency.swap_in(layer, selection)
        else:
            result = request.residency.replay(layer)
        own = self.engine.slot_rows[slot].tolist()
        count = int(plan.misses[i])
        pairs = torch.stack((plan.miss_position[i, :count], plan.miss_slot[i, :count]), dim=1)
        if plan.rows[i].tolist() != [own[s] if s >= 0 else -1 for s in result.slots]:
            self.found.append(f"The rows of slot {slot} in layer {layer} are others.")
        if tuple(map(tuple, pairs.tolist())) != result.misses or int(plan.absent[i]):
            self.found.append(f"The misses of slot {slot} in layer {layer} are others.")
        request.events[layer] += [Wrote(s, p) for p, s in result.misses]
        self.seen["misses"] += count

    def release(self, slot: int, *, keep: bool) -> None:
        """End a request; its whole pages stay in the cache if they are kept, and then its newest
        row has to be on the host."""
        request = self.running.pop(slot)
        whole = request.length // self.page
        if keep and whole > request.shared:
            pages = request.pages[:whole]
            self.logical.retain(pages)
            newest = request.length - 1
            row = self.backing_rows(request.pages)[newest]
            self.engine.back_up(*(np.array([value]) for value in (slot, newest, row)))
            self.engine.backups.drain()
            self.cached.append(Prompt(pages, request.truth[:, : whole * self.page]))
        self.engine.release(slot)
        self.logical.release(request.pages)
        self.judge()

    def evict(self) -> None:
        """Drop the cached prompts that no running request reads."""
        read = [request.prefix for request in self.running.values()]
        for prompt in [p for p in self.cached if not any(p is other for other in read)]:
            self.cached.remove(prompt)
            self.logical.release(prompt.pages)
        self.judge()

    def host(self) -> dict[int, Tensor]:
        """For each request slot: host rows of its positions, [dsa_layers, length, row_bytes]."""
        pool = self.engine.pools.host
        if pool.is_pinned():
            torch.cuda.synchronize()
        rows = {s: self.backing_rows(r.pages)[: r.length] for s, r in self.running.items()}
        return {slot: pool[:, own] for slot, own in rows.items()}

    def backing_rows(self, pages: list[int]) -> list[int]:
        """The host row of every position on these logical pages."""
        return rows_of(self.logical.backing[pages].tolist(), self.page)

    def memory(self) -> dict[str, object]:
        """All that is remembered but the pools, as plain values."""
        tables = ("slot_rows", "tags", "lru", "pages", "unsaved")
        pools = {"device": self.engine.device, "host": self.logical.hosts, "logical": self.logical}
        return {
            **{name: getattr(self.engine, name).tolist() for name in tables},
            **{name: pool.counts.tolist() for name, pool in pools.items()},
            "backing": self.logical.backing.tolist(),
        }

    def judge(self) -> None:
        """Note what any judge finds."""
        found, engine, host = self.found, self.engine, self.host()
        device, tags, lru = (x.cpu() for x in (engine.pools.device, engine.tags, engine.lru))
        for slot, request in self.running.items():
            length = request.length
            saved = length - int(engine.unsaved[slot])
            own = device[:, engine.slot_rows[slot].cpu()]
            for layer, leader in enumerate(LEADERS):
                buffer = request.residency.buffers[leader]
                found += judge_buffer(
                    tags[leader, slot].tolist(), lru[leader, slot].tolist(), length
                )
                if tags[leader, slot].tolist() != buffer.tags:
                    found.append(f"The tags of slot {slot} in layer {leader} are others.")
                if lru[leader, slot].tolist() != buffer.lru:
                    found.append(f"The LRU order of slot {slot} in layer {leader} is another.")
                rows = as_bytes(request.truth[layer])
                found += judge_resident(buffer.resident(length), as_bytes(own[layer]), rows)
                stored = dict(enumerate(as_bytes(host[slot][layer])[: max(saved, length - 1)]))
                found += judge_backup(stored, rows)
                found += judge_overwrites(request.events[layer])
        for slot in set(range(5)) - set(self.running):
            for layer in range(len(LEADERS)):
                found += judge_buffer(tags[layer, slot].tolist(), lru[layer, slot].tolist(), 0)
        found += judge_occupancy(
            self.occupancy(),
            running=len(self.running),
            rows_each=hot_rows(self.size, self.geometry.physical_page_size),
        )
        self.judge_rows(device)

    def judge_rows(self, device: Tensor) -> None:
        """Owners of device and host rows; what nobody owns is poison; the cache is complete."""
        engine, hot, page = self.engine, self.geometry.physical_page_size, self.page
        owned = {f"slot {slot}": rows_of(engine.pages[slot].tolist(), hot) for slot in self.running}
        free = rows_of(engine.device.free_ids(), hot)
        rows = range(hot, device.shape[1])
        self.found += judge_owners("device row", owned, free, rows)
        for slot, held in owned.items():
            if not set(engine.slot_rows[int(slot.split()[1])].tolist()) <= set(held):
                self.found.append(f"The hot buffer of {slot} reaches beyond its device pages.")
        holders = {f"slot {slot}": r.pages for slot, r in self.running.items()}
        holders |= {f"prompt {i}": prompt.pages for i, prompt in enumerate(self.cached)}
        backing = {who: self.logical.backing[pages].tolist() for who, pages in holders.items()}
        cached = {p for who, pages in backing.items() if who.startswith("prompt") for p in pages}
        for what, ids in (("device", owned), ("host", backing), ("logical", holders)):
            self.used[what].update(*ids.values())
        idle = self.logical.hosts.free_ids()
        pool = engine.pools.host
        self.found += judge_owners(
            "host row",
            {who: rows_of(pages, page) for who, pages in backing.items()},
            rows_of(idle, page),
            range(page, pool.shape[1]),
            shared=rows_of(cached, page),
        )
        for what, memory_, ids in (
            ("device", device, [*free, *range(hot)]),
            ("host", pool, rows_of({0, *idle}, page)),
        ):
            if not (memory_[:, ids] == POISON).all():
                self.found.append(f"A free {what} row holds something.")
        for prompt in self.cached:
            if not torch.equal(pool[:, self.backing_rows(prompt.pages)], prompt.truth):
                self.found.append("A host row of a cached prompt is wrong.")
