"""A KDA layer: short convolution, gated delta rule, output gate (Kimi Linear, arXiv 2510.26692).

The state of a request is a row of the state pool: the matrix [heads, key, value], then the last
conv_width - 1 inputs of the convolution, oldest first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from optimized.kernels import kda_decode
from optimized.step import Batch
from optimized.tiles import EPSILON, by_tiles, rms
from reference.contract import Weights
from reference.geometry import ModelShape


class KdaLayer:
    """Layer `layer` of the model, the `index`-th of the KDA layers."""

    def __init__(
        self, shape: ModelShape, weights: Weights, layer: int, index: int, backend: str
    ) -> None:
        def weight(name: str) -> Tensor:
            return weights[f"layers.{layer}.{name}"]

        self.shape = shape
        self.index = index
        self.backend = backend
        self.norm = weight("norm")
        # one product for all inputs of the layer: u_q, u_k, u_v, decay, beta, output gate
        names = ("wq", "wk", "wv", "wf", "wb", "wg")
        self.w_in = torch.cat([weight(name) for name in names]).t().contiguous()
        self.splits = [shape.conv_channels, *(len(weight(name)) for name in names[3:])]
        self.conv = torch.cat([weight(f"conv_{name}") for name in "qkv"]).t().contiguous()
        self.rate = weight("a_log").exp()[:, None]
        self.dt_bias = weight("dt_bias")
        self.w_out = weight("wo").t().contiguous()
        self.matrix = shape.kda_heads * shape.kda_key_dim * shape.kda_value_dim

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """[rows, hidden] -> [rows, hidden]; advances the batch's states and fills its marks."""
        inputs, decay, beta, gate = by_tiles(self._project, x)
        q, k, v = by_tiles(self._activate, self._convolve(inputs, batch))
        out = self._scan(batch, q, k, v, decay, beta)
        return by_tiles(self._output, x, out, gate)[0]

    def _project(self, x: Tensor) -> tuple[Tensor, ...]:
        """Inputs of the convolution, decay a, beta and the output gate."""
        heads, key = self.shape.kda_heads, self.shape.kda_key_dim
        inputs, f, b, g = (rms(x, self.norm) @ self.w_in).split(self.splits, dim=1)
        pace = F.softplus(f + self.dt_bias).view(-1, heads, key)
        return inputs, torch.exp(-self.rate * pace), torch.sigmoid(b), torch.sigmoid(g)

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

    def _output(self, x: Tensor, out: Tensor, gate: Tensor) -> tuple[Tensor]:
        return (x + (out * gate) @ self.w_out,)


def _unit(rows: Tensor) -> Tensor:
    return rows * torch.rsqrt(rows.square().sum(-1, keepdim=True) + EPSILON)
