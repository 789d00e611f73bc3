"""What two processes tell each other before the first room, and whether they fit.

A hello says who a process is, how its regions are laid out, and, for each transport, how they are
reached.  It comes from another machine, so nothing in it is believed before it is checked; a peer
that does not fit is refused with one sentence, before anything is mapped, registered or written.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec
from torch import uint8

from optimized.transfer.transport import Refused, Region
from reference.geometry import Geometry, RowFormat
from reference.protocol import Completion, Peer

VERSION = 1
"""Of the hello and of all messages; both ends must have the same."""

NONCE_BYTES = 16

Count = Annotated[int, msgspec.Meta(ge=1, le=2**47)]
"""Sizes and counts in a hello: none is zero, and no product of two overflows unnoticed."""
NUMBERS = 2**63
"""More than any number that is told to a peer."""
Natural = Annotated[int, msgspec.Meta(ge=0, le=NUMBERS - 1)]
LONGEST = 64
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=LONGEST)]
UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What decoding raises where a peer sent anything but what it should."""

Nonce = Annotated[bytes, msgspec.Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]
Reach = Annotated[bytes, msgspec.Meta(max_length=16 << 20)]


class Process(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One process for as long as its machine is up: a pid alone is soon somebody else's.

    Fields:
        boot: the kernel's boot id.
        namespace: inode of the pid namespace in which `pid` has a meaning.
        started: clock ticks from boot to its start.
    """

    boot: Name
    namespace: Natural
    pid: Count
    started: Natural

    @classmethod
    def current(cls) -> Process:
        """This process."""
        started = _start_time(os.getpid())
        assert started is not None, "a running process has an entry in /proc"
        return cls(_boot_id(), _pid_namespace(), os.getpid(), started)

    @property
    def is_visible(self) -> bool:
        """Whether this process can see the other one's life and death in its /proc."""
        return (self.boot, self.namespace) == (_boot_id(), _pid_namespace())

    def is_reaped(self) -> bool:
        """Whether the process is known to be over, and all that it held given back.  A zombie is
        not: threads of it may still run.  False where it cannot be seen from here."""
        return self.is_visible and _start_time(self.pid) != self.started


@cache
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def _pid_namespace() -> int:
    return os.stat("/proc/self/ns/pid").st_ino


def _start_time(pid: int) -> int | None:
    """Clock ticks from boot to the start of the process that has `pid` now; None without one."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    # the program's name, second and in brackets, may itself hold blanks and brackets
    return int(stat.rpartition(")")[2].split()[19])


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What an item of a region means: the part of a geometry that both ends must share."""

    kpool: Count
    physical_page_size: Count
    row_format: RowFormat

    @classmethod
    def of(cls, geometry: Geometry) -> Layout:
        """The layout of an engine with that geometry."""
        return cls(geometry.kpool, geometry.physical_page_size, geometry.row_format)


class RegionLayout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Shape of one region: its memory is [items, item_bytes] uint8."""

    name: Name
    items: Count
    item_bytes: Count

    @property
    def total_bytes(self) -> int:
        """Bytes of the whole region."""
        return self.items * self.item_bytes


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """One process's introduction; fields of later versions are ignored until `version` is read.

    Fields:
        epoch: how often this process has changed its addresses; what was told in an older epoch
            reaches nothing any more.
        nonce: drawn once a process, to tell it from whoever takes its name.
        ranks: tensor-parallel size of its instance.
        reach: for each transport by name, in its own form, how the regions are reached.
    """

    version: Natural = VERSION
    process: Process
    peer: Peer
    epoch: Natural
    nonce: Nonce
    ranks: Count
    completion: Completion
    layout: Layout
    regions: tuple[RegionLayout, ...]
    reach: dict[Name, Reach]

    def encode(self) -> bytes:
        """The bytes that `decode` takes."""
        return msgspec.msgpack.encode(self)


class _Versioned(msgspec.Struct):
    version: Natural


class Instance(NamedTuple):
    """What all ranks of an instance, and its peers, must agree on."""

    ranks: int
    completion: Completion
    geometry: Geometry


def introduce(
    me: Peer,
    instance: Instance,
    regions: Sequence[Region],
    *,
    reach: Mapping[str, bytes],
    epoch: int = 0,
    nonce: bytes | None = None,
) -> Hello:
    """This process's hello.

    Raises:
        ValueError: where a region's memory is not [items, item bytes] uint8, contiguous and of some
            size, or its name is none or another's.
    """
    names = [name for name, _ in regions]
    if len(set(names)) != len(names) or not all(1 <= len(name) <= LONGEST for name in names):
        raise ValueError(
            f"the regions are called {names}: give each a name of its own, of 1 to {LONGEST} "
            "characters."
        )
    for name, memory in regions:
        if not memory.numel():
            raise ValueError(f"region {name!r} is empty: leave it out at both ends.")
        if memory.dtype != uint8 or memory.ndim != 2 or not memory.is_contiguous():
            raise ValueError(
                f"region {name!r} is {memory.dtype} of shape {tuple(memory.shape)}: give a "
                "contiguous [items, item bytes] uint8 view of it."
            )
    return Hello(
        process=Process.current(),
        peer=me,
        epoch=epoch,
        nonce=secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce,
        ranks=instance.ranks,
        completion=instance.completion,
        layout=Layout.of(instance.geometry),
        regions=tuple(RegionLayout(name, *memory.shape) for name, memory in regions),
        reach=dict(reach),
    )


def decode(hello: bytes) -> Hello:
    """The hello in these bytes, each field within its limits.

    Raises:
        Refused: where it is none, or of another version.
    """
    try:
        version = msgspec.msgpack.decode(hello, type=_Versioned).version
        if version != VERSION:
            raise Refused(
                f"the peer speaks version {version} and this process version {VERSION}: run one "
                "release on both ends."
            )
        theirs = msgspec.msgpack.decode(hello, type=Hello)
    except UNREADABLE as error:
        raise Refused(
            f"the peer's hello cannot be read ({error}): hand over the bytes of its hello() "
            "unchanged."
        ) from error
    if not 0 <= theirs.peer.rank < theirs.ranks or not 0 <= theirs.peer.incarnation < NUMBERS:
        raise Refused(
            f"the peer calls itself {theirs.peer} of {theirs.ranks} ranks: number ranks from 0 "
            "and incarnations upwards, below 2**63."
        )
    if len({region.name for region in theirs.regions}) != len(theirs.regions):
        raise Refused("the peer names two regions alike: give each region a name of its own.")
    return theirs


def check(mine: Hello, theirs: Hello) -> None:
    """Whether two processes may move requests between each other.  Pools may differ in size.

    Raises:
        Refused: with one sentence that says what differs, and the cure.
    """
    if mine.peer.side == theirs.peer.side:
        raise Refused(
            f"both ends are on the {mine.peer.side.name.lower()} side: connect prefill with decode."
        )
    _same("tensor-parallel size", mine.ranks, theirs.ranks, "start both with the same size.")
    _same("rank", mine.peer.rank, theirs.peer.rank, "connect ranks of the same number.")
    _same(
        "completion style",
        mine.completion.name,
        theirs.completion.name,
        "choose one style for both.",
    )
    for field in Layout.__struct_fields__:
        _same(
            field,
            getattr(mine.layout, field),
            getattr(theirs.layout, field),
            "start both with one geometry.",
        )
    _same(
        "list of regions",
        [region.name for region in mine.regions],
        [region.name for region in theirs.regions],
        "register the same components, in the same order, on both.",
    )
    for here, there in zip(mine.regions, theirs.regions, strict=True):
        _same(
            f"item size in bytes of region {here.name!r}",
            here.item_bytes,
            there.item_bytes,
            "start both with one model and row format.",
        )


def _same(what: str, mine: object, theirs: object, cure: str) -> None:
    if mine != theirs:
        raise Refused(f"the {what} is {theirs} at the peer and {mine} here: {cure}")
