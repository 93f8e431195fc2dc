"""Bamba (ibm-ai-platform): Mamba-2 layers, a few attention layers with half of each head rotated, SwiGLU after every mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: `attn_layer_indices` says which layers are attention, the rotary share
of a head is 0.5 whatever the config says.
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
    mlp_weights,
    read_attention,
    read_mamba_n,
    read_token_ids,
    refuse_variants,
)
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, MlpSpec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from milepost.kernels.protocol import KernelBackend
    from milepost.models.protocol import Model

_ROTATED = 0.5
_NAMES = ("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight")
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
        vocab_size=read.integer("vocab_size", 128000),
        hidden_size=hidden,
        layers=tuple(LayerSpec(i, (attention if i in attending else mamba,), mlp) for i in range(count)),
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


def _attention_layers(read: ConfigReader, count: int) -> frozenset[int]:
    listed = read.raw("attn_layer_indices") or []
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in listed):
        read.complain("attn_layer_indices", f"attn_layer_indices={listed!r} must list layers from 0 to {count - 1}")
        return frozenset()
    return frozenset(listed)


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    hidden = spec.hidden_size
    tensors = frame_weights(spec, _NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        tensors += [WeightSpec(f"{prefix}.{name}.weight", (hidden,)) for name in ("input_layernorm", "pre_ff_layernorm")]
        (mixer,) = layer.mixers
        if isinstance(mixer, Mamba2Spec):
            tensors += mamba2_weights(f"{prefix}.mamba", mixer, hidden)
        elif isinstance(mixer, AttentionSpec):
            tensors += attention_weights(f"{prefix}.self_attn", mixer, hidden)
        if isinstance(layer.feed_forward, MlpSpec):
            tensors += mlp_weights(f"{prefix}.feed_forward", layer.feed_forward, hidden)
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
    """Two residual blocks a layer: the mixer, then the feed-forward."""
    from milepost.models.layers.mlp import GatedMlp
    from milepost.models.layers.stack import Stack, mixer_of

    stack = Stack(spec, weights, recurrent=recurrent, attention=attention, device=device, names=_NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        name = "self_attn" if layer.attention else "mamba"
        mixer = mixer_of(layer.mixers[0], weights, f"{prefix}.{name}", stack)
        stack.add(layer.index, weights[f"{prefix}.input_layernorm.weight"], mixer)
        feed_forward = GatedMlp.of(weights, f"{prefix}.feed_forward")
        stack.add(layer.index, weights[f"{prefix}.pre_ff_layernorm.weight"], feed_forward)
    return stack
