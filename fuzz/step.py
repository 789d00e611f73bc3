"""What an oracle sees of a run: the caller's own records, one step, and what is wrong with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from fuzz.stamps import U64, Stamper
from reference.contract import (
    ContractError,
    Engine,
    EngineOptions,
    OutOfMemory,
    RequestId,
    Snapshot,
    StepOutput,
    Weights,
)
from reference.geometry import Geometry, ModelShape
from reference.occupancy import hot_rows
from reference.restore import Step as TierStep

Text = Annotated[str, msgspec.Meta(max_length=4000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
"""Limits of what a saved case may say of a run."""

SPOILT = 0xA5
"""What the harness writes over what an engine returned, once it is judged: it is the caller's."""


class Violation(msgspec.Struct, frozen=True, omit_defaults=True):
    """One thing that is wrong.

    Fields:
        oracle, component: the failure's signature.
        sentence: all of it, in words.
        row, expected, actual: the place, what it should hold and what it holds, where one row
            shows it.
    """

    oracle: Name
    component: Name
    sentence: Text
    row: Text = ""
    expected: Text = ""
    actual: Text = ""

    @property
    def signature(self) -> str:
        """What two failures of one fault have in common."""
        return f"{self.oracle}/{self.component}"


class EngineCrash(Exception):
    """The engine raised what the contract does not allow: a finding, but of no oracle."""

    def __init__(self, call: str, cause: Exception) -> None:
        super().__init__(f"{call} raised {type(cause).__name__}: {cause}")
        self.violation = Violation("crash", f"{call}.{type(cause).__name__}", f"{self}.")


class InjectedFailure(Exception):
    """What the harness raises before an allocation or copy of the host tier."""


class InjectedInterrupt(BaseException):
    """What it raises as often: like a KeyboardInterrupt no Exception, and to be undone as well."""


class Guarded:
    """An engine whose unexpected exceptions come out as EngineCrash, so that the harness's own
    mistakes are not taken for the engine's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._engine, name)
        if not callable(value):
            return value

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return value(*args, **kwargs)
            except (ContractError, InjectedFailure):
                raise
            except Exception as cause:
                raise EngineCrash(name, cause) from cause

        self.__dict__[name] = call
        return call


@dataclass(slots=True)
class Client:
    """The caller's own record of one request.

    Fields:
        request: its id, which is also the order of submission.
        tokens: prompt, then decoded and accepted tokens.
        chain: stamp chain of `tokens` and then `drafts`.
        length: positions that the engine must hold.
        status: "running", "retracted" or "gone".
        drafts: tokens of a verify that were neither accepted nor rejected.
        best_hit: the longest hit that it ever had.
    """

    request: RequestId
    tokens: list[int]
    chain: U64
    length: int = 0
    status: str = "running"
    drafts: list[int] = field(default_factory=list)
    best_hit: int = 0

    @property
    def name(self) -> str:
        return f"request {self.request}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TierCall:
    """A call that moves a prefix between the device and the host tier.

    Fields:
        step: `back_up` or `restore`.
        request: the request whose first tokens `tokens` are; None at the end of a run.
        returned: what the call returned; None if it raised.
        moves: allocations and copies that it announced.
        failed_at: the words of the one that the harness made fail; None if there was none.
        raised: whether that failure came out of the engine.
    """

    step: TierStep
    request: RequestId | None
    tokens: tuple[int, ...]
    returned: int | None
    moves: int
    failed_at: str | None
    raised: bool


@dataclass(slots=True)
class Step:
    """One operation: what was asked, and the engine's own account of it.

    Fields:
        text: the operation, readable.
        before, after: the engine's account of its memory around the operation.
        calls: the requests of the operation; no other request's rows may change.
        wrote: the positions [start, stop) that each of them was told to store.
        outputs: each output with all tokens up to its last position (model runs).
        selections: of a decode under HiSparse what each of `outputs` looked up, [dsa_layers,
            selection_width] each.
        submitted, hit: the request admitted, and what the engine found in its cache.
        shared: how many tokens the submitted request has in common with its parent.
        inserted: requests that must have left their whole pages in the cache.
        retracted: the request taken back, and the tokens that the engine returned for it.
        evicted: pages asked for by an evict, and pages that went.
        tier: the back-up or restore, if it was one.
        refused: the engine's OutOfMemory, if it raised one.
        idle: whether there was nothing to do.
    """

    text: str
    before: Snapshot
    after: Snapshot
    calls: set[RequestId] = field(default_factory=set)
    wrote: dict[RequestId, tuple[int, int]] = field(default_factory=dict)
    outputs: list[tuple[tuple[int, ...], StepOutput]] = field(default_factory=list)
    selections: list[npt.NDArray[np.int64]] = field(default_factory=list)
    submitted: Client | None = None
    hit: int = 0
    shared: int = 0
    inserted: list[Client] = field(default_factory=list)
    retracted: tuple[Client, tuple[int, ...]] | None = None
    evicted: tuple[int, int] | None = None
    tier: TierCall | None = None
    refused: OutOfMemory | None = None
    idle: bool = False

    @property
    def about(self) -> set[RequestId]:
        """The requests that it concerns, whether or not it may change them."""
        if self.tier is None or self.tier.request is None:
            return self.calls
        return self.calls | {self.tier.request}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """The engine under test and what the caller knows of it.

    Fields:
        geometry: the engine's own, by which its addresses are judged.
        clients: every request ever submitted, by id.
        stamper: makes and checks the rows of a stamped run; chains also identify the contexts
            of a model run.
        weights: None in a stamped run.
    """

    engine: Engine
    geometry: Geometry
    shape: ModelShape
    options: EngineOptions
    stamper: Stamper
    clients: dict[RequestId, Client]
    weights: Weights | None = None

    @property
    def stamped(self) -> bool:
        return self.weights is None

    @property
    def hot_pages(self) -> int:
        """Device pages that each running request takes; 0 without HiSparse."""
        size, page_size = self.geometry.device_buffer_size, self.geometry.physical_page_size
        if self.options.hisparse is None or size is None:
            return 0
        return hot_rows(size, page_size) // page_size

    def running(self) -> list[Client]:
        """The clients that run now, in order of submission."""
        return [c for c in self.clients.values() if c.status == "running"]


class Oracle(Protocol):
    """Judges a run.  `name` is the `oracle` of all its violations."""

    name: str

    def check(self, step: Step) -> list[Violation]:
        """After each operation."""
        ...

    def close(self) -> list[Violation]:
        """Once, when the run has ended without a violation."""
        ...
