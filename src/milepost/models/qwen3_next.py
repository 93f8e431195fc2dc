"""Qwen3-Next: gated delta nets, every fourth layer gated attention, experts beside a shared one after every mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: weights of the norms are stored less 1, but for the one inside a
delta net; a quarter of each head is rotated; q_proj gives query and gate head by head; `in_proj_qkvz` and `in_proj_ba` are
stored by key head, and are put into the mixer's order here; experts follow every `decoder_sparse_step`-th mixer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from milepost.models.body import Body, body_weights, mixer_weights
from milepost.models.naming import expert_weights, linear_weights, mlp_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    DTYPES,
    read_attention,
    read_gated_delta,
    read_indices,
    read_layer_types,
    read_rotary_share,
    read_taken,
    read_token_ids,
    refuse_variants,
)
from milepost.models.spec import (
    FeedForwardSpec,
    GatedDeltaSpec,
    LayerSpec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    NormSpec,
    RouterSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

LAYER_TYPES = {"linear_attention": "delta", "full_attention": "attention"}
WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(["initializer_range", "attention_dropout", "router_aux_loss_coef"])
BODY = Body(
    frame=("embed_tokens.weight", "norm.weight", "lm_head.weight"),
    norms=("input_layernorm", "post_attention_layernorm"),
    mixers={"gated_delta": "linear_attn", "attention": "self_attn"},
    feed_forward="mlp",
)
_OFFSET = 1.0


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Qwen3-Next. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="qwen3_next", aliases={"torch_dtype": "dtype"})
    hidden, eps = read.integer("hidden_size", 2048), read.number("rms_norm_eps", 1e-6)
    count = read.integer("num_hidden_layers", 48)
    mlp = MlpSpec(read.integer("intermediate_size", 5632), bias=False, activation="silu", gated=True)
    step, dense = read.integer("decoder_sparse_step", 1), read_indices(read, "mlp_only_layers", count) or frozenset()
    moe = read_experts(read, 512, 10)

    def feed_forward(index: int) -> FeedForwardSpec:
        return moe if moe.experts and index not in dense and (index + 1) % step == 0 else mlp

    delta = read_gated_delta(read, eps, key_heads=16, heads=32)
    spec = read_model(read, hidden, count, delta, feed_forward, family="qwen3_next", architecture="Qwen3NextForCausalLM")
    read.finish(WITHOUT_EFFECT)
    return spec


def read_experts(read: ConfigReader, experts: int, taken: int, *, least: int = 0) -> MoeSpec:
    """Experts by softmax, beside a shared one that a sigmoid of its own dims."""
    count, chosen = read_taken(read, "num_experts", experts, taken, least=least)
    return MoeSpec(
        count,
        chosen,
        read.integer("moe_intermediate_size", 512),
        read.integer("shared_expert_intermediate_size", 512),
        RouterSpec(normalise=read.flag("norm_topk_prob", True)),
        shared_gate=True,
    )


def read_model(
    read: ConfigReader,
    hidden: int,
    count: int,
    delta: GatedDeltaSpec,
    feed_forward: Callable[[int], FeedForwardSpec],
    *,
    family: str,
    architecture: str,
    kv_heads: int = 2,
    vocab_size: int = 151936,
) -> ModelSpec:
    """What Qwen's hybrids have in common: attention, the kinds of layers, norms around 1."""
    share = read_rotary_share(read, 0.25)
    read.choice("hidden_act", "silu", ("silu", "swish"))
    attention = read_attention(read, hidden, kv_heads=kv_heads, rotary=share, head_dim=256, heads=16)
    attention = replace(attention, qk_norm=NormSpec(delta.norm_eps, _OFFSET), gated=True)
    spec = ModelSpec(
        family=family,
        architecture=architecture,
        vocab_size=read.integer("vocab_size", vocab_size),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(index, (delta if kind == "delta" else attention,), feed_forward(index))
            for index, kind in enumerate(_kinds(read, count))
        ),
        norm_eps=delta.norm_eps,
        norm_offset=_OFFSET,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_position_embeddings=read.integer("max_position_embeddings", 32768),
        dtype=DTYPES[read.choice("dtype", "float32", DTYPES)],
        recurrent_dtype=DTYPES[read.choice("mamba_ssm_dtype", "float32", DTYPES)],
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
    )
    read.unless("use_sliding_window", lambda value: value is False, "attention here is over all tokens")
    refuse_variants(read)
    return spec


def _kinds(read: ConfigReader, count: int) -> list[str]:
    """`delta` or `attention` for each layer, from a list, or from an interval if there is no list."""
    interval = read.integer("full_attention_interval", 4)
    if read.has("layer_types"):
        return read_layer_types(read, "layer_types", count, "delta", LAYER_TYPES)
    return ["delta" if (index + 1) % interval else "attention" for index in range(count)]


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    return model_weights(spec, _delta_weights)


def model_weights(
    spec: ModelSpec, delta_weights: Callable[[str, GatedDeltaSpec, int], list[WeightSpec]]
) -> tuple[WeightSpec, ...]:
    """The tensors of Qwen's hybrids, which store projections of delta nets in different ways."""

    def mixer(prefix: str, own: MixerSpec, hidden: int) -> list[WeightSpec]:
        return delta_weights(prefix, own, hidden) if isinstance(own, GatedDeltaSpec) else mixer_weights(prefix, own, hidden)

    return body_weights(spec, BODY, mixer=mixer, feed_forward=_feed_forward_weights)


def _feed_forward_weights(prefix: str, moe: FeedForwardSpec, hidden: int) -> list[WeightSpec]:
    if not isinstance(moe, MoeSpec):
        return mlp_weights(prefix, moe, hidden)
    shared = MlpSpec(moe.shared_width, bias=False, activation="silu", gated=True)
    return [
        *expert_weights(prefix, moe, hidden, router=BODY.router),
        *mlp_weights(f"{prefix}.shared_expert", shared, hidden),
        *linear_weights(f"{prefix}.shared_expert_gate", 1, hidden, bias=False),
    ]


def _delta_weights(prefix: str, mixer: GatedDeltaSpec, hidden: int) -> list[WeightSpec]:
    key, value = mixer.key_width, mixer.value_width
    return [
        *delta_core_weights(prefix, mixer, hidden),
        *linear_weights(f"{prefix}.in_proj_qkvz", 2 * (key + value), hidden, bias=False),
        *linear_weights(f"{prefix}.in_proj_ba", 2 * mixer.heads, hidden, bias=False),
    ]


def delta_core_weights(prefix: str, mixer: GatedDeltaSpec, hidden: int) -> list[WeightSpec]:
    """What all store alike: all of a delta net but its input projections."""
    return [
        WeightSpec(f"{prefix}.conv1d.weight", (2 * mixer.key_width + mixer.value_width, 1, mixer.conv_kernel)),
        WeightSpec(f"{prefix}.A_log", (mixer.heads,), True),
        WeightSpec(f"{prefix}.dt_bias", (mixer.heads,), True),
        WeightSpec(f"{prefix}.norm.weight", (mixer.value_dim,)),
        *linear_weights(f"{prefix}.out_proj", hidden, mixer.value_width, bias=False),
    ]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix; None for tensors of multi-token prediction, which isn't served."""
    return None if name.startswith("mtp.") else name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.qwen import by_key_head, hybrid

    return hybrid(spec, weights, backends, BODY, by_key_head)
