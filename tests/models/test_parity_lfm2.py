"""LFM2 and its mixture of experts: what their parsers read and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import UnsupportedModel
from milepost.models import load_spec
from milepost.models.spec import MlpSpec, ModelSpec, ShortConvSpec
from tests.families import TINY_CONFIGS

# LiquidAI/LFM2-1.2B, every key of it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "block_auto_adjust_ff_dim": True,
    "block_dim": 2048,
    "block_ff_dim": 12288,
    "block_ffn_dim_multiplier": 1.0,
    "block_mlp_init_scale": 1.0,
    "block_multiple_of": 256,
    "block_norm_eps": 1e-05,
    "block_out_init_scale": 1.0,
    "block_use_swiglu": True,
    "block_use_xavier_init": True,
    "bos_token_id": 1,
    "conv_L_cache": 3,
    "conv_bias": False,
    "conv_dim": 2048,
    "conv_dim_out": 2048,
    "conv_use_xavier_init": True,
    "eos_token_id": 7,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "max_position_embeddings": 128000,
    "model_type": "lfm2",
    "norm_eps": 1e-05,
    "num_attention_heads": 32,
    "num_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pad_token_id": 0,
    "rope_theta": 1000000.0,
    "theta": 1000000.0,
    "tie_embedding": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.54.0.dev0",
    "use_cache": True,
    "use_pos_enc": True,
    "vocab_size": 65536,
}


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def test_the_published_config(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED)
    assert [layer.index for layer in spec.attention_layers] == [2, 5, 8, 10, 12, 14]
    assert spec.layers[0].mixers == (ShortConvSpec(2048, 3, False),)
    assert spec.layers[0].feed_forward == MlpSpec(8192, bias=False, activation="silu", gated=True)
    assert [c.name for c in spec.layers[0].components] == ["window"]
    attention = spec.layers[2].attention
    assert attention is not None and attention.qk_norm is not None and attention.rotary is not None
    assert (attention.head_dim, attention.qk_norm.eps, attention.rotary.theta) == (64, 1e-5, 1e6)
    assert spec.tie_embeddings and spec.eos_token_ids == (7,)


def test_both_dialects_give_one_spec(tmp_path: Path) -> None:
    kinds = ["full_attention" if index in PUBLISHED["full_attn_idxs"] else "conv" for index in range(16)]
    dropped = ("full_attn_idxs", "rope_theta", "theta", "block_ff_dim", "tie_embedding", "torch_dtype", "block_norm_eps")
    kept = {key: value for key, value in PUBLISHED.items() if key not in dropped}
    rope = {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}
    newer = {**kept, **rope, "layer_types": kinds, "intermediate_size": 12288, "dtype": "bfloat16", "tie_word_embeddings": True}
    assert read(tmp_path, newer) == read(tmp_path, PUBLISHED)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("lfm2", {"conv_L_cash": 3}, "conv_L_cash is a key that the parser of lfm2 doesn't know"),
    "unknown layer": ("lfm2_moe", {"layer_types": ["conv", "mamba", "conv"]}, "unknown layers mamba"),
    "length": ("lfm2_moe", {"layer_types": ["conv"]}, "num_hidden_layers=3 disagrees with layer_types: 1 layers"),
    "index": ("lfm2", {"full_attn_idxs": [1, 4]}, r"full_attn_idxs=\[1, 4\] must list layers from 0 to 3"),
    "two lists": ("lfm2", {"layer_types": ["conv"] * 4}, "full_attn_idxs=.* disagrees with layer_types"),
    "kv heads": ("lfm2", {"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "heads": ("lfm2", {"num_attention_heads": 6}, "num_attention_heads=6 doesn't divide hidden_size=32"),
    "odd head": ("lfm2", {"hidden_size": 36, "num_attention_heads": 4}, "head_dim=9.*don't pair up"),
    "window": ("lfm2", {"conv_L_cache": 1}, "conv_L_cache=1 is less than 2"),
    "conv width": ("lfm2", {"conv_dim": 64}, "conv_dim=64.*hidden_size=32"),
    "not gated": ("lfm2", {"block_use_swiglu": False}, "block_use_swiglu"),
    "taken": ("lfm2_moe", {"num_experts_per_tok": 6}, "num_experts_per_tok=6"),
    "scaled rotary": ("lfm2", {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
    "rope_scaling": ("lfm2", {"rope_scaling": "linear"}, "rope_scaling"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    family, overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY_CONFIGS[family], **overrides})
