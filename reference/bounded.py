"""The layers of docs/model.md with their rounding errors: what a float32 engine may compute.

Twins of kda.py, mla.py, index.py and pooling.py, with a deviation on everything.  The rows of
an attention and the keys of an index are the engine's own stored ones, dequantised, and so
exact; what is bounded is the arithmetic around them.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from reference import rounding
from reference.geometry import Geometry, ModelShape
from reference.norms import EPSILON
from reference.pooling import hadamard
from reference.quant import E4M3_MAX, fp8_scale, quotient, round_bf16, round_e4m3
from reference.rounding import ELEMENTARY, LAMBDA, Approx, U, dot_variance, root_sum

STATE_BLOCK = 64
"""Steps of a recurrence whose states are held at once."""


class State(NamedTuple):
    """The KDA state of a prefix."""

    matrix: Approx  # [heads, key, value]
    window: Approx  # [conv_width - 1, conv_channels]


def kda(
    y: Approx, w: Mapping[str, Tensor], shape: ModelShape, state_at: Collection[int]
) -> tuple[Approx, dict[int, State]]:
    """A KDA layer: (mix [n, hidden], state after each prefix length of `state_at`)."""
    n, heads, dk, dv = len(y.mid), shape.kda_heads, shape.kda_key_dim, shape.kda_value_dim
    inputs = [rounding.linear(y, w[name]) for name in ("wq", "wk", "wv")]
    c_q, c_k, v = (
        rounding.silu(_convolve(u, w[taps])).view(n, heads, -1)
        for u, taps in zip(inputs, ("conv_q", "conv_k", "conv_v"), strict=True)
    )
    q = rounding.scale(rounding.unit(c_q, EPSILON), dk**-0.5)
    k = rounding.unit(c_k, EPSILON)
    rate = torch.exp(w["a_log"])[:, None].expand(heads, dk)
    rate_dev = (ELEMENTARY + 2 * U * w["a_log"].abs())[:, None] * rate
    bias = Approx.exact(w["dt_bias"].expand(n, -1))
    step = rounding.softplus(rounding.add(rounding.linear(y, w["wf"]), bias)).view(n, heads, dk)
    a = rounding.decay_exp(rounding.multiply(step, Approx(-rate, rate_dev)))
    beta = rounding.sigmoid(rounding.linear(y, w["wb"]))
    out, matrices = _recur(q, k, v, a, beta, state_at)
    gate = rounding.sigmoid(rounding.linear(y, w["wg"])).view(n, heads, dv)
    mix = rounding.linear(rounding.multiply(out, gate).flatten(), w["wo"])
    u = rounding.concat(inputs, dim=1)
    return mix, {m: State(matrices[m], _window(u, m, shape)) for m in matrices}


def _convolve(u: Approx, taps: Tensor) -> Approx:
    """Causal convolution of u [n, channels] with taps [channels, width]."""
    n, width = len(u.mid), taps.shape[-1]
    mid, variance, products = (torch.zeros_like(u.mid) for _ in range(3))
    for j in range(width):
        tap, shift = taps[:, j], width - 1 - j
        mid[shift:] += tap * u.mid[: n - shift]
        variance[shift:] += (tap * u.dev[: n - shift]).square()
        products[shift:] += (tap * u.mid[: n - shift]).square()
    return Approx(mid, (variance + dot_variance(products, mid, width)).sqrt())


def _window(u: Approx, length: int, shape: ModelShape) -> Approx:
    """The convolution's inputs before position `length`, zeros where there was none."""
    reach = shape.conv_width - 1
    last = u[slice(max(0, length - reach), length)]
    missing = (0, 0, max(0, reach - length), 0)
    return Approx(pad(last.mid, missing), pad(last.dev, missing))


def _recur(
    q: Approx, k: Approx, v: Approx, a: Approx, beta: Approx, state_at: Collection[int]
) -> tuple[Approx, dict[int, Approx]]:
    """The gated delta rule, with the variance of every entry of the state.

    One step takes an error D of the state to (I - beta k k^T) diag(a) D, and adds what the
    errors of a, beta, k, v and its own rounding contribute.
    """
    n, heads, dk = k.mid.shape
    matrix = v.mid.new_zeros(1, heads, dk, v.mid.shape[-1])
    variance = torch.zeros_like(matrix)
    kept = {0: Approx.exact(matrix[0])} if 0 in state_at else {}
    outs: list[Approx] = []
    for start in range(0, n, STATE_BLOCK):
        at = slice(start, start + STATE_BLOCK)
        step = _Steps(q[at], k[at], v[at], a[at], beta[at])
        matrices = torch.cat([matrix[-1:], _matrices(matrix[-1], step)])
        variances = _variances(variance[-1], step, matrices)
        matrix, variance = matrices[1:], variances
        outs.append(_read_out(step.q, matrix, variance))
        for length in state_at:
            if start < length <= start + len(matrix):
                i = length - start - 1
                kept[length] = Approx(matrix[i], variance[i].sqrt())
    return rounding.concat(outs), kept


