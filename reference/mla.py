"""Multi-head latent attention over selected positions, absorbed and without RoPE.

Specifies the attention of docs/model.md (DeepSeek-V2's MLA, arXiv 2405.04434, in the absorbed
form: keys and values are both the latent row).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reference.geometry import ModelShape
from reference.norms import rms

GATHER_BLOCK = 1 << 23
"""Most gathered row values held at once."""


def compressed_query(y: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """c_q [n, q_lora], which the attention's and the index's queries share."""
    return rms(y @ w["wqa"].T, w["q_norm"])


def attention_query(c_q: Tensor, w: Mapping[str, Tensor], shape: ModelShape) -> Tensor:
    """q [n, heads, latent]."""
    return (c_q @ w["wqb"].T).view(len(c_q), shape.heads, shape.latent)


def latent_row(y: Tensor, w: Mapping[str, Tensor]) -> Tensor:
    """[n, latent] rows, before the rounding of their stored format."""
    return rms(y @ w["wkv"].T, w["kv_norm"])


def attend(q: Tensor, rows: Tensor, selected: Tensor) -> Tensor:
    """Attention outputs [n, heads, latent].

    Arguments: q [n, heads, latent]; rows [positions, latent] as stored; selected [n, width]
    int64, where -1 is no position.
    """
    width = max(1, int((selected >= 0).sum(1).max())) if len(selected) else 1
    selected = selected[:, :width]
    block = max(1, GATHER_BLOCK // (width * rows.shape[-1]))
    parts = [
        _attend(part, rows[chosen.clamp(min=0)], chosen >= 0)
        for part, chosen in zip(torch.split(q, block), torch.split(selected, block), strict=True)
    ]
    return torch.cat(parts)


def _attend(q: Tensor, rows: Tensor, valid: Tensor) -> Tensor:
    """q [n, heads, latent], gathered rows [n, width, latent], valid [n, width]."""
    logit = q @ rows.mT * rows.shape[-1] ** -0.5
    weight = torch.softmax(logit.masked_fill(~valid[:, None], -torch.inf), -1)
    return weight @ rows
