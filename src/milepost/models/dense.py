"""Attention in every layer (Llama, Mistral, Qwen2, Qwen3, Gemma 2 and 3), to set hybrids beside. They are sized, not served.

In: a `config.json`. Out: a spec. The law kept here: what can change the size of KV is read, and a key that isn't known is
refused by name. No torch.

Facts, checked against transformers 5.24: Gemma's windows stand in every second layer (2) or in five of six (3), Mistral's in
all, Qwen's from layer `max_window_layers` on if the config turns them on.
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
    final_logit_softcapping hidden_act hidden_activation initializer_range mlp_bias mlp_only_layers norm_topk_prob
    original_max_position_embeddings partial_rotary_factor pretraining_tp query_pre_attn_scalar resid_pdrop rms_norm_eps
    rope_local_base_freq rope_parameters rope_scaling rope_theta router_aux_loss_coef
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())
"""None of these changes how many numbers a token adds to KV."""
_LAYER_TYPES = ("full_attention", "sliding_attention")
_ALWAYS = ("hidden_size", "num_hidden_layers", "num_attention_heads")
_NEEDED = {
    "gemma3": ("num_key_value_heads", "head_dim", "sliding_window"),
    "gemma2": ("num_key_value_heads", "head_dim", "sliding_window"),
    "qwen3": ("num_key_value_heads", "head_dim"),
    "qwen2": ("num_key_value_heads",),
    "mistral": ("num_key_value_heads", "sliding_window"),
    "llama": (),
}
"""By kind: keys that KV can't be sized without, since each implementation has a default of its own; null counts as said."""


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of a dense model. Raises UnsupportedModel naming every field that can't be read, or is missed."""
    architecture = next(iter(config.get("architectures") or ()), config.get("model_type", ""))
    kind = next((kind for kind in _NEEDED if kind in architecture.lower()), "llama")
    aliases = {"torch_dtype": "dtype", "_sliding_window_pattern": "sliding_window_pattern"}
    read = ConfigReader(config, family=architecture, aliases=aliases)
    for name in (*_ALWAYS, *_NEEDED[kind]):
        if not read.present(name):
            read.complain(name, f"{name} isn't in the config, and KV can't be sized without it")
    hidden, attention, part = read.integer("hidden_size", 4096), _attention(read), _feed_forward(read)
    windows = _windows(read, kind, read.integer("num_hidden_layers", 32))
    spec = ModelSpec(
        family="dense",
        architecture=architecture,
        hidden_size=hidden,
        layers=tuple(LayerSpec(i, (replace(attention, window=window),), part) for i, window in enumerate(windows)),
        norm_eps=1e-6,
        **read_common(read, vocab_size=32000, tied=kind.startswith("gemma"), positions=32768),
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


def _windows(read: ConfigReader, kind: str, count: int) -> list[int | None]:
    """The window of each layer; None: it attends to all tokens."""
    window = read.integer("sliding_window", 4096) if read.has("sliding_window") else None
    pattern, first = read.integer("sliding_window_pattern", 6), read.integer("max_window_layers", 28, least=0)
    listed = read.raw("layer_types")
    if not read.flag("use_sliding_window", not kind.startswith("qwen")):
        window = None
    if isinstance(listed, list):
        if len(listed) != count or not set(listed) <= set(_LAYER_TYPES):
            read.complain("layer_types", f"layer_types must name {count} layers, each one of {', '.join(_LAYER_TYPES)}")
        return [window if each == "sliding_attention" else None for each in listed]
    match kind:
        case "gemma2":
            return [window if index % 2 == 0 else None for index in range(count)]
        case "gemma3":
            return [window if (index + 1) % pattern else None for index in range(count)]
        case "qwen2" | "qwen3":
            return [window if index >= first else None for index in range(count)]
        case _:
            return [window] * count
