"""The protocol that every engine stands behind: reference, optimized or foreign.

An engine runs in one of two ways.  With a *model* it computes keys, states,
selections and logits from tokens.  In a *stamped* run the caller hands it the
rows to store (`Rows`), whose payload says who wrote them, so that whatever is
read later names its writer; the engine needs no hook for that, only its usual
store path.  Which of the two an engine can do stands in `capabilities`.

Words and units are those of docs/architecture.md and `reference.geometry`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal, Protocol, get_args

from torch import Tensor

from reference.geometry import Geometry, ModelShape
from reference.handover import Handover as Handover
from reference.handover import Places as Places
from reference.handover import Tokens as Tokens
from reference.views import CachedNode as CachedNode
from reference.views import HotBufferView as HotBufferView
from reference.views import HotSnapshot as HotSnapshot
from reference.views import Occupancy as Occupancy
from reference.views import RequestId as RequestId
from reference.views import RequestView as RequestView
from reference.views import Snapshot as Snapshot
from reference.views import TieredPrefix as TieredPrefix
from reference.views import TierSnapshot as TierSnapshot

Weights = Mapping[str, Tensor]
"""float32 tensors under the names of docs/model.md; an engine may keep them uncopied."""


PageOrder = Literal["reuse", "high", "permuted"]
"""Which free page is handed out: the one freed last, the highest, or by a fixed random order."""

CopyOrder = Literal["early", "late", "random"]
"""When an engine on a CPU makes the copies that a step orders on the side stream: as soon as they
are ordered, not before something waits for them, or one by one between the two."""


class Capability(StrEnum):
    """What an engine can do; a target skips, and says so, what is missing.

    CHUNKS            prefills a prompt in several chunks; without it, in one.
    ANY_CHUNK         a chunk may end anywhere; without it, one that leaves its prompt unfinished
                      ends with a logical page.
    ANY_DRAFTS        a verify takes any number of drafts up to `max_drafts`, an accept may keep
                      none, and requests decode too; without it, with drafts, a verify takes
                      `max_drafts` always, for which it may want twice the room, an accept keeps
                      one at least, and nobody decodes.
    EVERY_CHECKPOINT  keeps the KDA state at every `mamba_track_interval` that a step passes, and
                      leaves a request's pages up to the last of them in the cache; without it, at
                      those that it likes.
    FRUGAL_EVICTION   evicts no more than a step needs; without it, also what an estimate wants.
    KEEPS_AGE         the rest of a cached prefix that another one cuts stays as old as it was;
                      without it, it may become recent.
    HOT_AHEAD         under HiSparse a request has its whole hot buffer from its submit on, with its
                      newest position in it from the end of its prompt on, and each logical page a
                      host page; without it, all three come as the first row is to be stored there.
    ANY_CELLS         a selection may hold cells that name no position, and repeat positions;
                      without it, a request longer than its hot buffer selects topk different ones.
    """

    STAMPED = "stamped"
    MODEL = "model"
    PREFIX_SHARING = "prefix_sharing"
    CHUNKS = "chunks"
    ANY_CHUNK = "any_chunk"
    ANY_DRAFTS = "any_drafts"
    EVERY_CHECKPOINT = "every_checkpoint"
    FRUGAL_EVICTION = "frugal_eviction"
    KEEPS_AGE = "keeps_age"
    VERIFY = "verify"
    RAW = "raw"
    HISPARSE = "hisparse"
    HOT_AHEAD = "hot_ahead"
    ANY_CELLS = "any_cells"
    HOST_TIER = "host_tier"
    TRANSFER = "transfer"


class Component(StrEnum):
    """The stored parts of a token or prefix.

    KV     one row for a position, in the geometry's row format.  Under HiSparse these are the
           rows on the host, of all positions but a newest one that is not saved yet.
    INDEX  one row for a closed group: index_dim key bytes, then a float32 scale.
    TAIL   one row for a position after the last closed group: bf16 key, then bf16 gate.
    STATE  one row for a request: the float32 KDA state after all its positions.
    HOT    one row for a slot of a request's hot buffer, the newest position's behind them;
           under HiSparse only.
    """

    KV = "kv"
    INDEX = "index"
    TAIL = "tail"
    STATE = "state"
    HOT = "hot"


class ContractError(Exception):
    """The base of what an engine raises on purpose."""


class OutOfMemory(ContractError):
    """No pages, state slots or request slots are left even after eviction; the call changed
    nothing but what it evicted.  Finish, abort or retract a request, then call again."""


class InvalidCall(ContractError):
    """The call breaks the contract (unknown request, stop before start, too many drafts, a
    token that is no integer, an option out of its range); nothing was changed."""


def _require_counts(options: object, **least: int) -> None:
    """Raises InvalidCall unless these options are integers of at least so much.  Numpy's are
    refused: a size computed from a narrow one would overflow."""
    for name, minimum in least.items():
        value = getattr(options, name)
        if type(value) is not int or value < minimum:
            raise InvalidCall(f"{name} is {value!r}: set it to an int of at least {minimum}.")


def _require_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raises InvalidCall unless an option is one of `choices`."""
    if value not in choices:
        raise InvalidCall(f"{name} is {value!r}: choose one of {', '.join(choices)}.")


