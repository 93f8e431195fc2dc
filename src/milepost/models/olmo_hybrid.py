"""Olmo-Hybrid (Ai2): gated delta nets under pre-norms, every fourth layer attention under post-norms, SwiGLU.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: an attention layer norms what its parts give, not what they read; q
and k are normed over all heads together, and rotated only if there is a `rope_theta` (the released ones have none);
`linear_allow_neg_eigval` doubles a delta net's write strength; the norm inside a delta net has an epsilon of its own, 1e-5;
checkpoints hold one convolution each for q, k and v, and call the two norms of a delta net's layer by other names. What
transformers 5.24 itself saves has the three cut into equal thirds, whatever their widths: that is refused by shape.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.models.naming import attention_weights, frame_weights, linear_weights, mlp_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    read_attention,
    read_common,
    read_gated_delta,
    read_layer_types,
    refuse_variants,
)
from milepost.models.spec import AttentionSpec, GatedDeltaSpec, LayerSpec, MlpSpec, ModelSpec, NormSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_LAYER_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
_INITIAL = """
    attention_dropout initializer_range linear_a_log_max linear_a_log_min linear_dt_init_floor linear_dt_max linear_dt_min
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_INITIAL.split())
_UNROTATED = frozenset(["rope_parameters", "rope_theta", "rope_scaling"])
_NAMES = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
_RENAMED = ((".attention_layer_norm.", ".input_layernorm."), (".feedforward_layer_norm.", ".post_attention_layernorm."))
_DELTA_EPS = 1e-5


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Olmo-Hybrid. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="olmo_hybrid", aliases={"torch_dtype": "dtype"})
    hidden, eps = read.integer("hidden_size", 3840), read.number("rms_norm_eps", 1e-6)
    count = read.integer("num_hidden_layers", 32)
    parameters = read.raw("rope_parameters")
    rotated = read.has("rope_theta") or (isinstance(parameters, dict) and parameters.get("rope_theta") is not None)
    attention = read_attention(read, hidden, kv_heads=None, heads=30, rotary=1.0 if rotated else None)
    attention = replace(attention, qk_norm=NormSpec(eps, per_head=False))
    delta = _delta(read, hidden, attention.heads)
    read.choice("hidden_act", "silu", ("silu", "swish"))
    mlp = MlpSpec(read.integer("intermediate_size", 11008), bias=False, activation="silu", gated=True)
    spec = ModelSpec(
        family="olmo_hybrid",
        architecture="OlmoHybridForCausalLM",
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(index, (delta if kind == "delta" else attention,), mlp)
            for index, kind in enumerate(_kinds(read, count))
        ),
        norm_eps=eps,
        **read_common(read, vocab_size=100352, tied=False, positions=65536),
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT | (frozenset() if rotated else _UNROTATED))
    return spec


def _delta(read: ConfigReader, hidden: int, heads: int) -> GatedDeltaSpec:
    """By default as many heads as attention has, keys of 3/4 of a head's share of hidden, values twice as long."""
    key_dim = read.integer("linear_key_head_dim", max(1, 3 * hidden // (4 * read.integer("linear_num_key_heads", heads))))
    delta = read_gated_delta(read, _DELTA_EPS, key_heads=heads, heads=heads, key_dim=key_dim, value_dim=2 * key_dim)
    return replace(delta, beta_scale=2.0 if read.flag("linear_allow_neg_eigval", True) else 1.0)


def _kinds(read: ConfigReader, count: int) -> list[str]:
    """`delta` or `attention` for each layer; without a list every fourth is attention, and the last if there are but three."""
    if read.has("layer_types"):
        return read_layer_types(read, "layer_types", count, "delta", _LAYER_TYPES)
    last = count - 1 if count < 4 else -1
    return ["attention" if index % 4 == 3 or index == last else "delta" for index in range(count)]


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`, norms by their common names."""
    hidden = spec.hidden_size
    tensors = frame_weights(spec, _NAMES)
    for layer in spec.layers:
        prefix, (mixer,) = f"layers.{layer.index}", layer.mixers
        norms = ["post_attention_layernorm", "post_feedforward_layernorm" if layer.attention else "input_layernorm"]
        tensors += [WeightSpec(f"{prefix}.{name}.weight", (hidden,)) for name in norms]
        if isinstance(mixer, GatedDeltaSpec):
            tensors += _delta_weights(f"{prefix}.linear_attn", mixer, hidden)
        elif isinstance(mixer, AttentionSpec):
            tensors += attention_weights(f"{prefix}.self_attn", mixer, hidden)
        if isinstance(layer.feed_forward, MlpSpec):
            tensors += mlp_weights(f"{prefix}.mlp", layer.feed_forward, hidden)
    return tuple(tensors)


def _delta_weights(prefix: str, mixer: GatedDeltaSpec, hidden: int) -> list[WeightSpec]:
    key, value = mixer.key_width, mixer.value_width
    rows = {"q": key, "k": key, "v": value, "g": value, "b": mixer.heads, "a": mixer.heads}
    return [
        *(WeightSpec(f"{prefix}.{name}_conv1d.weight", (rows[name], 1, mixer.conv_kernel)) for name in "qkv"),
        *(WeightSpec(f"{prefix}.{name}_proj.weight", (count, hidden)) for name, count in rows.items()),
        *(WeightSpec(f"{prefix}.{name}", (mixer.heads,), True) for name in ("A_log", "dt_bias")),
        WeightSpec(f"{prefix}.o_norm.weight", (mixer.value_dim,)),
        *linear_weights(f"{prefix}.o_proj", hidden, value, bias=False),
    ]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix, norms by their common names."""
    name = name.removeprefix("model.")
    for own, common in _RENAMED:
        name = name.replace(own, common)
    return name


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer, the mixer and the feed-forward; an attention layer norms after them, others before."""
    from milepost.models.layers.mlp import GatedMlp
    from milepost.models.layers.olmo import PostNormed, delta_tensors
    from milepost.models.layers.stack import Stack, mixer_of

    stack = Stack(spec, weights, backends, _NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        mlp = GatedMlp.of(weights, f"{prefix}.mlp")
        second = weights[f"{prefix}.post_attention_layernorm.weight"]
        if layer.attention:
            mixer = mixer_of(layer.attention, weights, f"{prefix}.self_attn", stack)
            third = weights[f"{prefix}.post_feedforward_layernorm.weight"]
            stack.add(layer.index, None, PostNormed(mixer, second, spec.norm_eps))
            stack.add(layer.index, None, PostNormed(mlp, third, spec.norm_eps))
        else:
            inner = f"{prefix}.linear_attn"
            mixer = mixer_of(layer.mixers[0], delta_tensors(weights, inner), inner, stack)
            stack.add(layer.index, weights[f"{prefix}.input_layernorm.weight"], mixer)
            stack.add(layer.index, second, mlp)
    return stack
