"""Sizes and units of a pooled KV cache, as one validated value object.

Every address formula takes its numbers from here, so the rules that a server
must check at start-up are the rules of this constructor.  Rejections follow
SGLang #42178 (k-pool) and its reviews: context parallelism with pooling, a
checkpoint interval checked against the *final* page size, and the hot-buffer
bound that HiSparse needs once a tail is selected on top of topk.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

Position = NewType("Position", int)
"""Index of a token within its request, from 0."""
Loc = NewType("Loc", int)
"""Row of one token in the token-to-KV pool.  Locs of logical page 0 are padding."""
PhysicalPage = NewType("PhysicalPage", int)
"""`physical_page_size` consecutive locs: the unit of the attention kernels."""
LogicalPage = NewType("LogicalPage", int)
"""`logical_page_size` consecutive locs: the unit of allocation, sharing and transfer."""
Group = NewType("Group", int)
"""Index of a pooled key within its request: group j covers positions j*kpool ..."""
IndexSlot = NewType("IndexSlot", int)
"""Row of one pooled key in the index pool."""


class GeometryError(ValueError):
    """A geometry that no engine may start with; the message names the cure."""


class RowFormat(StrEnum):
    """How one KV row of `latent` channels is stored.

    BF16        latent bf16 values.
    FP8_RAW     latent e4m3 values, saturated, without scales (TileLang's format).
    FP8_PACKED  latent e4m3 values, then one float32 scale for every 128 channels.
    """

    BF16 = "bf16"
    FP8_RAW = "fp8_raw"
    FP8_PACKED = "fp8_packed"

    def row_bytes(self, latent: int) -> int:
        """Bytes of one stored row of `latent` channels."""
        if self is RowFormat.BF16:
            return 2 * latent
        if self is RowFormat.FP8_RAW:
            return latent
        return latent + 4 * -(-latent // PACKED_BLOCK)


PACKED_BLOCK = 128
"""Channels that share one scale in RowFormat.FP8_PACKED."""


class IndexSharding(StrEnum):
    """In which unit an index pool is split over ranks; NONE replicates it."""

    NONE = "none"
    SLOTS = "slots"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """Address geometry of one engine.  With kpool 1 every formula is the unpooled one.

    Fields:
        kpool: consecutive tokens behind one pooled index key.
        physical_page_size: tokens of a physical page; also index slots of an index page.
        topk: positions selected for attention, the tail not counted.
        mamba_track_interval: tokens between two KDA checkpoints.
        max_drafts: most draft tokens of one verify step; widens the tail ring.
        round_scale: round a pooled key's scale up to a power of two.
        row_format: storage of a KV row.
        dcp_size: decode context parallel ranks.
        index_sharding: unit in which ranks split the index pool.
        device_buffer_size: rows of a request's hot buffer; None without HiSparse.

    Raises:
        GeometryError: with one sentence that names the cure.
    """

    kpool: int = 4
    physical_page_size: int = 64
    topk: int = 2048
    mamba_track_interval: int = 256
    max_drafts: int = 0
    round_scale: bool = True
    row_format: RowFormat = RowFormat.BF16
    dcp_size: int = 1
    index_sharding: IndexSharding = IndexSharding.NONE
    device_buffer_size: int | None = None

    def __post_init__(self) -> None:
        for name in ("kpool", "physical_page_size", "topk", "mamba_track_interval", "dcp_size"):
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}: set it to at least 1.")
        if self.max_drafts < 0:
            raise GeometryError(f"max_drafts is {self.max_drafts}: set it to 0 or more.")
        if self.dcp_size > 1 and self.kpool > 1:
            raise GeometryError(
                f"dcp_size {self.dcp_size} splits the {self.kpool} positions of a pooled key "
                "over ranks: set dcp_size to 1 or kpool to 1."
            )
        if self.physical_page_size % self.kpool:
            raise GeometryError(
                f"physical_page_size {self.physical_page_size} is no multiple of kpool "
                f"{self.kpool}: choose a page size that kpool divides."
            )
        if self.topk % self.kpool:
            raise GeometryError(
                f"topk {self.topk} is no multiple of kpool {self.kpool}: choose a topk that "
                "kpool divides, since whole groups are selected."
            )
        if self.mamba_track_interval % self.logical_page_size:
            raise GeometryError(
                f"mamba_track_interval {self.mamba_track_interval} is no multiple of the logical "
                f"page of {self.logical_page_size} tokens: set it to a multiple of "
                f"{self.logical_page_size}."
            )
        if self.index_sharding is IndexSharding.TOKENS and self.kpool > 1:
            raise GeometryError(
                f"an index pool sharded in token units holds one key for {self.kpool} tokens: "
                "shard it in slots, or set kpool to 1."
            )
        rows, least = self.device_buffer_size, self.topk + max(0, self.kpool - 2)
        if rows is None:
            return
        if type(rows) is not int:
            raise GeometryError(
                f"device_buffer_size is {rows!r}: set it to an int, or to None without HiSparse."
            )
        if rows < least:
            raise GeometryError(
                f"device_buffer_size {rows} leaves no row to evict: set it to "
                f"at least {least} (topk {self.topk} plus the tail less the newest token)."
            )

    @property
    def logical_page_size(self) -> int:
        """Tokens of a logical page."""
        return self.physical_page_size * self.kpool

    @property
    def index_page_size(self) -> int:
        """Index slots of an index page; its id is its logical page's id."""
        return self.physical_page_size

    @property
    def ring_size(self) -> int:
        """Rows of a request's tail ring; position p waits in row p % ring_size."""
        return self.kpool + self.max_drafts

    @property
    def topk_groups(self) -> int:
        """Most groups selected for one query."""
        return self.topk // self.kpool

    @property
    def selection_width(self) -> int:
        """Columns of a selection row: topk positions and the longest tail."""
        return self.topk + self.kpool - 1

    def index_page_bytes(self, index_dim: int) -> int:
        """Bytes of an index page: all key bytes, then all float32 scales."""
        return self.index_page_size * (index_dim + 4)

    def state_positions(self, start: int, stop: int) -> tuple[int, ...]:
        """Prefix lengths in (start, stop] at which the KDA state is kept: each
        checkpoint, and stop itself, ascending."""
        step = self.mamba_track_interval
        marks = list(range(start // step * step + step, stop + 1, step))
        if stop > start and (not marks or marks[-1] != stop):
            marks.append(stop)
        return tuple(marks)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """Sizes of the hybrid model; the defaults are GLM-5.3-Flash's.

    Layer i is DSA when i % dsa_period == dsa_period - 1, else KDA.
    """

    layers: int = 45
    dsa_period: int = 4
    vocab: int = 151552
    hidden: int = 4096
    heads: int = 64
    latent: int = 512
    q_lora: int = 1536
    index_heads: int = 32
    index_dim: int = 128
    kda_heads: int = 64
    kda_key_dim: int = 128
    kda_value_dim: int = 128
    conv_width: int = 4

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if getattr(self, name) < 1:
                raise GeometryError(f"{name} is {getattr(self, name)}: set it to at least 1.")
        if self.index_dim & (self.index_dim - 1):
            raise GeometryError(
                f"index_dim {self.index_dim} is no power of two: choose one, since pooled keys "
                "are multiplied by a Hadamard matrix."
            )

    @property
    def dsa_layers(self) -> tuple[int, ...]:
        """Layer ids of the DSA layers, ascending."""
        return tuple(i for i in range(self.layers) if i % self.dsa_period == self.dsa_period - 1)

    @property
    def kda_layers(self) -> tuple[int, ...]:
        """Layer ids of the KDA layers, ascending."""
        return tuple(i for i in range(self.layers) if i % self.dsa_period != self.dsa_period - 1)

    @property
    def conv_channels(self) -> int:
        """Channels that pass the short convolution: q, k and v of all KDA heads."""
        return self.kda_heads * (2 * self.kda_key_dim + self.kda_value_dim)

    @property
    def state_width(self) -> int:
        """float32 words of one layer's KDA state: the matrix [heads, key, value], then the
        convolution window [conv_width - 1, conv_channels], oldest input first."""
        matrix = self.kda_heads * self.kda_key_dim * self.kda_value_dim
        return matrix + (self.conv_width - 1) * self.conv_channels
