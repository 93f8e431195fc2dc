"""The dialect of the first Mamba releases (mamba-130m, mamba2-2.7b, mamba2attn-2.7b): `d_model`, `n_layer`, `ssm_cfg`.

In: such a `config.json`, which names no architecture. Out: the same model in the dialect of its family, or, where attention
layers stand among the Mamba-2 ones, a spec to size it by. The law kept here: a key that isn't known is refused. No torch.

Facts, checked against published files: `ssm_cfg.layer` says Mamba1 (the default) or Mamba2; the vocabulary is padded to a
multiple of `pad_vocab_size_multiple`; embeddings are tied unless the file says otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.errors import UnsupportedModel
from milepost.models.reader import ConfigReader
from milepost.models.spec import AttentionSpec, LayerSpec, ModelSpec, RotarySpec

ARCHITECTURES = {"Mamba1": "MambaForCausalLM", "Mamba2": "Mamba2ForCausalLM"}
HYBRID = "Mamba2WithAttention"
"""What we call Mamba-2 with attention layers among the others; the files give it no name."""
_PADDED_TO = 8
_THETA = 10000.0
_MAMBA1 = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "dt_rank": "time_step_rank"}
_MAMBA2 = {"d_state": "state_size", "d_conv": "conv_kernel", "expand": "expand", "headdim": "head_dim", "ngroups": "n_groups"}


def is_dialect(config: Mapping[str, Any]) -> bool:
    """True if a config is written so and names no architecture."""
    return "ssm_cfg" in config and "d_model" in config and not config.get("architectures") and "hidden_size" not in config


def translate(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same model as its family's `config.json` says it, or one of architecture HYBRID, which keeps this dialect.

    Raises UnsupportedModel naming every key that can't be read.
    """
    read = ConfigReader(config, family="state-spaces", aliases={})
    cell = read.raw("ssm_cfg")
    inner = ConfigReader(cell if isinstance(cell, dict) else {}, family="ssm_cfg", aliases={})
    layer = inner.choice("layer", "Mamba1", ARCHITECTURES)
    if read.raw("attn_layer_idx"):
        return {**config, "architectures": [HYBRID]}
    hidden, padded = read.integer("d_model", 768), read.integer("pad_vocab_size_multiple", _PADDED_TO)
    names = _MAMBA1 if layer == "Mamba1" else _MAMBA2
    sizes = {present: inner.raw(name) for name, present in names.items() if inner.has(name)}
    read.unless("d_intermediate", lambda value: value == 0, "there are no feed-forward blocks in this family")
    read.unless("attn_cfg", lambda value: value == {}, "no attention layers are listed")
    read.unless("rms_norm", lambda value: value is True, "it must be true")
    vocabulary = read.integer("vocab_size", 50277)
    found = {
        "architectures": [ARCHITECTURES[layer]],
        "hidden_size": hidden,
        "num_hidden_layers": read.integer("n_layer", 24),
        "vocab_size": -(-vocabulary // padded) * padded,
        "residual_in_fp32": read.flag("residual_in_fp32", True),
        "tie_word_embeddings": read.flag("tie_embeddings", True),
        **sizes,
    }
    if layer == "Mamba2":
        head_dim, expand = sizes.get("head_dim", 64), sizes.get("expand", 2)
        whole = isinstance(head_dim, int) and isinstance(expand, int) and head_dim > 0
        found |= {"num_heads": hidden * expand // head_dim if whole else 0, "n_groups": sizes.get("n_groups", 1)}
    read.finish({"fused_add_norm", "model_type", "transformers_version", "use_cache"})
    inner.finish(())
    return found


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """A spec of Mamba-2 with attention layers, to size it by. Raises UnsupportedModel naming the fields."""
    from milepost.models import mamba, mamba2

    attending = ("attn_layer_idx", "attn_cfg", "architectures")
    plain = translate({name: value for name, value in config.items() if name not in attending})
    spec = mamba2.parse(plain) if plain["architectures"] == [ARCHITECTURES["Mamba2"]] else mamba.parse(plain)
    attention = _attention(config.get("attn_cfg"), spec.hidden_size)
    indices = config["attn_layer_idx"]
    if not isinstance(indices, list) or not all(isinstance(i, int) and 0 <= i < len(spec.layers) for i in indices):
        raise UnsupportedModel(
            f"attn_layer_idx={indices!r} must list layers from 0 to {len(spec.layers) - 1}", field="attn_layer_idx"
        )
    layers = tuple(LayerSpec(layer.index, (attention,)) if layer.index in indices else layer for layer in spec.layers)
    return replace(spec, family="mamba2_hybrid", architecture=HYBRID, layers=layers)


def _attention(config: Any, hidden: int) -> AttentionSpec:
    read = ConfigReader(config if isinstance(config, dict) else {}, family="attn_cfg", aliases={})
    heads = read.integer("num_heads", 1)
    head_dim, rotated = read.integer("head_dim", max(1, hidden // heads)), read.integer("rotary_emb_dim", 0, least=0)
    kv_heads = read.integer("num_heads_kv", heads)
    if heads % kv_heads:
        read.complain("num_heads_kv", f"num_heads_kv={kv_heads} doesn't divide num_heads={heads}")
    read.unless("causal", lambda value: value is True, "only causal attention is known")
    for name in ("d_conv", "qkv_proj_bias", "out_proj_bias"):
        read.raw(name)
    read.finish(())
    rotary = RotarySpec(rotated, _THETA) if rotated else None
    return AttentionSpec(heads, kv_heads, head_dim, False, head_dim**-0.5, rotary)
