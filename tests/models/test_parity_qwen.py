"""Qwen3-Next, Qwen3.5 and its mixture of experts: what their parsers read and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import UnsupportedModel
from milepost.models import load_spec
from milepost.models.spec import GatedDeltaSpec, MlpSpec, ModelSpec, MoeSpec, RotarySpec
from tests.families import TINY_CONFIGS

# Qwen/Qwen3-Next-80B-A3B-Instruct, every key of it.
PUBLISHED: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "decoder_sparse_step": 1,
    "eos_token_id": 151645,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 5120,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_next",
    "moe_intermediate_size": 512,
    "norm_topk_prob": True,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_hidden_layers": 48,
    "num_key_value_heads": 2,
    "output_router_logits": False,
    "partial_rotary_factor": 0.25,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000000,
    "router_aux_loss_coef": 0.001,
    "shared_expert_intermediate_size": 512,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.57.0.dev0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def test_the_published_config(tmp_path: Path) -> None:
    spec = read(tmp_path, PUBLISHED)
    assert [layer.index for layer in spec.attention_layers] == list(range(3, 48, 4))
    assert spec.layers[0].mixers == (GatedDeltaSpec(16, 32, 128, 128, 4, 1e-6),)
    attention, experts = spec.layers[3].attention, spec.layers[3].feed_forward
    assert attention is not None and attention.gated and attention.rotary == RotarySpec(64, 1e7)
    assert isinstance(experts, MoeSpec) and (experts.experts, experts.per_token, experts.shared_gate) == (512, 10, True)


def test_both_dialects_give_one_spec(tmp_path: Path) -> None:
    kinds = ["linear_attention" if (index + 1) % 4 else "full_attention" for index in range(48)]
    dropped = ("full_attention_interval", "rope_theta", "partial_rotary_factor", "torch_dtype", "rope_scaling")
    kept = {key: value for key, value in PUBLISHED.items() if key not in dropped}
    rope = {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.25}
    newer = {**kept, "layer_types": kinds, "dtype": "bfloat16", "rope_parameters": rope}
    assert read(tmp_path, newer) == read(tmp_path, PUBLISHED)


def test_without_experts_all_layers_are_dense(tmp_path: Path) -> None:
    spec = read(tmp_path, {**PUBLISHED, "num_experts": 0})
    assert all(isinstance(layer.feed_forward, MlpSpec) for layer in spec.layers)


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("qwen3_next", {"linear_heads": 3}, "linear_heads is a key that the parser of qwen3_next doesn't know"),
    "unknown layer": ("qwen3_next", {"layer_types": ["mamba"] * 4}, "unknown layers mamba"),
    "length": ("qwen3_next", {"layer_types": ["linear_attention"]}, "num_hidden_layers=4 disagrees with layer_types: 1"),
    "key heads": ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 doesn't divide linear_num_value_heads=4"),
    "kv heads": ("qwen3_next", {"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "rotary share": ("qwen3_next", {"partial_rotary_factor": 1.5}, "partial_rotary_factor=1.5"),
    "unpaired": ("qwen3_next", {"head_dim": 12}, "head_dim=12: 3 rotated"),
    "dense layers": ("qwen3_next", {"mlp_only_layers": [4]}, "mlp_only_layers"),
    "taken": ("qwen3_next", {"num_experts_per_tok": 6}, "num_experts_per_tok=6 must be from 1 to num_experts=5"),
    "sliding": ("qwen3_next", {"use_sliding_window": True}, "use_sliding_window"),
    "ungated": ("qwen3_5", {"attn_output_gate": False}, "attn_output_gate"),
    "unknown key of 3.5": ("qwen3_5", {"num_experts": 4}, "num_experts is a key that the parser of qwen3_5 doesn't know"),
    "unknown layer of 3.5": ("qwen3_5_moe", {"layer_types": ["sliding_attention"] * 4}, "unknown layers sliding_attention"),
    "no experts": ("qwen3_5_moe", {"num_experts": 0}, "num_experts=0 is less than 1"),
    "shares": ("qwen3_5_moe", {"norm_topk_prob": False}, "norm_topk_prob"),
    "activation": ("qwen3_next", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    family, overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY_CONFIGS[family], **overrides})
