"""Exact: owners, reference counts, hits and lengths, without tolerance.

The engine's own account of its memory is judged by the reference's rules of prefix sharing
(`reference.prefix`), and against the caller's count of what each request must hold.
"""

from __future__ import annotations

from itertools import cycle

from fuzz.oracles.history import History, spare_pages
from fuzz.step import Client, Step, Violation, World
from fuzz.targets.setup import outputs_from
from reference.addressing import pages_for
from reference.contract import Capability, RequestView, Snapshot
from reference.prefix import (
    cached_prefixes,
    judge_owners,
    judge_pages,
    judge_requests,
    judge_states,
    judge_tree,
    longest_hit,
)


class Exact:
    """Judges every step's snapshot."""

    name = "exact"

    def __init__(self, world: World) -> None:
        self._world = world
        # A fresh engine owns nothing: what is free at first is all that there is.
        fresh = world.engine.inspect()
        self._pages, self._states = len(fresh.free_pages) + 1, len(fresh.free_states) + 1
        self._shares = Capability.PREFIX_SHARING in world.engine.capabilities
        any_drafts = Capability.ANY_DRAFTS in world.engine.capabilities
        self._ahead = world.geometry.max_drafts * (1 if any_drafts else 2)
        self._every = Capability.EVERY_CHECKPOINT in world.engine.capabilities
        self._history = History(world)

    def check(self, step: Step) -> list[Violation]:
        """The account after the step, what its calls returned, and what a refusal changed."""
        world, after = self._world, step.after
        parts = {
            "requests": [*judge_requests(after, world.geometry), *self._lengths(after)],
            "hit": self._hit(step),
            "retract": self._retracted(step),
            "refusal": self._refusal(step),
            "outputs": self._outputs(step),
        }
        if self._shares:
            parts |= {
                "tree": judge_tree(after, world.geometry),
                "owners": judge_owners(after),
                "pages": judge_pages(after, pages=self._pages),
                "states": judge_states(after, state_slots=self._states),
                "insert": [s for c in step.inserted if self._every for s in self._insert(c, after)],
                "evict": self._evicted(step),
            }
        found = [Violation(self.name, part, s) for part, said in parts.items() for s in said]
        # The account over several steps goes by trees that are whole.
        if self._shares and not found:
            said = self._history.observe(step)
            found = [Violation(self.name, part, s) for part in said for s in said[part]]
        return found

    def close(self) -> list[Violation]:
        return []

    def _lengths(self, after: Snapshot) -> list[str]:
        """Every running request holds what the caller gave it, and nothing else runs."""
        found = []
        clients = self._world.clients
        running = {client.request for client in self._world.running()}
        for request in running ^ after.requests.keys():
            should = "running" if request in running else "gone"
            found.append(f"request {request} runs: it should be {should}.")
        for request in running & after.requests.keys():
            client, view = clients[request], after.requests[request]
            if view.length != client.length:
                said = f"{client.length} positions; it has {view.length}"
                found.append(f"{client.name} should have {said}.")
            if view.pending != len(client.drafts):
                said = f"{len(client.drafts)} drafts pending; it has {view.pending}"
                found.append(f"{client.name} should have {said}.")
        return found

    def _hit(self, step: Step) -> list[str]:
        """An admission finds the longest prefix that may be reused."""
        if step.submitted is None:
            return []
        prefixes = cached_prefixes(step.before.cached).values()
        want = longest_hit(step.submitted.tokens, prefixes, self._world.geometry)
        if step.hit == want:
            return []
        return [
            f"{step.submitted.name} should hit {want} tokens, the longest cached prefix of whole "
            f"logical pages that ends on a checkpoint; it hit {step.hit}."
        ]

    def _retracted(self, step: Step) -> list[str]:
        if step.retracted is None or list(step.retracted[1]) == step.retracted[0].tokens:
            return []
        client, tokens = step.retracted
        return [
            f"Retracting {client.name} should return its {len(client.tokens)} tokens; it "
            f"returned {len(tokens)}, or others."
        ]

    def _insert(self, client: Client, after: Snapshot) -> list[str]:
        """Whole pages up to the last checkpoint are left in the cache."""
        geometry = self._world.geometry
        step = geometry.mamba_track_interval
        want = client.length // step * step
        prefixes = cached_prefixes(after.cached).values()
        # One token more, since a hit never covers a whole request.
        got = longest_hit([*client.tokens[:want], -1], prefixes, geometry)
        if got == want:
            return []
        return [f"{client.name} should leave {want} tokens in the cache; {got} are there."]

    def _evicted(self, step: Step) -> list[str]:
        """An evict frees what was asked for, or all that nobody holds."""
        if step.evicted is None:
            return []
        asked, went = step.evicted
        gone = step.after.evicted_pages - step.before.evicted_pages
        freed = len(step.after.free_pages - step.before.free_pages)
        evictable = len(_evictable_pages(step.before))
        if went >= min(asked, evictable) and went == gone == freed:
            return []
        return [
            f"Evicting {asked} of {evictable} evictable pages should free {min(asked, evictable)} "
            f"or more; it returned {went}, counted {gone} and freed {freed}."
        ]

    def _outputs(self, step: Step) -> list[str]:
        """Each output stands for those positions of its request whose output was wanted."""
        world, found = self._world, []
        layers, width = len(world.shape.dsa_layers), world.geometry.selection_width
        # In the order of the call, and a decode of several tokens is as many calls.
        asked = cycle(step.wrote.items())
        for (context, output), (request, (start, _)) in zip(step.outputs, asked, strict=False):
            stop = len(context)
            if step.text.startswith("decode"):
                start = stop - 1
            elif step.text.startswith("extend") and not world.stamped:
                first = outputs_from(world.options, start, stop)
                start = stop - 1 if first is None else first
            # A stamped run has none.
            count = 0 if world.stamped else stop - start
            got = (tuple(output.selected.shape), tuple(output.logits.shape))
            shapes = ((layers, count, width), (count, world.shape.vocab))
            begins = start if world.stamped else output.start
            if (output.request, begins, got) != (request, start, shapes):
                found.append(
                    f"'{step.text}' should give outputs of request {request} from position "
                    f"{start}, of shapes {shapes}; it gave those of request {output.request} from "
                    f"{output.start}, of shapes {got}."
                )
        return found

    def _refusal(self, step: Step) -> list[str]:
        """OutOfMemory changes nothing but what it evicted, and comes only when all is used."""
        if step.refused is None or step.wrote:
            return []
        before, after = step.before, step.after
        found = [
            f"Running out of memory should not change request {request}."
            for request in before.requests.keys() | after.requests.keys()
            if before.requests.get(request) != after.requests.get(request)
        ]
        # What a restore needs is the restore oracle's business.
        if self._shares and step.tier is None and self._has_room(step):
            found.append(
                f"'{step.text}' should succeed: {spare_pages(before)} pages and "
                f"{len(before.free_states)} states were free, and "
                f"{len(_evictable_pages(before))} pages evictable."
            )
        return found

    def _has_room(self, step: Step) -> bool:
        """Whether the refused step's needs, counted generously, could have been met.  A state
        for each position's checkpoint and draft is more than any step takes; a request that has
        no state yet takes one, and one in which to keep its next checkpoint."""
        world, before = self._world, step.before
        if any(request not in before.requests for request in step.calls):
            # The only evictable state may be the checkpoint that the request itself resumes at.
            slots = before.hot is None or len(before.hot.free_device) >= world.hot_pages
            running = len(before.requests)
            return slots and running < world.options.max_requests and bool(before.free_states)
        pages = states = 0
        for request in step.calls:
            client, view = world.clients[request], before.requests[request]
            stop = len(client.tokens) + max(8, self._ahead)
            pages += pages_for(stop, world.geometry) - len(view.pages)
            states += _states_within(view, stop, world) + 2 * (view.state_slot is None)
        return pages <= spare_pages(before) + len(_evictable_pages(before)) and states <= len(
            before.free_states
        ) + _evictable_states(before)


def _states_within(view: RequestView, stop: int, world: World) -> int:
    interval = world.geometry.mamba_track_interval
    return stop // interval - view.length // interval + world.geometry.max_drafts + 1


def _evictable_pages(snapshot: Snapshot) -> set[int]:
    return {page for node in snapshot.cached if not node.locks for page in node.pages}


def _evictable_states(snapshot: Snapshot) -> int:
    return sum(len(node.checkpoints) for node in snapshot.cached if not node.locks)
