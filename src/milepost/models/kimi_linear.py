"""Kimi Linear (Moonshot AI): Kimi delta attention, every fourth layer latent attention, experts beside a shared one.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24 and the checkpoint's own code:

- `linear_attn_config` lists layers from 1; transformers writes `layer_types` and `linear_*` keys instead of it.
- Nothing is rotated: `qk_rope_head_dim` channels of the key are shared by all heads, and stay as they come from the map.
- `head_dim` of the delta attention is the width of its keys, of its values, and the rank of its decay and of its gate.
- The norms inside latent attention have an epsilon of their own, 1e-6. The scores' scale is that of the whole key.
- Experts are chosen by sigmoid plus a bias, within the best groups, and weighed by the sigmoid alone; the router is fp32.
  From `first_k_dense_replace` on, every `moe_layer_freq`-th layer has them; transformers writes `mlp_layer_types`.
- Published names call a feed-forward `mlp` where it is dense and `block_sparse_moe` where it isn't; transformers saves both
  as the latter. An expert's maps are w1 (gate), w2 (down) and w3 (up), and q, k and v have a convolution each; transformers
  can also save what it runs, all experts and the three convolutions in one tensor.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.body import Body, body_weights
from milepost.models.naming import mlp_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    read_common,
    read_groups,
    read_layer_types,
    read_taken,
    refuse_variants,
)
from milepost.models.spec import (
    FeedForwardSpec,
    KdaSpec,
    LatentAttentionSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.layers.stack import Part
    from milepost.models.protocol import Backends, Model

_LINEAR = "linear_attn_config"
_ALIASES = {
    "torch_dtype": "dtype",
    "model_max_length": "max_position_embeddings",
    "norm_topk_prob": "moe_renormalize",
    "n_group": "num_expert_group",
    "num_local_experts": "num_experts",
    "num_experts_per_token": "num_experts_per_tok",
    "n_shared_experts": "num_shared_experts",
    f"{_LINEAR}.head_dim": "linear_head_dim",
    f"{_LINEAR}.num_heads": "linear_num_heads",
    f"{_LINEAR}.short_conv_kernel_size": "linear_conv_kernel_dim",
}
_LAYER_TYPES = {"linear_attention": "kda", "full_attention": "latent"}
_MLP_TYPES = {"dense": "dense", "sparse": "sparse"}
# `head_dim` is hidden_size / heads as published and qk_rope_head_dim as transformers writes it; nobody reads it.
_UNREAD = "attention_dropout head_dim initializer_range pretraining_tp rope_parameters rope_scaling rope_theta"
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_UNREAD.split())
_BODY = Body(
    frame=("embed_tokens.weight", "norm.weight", "lm_head.weight"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mixers={"kda": "self_attn", "latent_attention": "self_attn"},
    feed_forward="mlp",
)
_RENAMED = ((".block_sparse_moe.", ".mlp."), (".self_attn.forget_gate.", ".self_attn."))
_EXPERT_MAPS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(\.experts\.\d+\.)(w[123])(\.weight)$")
_LATENT_EPS = 1e-6
_ROUTER_EPSILON = 1e-20


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Kimi Linear. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(_flat(config), family="kimi_linear", aliases=_ALIASES)
    read.unless(_LINEAR, lambda value: False, "it must be an object")
    hidden, eps = read.integer("hidden_size", 2304), read.number("rms_norm_eps", 1e-5)
    count = read.integer("num_hidden_layers", 27)
    mixers: dict[str, MixerSpec] = {"kda": _kda(read, eps), "latent": _latent(read)}
    read.choice("hidden_act", "silu", ("silu", "swish"))
    mlp = MlpSpec(read.integer("intermediate_size", 9216), bias=False, activation="silu", gated=True)
    blocks: dict[str, FeedForwardSpec] = {"dense": mlp, "sparse": _experts(read)}
    kinds, inner = _kinds(read, count), _feed_forwards(read, count)
    spec = ModelSpec(
        family="kimi_linear",
        architecture="KimiLinearForCausalLM",
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(index, (mixers[kind],), blocks[block])
            for index, (kind, block) in enumerate(zip(kinds, inner, strict=False))
        ),
        norm_eps=eps,
        **read_common(read, vocab_size=163840, tied=False, positions=1048576),
    )
    refuse_variants(read)
    read.unless("num_nextn_predict_layers", lambda value: value == 0, "multi-token prediction isn't served yet")
    read.finish(_WITHOUT_EFFECT)
    return spec


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with what `linear_attn_config` holds beside it, so that an unknown key in there is refused as well."""
    nested = config.get(_LINEAR)
    if not isinstance(nested, dict):
        return dict(config)
    outer = {name: value for name, value in config.items() if name != _LINEAR}
    return {**outer, **{f"{_LINEAR}.{name}": value for name, value in nested.items()}}


