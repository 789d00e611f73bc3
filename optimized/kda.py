"""A KDA layer: short convolution, gated delta rule, output gate (Kimi Linear, arXiv 2510.26692).

The state of a request is a row of the state pool: the matrix [heads, key, value], then the last
conv_width - 1 inputs of the convolution, oldest first.

A tensor-parallel rank has some of the heads, and the layer computes the same bits for any number
of ranks: every product has the shape that it has for one head, what rounds by its place in an
array is given whole tiles, and the output's product runs over the heads of all ranks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.groups import Group
from optimized.heads import own_rows
from optimized.kernels import kda_decode
from optimized.step import Batch
from optimized.tiles import EPSILON, by_tiles, rms
from reference.contract import Weights
from reference.geometry import ModelShape


class KdaLayer:
    """Layer `layer` of the model, the `index`-th of the KDA layers; `shape` is the rank's."""

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights,
        layer: int,
        index: int,
        group: Group,
        backend: str,
    ) -> None:
        def weight(name: str) -> Tensor:
            return weights[f"layers.{layer}.{name}"]

        def own(name: str) -> Tensor:
            return own_rows(weight(name), group.rank, group.size)

        self.shape = shape
        self.index = index
        self.group = group
        self.backend = backend
        self.norm = weight("norm")
        # one product for all inputs of a head: u_q, u_k, u_v, decay, beta, output gate
        inputs = [own(name) for name in ("wq", "wk", "wv", "wf", "wb", "wg")]
        by_head = zip(*(rows.chunk(shape.kda_heads) for rows in inputs), strict=True)
        self.w_in = [torch.cat(rows).t().contiguous() for rows in by_head]
        self.columns = _by_input([len(rows) // shape.kda_heads for rows in inputs], shape.kda_heads)
        self.splits = [shape.conv_channels, *(len(rows) for rows in inputs[3:])]
        self.conv = torch.cat([own(f"conv_{name}") for name in "qkv"]).t().contiguous()
        self.rate = own("a_log").exp()[:, None]
        self.dt_bias = own("dt_bias")
        self.w_out = weight("wo").t().contiguous()
        self.matrix = shape.kda_heads * shape.kda_key_dim * shape.kda_value_dim

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; advances the batch's states and fills its marks."""
        inputs, decay, beta, gate = by_tiles(self._project, x)
        q, k, v = by_tiles(self._activate, self._convolve(inputs, batch))
        out = self._scan(batch, q, k, v, decay, beta)
        heads = torch.cat(self.group.gather(out * gate), dim=1)
        return by_tiles(self._output, x, heads)[0]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the convolution, decay a, beta and the output gate."""
        heads, key = self.shape.kda_heads, self.shape.kda_key_dim
        y = rms(x, self.norm)
        joined = torch.cat([y @ w for w in self.w_in], dim=1).index_select(1, self.columns)
        inputs, f, b, g = joined.split(self.splits, dim=1)
        pace = F.softplus(f + self.dt_bias).view(-1, heads, key)
        # a sigmoid of a view would treat the last few columns in another way than the rest
        b, g = b.contiguous().sigmoid(), g.contiguous().sigmoid()
        return inputs, torch.exp(-self.rate * pace), b, g

    def _convolve(self, inputs: Tensor, batch: Batch) -> Tensor:
        """[rows, conv_channels]: sum over the window, before the activation.  Multiplications
        and additions stay apart, since a fused one would round by its place in the array."""
        width = self.shape.conv_width
        out = torch.empty_like(inputs)
        for request, (first, stop) in enumerate(batch.row_spans):
            row = batch.states[batch.state_slots[request], self.index, self.matrix :]
            # window rows, then the request's own
            past = torch.cat((row.view(width - 1, inputs.shape[1]), inputs[first:stop]))
            total = past[: stop - first] * self.conv[0]
            for tap in range(1, width):
                total += past[tap : tap + stop - first] * self.conv[tap]
            out[first:stop] = total
            for mark in batch.marks_of(request):
                window = past[mark.count : mark.count + width - 1]
                mark.out[self.index, self.matrix :] = window.reshape(-1)
            row.copy_(past[stop - first :].reshape(-1))
        return out

    def _activate(self, conv: Tensor) -> tuple[Tensor, ...]:
        """q, k [rows, heads, key] normalised, v [rows, heads, value]."""
        heads, key, value = (
            self.shape.kda_heads,
            self.shape.kda_key_dim,
            self.shape.kda_value_dim,
        )
        q, k, v = F.silu(conv).split([heads * key, heads * key, heads * value], dim=1)
        q, k = (_unit(rows.reshape(-1, heads, key)) for rows in (q, k))
        return q * key**-0.5, k, v.reshape(-1, heads, value)

    def _scan(
        self, batch: Batch, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor
    ) -> Tensor:
        """[rows, heads * value]: one recurrent step for each time, over all requests that
        still have a row."""
        order, running, slots = batch.by_time
        streams = [rows[order].split(running) for rows in (q, k, v, decay, beta)]
        shape = (-1, self.shape.kda_heads, self.shape.kda_key_dim, self.shape.kda_value_dim)
        state = batch.states[:, self.index, : self.matrix].view(shape)
        out = []
        for time, step in enumerate(zip(slots, *streams, strict=True)):
            out.append(kda_decode.kda_decode(state, *step, backend=self.backend))
            for mark in batch.marks_at(time + 1):
                matrix = state[batch.state_slots[mark.request]]
                mark.out[self.index, : self.matrix] = matrix.reshape(-1)
        joined = torch.empty_like(v)
        joined[order] = torch.cat(out)
        return joined.flatten(1)

    def _output(self, x: Tensor, heads: Tensor) -> tuple[Tensor]:
        return (x + heads @ self.w_out,)


def _by_input(widths: list[int], heads: int) -> Tensor:
    """[columns] int64: the columns that are input by input and in each head by head, in an array
    that is head by head and in each input by input, `widths` wide."""
    place = torch.arange(heads * sum(widths)).view(heads, -1)
    return torch.cat([columns.flatten() for columns in place.split(widths, dim=1)])


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON)
