"""Weights: their shapes, random ones, and ones in closed form that retrieve.

The retrieval model needs no download.  Two layers: KDA's short convolution puts the previous
token's code beside the current one; the DSA layer's query is the current token, its key the
previous one, its value the token itself.  So it continues whatever followed the same token
earlier, and finds that only through the pooled index keys, as in the experiments of SGLang
#42178.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from reference.contract import Weights
from reference.geometry import Geometry, ModelShape


def weight_shapes(shape: ModelShape, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    """Every weight's name (docs/model.md) and shape."""
    s = shape
    keys, values = s.kda_heads * s.kda_key_dim, s.kda_heads * s.kda_value_dim
    kda = {
        "wq": (keys, s.hidden),
        "wk": (keys, s.hidden),
        "wv": (values, s.hidden),
        "conv_q": (keys, s.conv_width),
        "conv_k": (keys, s.conv_width),
        "conv_v": (values, s.conv_width),
        "wf": (keys, s.hidden),
        "dt_bias": (keys,),
        "a_log": (s.kda_heads,),
        "wb": (s.kda_heads, s.hidden),
        "wg": (values, s.hidden),
        "wo": (s.hidden, values),
    }
    dsa = {
        "wqa": (s.q_lora, s.hidden),
        "q_norm": (s.q_lora,),
        "wqb": (s.heads * s.latent, s.q_lora),
        "wkv": (s.latent, s.hidden),
        "kv_norm": (s.latent,),
        "wik": (s.index_dim, s.hidden),
        "ln_g": (s.index_dim,),
        "ln_b": (s.index_dim,),
        "wgate": (s.index_dim, s.hidden),
        "wiq": (s.index_heads * s.index_dim, s.q_lora),
        "wiw": (s.index_heads, s.hidden),
        "ape": (geometry.kpool, s.index_dim),
        "wo": (s.hidden, s.heads * s.latent),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "embed": (s.vocab, s.hidden),
        "final_norm": (s.hidden,),
        "unembed": (s.vocab, s.hidden),
        "logit_scale": (),
    }
    for layer in range(s.layers):
        parts = {"norm": (s.hidden,)} | (dsa if layer in s.dsa_layers else kda)
        shapes |= {f"layers.{layer}.{name}": size for name, size in parts.items()}
    return shapes


def random_weights(shape: ModelShape, geometry: Geometry, seed: int) -> Weights:
    """Random weights under which everything matters: decays in (0.5, 1), gates and attention
    far from uniform, selections that depend on the keys, logits that spread over nats."""
    generator = torch.Generator().manual_seed(seed)

    def draw(name: str, size: tuple[int, ...]) -> Tensor:
        short = name.rsplit(".", 1)[-1]
        if short == "logit_scale":
            return torch.tensor(3.0)
        if short in ("a_log", "dt_bias"):
            low, high = (math.log(0.2), math.log(0.6)) if short == "a_log" else (-0.5, 0.25)
            return low + (high - low) * torch.rand(size, generator=generator)
        noise = torch.randn(size, generator=generator)
        if short.endswith("norm") or short == "ln_g":
            return 1 + 0.1 * noise
        if short == "embed":
            return noise
        if short == "ln_b":
            return 0.1 * noise
        if short == "ape":
            return 0.5 * noise
        if short.startswith("conv"):
            return (0.4 + 0.3 * noise) * (1 - 2 * (torch.arange(size[-1]) % 2))
        # a matrix keeps the size of its input times its gain
        gain: float = _GAIN.get(short, 1.0) * size[-1] ** -0.5
        return gain * noise

    return {name: draw(name, size) for name, size in weight_shapes(shape, geometry).items()}


_GAIN = {"wf": 0.25, "wqb": 2.0, "wo": 0.5, "conv_q": 0.5, "conv_k": 0.5, "conv_v": 0.5}