def _kda(read: ConfigReader, eps: float) -> KdaSpec:
    heads, dim = read.integer("linear_num_heads", 32), read.integer("linear_head_dim", 128)
    return KdaSpec(heads, dim, dim, read.integer("linear_conv_kernel_dim", 4, least=2), rank=dim, norm_eps=eps)


def _latent(read: ConfigReader) -> LatentAttentionSpec:
    heads = read.integer("num_attention_heads", 32)
    read.unless("num_key_value_heads", lambda value: value == heads, f"it must equal num_attention_heads={heads}")
    read.unless("mla_use_nope", lambda value: value is True, "rotated latent attention isn't served")
    nope, shared = read.integer("qk_nope_head_dim", 128), read.integer("qk_rope_head_dim", 64)
    key = nope + shared
    read.unless("qk_head_dim", lambda value: value == key, f"it must equal qk_nope_head_dim + qk_rope_head_dim={key}")
    return LatentAttentionSpec(
        heads=heads,
        rank=read.integer("kv_lora_rank", 512),
        nope_dim=nope,
        shared_dim=shared,
        value_dim=read.integer("v_head_dim", 128),
        scale=key**-0.5,
        norm_eps=_LATENT_EPS,
        query_rank=None if read.raw("q_lora_rank") is None else read.integer("q_lora_rank", 1),
        bias=read.flag("attention_bias", False),
    )


def _experts(read: ConfigReader) -> MoeSpec:
    count, taken = read_taken(read, "num_experts", 256, 8)
    groups, best = read_groups(read, "num_expert_group", "num_experts", count, taken)
    read.unless("use_grouped_topk", lambda value: value is True or groups == 1, f"num_expert_group={groups} says otherwise")
    read.choice("moe_router_activation_func", "sigmoid", ("sigmoid",))
    normalise = read.flag("moe_renormalize", True)
    if normalise and taken == 1:
        read.complain("num_experts_per_tok", "num_experts_per_tok=1: engines disagree on moe_renormalize for one expert")
    router = RouterSpec(
        scores="sigmoid",
        normalise=normalise,
        bias=True,
        scaling=read.number("routed_scaling_factor", 2.446),
        epsilon=_ROUTER_EPSILON,
        groups=groups,
        best_groups=best,
    )
    width = read.integer("moe_intermediate_size", 1024)
    return MoeSpec(count, taken, width, width * read.integer("num_shared_experts", 1), router)


def _kinds(read: ConfigReader, count: int) -> list[str]:
    """`kda` or `latent` for each layer, from either dialect's lists; both may stand in a file if they agree."""
    kda, full = (_layers(read, f"{_LINEAR}.{name}", count) for name in ("kda_layers", "full_attn_layers"))
    kinds = read_layer_types(read, "layer_types", count, "kda", _LAYER_TYPES)
    if kda is None or full is None:
        if not read.has("layer_types"):
            read.complain("layer_types", f"neither layer_types nor {_LINEAR} with kda_layers and full_attn_layers is there")
        return kinds
    if sorted([*kda, *full]) != list(range(1, count + 1)):
        read.complain(_LINEAR, f"{_LINEAR}: kda_layers and full_attn_layers must hold each of 1 to {count} once")
    listed = ["latent" if index + 1 in full else "kda" for index in range(count)]
    if read.has("layer_types") and kinds != listed:
        read.complain("layer_types", f"layer_types disagrees with {_LINEAR}")
    return listed


