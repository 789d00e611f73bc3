"""What the tests of HiSparse's coordinator share: random operations, each judged afterwards."""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor

from optimized.hisparse.backups import BackupQueue
from optimized.hisparse.coordinator import Coordinator
from optimized.memory.allocator import Allocator
from oracle_tests.kernel_cases import POISON
from reference.contract import Occupancy, OutOfMemory
from reference.geometry import Geometry, ModelShape
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

SHAPE = ModelShape(layers=12, latent=8, index_dim=16, heads=1, kda_heads=1, hidden=8, vocab=8)
LEADERS = (0, 0, 2)
"""Of the three DSA layers the second uses the index of the first."""
LEAST = Geometry(
    kpool=4, physical_page_size=4, topk=8, mamba_track_interval=16, device_buffer_size=10
)
"""The hot buffer is as small as topk and kpool allow, and no whole number of device pages."""
ROOMY = Geometry(
    kpool=2, physical_page_size=4, topk=4, mamba_track_interval=8, device_buffer_size=16
)
UNPOOLED = Geometry(
    kpool=1, physical_page_size=8, topk=6, mamba_track_interval=8, device_buffer_size=6
)
GEOMETRIES = {"least": LEAST, "roomy": ROOMY, "unpooled": UNPOOLED}


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
        self.logical = Allocator(2 * host_pages, order=order, seed=seed)
        self.engine = Coordinator(
            geometry,
            SHAPE,
            logical=self.logical,
            device_pages=3 * rows_each // geometry.physical_page_size + 1,
            host_pages=host_pages,
            max_requests=4,
            page_order=order,
            seed=seed,
            backend=launch[0],
            device=launch[1],
            leaders=LEADERS,
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
        return Occupancy(**asdict(self.engine.occupancy(cached=cached)))

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
        own = self.logical.allocate(count).tolist()
        before = memory(self.engine)
        try:
            self.engine.reserve(slot, shared + own)
        except OutOfMemory as error:
            assert memory(self.engine) == before, "a refused admission changed something"
            self.logical.release(own)
            assert not fits, "an admission that fits was refused"
            self.seen["no_device" if "raise device_pages" in str(error) else "no_host"] += 1
            self.judge()
            return False
        assert fits, "an admission that does not fit was granted"
        self.logical.retain(shared)
        truth = self.fresh(length)
        if shared:
            known = len(shared) * self.page
            truth[:, :known] = prefix.truth[:, :known]
            self.seen["hits"] += 1
        rows = self.backing_rows(own)[: length - len(shared) * self.page]
        self.engine.pools.host[:, rows] = truth[:, len(shared) * self.page :]
        self.engine.preload(slot, length)
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

    def decode(self, slots: list[int], kind: str, *, padding: int = 0) -> None:
        """One step: grow, append, store the new rows, select in every layer."""
        slots = [slot for slot in slots if self.make_room(slot)]
        if not slots:
            return
        batch = self.engine.append([*slots, *[0] * padding])
        for slot in slots:
            request = self.running[slot]
            request.residency.start_backup()
            request.residency.finish_backup()
            request.residency.append()
            request.truth = torch.cat((request.truth, self.fresh(1)), dim=1)
            request.length += 1
            self.seen["crossed"] += request.length == self.size + 1
        self.schedule()
        rows = self.engine.rows_to_write(batch)
        assert (rows[len(slots) :] == 0).all()
        self.write(slots, rows[: len(slots)])
        blank = torch.full((padding, self.geometry.selection_width), 7)
        leader = None
        for layer in range(len(LEADERS)):
            selections = [self.select(slot, layer, kind) for slot in slots]
            selection = torch.cat((torch.tensor(selections), blank)).to(rows.device)
            if LEADERS[layer] == layer:
                leader = self.engine.locate(layer, batch, selection)
            else:
                self.engine.follow(layer, batch, leader)
            assert (leader.rows[len(slots) :] == -1).all(), "a padding row selects nothing"
            for i, slot in enumerate(slots):
                self.compare(layer, slot, selections[i], leader, i)
        self.judge()

    def make_room(self, slot: int) -> bool:
        """Give the request a page if it has no place for one more position, if there is one."""
        request = self.running[slot]
        if request.length < len(request.pages) * self.page:
            return True
        page = self.logical.allocate(1).tolist()
        before = memory(self.engine)
        try:
            self.engine.grow(slot, page)
        except OutOfMemory:
            assert memory(self.engine) == before, "a refused growth changed something"
            self.logical.release(page)
            self.seen["stuck"] += 1
            return False
        request.pages += page
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
        """End a request; its whole pages stay in the cache if they are kept."""
        request = self.running.pop(slot)
        request.residency.start_backup()
        request.residency.finish_backup()
        request.residency.release()
        whole = request.length // self.page
        if keep and whole > request.shared:
            pages = request.pages[:whole]
            self.logical.retain(pages)
            self.engine.hosts.hold(pages)
            self.cached.append(Prompt(pages, request.truth[:, : whole * self.page]))
        self.engine.release(slot)
        self.logical.release(request.pages)
        self.judge()

    def evict(self) -> None:
        """Drop the cached prompts that no running request reads."""
        read = [request.prefix for request in self.running.values()]
        for prompt in [p for p in self.cached if not any(p is other for other in read)]:
            self.cached.remove(prompt)
            self.engine.hosts.drop(prompt.pages)
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
        """The host row of every position on these logical pages, by the map alone."""
        return rows_of(self.engine.hosts.backing[pages].tolist(), self.page)

    def judge(self) -> None:
        """Note what any judge finds."""
        found, engine, host = self.found, self.engine, self.host()
        device, tags, lru = (x.cpu() for x in (engine.pools.device, engine.tags, engine.lru))
        tables = engine.host_rows.tolist()
        for slot, request in self.running.items():
            length, saved = request.length, int(engine.saved[slot])
            own = device[:, engine.slot_rows[slot].cpu()]
            backing = self.backing_rows(request.pages)
            if tables[slot] != backing + [-1] * (len(tables[slot]) - len(backing)):
                found.append(f"The host rows of slot {slot} are not those of its pages.")
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
        owned = {
            f"slot {slot}": rows_of(held.device_pages.tolist(), hot)
            for slot, held in engine.running.items()
        }
        free = rows_of(engine.device.free_ids(), hot)
        rows = range(hot, device.shape[1])
        self.found += judge_owners("device row", owned, free, rows)
        for slot, held in owned.items():
            if not set(engine.slot_rows[int(slot.split()[1])].tolist()) <= set(held):
                self.found.append(f"The hot buffer of {slot} reaches beyond its device pages.")
        holders = {f"slot {slot}": r.pages for slot, r in self.running.items()}
        holders |= {f"prompt {i}": prompt.pages for i, prompt in enumerate(self.cached)}
        backing = {who: engine.hosts.backing[pages].tolist() for who, pages in holders.items()}
        cached = {p for who, pages in backing.items() if who.startswith("prompt") for p in pages}
        for what, ids in (("device", owned), ("host", backing), ("logical", holders)):
            self.used[what].update(*ids.values())
        idle = engine.hosts.allocator.free_ids()
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


def as_bytes(rows: Tensor) -> list[bytes]:
    return [row.numpy().tobytes() for row in rows]


def rows_of(pages, page_size: int) -> list[int]:
    return [page * page_size + i for page in pages for i in range(page_size)]


def memory(engine: Coordinator) -> dict[str, object]:
    """All that an engine remembers but the pools, as plain values."""
    tables = ("slot_rows", "host_rows", "tags", "lru", "length", "saved")
    return {
        **{name: getattr(engine, name).tolist() for name in tables},
        "backing": engine.hosts.backing.tolist(),
        "device": engine.device.counts.tolist(),
        "host": engine.hosts.allocator.counts.tolist(),
        "running": {slot: asdict(held).__repr__() for slot, held in engine.running.items()},
    }