class _Steps(NamedTuple):
    q: Approx  # [n, heads, key]
    k: Approx  # [n, heads, key]
    v: Approx  # [n, heads, value]
    a: Approx  # [n, heads, key]
    beta: Approx  # [n, heads]


def _matrices(matrix: Tensor, step: _Steps) -> Tensor:
    """[n, heads, key, value] states after each step."""
    decay, key = step.a.mid[..., None], step.k.mid[..., None]
    written, value = step.beta.mid[..., None, None] * key, step.v.mid[:, :, None]
    states: list[Tensor] = []
    for t in range(len(key)):
        matrix = decay[t] * matrix
        matrix = matrix + written[t] * (value[t] - key[t].mT @ matrix)
        states.append(matrix)
    return torch.stack(states)


def _variances(variance: Tensor, step: _Steps, matrices: Tensor) -> Tensor:
    """[n, heads, key, value] variances after each step, of the states matrices[1:]."""
    decay, key, strength = step.a.mid[..., None], step.k.mid[..., None], step.beta.mid
    strength = strength[..., None, None]
    faded = decay * matrices[:-1]
    key2, key_var, square = key.square(), step.k.dev[..., None].square(), faded.square()
    found = key.mT @ faded
    wanted = step.v.mid[:, :, None] - found
    wanted_var = step.v.dev[:, :, None].square() + key_var.mT @ square + (U * wanted).square()
    wanted_var = wanted_var + dot_variance(key2.mT @ square, found, key.shape[-2])
    of_decay = (step.a.dev[..., None] * matrices[:-1]).square() + U**2 * square
    of_write = (step.beta.dev[..., None, None] * key * wanted).square() + strength.square() * (
        key_var * wanted.square() + key2 * wanted_var
    )
    of_write += U**2 * (4 * (matrices[1:] - faded).square() + matrices[1:].square())
    decay2, stays, moves = decay.square(), 1 - 2 * strength * key2, strength.square() * key2
    result: list[Tensor] = []
    for t in range(len(key)):
        variance = decay2[t] * variance + of_decay[t]
        variance = stays[t] * variance + moves[t] * (key2[t].mT @ variance) + of_write[t]
        result.append(variance)
    return torch.stack(result)


def _read_out(q: Approx, matrix: Tensor, variance: Tensor) -> Approx:
    """o = S^T q [n, heads, value]."""
    query2, query_var, square = q.mid.square(), q.dev.square(), matrix.square()
    mid = (q.mid[:, :, None] @ matrix)[:, :, 0]
    total = (query2[:, :, None] @ variance + query_var[:, :, None] @ square)[:, :, 0]
    products = (query2[:, :, None] @ square)[:, :, 0]
    return Approx(mid, (total + dot_variance(products, mid, q.mid.shape[-1])).sqrt())


def compressed_query(y: Approx, w: Mapping[str, Tensor]) -> Approx:
    return rounding.rms(rounding.linear(y, w["wqa"]), w["q_norm"], EPSILON)


def latent_row(y: Approx, w: Mapping[str, Tensor]) -> Approx:
    return rounding.rms(rounding.linear(y, w["wkv"]), w["kv_norm"], EPSILON)


def key_and_gate(y: Approx, w: Mapping[str, Tensor]) -> tuple[Approx, Approx]:
    """Before their rounding to bf16."""
    key = rounding.layernorm(rounding.linear(y, w["wik"]), w["ln_g"], w["ln_b"], EPSILON)
    return key, rounding.linear(y, w["wgate"])


def rotate(x: Approx) -> Approx:
    """bf16(Had(x)) along the last axis."""
    width = x.mid.shape[-1]
    turned = rounding.linear(x.view(-1, width), hadamard(width)).view(*x.mid.shape)
    return rounding.rounded(turned, round_bf16)


