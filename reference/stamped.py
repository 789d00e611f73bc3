"""What a stamped request has been handed: its rows, by position."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from reference.contract import Rows
from reference.geometry import ModelShape


@dataclass(slots=True)
class Stamps:
    """Rows of a stamped request.  `states` holds those of the lengths it may yet stand at."""

    kv: Tensor  # [dsa_layers, n, latent]
    key: Tensor  # [dsa_layers, n, index_dim]
    gate: Tensor
    states: dict[int, Tensor]  # each [kda_layers, state_width]

    @classmethod
    def empty(cls, shape: ModelShape) -> Stamps:
        kv, key = (
            torch.empty(len(shape.dsa_layers), 0, width)
            for width in (shape.latent, shape.index_dim)
        )
        return cls(kv, key, key, {0: torch.zeros(len(shape.kda_layers), shape.state_width)})

    def write(self, rows: Rows, start: int, states: dict[int, Tensor]) -> None:
        """Store copies of rows from position `start` on, over what a rejected draft left there.
        `states` are of the lengths that they reach."""
        self.kv = torch.cat([self.kv[:, :start], rows.kv], 1)
        self.key = torch.cat([self.key[:, :start], rows.key], 1)
        self.gate = torch.cat([self.gate[:, :start], rows.gate], 1)
        reached = {length: state.clone() for length, state in states.items()}
        self.states = {start: self.states[start]} | reached