def retrieval_weights(
    geometry: Geometry,
    seed: int,
    logit_scale: float,
    *,
    vocab: int = 512,
    channels: int = 128,
) -> tuple[ModelShape, Weights]:
    """The retrieval model, for any geometry.

    The hidden state has four blocks of `channels`: current code, previous code, output, and a
    block whose first channel is the constant 1.  Codes are random, of as many +1 as -1, so
    that norms only scale them.  Arguments: logit_scale, the logit of a token found with
    certainty; vocab, tokens; channels, a power of two.
    """
    shape = ModelShape(
        layers=2,
        dsa_period=2,
        vocab=vocab,
        hidden=4 * channels,
        heads=1,
        latent=2 * channels,
        q_lora=channels,
        index_heads=1,
        index_dim=channels,
        kda_heads=1,
        kda_key_dim=8,
        kda_value_dim=2 * channels,
    )
    weights = {name: torch.zeros(size) for name, size in weight_shapes(shape, geometry).items()}
    code = _balanced_codes(vocab, channels, seed)
    current, previous, out = (slice(i * channels, (i + 1) * channels) for i in range(3))
    weights["embed"][:, current] = code
    weights["embed"][:, 3 * channels] = 1
    weights["unembed"][:, out] = code / channels
    # after both layers current, previous and output block have `channels` entries of +-1
    weights["final_norm"].fill_(math.sqrt((3 * channels + 1) / shape.hidden))
    weights["logit_scale"] = torch.tensor(float(logit_scale))
    _previous_token_layer(weights, shape, current, previous)
    _lookup_layer(weights, shape, current, previous, out)
    return shape, weights


def _balanced_codes(vocab: int, channels: int, seed: int) -> Tensor:
    """[vocab, channels] of +1 and -1, each row with as many of one as of the other."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(vocab, channels, generator=generator).argsort(1)
    return torch.where(order < channels // 2, 1.0, -1.0)


def _previous_token_layer(
    weights: dict[str, Tensor], shape: ModelShape, current: slice, previous: slice
) -> None:
    """Layer 0, KDA: write the previous token's code into the block `previous`."""
    w = {k[9:]: v for k, v in weights.items() if k.startswith("layers.0.")}
    channels = shape.index_dim
    eye, constant = torch.eye(channels), 3 * channels
    w["norm"].fill_(math.sqrt((channels + 1) / shape.hidden))
    # silu(x) - silu(-x) = x: values carry both signs of the previous token's code
    w["wv"][:channels, current] = eye
    w["wv"][channels:, current] = -eye
    w["conv_v"][:, -2] = 1
    # one key for all tokens, written whole (beta 1) over a forgotten state (decay 0)
    for name in ("wq", "wk"):
        w[name][:, constant] = 1
    w["conv_q"][:, -1] = w["conv_k"][:, -1] = 1
    w["dt_bias"].fill_(60)
    w["wb"][:, constant] = w["wg"][:, constant] = 20
    # the query has norm key_dim**-0.5
    gain = shape.kda_key_dim**0.5
    w["wo"][previous, :channels] = gain * eye
    w["wo"][previous, channels:] = -gain * eye


def _lookup_layer(
    weights: dict[str, Tensor],
    shape: ModelShape,
    current: slice,
    previous: slice,
    out: slice,
) -> None:
    """Layer 1, DSA: look the current token up among the previous ones, and write the token
    that followed into the block `out`."""
    w = {k[9:]: v for k, v in weights.items() if k.startswith("layers.1.")}
    channels = shape.index_dim
    eye = torch.eye(channels)
    w["norm"].fill_(math.sqrt((2 * channels + 1) / shape.hidden))
    for name in ("q_norm", "kv_norm", "ln_g"):
        w[name].fill_(1)
    w["wqa"][:, current] = eye
    # a match scores 32: sure among thousands of positions
    w["wqb"][:channels] = 32 * shape.latent**0.5 / channels * eye
    w["wkv"][:channels, previous] = eye
    w["wkv"][channels:, current] = eye
    w["wik"][:, previous] = eye
    w["wiq"][:] = eye
    w["wiw"][:, 3 * channels] = 1
    w["wo"][out, channels:] = eye
