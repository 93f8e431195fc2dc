"""Attention in every layer (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3), to set hybrids beside. They are sized, not served.

In: a `config.json`. Out: a spec. The law kept here: what can change the size of KV is read, and a key that isn't known is
refused by name. No torch.

Facts, checked against published files: Gemma's windows stand in every second layer (2) or in five of six (3); Mistral's and
Qwen's in all, if the config turns them on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import read_common, read_taken
from milepost.models.spec import AttentionSpec, FeedForwardSpec, LayerSpec, MlpSpec, ModelSpec, MoeSpec

_ATTRIBUTES = """
    attention_bias attention_dropout attn_logit_softcapping cache_implementation decoder_sparse_step embd_pdrop
    final_logit_softcapping hidden_act hidden_activation initializer_range max_window_layers mlp_bias mlp_only_layers
    norm_topk_prob original_max_position_embeddings partial_rotary_factor pretraining_tp query_pre_attn_scalar resid_pdrop
    rms_norm_eps rope_local_base_freq rope_parameters rope_scaling rope_theta router_aux_loss_coef
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())
"""None of these changes how many numbers a token adds to KV."""
_LAYER_TYPES = ("full_attention", "sliding_attention")


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of a dense model. Raises UnsupportedModel naming every field that can't be read."""
    architecture = next(iter(config.get("architectures") or ()), config.get("model_type", ""))
    aliases = {"torch_dtype": "dtype", "_sliding_window_pattern": "sliding_window_pattern"}
    read = ConfigReader(config, family=architecture, aliases=aliases)
    hidden, attention, part = read.integer("hidden_size", 4096), _attention(read), _feed_forward(read)
    windows = _windows(read, architecture, read.integer("num_hidden_layers", 32))
    spec = ModelSpec(
        family="dense",
        architecture=architecture,
        hidden_size=hidden,
        layers=tuple(LayerSpec(i, (replace(attention, window=window),), part) for i, window in enumerate(windows)),
        norm_eps=1e-6,
        **read_common(read, vocab_size=32000, tied=architecture.startswith("Gemma"), positions=32768),
    )
    read.finish(_WITHOUT_EFFECT)
    return spec


def _attention(read: ConfigReader) -> AttentionSpec:
    heads = read.integer("num_attention_heads", 32)
    kv, hidden = read.integer("num_key_value_heads", heads), read.integer("hidden_size", 4096)
    if heads % kv:
        read.complain("num_key_value_heads", f"num_key_value_heads={kv} doesn't divide num_attention_heads={heads}")
    if hidden % heads and not read.has("head_dim"):
        read.complain("num_attention_heads", f"num_attention_heads={heads} doesn't divide hidden_size={hidden}")
    head_dim = read.integer("head_dim", max(1, hidden // heads))
    return AttentionSpec(heads, kv, head_dim, False, head_dim**-0.5)


def _feed_forward(read: ConfigReader) -> FeedForwardSpec:
    width = read.integer("intermediate_size", 11008)
    if not read.has("num_experts"):
        return MlpSpec(width, bias=False, activation="silu", gated=True)
    experts, taken = read_taken(read, "num_experts", 128, 8)
    return MoeSpec(experts, taken, read.integer("moe_intermediate_size", width), 0)


def _windows(read: ConfigReader, architecture: str, count: int) -> list[int | None]:
    """The window of each layer; None: it attends to all tokens."""
    window = read.integer("sliding_window", 4096) if read.has("sliding_window") else None
    pattern, listed = read.integer("sliding_window_pattern", 6), read.raw("layer_types")
    if not read.flag("use_sliding_window", not architecture.startswith("Qwen")):
        window = None
    if isinstance(listed, list):
        if len(listed) != count or not set(listed) <= set(_LAYER_TYPES):
            read.complain("layer_types", f"layer_types must name {count} layers, each one of {', '.join(_LAYER_TYPES)}")
        return [window if kind == "sliding_attention" else None for kind in listed]
    if architecture.startswith("Gemma2"):
        return [window if index % 2 == 0 else None for index in range(count)]
    if architecture.startswith("Gemma3"):
        return [window if (index + 1) % pattern else None for index in range(count)]
    return [window] * count
