"""RecurrentGemma (Google, arXiv 2404.07839): Griffin's RG-LRU blocks, attention over a window, a gated feed-forward after each.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: `block_types` is a pattern that repeats until the layers are full;
embeddings are multiplied by the square root of `hidden_size` as bf16 rounds it, whatever the weights' dtype; norms
multiply by 1 + weight; the feed-forward is half as wide as `intermediate_size` says; half of each head is rotated; logits
are capped; all maps have biases but q, k and v, which have them where `attention_bias` says so.

A query sees `attention_window_size` tokens, itself included, as in transformers 5. Google's own code lets it see one more.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.models.body import Body, body_weights, mixer_weights
from milepost.models.naming import linear_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    read_attention,
    read_common,
    read_layer_types,
    read_rotary_share,
    refuse_variants,
)
from milepost.models.spec import (
    AttentionSpec,
    GateActivation,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    RgLruSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_NO_LIMIT = 1 << 20
"""Neither a state nor a window grows with the context, and no key names a longest one: a number to plan with."""
_BODY = Body(
    frame=("embed_tokens.weight", "final_norm.weight", "lm_head.weight"),
    norms=("temporal_pre_norm", "channel_pre_norm"),
    mixers={"rglru": "temporal_block", "attention": "temporal_block"},
    feed_forward="mlp_block",
)
_ALIASES = {
    "torch_dtype": "dtype",
    "sliding_window": "attention_window_size",
    "_block_types": "block_types",
    "layers_block_type": "layer_types",
}
_LAYER_TYPES = {
    "recurrent": "recurrent",
    "attention": "attention",
    "linear_attention": "recurrent",
    "sliding_attention": "attention",
}
_ACTIVATIONS: dict[str, GateActivation] = {
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu": "gelu",
    "silu": "silu",
}
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(
    [
        "attention_dropout",
        "final_w_init_variance_scale",
        "initializer_range",
        "rotary_emb_base",  # the first release carries it beside rope_theta, which alone is read
        "w_init_variance_scale",
    ]
)


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of RecurrentGemma. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="recurrent_gemma", aliases=_ALIASES)
    hidden = read.integer("hidden_size", 2560)
    read.unless("embeddings_scale_by_sqrt_dim", lambda value: value is True, "embeddings are multiplied by sqrt(hidden_size)")
    if read.present("logits_soft_cap") and not read.has("logits_soft_cap"):
        read.complain("logits_soft_cap", "logits_soft_cap=None is not supported: it must be a number above 0")
    spec = ModelSpec(
        family="recurrent_gemma",
        architecture="RecurrentGemmaForCausalLM",
        hidden_size=hidden,
        layers=_layers(read, hidden),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        **read_common(read, vocab_size=256000, tied=True, positions=_NO_LIMIT),
        embedding_multiplier=_as_bf16(hidden**0.5),
        logits_soft_cap=read.number("logits_soft_cap", 30.0),
        norm_offset=1.0,
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _layers(read: ConfigReader, hidden: int) -> tuple[LayerSpec, ...]:
    activation = _ACTIVATIONS[read.choice("hidden_activation", "gelu_pytorch_tanh", _ACTIVATIONS)]
    attention = _attention(read, hidden)
    width = read.integer("lru_width", hidden)
    if width % attention.heads:
        read.complain("lru_width", f"num_attention_heads={attention.heads} doesn't divide lru_width={width}")
    recurrent = RgLruSpec(width, attention.heads, read.integer("conv1d_width", 4, least=2), activation)
    mlp = MlpSpec(read.integer("intermediate_size", 7680, least=2) // 2, bias=True, activation=activation, gated=True)
    kinds = _kinds(read, read.integer("num_hidden_layers", 26))
    return tuple(LayerSpec(i, (attention if kind == "attention" else recurrent,), mlp) for i, kind in enumerate(kinds))


def _attention(read: ConfigReader, hidden: int) -> AttentionSpec:
    read.unless(
        "head_dim",
        lambda value: value == hidden // read.integer("num_attention_heads", 10),
        "it must be hidden_size / num_attention_heads",
    )
    attention = read_attention(read, hidden, kv_heads=None, heads=10, rotary=read_rotary_share(read, 0.5))
    return replace(attention, window=read.integer("attention_window_size", 2048), out_bias=True)


def _kinds(read: ConfigReader, count: int) -> list[str]:
    """`recurrent` or `attention` for each layer: the pattern, repeated; a list of all layers must agree with it."""
    pattern = read.raw("block_types")
    period = ["recurrent", "recurrent", "attention"]
    if pattern is not None:
        if not isinstance(pattern, list) or not pattern or not all(kind in ("recurrent", "attention") for kind in pattern):
            read.complain("block_types", f"block_types={pattern!r} is not a list of recurrent and attention")
        else:
            period = pattern
    kinds = [period[index % len(period)] for index in range(count)]
    if read.has("layer_types") and read_layer_types(read, "layer_types", count, "recurrent", _LAYER_TYPES) != kinds:
        read.complain("layer_types", f"layer_types={read.raw('layer_types')!r} disagrees with block_types={period}")
    return kinds


def _as_bf16(value: float) -> float:
    """The nearest bf16, ties to even: the upper half of an fp32's bits."""
    (bits,) = struct.unpack("<I", struct.pack("<f", value))
    rounded = (bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000
    return float(struct.unpack("<f", struct.pack("<I", rounded))[0])


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    return body_weights(spec, _BODY, mixer=_mixer_weights)


def _mixer_weights(prefix: str, mixer: MixerSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of a recurrent block of Griffin, whose decays' parameter keeps its precision, or of attention."""
    if not isinstance(mixer, RgLruSpec):
        return mixer_weights(prefix, mixer, hidden)
    width, block = mixer.width, mixer.width // mixer.heads
    gates = ("input_gate", "recurrent_gate")
    return [
        *linear_weights(f"{prefix}.linear_x", width, hidden, bias=True),
        *linear_weights(f"{prefix}.linear_y", width, hidden, bias=True),
        *linear_weights(f"{prefix}.linear_out", hidden, width, bias=True),
        WeightSpec(f"{prefix}.conv_1d.weight", (width, 1, mixer.conv_kernel)),
        WeightSpec(f"{prefix}.conv_1d.bias", (width,)),
        WeightSpec(f"{prefix}.rg_lru.recurrent_param", (width,), True),
        *(WeightSpec(f"{prefix}.rg_lru.{name}_weight", (mixer.heads, block, block)) for name in gates),
        *(WeightSpec(f"{prefix}.rg_lru.{name}_bias", (mixer.heads, block)) for name in gates),
    ]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY)
