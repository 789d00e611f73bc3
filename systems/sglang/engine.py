"""SGLang's k-pool caches behind the contract: stamped runs, on a CPU.

The engine does what SGLang's scheduler and model runner do between pools, tree, planners and
kernels, and nothing else: it works out no address, repairs nothing and checks nothing that SGLang
computes.  What it says of its memory it reads from SGLang's own tables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from reference.contract import (
    Admission,
    Capability,
    Chunk,
    Component,
    Drafts,
    EngineFactory,
    EngineOptions,
    InvalidCall,
    RequestId,
    Rows,
    Sizes,
    Snapshot,
    StepOutput,
    Tokens,
    Weights,
)
from reference.geometry import Geometry, ModelShape, RowFormat
from reference.physical_pages import in_physical_pages
from systems.sglang import setting
from systems.sglang.accounts import Accounts, Running
from systems.sglang.adapter import NOT_OFFERED, Adapter, given
from systems.sglang.budget import Budget
from systems.sglang.forward import Forward
from systems.sglang.loader import Release
from systems.sglang.pools import Pools
from systems.sglang.reading import Reading
from systems.sglang.scheduler import Scheduler, tracked
from systems.sglang.states import States

INDEX_DIM, PHYSICAL_PAGE = 128, 64
"""What SGLang's kernels are written for."""
MOST_TOKENS = 4096
"""Positions of a request that its page table has room for."""
DRAFTS = 6
"""Of a verify: more than a group, so that one can close two; not a multiple, so that a ring's
turns and its groups fall apart."""


SHAPE = ModelShape(
    layers=2,
    dsa_period=2,
    vocab=2,
    hidden=2,
    heads=1,
    latent=16,
    q_lora=2,
    index_heads=1,
    index_dim=INDEX_DIM,
    kda_heads=1,
    kda_key_dim=4,
    kda_value_dim=4,
    conv_width=2,
)
"""Of stamped runs: the narrowest rows that SGLang's pools take."""


def sizes(release: Release) -> tuple[Sizes, ...]:
    """What the engine of a release can be built with.  Scales that are not rounded are a multiple
    of 1 / 448 in SGLang's kernels, and a quotient here: another last bit."""
    geometry = Geometry(
        kpool=4,
        physical_page_size=PHYSICAL_PAGE,
        topk=8,
        mamba_track_interval=4 * PHYSICAL_PAGE,
    )
    drafting = replace(geometry, max_drafts=DRAFTS)
    return tuple(Sizes(geometry=each, shape=SHAPE) for each in (geometry, drafting))


def capabilities(release: Release) -> frozenset[Capability]:
    """What the engine of a release can do."""
    logical = {Capability.RAW} if release.differences.logical_pages else set()
    own = (
        Capability.STAMPED,
        Capability.PREFIX_SHARING,
        Capability.CHUNKS,
        Capability.VERIFY,
    )
    return frozenset({*own, *logical})


def factory(release: Release) -> EngineFactory:
    """Builds engines of a release that this process has loaded.  One is built here and now, so
    that processes forked from this one find all of SGLang imported."""
    (size, *_) = sizes(release)
    least = EngineOptions(pages=2, state_slots=2, max_requests=1)
    SGLangEngine(release, size.geometry, size.shape, least)

    def build(
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None = None,
    ) -> SGLangEngine:
        if weights is not None:
            raise InvalidCall(NOT_OFFERED.format("model runs"))
        return SGLangEngine(release, geometry, shape, options)

    return build


