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

from milepost.models.body import Body, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    MAMBA_N_WITHOUT_EFFECT,
    read_attention,
    read_common,
    read_layer_types,
    read_mamba_n,
    refuse_variants,
)
from milepost.models.spec import (
    AttentionSpec,
    FeedForwardSpec,
    LayerSpec,
    Mamba2Spec,
    ModelSpec,
    MoeSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.layers.stack import Part
    from milepost.models.protocol import Backends, Model

_BODY = Body(
    frame=("embed_tokens.weight", "norm.weight", "lm_head.weight"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mixers={"mamba2": "mamba", "attention": "self_attn"},
    feed_forward="shared_mlp",
)
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
        hidden_size=hidden,
        layers=_layers(kinds, mamba, attention, _experts(read)),
        norm_eps=eps,
        **read_common(read, vocab_size=32000, tied=False, positions=2048),
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
    return body_weights(spec, _BODY, feed_forward=_moe_weights)


def _moe_weights(prefix: str, moe: FeedForwardSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of the shared feed-forward under `prefix` and of the experts beside it, gate and up in one."""
    if not isinstance(moe, MoeSpec):
        return []
    tensors = [
        WeightSpec(f"{prefix}.input_linear.weight", (2 * moe.shared_width, hidden)),
        WeightSpec(f"{prefix}.output_linear.weight", (hidden, moe.shared_width)),
    ]
    if moe.experts:
        inner = _beside(prefix)
        tensors += [
            WeightSpec(f"{inner}.router.layer.weight", (moe.experts, hidden)),
            WeightSpec(f"{inner}.input_linear.weight", (moe.experts, 2 * moe.width, hidden)),
            WeightSpec(f"{inner}.output_linear.weight", (moe.experts, hidden, moe.width)),
        ]
    return tensors


def _beside(prefix: str) -> str:
    """Where the experts stand, beside the shared feed-forward."""
    return f"{prefix.rpartition('.')[0]}.block_sparse_moe"


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the shared feed-forward and the experts."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY, second=_feed_forward)


def _feed_forward(moe: FeedForwardSpec, weights: Mapping[str, Tensor], prefix: str) -> Part:
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import Experts, GatedMlp, Sum
    from milepost.models.layers.router import Router

    shared = GatedMlp(Linear.of(weights, f"{prefix}.input_linear"), Linear.of(weights, f"{prefix}.output_linear"))
    if not isinstance(moe, MoeSpec) or not moe.experts:
        return shared
    inner = _beside(prefix)
    up, down = weights[f"{inner}.input_linear.weight"], weights[f"{inner}.output_linear.weight"]
    router = Router(moe.router, moe.per_token, Linear.of(weights, f"{inner}.router.layer"))
    return Sum(Experts(router, up.unbind(), down.unbind()), shared)
