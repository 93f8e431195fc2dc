"""Bamba (ibm-ai-platform): Mamba-2 layers, a few attention layers with half of each head rotated, SwiGLU after every mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: `attn_layer_indices` says which layers are attention, the rotary share
of a head is 0.5 whatever the config says.
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
    read_mamba_n,
    refuse_variants,
)
from milepost.models.spec import LayerSpec, MlpSpec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_ROTATED = 0.5
_BODY = Body(
    frame=("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight"),
    norms=("input_layernorm", "pre_ff_layernorm"),
    mixers={"mamba2": "mamba", "attention": "self_attn"},
    feed_forward="feed_forward",
)
_ATTRIBUTES = "mamba_dt_rank partial_rotary_factor use_mamba_kernels z_loss_coefficient"
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | MAMBA_N_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Bamba. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="bamba", aliases={"torch_dtype": "dtype"})
    hidden, eps = read.integer("hidden_size", 4096), read.number("rms_norm_eps", 1e-5)
    mamba = read_mamba_n(read, hidden, eps, heads=128, state_size=256)
    attention = read_attention(read, hidden, kv_heads=8, rotary=_ROTATED)
    rotated = int(attention.head_dim * _ROTATED)
    read.unless("attn_rotary_emb", lambda value: value == rotated, f"half of a head is rotated: {rotated}")
    read.choice("hidden_act", "silu", ("silu", "swish"))
    mlp = MlpSpec(read.integer("intermediate_size", 14336), read.flag("mlp_bias", False), "silu", gated=True)
    count = read.integer("num_hidden_layers", 32)
    attending = _attention_layers(read, count)
    spec = ModelSpec(
        family="bamba",
        architecture="BambaForCausalLM",
        hidden_size=hidden,
        layers=tuple(LayerSpec(i, (attention if i in attending else mamba,), mlp) for i in range(count)),
        norm_eps=eps,
        **read_common(read, vocab_size=128000, tied=False, positions=262144),
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _attention_layers(read: ConfigReader, count: int) -> frozenset[int]:
    listed = read.raw("attn_layer_indices") or []
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in listed):
        read.complain("attn_layer_indices", f"attn_layer_indices={listed!r} must list layers from 0 to {count - 1}")
        return frozenset()
    return frozenset(listed)


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    return body_weights(spec, _BODY)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY)