class SGLangEngine(Adapter[Running]):
    """`reference.contract.Engine` tells what each call does, takes and returns."""

    def __init__(
        self, release: Release, geometry: Geometry, shape: ModelShape, options: EngineOptions
    ) -> None:
        _require_fitting(geometry, shape, options)
        if not release.differences.logical_pages:
            geometry, options = in_physical_pages(geometry, options)
        # one slot more for each request, in which SGLang keeps the state that it tracks
        options = replace(options, state_slots=options.state_slots + options.max_requests)
        super().__init__(geometry, shape, capabilities(release))
        setting.publish(geometry)
        self.pools = Pools(geometry, shape, options, release.differences, max_length=MOST_TOKENS)
        ape = options.ape
        if ape is None:
            ape = torch.zeros(len(shape.dsa_layers), geometry.kpool, shape.index_dim)
        head_gates = release.differences.head_gates
        self._forward = Forward(geometry, shape, self.pools, ape.float(), head_gates=head_gates)
        self._scheduler = Scheduler(self.pools, release.differences, drafts=geometry.max_drafts)
        self._states = States(geometry, self.pools)
        self._budget = Budget(geometry, self.pools)
        self._accounts = Accounts(geometry, self.pools)
        self._reading = Reading(geometry, shape, self.pools, self._forward.backend)
        self._retracted: dict[RequestId, Running] = {}

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        prompt = self._prompt(request, tokens)
        self._budget.require_request(self._running.values())
        again = self._retracted.pop(request, None)
        if again is not None and again.tokens != prompt:
            again = None
        req, hit = self._scheduler.admit(str(request), prompt, again.req if again else None)
        self._running[request] = Running(req=req, tokens=prompt, length=hit)
        self._accounts.hits += hit > 0
        self._settle()
        return Admission(hit=hit)

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        running = [self._find(chunk.request) for chunk in chunks]
        rows = [given(chunk.rows) for chunk in chunks]
        for each, chunk in zip(running, chunks, strict=True):
            if not each.length < chunk.stop <= len(each.tokens):
                raise InvalidCall(
                    f"request {chunk.request} has {each.length} of {len(each.tokens)} tokens "
                    f"stored: extend it to a position in between, not {chunk.stop}."
                )
        stops = [chunk.stop for chunk in chunks]
        self._budget.require_prefill(running, stops)
        starts = [each.length for each in running]
        batch = self._scheduler.prefill([each.req for each in running], stops)
        self._states.begin(batch)
        self._forward.extend(batch, _joined(rows))
        self._states.prefilled(batch, starts, stops, [part.state for part in rows], tracked(batch))
        for each, stop in zip(running, stops, strict=True):
            each.length = stop
            self._scheduler.prefilled(each.req, whole=stop == len(each.tokens))
        self._settle()
        return self._outputs([chunk.request for chunk in chunks], starts)

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        running, rows = [self._find(request) for request in requests], given(rows)
        for request, each in zip(requests, running, strict=True):
            if each.length < len(each.tokens):
                raise InvalidCall(f"request {request} is not prefilled yet: extend it first.")
        if self.geometry.max_drafts:
            raise InvalidCall("an engine with drafts does not decode: verify instead.")
        self._budget.require_decode(running)
        starts = [each.length for each in running]
        batch = self._scheduler.step([each.req for each in running], [int(t) for t in tokens])
        self._forward.decode(batch, rows)
        self._states.stepped(batch, rows.state)
        self._scheduler.stepped(batch)
        for each, token in zip(running, tokens, strict=True):
            each.tokens.append(int(token))
            each.length += 1
        self._settle()
        return self._outputs(requests, starts)

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        width = self.geometry.max_drafts
        running = [self._find(each.request) for each in drafts]
        rows = [given(each.rows) for each in drafts]
        for each, asked in zip(running, drafts, strict=True):
            _require_verifiable(each, asked, width)
        self._budget.require_verify(running)
        batch = self._scheduler.drafted([each.req for each in running])
        self._forward.verify(batch, _joined(rows))
        for each, asked, part in zip(running, drafts, rows, strict=True):
            each.drafts, each.states = [int(token) for token in asked.tokens], part.state.clone()
        self._settle()
        return self._outputs([each.request for each in drafts], [each.length for each in running])

    def accept(self, request: RequestId, count: int) -> None:
        each = self._find(request)
        if not 0 < count <= len(each.drafts) or each.states is None:
            raise InvalidCall(
                f"request {request} has {len(each.drafts)} drafts pending: accept one at least, "
                f"and no more, not {count}."
            )
        kept = each.drafts[:count]
        batch, (last,), (cached,) = self._scheduler.accepted([each.req], [kept])
        self._states.accepted(batch, each.states, last, cached)
        each.tokens += kept
        each.length += count
        each.drafts, each.states = [], None
        self._settle()

    def finish(self, request: RequestId) -> None:
        self._leave(request, keep=True)

    def abort(self, request: RequestId) -> None:
        self._leave(request, keep=False)

    def _leave(self, request: RequestId, *, keep: bool) -> None:
        self._scheduler.release(self._find(request).req, keep=keep)
        del self._running[request]
        self._settle()

    def retract(self, request: RequestId) -> tuple[int, ...]:
        each = self._find(request)
        self._scheduler.retract(each.req, sampled=each.length == len(each.tokens))
        self._retracted[request] = self._running.pop(request)
        self._settle()
        return tuple(each.tokens)

    def evict(self, pages: int) -> int:
        went = self._scheduler.evict(pages * self.geometry.logical_page_size)
        self._settle()
        return went // self.geometry.logical_page_size

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        return self._reading.read(self._find(request), component, layer, start, stop)

    def raw(self, component: Component, layer: int) -> Tensor:
        return self._reading.raw(component, layer)

    def inspect(self) -> Snapshot:
        return self._accounts.snapshot(self._running)

    def _settle(self) -> None:
        """What follows every call that may have freed or written memory."""
        self.pools.scrub()
        self._reading.refresh()

    def _outputs(self, requests: Sequence[RequestId], starts: Sequence[int]) -> list[StepOutput]:
        return [self._silent(*each) for each in zip(requests, starts, strict=True)]


def _require_verifiable(each: Running, asked: Drafts, width: int) -> None:
    """Raises InvalidCall unless these are drafts that SGLang would verify."""
    if not width or len(asked.tokens) != width:
        raise InvalidCall(
            f"request {asked.request} has {len(asked.tokens)} drafts: SGLang verifies the "
            f"geometry's max_drafts, {width}, always."
        )
    if each.length < len(each.tokens) or each.drafts:
        raise InvalidCall(
            f"request {asked.request} is not ready for drafts: extend it to the end of its "
            "prompt, and accept what is pending."
        )


def _joined(parts: Sequence[Rows]) -> Rows:
    """The rows of several chunks, one behind the other."""
    kv, key, gate = (
        torch.cat([getattr(part, name) for part in parts], dim=1) for name in ("kv", "key", "gate")
    )
    return Rows(kv=kv, key=key, gate=gate, state=torch.cat([part.state for part in parts]))


def _require_fitting(geometry: Geometry, shape: ModelShape, options: EngineOptions) -> None:
    """Raises InvalidCall where SGLang's kernels or pools want another size."""
    wants = {
        f"a physical page of {PHYSICAL_PAGE} tokens": geometry.physical_page_size == PHYSICAL_PAGE,
        "a kpool of 2 at least": geometry.kpool > 1,
        f"index keys of {INDEX_DIM} channels": shape.index_dim == INDEX_DIM,
        "bf16 rows": geometry.row_format is RowFormat.BF16,
        "as many channels of a KDA key as of its value": shape.kda_key_dim == shape.kda_value_dim,
        "all KV rows on the device": options.hisparse is None,
        "no host tier": options.host_tier is None,
        "a KV pool that it allocates": options.kv_memory is None,
    }
    for what, there in wants.items():
        if not there:
            raise InvalidCall(f"The SGLang engine needs {what}: build it so.")
