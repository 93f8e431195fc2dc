"""Jamba (AI21, arXiv 2403.19887): Mamba-1 layers, an attention layer in every period, experts after every other mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: layer i is attention where i mod `attn_layer_period` is
`attn_layer_offset`, and has experts where i mod `expert_layer_period` is `expert_layer_offset`; positions aren't embedded;
RMS norms stand on dt, B and C; shares of the chosen experts are their softmax over all, and don't sum to 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.body import Body, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    read_attention,
    read_common,
    read_layer_types,
    read_rank,
    read_taken,
    refuse_variants,
)
from milepost.models.spec import (
    AttentionSpec,
    LayerSpec,
    Mamba1Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_BODY = Body(
    frame=("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight"),
    norms=("input_layernorm", "pre_ff_layernorm"),
    mixers={"mamba1": "mamba", "attention": "self_attn"},
    feed_forward="feed_forward",
    router="router",
)
_ALIASES = {
    "torch_dtype": "dtype",
    "num_local_experts": "num_experts",
    "layers_block_type": "layer_types",
    "n_ctx": "max_position_embeddings",
}
_LAYER_TYPES = {"mamba": "mamba1", "linear_attention": "mamba1", "attention": "attention", "full_attention": "attention"}
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(
    [
        "attention_dropout",
        "calc_logits_for_entire_prompt",
        "initializer_range",
        "num_logits_to_keep",
        "router_aux_loss_coef",
        "use_associative_scan",
        "use_mamba_kernels",
        "use_mambapy",
    ]
)


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Jamba. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="jamba", aliases=_ALIASES)
    hidden, eps = read.integer("hidden_size", 4096), read.number("rms_norm_eps", 1e-6)
    spec = ModelSpec(
        family="jamba",
        architecture="JambaForCausalLM",
        hidden_size=hidden,
        layers=_layers(read, _mamba(read, hidden, eps), read_attention(read, hidden, kv_heads=8)),
        norm_eps=eps,
        **read_common(read, vocab_size=65536, tied=False, positions=262144),
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _mamba(read: ConfigReader, hidden: int, eps: float) -> Mamba1Spec:
    read.unless("mamba_inner_layernorms", lambda value: value is True, "dt, B and C are normed in this family")
    return Mamba1Spec(
        inner=read.integer("mamba_expand", 2) * hidden,
        state_size=read.integer("mamba_d_state", 16),
        dt_rank=read_rank(read, "mamba_dt_rank", hidden),
        conv_kernel=read.integer("mamba_d_conv", 4, least=2),
        conv_bias=read.flag("mamba_conv_bias", True),
        proj_bias=read.flag("mamba_proj_bias", False),
        norm_eps=eps,
    )


def _layers(read: ConfigReader, mamba: Mamba1Spec, attention: AttentionSpec) -> tuple[LayerSpec, ...]:
    count, width = read.integer("num_hidden_layers", 32), read.integer("intermediate_size", 14336)
    read.choice("hidden_act", "silu", ("silu", "swish"))
    mlp = MlpSpec(width, bias=False, activation="silu", gated=True)
    experts, taken = read_taken(read, "num_experts", 16, 2)
    moe = MoeSpec(experts, taken, width, 0, RouterSpec(normalise=False))
    attending, mixing = _periodic(read, "attn_layer", 8, 4), _periodic(read, "expert_layer", 2, 1)
    kinds = ["attention" if index % attending[0] == attending[1] else "mamba1" for index in range(count)]
    if read.has("layer_types") and read_layer_types(read, "layer_types", count, "mamba1", _LAYER_TYPES) != kinds:
        period = f"attn_layer_period={attending[0]} and attn_layer_offset={attending[1]}"
        read.complain("layer_types", f"layer_types={read.raw('layer_types')!r} disagrees with {period}")
    return tuple(
        LayerSpec(
            index,
            (attention if kind == "attention" else mamba,),
            moe if experts > 1 and index % mixing[0] == mixing[1] else mlp,
        )
        for index, kind in enumerate(kinds)
    )


def _periodic(read: ConfigReader, name: str, period: int, offset: int) -> tuple[int, int]:
    """Which layers something stands in: every `period`-th, from `offset` on."""
    every, first = read.integer(f"{name}_period", period), read.integer(f"{name}_offset", offset, least=0)
    if first >= every:
        read.complain(f"{name}_offset", f"{name}_offset={first} must be less than {name}_period={every}")
    return every, first


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    return body_weights(spec, _BODY)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY)
