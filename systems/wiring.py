"""What the two instances of a transfer are built from, in words of the reference alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reference.contract import EngineOptions
from reference.geometry import Geometry, ModelShape
from reference.protocol import Completion, Side, Topology
from reference.transfer import heads_of, writers_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Wiring:
    """Both instances, and how requests move between them.

    Fields:
        geometries: of either side; they may differ in what a transfer need not share, as the
            size of the tail rings.
        options: of each rank's engine; ranks: how many there are.
        shape: the whole model's.
        chunks: pieces in which the pages of a request come.
        retry, abort_timeout, transfer_timeout: what a node waits, in the units of its clock.
    """

    geometries: Mapping[Side, Geometry]
    options: Mapping[Side, EngineOptions]
    ranks: Mapping[Side, int]
    shape: ModelShape
    chunks: int
    completion: Completion
    quarantine_limit: int
    retry: int
    abort_timeout: int
    transfer_timeout: int

    @property
    def topology(self) -> Topology:
        """Who writes to whom."""
        return Topology(
            pieces=self.chunks + 1,
            writers=writers_of(self.ranks[Side.PREFILL], self.ranks[Side.DECODE]),
            quarantine_limit=self.quarantine_limit,
        )

    def heads(self, side: Side, rank: int) -> range:
        """The KDA heads of a rank."""
        return heads_of(rank, self.ranks[side], self.shape)