def _layers(read: ConfigReader, name: str, count: int) -> list[int] | None:
    """A list of layers, counted from 1; None if it is missing or null."""
    listed = read.raw(name)
    if listed is None:
        return None
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        read.complain(name, f"{name}={listed!r} is not a list of layers from 1 to {count}")
        return []
    return listed


def _feed_forwards(read: ConfigReader, count: int) -> list[str]:
    """`dense` or `sparse` for each layer; both dialects may stand in a file if they agree."""
    given = read.has("first_k_dense_replace") or read.has("moe_layer_freq")
    first, every = read.integer("first_k_dense_replace", 1, least=0), read.integer("moe_layer_freq", 1)
    counted = ["sparse" if index >= first and index % every == 0 else "dense" for index in range(count)]
    if not read.has("mlp_layer_types"):
        return counted
    listed = read_layer_types(read, "mlp_layer_types", count, "dense", _MLP_TYPES)
    if given and listed != counted:
        read.complain("mlp_layer_types", "mlp_layer_types disagrees with first_k_dense_replace and moe_layer_freq")
    return listed


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.` and with one name for either kind of feed-forward."""
    return body_weights(spec, _BODY, feed_forward=_feed_forward_weights)


def _feed_forward_weights(prefix: str, moe: FeedForwardSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of the experts, of the shared one, and of the router, which keeps its precision; or of the one that is dense."""
    if not isinstance(moe, MoeSpec):
        return mlp_weights(prefix, moe, hidden)
    shared = MlpSpec(moe.shared_width, bias=False, activation="silu", gated=True)
    each = [f"{prefix}.experts.{expert}" for expert in range(moe.experts)]
    up = tuple(f"{name}.{half}_proj.weight" for name in each for half in ("gate", "up"))
    down = tuple(f"{name}.down_proj.weight" for name in each)
    shapes = (moe.experts, 2 * moe.width, hidden), (moe.experts, hidden, moe.width)
    return [
        WeightSpec(f"{prefix}.gate.weight", (moe.experts, hidden), keep_precision=True),
        WeightSpec(f"{prefix}.gate.e_score_correction_bias", (moe.experts,), keep_precision=True),
        WeightSpec(f"{prefix}.experts.gate_up_proj", shapes[0], parts=up, part_shape=(moe.width, hidden)),
        WeightSpec(f"{prefix}.experts.down_proj", shapes[1], parts=down),
        *mlp_weights(f"{prefix}.shared_experts", shared, hidden),
    ]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix, parts by their common names."""
    name = name.removeprefix("model.")
    for own, common in _RENAMED:
        name = name.replace(own, common)
    return _EXPERT.sub(lambda found: f"{found[1]}{_EXPERT_MAPS[found[2]]}{found[3]}", name)


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY, second=_feed_forward)


def _feed_forward(moe: FeedForwardSpec, weights: Mapping[str, Tensor], prefix: str) -> Part:
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import Experts, GatedMlp, Sum
    from milepost.models.layers.router import Router

    if not isinstance(moe, MoeSpec):
        return GatedMlp.of(weights, prefix)

    bias = weights[f"{prefix}.gate.e_score_correction_bias"]
    router = Router(moe.router, moe.per_token, Linear.of(weights, f"{prefix}.gate"), bias)
    experts = Experts(router, *(weights[f"{prefix}.experts.{name}_proj"].unbind() for name in ("gate_up", "down")))
    return Sum(experts, GatedMlp.of(weights, f"{prefix}.shared_experts"))
