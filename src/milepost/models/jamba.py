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

from milepost.models.mixers import (
    DTYPES,
    attention_weights,
    expert_weights,
    frame_weights,
    mamba1_weights,
    mlp_weights,
    read_attention,
    read_layer_types,
    read_rank,
    read_taken,
    read_token_ids,
    refuse_variants,
)
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
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
    import torch
    from torch import Tensor

    from milepost.kernels.protocol import KernelBackend
    from milepost.models.layers.mlp import Experts
    from milepost.models.protocol import Model

_NAMES = ("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight")
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
        vocab_size=read.integer("vocab_size", 65536),
        hidden_size=hidden,
        layers=_layers(read, _mamba(read, hidden, eps), read_attention(read, hidden, kv_heads=8)),
        norm_eps=eps,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_position_embeddings=read.integer("max_position_embeddings", 262144),
        dtype=DTYPES[read.choice("dtype", "float32", DTYPES)],
        recurrent_dtype="float32",
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
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
    hidden = spec.hidden_size
    tensors = frame_weights(spec, _NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        tensors += [WeightSpec(f"{prefix}.{name}.weight", (hidden,)) for name in ("input_layernorm", "pre_ff_layernorm")]
        (mixer,) = layer.mixers
        if isinstance(mixer, Mamba1Spec):
            tensors += mamba1_weights(f"{prefix}.mamba", mixer, hidden)
        elif isinstance(mixer, AttentionSpec):
            tensors += attention_weights(f"{prefix}.self_attn", mixer, hidden)
        match layer.feed_forward:
            case MlpSpec() as mlp:
                tensors += mlp_weights(f"{prefix}.feed_forward", mlp, hidden)
            case MoeSpec() as moe:
                tensors += expert_weights(f"{prefix}.feed_forward", moe, hidden, router="router")
    return tuple(tensors)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    *,
    recurrent: KernelBackend,
    attention: KernelBackend,
    device: torch.device,
) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.mlp import GatedMlp
    from milepost.models.layers.stack import Stack, mixer_of

    stack = Stack(spec, weights, recurrent=recurrent, attention=attention, device=device, names=_NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        name = "self_attn" if layer.attention else "mamba"
        mixer = mixer_of(layer.mixers[0], weights, f"{prefix}.{name}", stack)
        stack.add(layer.index, weights[f"{prefix}.input_layernorm.weight"], mixer)
        moe, inner = layer.feed_forward, f"{prefix}.feed_forward"
        part = _experts(moe, weights, inner) if isinstance(moe, MoeSpec) else GatedMlp.of(weights, inner)
        stack.add(layer.index, weights[f"{prefix}.pre_ff_layernorm.weight"], part)
    return stack


def _experts(moe: MoeSpec, weights: Mapping[str, Tensor], prefix: str) -> Experts:
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import Experts
    from milepost.models.layers.router import Router

    router = Router(moe.router, moe.per_token, Linear.of(weights, f"{prefix}.router"))
    return Experts.of(weights, f"{prefix}.experts", router, moe.experts)