def pooled(key: Approx, gate: Approx, ape: Tensor) -> Approx:
    """bf16(Had(pooled key)) [groups, dim] of the closed groups among n positions."""
    kpool, dim = ape.shape
    closed = slice(0, len(key.mid) // kpool * kpool)
    k, g = (rounding.rounded(x[closed], round_bf16).view(-1, kpool, dim) for x in (key, gate))
    z = g.mid + ape
    p = torch.softmax(z, 1)
    below = z.amax(1, keepdim=True) - z
    z_dev = root_sum(g.dev, ELEMENTARY + 2 * U * (z.abs() + below))
    # a weight moves by p_i ((1 - p_i) dz_i - the others' p dz)
    others = ((p * z_dev).square().sum(1, keepdim=True) - (p * z_dev).square()).clamp(min=0)
    p_dev = p * root_sum((1 - p) * z_dev, others.sqrt(), torch.full_like(p, 2 * U))
    mid = (p * k.mid).sum(1)
    variance = ((p * k.dev).square() + (p_dev * k.mid).square()).sum(1)
    variance = variance + dot_variance((p * k.mid).square().sum(1), mid, kpool)
    return rotate(rounding.rounded(Approx(mid, variance.sqrt()), round_bf16))


def fp8_scale_range(x: Approx, *, round_scale: bool) -> tuple[Tensor, Tensor]:
    """Lowest and highest scale [...] of rows within x."""
    low = (x.mid.abs() - x.bound).amax(-1)
    return (
        fp8_scale(low, round_scale=round_scale),
        fp8_scale(x.size.amax(-1), round_scale=round_scale),
    )


def index_query(
    c_q: Approx, y: Approx, w: Mapping[str, Tensor], shape: ModelShape, geometry: Geometry
) -> tuple[Approx, Approx]:
    """(dequantised query [n, index_heads, index_dim], head weights [n, index_heads] without
    the query's scale)."""
    heads = rounding.rounded(rounding.linear(c_q, w["wiq"]), round_bf16)
    rotated = rotate(heads.view(len(y.mid), shape.index_heads, shape.index_dim))
    low, high = fp8_scale_range(rotated, round_scale=geometry.round_scale)
    s = fp8_scale(rotated.mid.abs().amax(-1), round_scale=geometry.round_scale)[..., None]
    sure = rounding.rounded(rotated, lambda x: round_e4m3(quotient(x, s)) * s)
    # where the scale itself may differ, both values are within half a step of their inputs:
    # 1/16 of the value, or half the smallest e4m3 number
    top = high[..., None]
    step = torch.maximum(rotated.size / 16, top * 2**-10) + U * E4M3_MAX * top
    loose = rotated.bound + step + (sure.mid - rotated.mid).abs()
    bound = torch.where((low == high)[..., None], sure.bound / 2, loose)
    factor = shape.index_heads**-0.5 * shape.index_dim**-0.5
    weight = rounding.scale(rounding.linear(y, w["wiw"]), factor)
    return Approx.within(sure.mid, bound), weight


def scores(query: Approx, weight: Approx, keys: Tensor, scales: Tensor) -> Approx:
    """[n, groups] scores against stored keys [groups, dim] and scales.

    A group whose every dot product is surely negative scores exactly 0, with deviation 0.
    """
    dim, heads = keys.shape[1], weight.mid.shape[1]
    dot = torch.einsum("nhd,gd->nhg", query.mid, keys)
    spread = query.dev.square() + (dim + 2) * U**2 * query.mid.square()
    variance = torch.einsum("nhd,gd->nhg", spread, keys.square()) + (dim + 2) * (U * dot) ** 2
    reach = LAMBDA * variance.sqrt()
    part = dot.relu()
    part_dev = torch.maximum((dot + reach).relu() - part, part - (dot - reach).relu()) / LAMBDA
    score = torch.einsum("nh,nhg->ng", weight.mid, part)
    own = weight.dev.square() + (heads + 4) * U**2 * weight.mid.square()
    variance = torch.einsum("nh,nhg->ng", weight.mid.square(), part_dev.square())
    variance = variance + torch.einsum("nh,nhg->ng", own, (part + part_dev).square())
    return Approx(score * scales, variance.sqrt() * scales)


def attend(q: Approx, rows: Tensor, valid: Tensor) -> Approx:
    """Attention [n, heads, latent] of q over gathered rows [n, width, latent].

    An error e of the query moves the output by (covariance of the rows under the weights) e;
    an error of one weight moves it by that weight's share times the row's distance to it.
    """
    width, latent = rows.shape[1:]
    root = latent**-0.5
    logit = (q.mid @ rows.mT * root).masked_fill(~valid[:, None], -torch.inf)
    p = torch.softmax(logit, -1)
    out = p @ rows
    covariance = torch.einsum("nhw,nwc,nwd->nhcd", p, rows, rows)
    covariance = covariance - out[..., :, None] * out[..., None, :]
    inherited = (covariance.square() @ q.dev.square()[..., None])[..., 0] * root**2
    largest = logit.masked_fill(~valid[:, None], 0).abs().amax(-1, keepdim=True)
    products = (q.mid.square() @ rows.square().mT).amax(-1, keepdim=True) * root**2
    weight_var = dot_variance(products, largest, latent) + (ELEMENTARY + 4 * U * largest) ** 2
    share, square = p.square(), rows.square()
    apart = share @ square - 2 * out * (share @ rows) + out.square() * share.sum(-1, keepdim=True)
    variance = inherited + weight_var * apart.clamp(min=0)
    return Approx(out, (variance + dot_variance(share @ square, out, width)).sqrt())
