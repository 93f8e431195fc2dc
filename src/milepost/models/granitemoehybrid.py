"""Granite-4.0-H (IBM): Mamba-2 and attention layers; after each mixer a shared SwiGLU, beside experts in the MoE models.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: `embedding_multiplier` scales embeddings, `residual_multiplier` what
each block adds, `attention_multiplier` replaces head_dim^-1/2, logits are divided by `logits_scaling`; `num_local_experts` 0
means dense; positions are embedded only if `position_embedding_type` is "rope" ("nope" and null: not at all).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.mixers import (
    DTYPES,
    MAMBA_N_WITHOUT_EFFECT,
    attention_weights,
    frame_weights,
    mamba2_weights,
    read_attention,
    read_layer_types,
    read_mamba_n,
    read_token_ids,
    refuse_variants,
)
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, ModelSpec, MoeSpec, WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from milepost.kernels.protocol import KernelBackend
    from milepost.models.layers.mlp import Sum
    from milepost.models.protocol import Model

_NAMES = ("embed_tokens.weight", "norm.weight", "lm_head.weight")
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | MAMBA_N_WITHOUT_EFFECT | {"router_aux_loss_coef", "init_method"}
_UNROTATED = ("rope_theta", "rope_scaling", "rope_parameters")


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Granite-4.0-H. Raises UnsupportedModel naming every field that can't be served."""
    aliases = {"torch_dtype": "dtype", "layers_block_type": "layer_types"}
    read = ConfigReader(config, family="granitemoehybrid", aliases=aliases)
    hidden, eps = read.integer("hidden_size", 4096), read.number("rms_norm_eps", 1e-6)
    count = read.integer("num_hidden_layers", 32)
    kinds = read_layer_types(read, "layer_types", count, default="mamba2")
    mamba = read_mamba_n(read, hidden, eps, heads=128, state_size=256)
    read.choice("normalization_function", "rmsnorm", ("rmsnorm",))
    rotated = read.choice("position_embedding_type", "nope", ("rope", "nope")) == "rope"
    scale = read.number("attention_multiplier", 1.0)
    attention = read_attention(read, hidden, kv_heads=None, scale=scale, rotary=1.0 if rotated else None)
    read.choice("hidden_act", "silu", ("silu", "swish"))
    spec = ModelSpec(
        family="granitemoehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        vocab_size=read.integer("vocab_size", 32000),
        hidden_size=hidden,
        layers=_layers(kinds, mamba, attention, _experts(read)),
        norm_eps=eps,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_position_embeddings=read.integer("max_position_embeddings", 2048),
        dtype=DTYPES[read.choice("dtype", "float32", DTYPES)],
        recurrent_dtype="float32",
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
        embedding_multiplier=read.number("embedding_multiplier", 1.0),
        residual_multiplier=read.number("residual_multiplier", 1.0),
        logits_divisor=read.number("logits_scaling", 1.0),
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT | (frozenset() if rotated else frozenset(_UNROTATED)))
    return spec


def _layers(kinds: list[str], mamba: Mamba2Spec, attention: AttentionSpec, experts: MoeSpec) -> tuple[LayerSpec, ...]:
    return tuple(
        LayerSpec(index, (mamba if kind == "mamba2" else attention,), experts) for index, kind in enumerate(kinds)
    )


def _experts(read: ConfigReader) -> MoeSpec:
    count = read.integer("num_local_experts", 8, least=0)
    taken = read.integer("num_experts_per_tok", 2, least=0)
    if count and not 1 <= taken <= count:
        read.complain("num_experts_per_tok", f"num_experts_per_tok={taken} must be from 1 to num_local_experts={count}")
    return MoeSpec(count, taken, read.integer("intermediate_size", 11008), read.integer("shared_intermediate_size", 1024))


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    hidden = spec.hidden_size
    tensors = frame_weights(spec, _NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        norms = ("input_layernorm", "post_attention_layernorm")
        tensors += [WeightSpec(f"{prefix}.{name}.weight", (hidden,)) for name in norms]
        (mixer,) = layer.mixers
        if isinstance(mixer, Mamba2Spec):
            tensors += mamba2_weights(f"{prefix}.mamba", mixer, hidden)
        elif isinstance(mixer, AttentionSpec):
            tensors += attention_weights(f"{prefix}.self_attn", mixer, hidden)
        if isinstance(layer.feed_forward, MoeSpec):
            tensors += _moe_weights(prefix, layer.feed_forward, hidden)
    return tuple(tensors)


def _moe_weights(prefix: str, moe: MoeSpec, hidden: int) -> list[WeightSpec]:
    tensors = [
        WeightSpec(f"{prefix}.shared_mlp.input_linear.weight", (2 * moe.shared_width, hidden)),
        WeightSpec(f"{prefix}.shared_mlp.output_linear.weight", (hidden, moe.shared_width)),
    ]
    if moe.experts:
        inner = f"{prefix}.block_sparse_moe"
        tensors += [
            WeightSpec(f"{inner}.router.layer.weight", (moe.experts, hidden)),
            WeightSpec(f"{inner}.input_linear.weight", (moe.experts, 2 * moe.width, hidden)),
            WeightSpec(f"{inner}.output_linear.weight", (moe.experts, hidden, moe.width)),
        ]
    return tensors


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
    """Two residual blocks a layer: the mixer, then the shared feed-forward and the experts."""
    from milepost.models.layers.stack import Stack, mixer_of

    stack = Stack(spec, weights, recurrent=recurrent, attention=attention, device=device, names=_NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        name = "self_attn" if layer.attention else "mamba"
        mixer = mixer_of(layer.mixers[0], weights, f"{prefix}.{name}", stack)
        stack.add(layer.index, weights[f"{prefix}.input_layernorm.weight"], mixer)
        if isinstance(layer.feed_forward, MoeSpec):
            norm = weights[f"{prefix}.post_attention_layernorm.weight"]
            stack.add(layer.index, norm, _feed_forward(layer.feed_forward, weights, prefix))
    return stack


def _feed_forward(moe: MoeSpec, weights: Mapping[str, Tensor], prefix: str) -> Sum:
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import Experts, GatedMlp, Sum
    from milepost.models.layers.router import Router

    inner = f"{prefix}.shared_mlp"
    shared = GatedMlp(Linear.of(weights, f"{inner}.input_linear"), Linear.of(weights, f"{inner}.output_linear"))
    if not moe.experts:
        return Sum(shared)
    inner = f"{prefix}.block_sparse_moe"
    up, down = weights[f"{inner}.input_linear.weight"], weights[f"{inner}.output_linear.weight"]
    router = Router(moe.router, moe.per_token, Linear.of(weights, f"{inner}.router.layer"))
    return Sum(Experts(router, up.unbind(), down.unbind()), shared)