@dataclass(frozen=True, slots=True, kw_only=True)
class HiSparse:
    """All KV rows on the host, and a hot buffer of `geometry.device_buffer_size` rows for each
    running request on the device.  Index rows, tails and states stay where they are.

    Fields:
        device_pages: physical pages of hot rows, padding page 0 included.
        host_pages: logical pages of host rows, padding page 0 included.
        copies: when they are made; "random" is drawn from the engine's seed.

    Raises:
        InvalidCall: for a memory with no page beside its padding, or an unknown order.  An engine
            raises it besides where `device_pages` are too few for one hot buffer.
    """

    device_pages: int
    host_pages: int
    copies: CopyOrder = "late"

    def __post_init__(self) -> None:
        _require_counts(self, device_pages=2, host_pages=2)
        _require_choice("copies", self.copies, get_args(CopyOrder))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTier:
    """Memory on the host for copies of cached prefixes, padding not needed.

    Fields:
        pages: logical pages, each with its KV and index rows; states: KDA checkpoints.
    """

    pages: int
    states: int

    def __post_init__(self) -> None:
        _require_counts(self, pages=0, states=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """How large the pools are and how hostile the memory is.

    Fields:
        pages: logical pages of the token pool, padding page 0 included.
        state_slots: rows of the KDA state pool, padding slot 0 included; running requests
            and checkpoints share them.
        max_requests: requests that may run at once.
        page_order: of logical pages and state slots; an engine may hand out those of other
            memories in other orders, so that ids that belong together do not stay together.
        poison: fill fresh and freed memory with NaN bit patterns (every byte 0xFF).
        seed: seeds "permuted".
        ape: [dsa_layers, kpool, index_dim] float32, the position weights of a stamped run;
            None means zeros.  A model run takes its own from the weights.
        backend: kernels of the optimized engine, by name; "torch" or "triton".
        hisparse: None keeps all KV rows on the device.
        host_tier: None means that `back_up` and `restore` are not offered.
        kv_memory: [kv_bytes(...)] uint8 in which the engine keeps its KV pool, such as memory
            that it shares with another process; None lets it allocate its own.

    Raises:
        InvalidCall: for a size that has no room for its padding, no request at all, a negative
            seed or an unknown order.  An engine raises it besides for a backend that it does not
            have, and for an `ape` or `kv_memory` of another shape.
    """

    pages: int
    state_slots: int
    max_requests: int
    page_order: PageOrder = "reuse"
    poison: bool = True
    seed: int = 0
    ape: Tensor | None = None
    backend: str = "torch"
    hisparse: HiSparse | None = None
    host_tier: HostTier | None = None
    kv_memory: Tensor | None = None

    def __post_init__(self) -> None:
        _require_counts(self, pages=1, state_slots=1, max_requests=1, seed=0)
        _require_choice("page_order", self.page_order, get_args(PageOrder))


def kv_bytes(geometry: Geometry, shape: ModelShape, options: EngineOptions) -> int:
    """Bytes of an engine's KV pool, padding included; under HiSparse it is the host's."""
    pages = options.hisparse.host_pages if options.hisparse else options.pages
    rows = len(shape.dsa_layers) * pages * geometry.logical_page_size
    return rows * geometry.row_format.row_bytes(shape.latent)


def components(options: EngineOptions) -> tuple[Component, ...]:
    """What an engine with these options stores."""
    return tuple(c for c in Component if options.hisparse or c is not Component.HOT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """What a stamped run stores for n positions.  In an extend or verify they are the n
    consecutive positions of one chunk; in a decode the one new position of each of n requests.
    All are dense tensors on the engine's device; gradients are dropped.

    Fields:
        kv: [dsa_layers, n, latent] float32.
        key: [dsa_layers, n, index_dim] float32, after the layer norm.
        gate: [dsa_layers, n, index_dim] float32.
        state: [m, kda_layers, state_width] float32.  In an extend: the state after each prefix
            length of `geometry.state_positions(start, stop)`.  In a decode: after the new
            position of each request (m = n).  In a verify: after each draft (m = n).
        selected: [dsa_layers, n, selection_width] int64, in a decode under HiSparse: what each
            layer selects for the new position; any integers, of which those that are no
            position of the request are void.
    """

    kv: Tensor
    key: Tensor
    gate: Tensor
    state: Tensor
    selected: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Admission:
    """`hit`: tokens found in the cache, a whole number of logical pages that ends on a KDA
    checkpoint and is shorter than the request's tokens."""

    hit: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """Prefill of `request` from its present length up to position `stop` (exclusive).

    Fields:
        rows: the rows to store (stamped run), else None.
        outputs_from: first position whose selection and logits are wanted; None for the last
            position of the chunk alone.
    """

    request: RequestId
    stop: int
    rows: Rows | None = None
    outputs_from: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafts:
    """Draft `tokens` (at most max_drafts) of `request`, checked in one step.  They take the
    positions from its present length on; `accept` says how many stay."""

    request: RequestId
    tokens: Tokens
    rows: Rows | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutput:
    """What a step computed for the n positions start .. start + n - 1 of one request; n is 0
    in a stamped run.

    Fields:
        selected: [dsa_layers, n, selection_width] int64.  The positions of the selected groups,
            ascending, then the tail, then -1.
        logits: [n, vocab] float32.
        misses: [dsa_layers, n] int64, in a decode under HiSparse: rows swapped in for it; the n
            is 1 in a stamped run too.
        attended: [dsa_layers, 1, selection_width, row bytes] uint8, in a stamped decode under
            HiSparse: the device rows at which attention looks for `Rows.selected`, as they are
            after the swap-in; zeros in void cells.
    """

    request: RequestId
    start: int
    selected: Tensor
    logits: Tensor
    misses: Tensor | None = None
    attended: Tensor | None = None


def proceed(what: str) -> None:
    """Lets a copy of the host tier go on."""


class Engine(Handover, Protocol):
    """One engine.  Calls either succeed or raise a ContractError and change nothing.

    Tokens and rows are copied on entry, and what a call returns is the caller's own (but `raw`,
    which is a view).  Counts, positions and layers are integers; a bool is none.
    """

    geometry: Geometry
    shape: ModelShape
    capabilities: frozenset[Capability]

    def submit(self, request: RequestId, tokens: Tokens) -> Admission:
        """Admit a request; match its tokens with the cache, lock what it shares, and start
        its state from the hit's checkpoint.  Its length is then the hit.  Takes a ring row and
        a state slot; raises OutOfMemory without one, and InvalidCall without tokens."""
        ...

    def extend(self, chunks: Sequence[Chunk]) -> list[StepOutput]:
        """Prefill one chunk of each of several requests in one step, allocating pages (the
        least recently used cached prefixes are evicted when none is free).  A request whose
        prompt is complete shares its whole pages with the tree at once."""
        ...

    def decode(
        self, requests: Sequence[RequestId], tokens: Tokens, rows: Rows | None = None
    ) -> list[StepOutput]:
        """Append one token to each request and run one step over the batch."""
        ...

    def verify(self, drafts: Sequence[Drafts]) -> list[StepOutput]:
        """Run draft tokens of several requests in one step.  Nothing else may happen to these
        requests before `accept` (but abort, retract or finish, which reject all)."""
        ...

    def accept(self, request: RequestId, count: int) -> None:
        """Keep the first `count` pending drafts; the rest are rejected and their rows will be
        written again.  Raises OutOfMemory if a checkpoint that the kept ones reach finds no
        state slot; all drafts are then still pending."""
        ...

    def finish(self, request: RequestId) -> None:
        """Leave the whole pages of the request, up to its last checkpoint, in the cache; free
        the rest."""
        ...

    def abort(self, request: RequestId) -> None:
        """Drop the request at once; what it shared stays, what it owned is freed."""
        ...

    def retract(self, request: RequestId) -> tuple[int, ...]:
        """Free the request's memory as `finish` does, and return all its tokens, to be
        submitted again later."""
        ...

    def evict(self, pages: int) -> int:
        """Evict at least `pages` unlocked cached pages, least recently used first, if there
        are so many; returns how many went."""
        ...

    def back_up(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        """Copy the longest cached prefix of `tokens`, all of them at most, that can be resumed
        to the host tier, with all its components; the tier's least recently used prefixes go to
        make room.  One that is there already is used, not copied.  Returns its length; 0 where
        there is none or the whole tier is too small for it, and then nothing goes.

        `before` is called with a few words before each allocation and each copy.  What it raises
        passes through; the prefix then stands in both tiers as it did before, or is gone from
        the one that was to be filled.  It may look on by `inspect` and `raw`; any other call of
        the engine from inside it raises InvalidCall and changes nothing."""
        ...

    def restore(self, tokens: Tokens, *, before: Callable[[str], None] = proceed) -> int:
        """Bring the longest prefix of `tokens`, all of them at most, that stands in the host tier
        back into the cache, with all its components; the least recently used cached prefixes are
        evicted to make room.  One that is cached already is used, not copied.  Returns its
        length, 0 where there is none.  `before` as in `back_up`.  Raises OutOfMemory when there
        is no room."""
        ...

    def read(
        self, request: RequestId, component: Component, layer: int, start: int, stop: int
    ) -> Tensor:
        """[rows, row bytes] uint8: rows of a request by the engine's own read path (page
        table, gather).  `layer` counts within the component's own layers (DSA, or KDA for
        STATE).  start and stop are positions for KV and TAIL, groups for INDEX, 0 and 1 for
        STATE, slots for HOT."""
        ...

    def raw(self, component: Component, layer: int) -> Tensor:
        """uint8 view of a layer's whole buffer.  The buffer never moves, so a view also shows
        what is stored after it was taken.

        KV: [locs, row bytes].  INDEX: [pages, index page bytes].  TAIL: [request slots,
        ring_size, 4 * index_dim], a key's bytes and then a gate's.  STATE: [slots,
        4 * state_width].  Under HiSparse KV: [host rows, row bytes] and HOT: [device rows, row
        bytes]."""
        ...

    def inspect(self) -> Snapshot:
        """Page tables, owners and counts, at this moment."""
        ...


class EngineFactory(Protocol):
    """Builds an engine.  weights None asks for a stamped engine."""

    def __call__(
        self,
        geometry: Geometry,
        shape: ModelShape,
        options: EngineOptions,
        weights: Weights | None = None,
    ) -> Engine: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A geometry, and a shape, that an engine can be built with."""

    geometry: Geometry
    shape: ModelShape


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A named engine that a campaign can run: its factory, and what it can do.

    Fields:
        sizes: all that it can be built with, the plainest first; none if it takes whatever is
            legal.
        isolated: it may end the process that it runs in, so each execution has one of its own.
        hot: makes the system that takes its place in runs that are always with HiSparse, if that
            is an engine of its own.
    """

    name: str
    version: str
    factory: EngineFactory
    capabilities: frozenset[Capability] = field(default_factory=frozenset)
    sizes: tuple[Sizes, ...] = ()
    isolated: bool = False
    hot: Callable[[], System] | None = None
