"""LFM2 (Liquid AI): gated short convolutions, some attention layers with normed q and k, SwiGLU after every mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: a convolution layer remembers `conv_L_cache` - 1 columns of B * x and
nothing else; layers come as `layer_types` or as `full_attn_idxs`, and without either all are attention;
`block_auto_adjust_ff_dim` makes the feed-forward 2/3 as wide as `block_ff_dim` says (also called `intermediate_size`),
times `block_ffn_dim_multiplier`, rounded up to `block_multiple_of`; q and k are normed head by head, then rotated.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.models.body import Body, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    read_attention,
    read_common,
    read_indices,
    read_layer_types,
    refuse_variants,
)
from milepost.models.spec import (
    FeedForwardSpec,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    NormSpec,
    ShortConvSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

LAYER_TYPES = {"conv": "conv", "full_attention": "attention", "attention": "attention"}
ALIASES = {"torch_dtype": "dtype", "tie_embedding": "tie_word_embeddings", "theta": "rope_theta", "block_norm_eps": "norm_eps"}
WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(
    ["initializer_range", "block_mlp_init_scale", "block_out_init_scale", "block_use_xavier_init", "conv_use_xavier_init"]
)
_THETA = 1_000_000.0
_BODY = Body(
    frame=("embed_tokens.weight", "embedding_norm.weight", "lm_head.weight"),
    norms=("operator_norm", "ffn_norm"),
    mixers={"short_conv": "conv", "attention": "self_attn"},
    feed_forward="feed_forward",
)
_RENAMED = (
    (".self_attn.out_proj.", ".self_attn.o_proj."),
    (".q_layernorm.", ".q_norm."),
    (".k_layernorm.", ".k_norm."),
    (".w1.", ".gate_proj."),
    (".w2.", ".down_proj."),
    (".w3.", ".up_proj."),
)


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of LFM2. Raises UnsupportedModel naming every field that can't be served."""
    aliases = {**ALIASES, "block_ff_dim": "intermediate_size", "num_heads": "num_attention_heads"}
    read = ConfigReader(config, family="lfm2", aliases=aliases)
    hidden = read.integer("hidden_size", 2560)
    for name in ("block_dim", "conv_dim", "conv_dim_out"):
        read.unless(name, lambda value: value == hidden, f"it must equal hidden_size={hidden}")
    for name in ("block_use_swiglu", "use_pos_enc"):
        read.unless(name, lambda value: value is True, "it must be true")
    mlp = MlpSpec(_width(read), bias=False, activation="silu", gated=True)
    spec = read_model(read, hidden, lambda index: mlp, family="lfm2", architecture="Lfm2ForCausalLM")
    read.finish(WITHOUT_EFFECT)
    return spec


def read_model(
    read: ConfigReader, hidden: int, feed_forward: Callable[[int], FeedForwardSpec], *, family: str, architecture: str
) -> ModelSpec:
    """What LFM2 has in common with its mixture of experts; `feed_forward` says what follows the mixer of a layer."""
    eps, count = read.number("norm_eps", 1e-5), read.integer("num_hidden_layers", 32)
    attention = replace(read_attention(read, hidden, kv_heads=8, rotary=1.0, theta=_THETA), qk_norm=NormSpec(eps))
    conv = ShortConvSpec(hidden, read.integer("conv_L_cache", 3, least=2), read.flag("conv_bias", False))
    kinds = _kinds(read, count)
    spec = ModelSpec(
        family=family,
        architecture=architecture,
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(i, (conv if kind == "conv" else attention,), feed_forward(i)) for i, kind in enumerate(kinds)
        ),
        norm_eps=eps,
        **read_common(read, vocab_size=65536, tied=True, positions=128000),
    )
    refuse_variants(read)
    return spec


def _width(read: ConfigReader) -> int:
    width = read.integer("intermediate_size", 12288)
    multiplier, multiple = read.number("block_ffn_dim_multiplier", 1.0), read.integer("block_multiple_of", 256)
    if not read.flag("block_auto_adjust_ff_dim", True):
        return width
    return -(-int(multiplier * int(2 * width / 3)) // multiple) * multiple


def _kinds(read: ConfigReader, count: int) -> list[str]:
    """`conv` or `attention` for each layer; both spellings may stand in a file if they agree."""
    attending = read_indices(read, "full_attn_idxs", count)
    if read.raw("layer_types") is None:
        return ["attention" if attending is None or index in attending else "conv" for index in range(count)]
    kinds = read_layer_types(read, "layer_types", count, "attention", LAYER_TYPES)
    if attending is not None and attending != {index for index, kind in enumerate(kinds) if kind == "attention"}:
        read.complain("full_attn_idxs", f"full_attn_idxs={sorted(attending)} disagrees with layer_types")
    return kinds


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.` and with LFM2's own names for common parts replaced."""
    return body_weights(spec, _BODY)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix, parts by their common names."""
    name = name.removeprefix("model.")
    for own, common in _RENAMED:
        name = name.replace(own, common)
    return name


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY)
