"""Mamba-1 and Jamba: what their parsers read and refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import UnsupportedModel
from milepost.models import load_spec
from milepost.models.spec import Mamba1Spec, ModelSpec, MoeSpec
from tests.families import TINY_CONFIGS

# state-spaces/mamba-130m-hf, every key of it.
PURE: dict[str, Any] = {
    "architectures": ["MambaForCausalLM"],
    "bos_token_id": 0,
    "conv_kernel": 4,
    "d_inner": 1536,
    "d_model": 768,
    "eos_token_id": 0,
    "expand": 2,
    "fused_add_norm": True,
    "hidden_act": "silu",
    "hidden_size": 768,
    "initializer_range": 0.1,
    "intermediate_size": 1536,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "n_layer": 24,
    "num_hidden_layers": 24,
    "pad_token_id": 0,
    "pad_vocab_size_multiple": 8,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": True,
    "rms_norm": True,
    "ssm_cfg": {},
    "state_size": 16,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 48,
    "time_step_scale": 1.0,
    "torch_dtype": "float32",
    "transformers_version": "4.39.0.dev0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 50280,
}
# ai21labs/Jamba-v0.1, every key of it.
JAMBA: dict[str, Any] = {
    "architectures": ["JambaForCausalLM"],
    "attention_dropout": 0.0,
    "attn_layer_offset": 4,
    "attn_layer_period": 8,
    "auto_map": {"AutoConfig": "configuration_jamba.JambaConfig"},
    "bos_token_id": 1,
    "calc_logits_for_entire_prompt": False,
    "eos_token_id": 2,
    "expert_layer_offset": 1,
    "expert_layer_period": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "mamba_conv_bias": True,
    "mamba_d_conv": 4,
    "mamba_d_state": 16,
    "mamba_dt_rank": 256,
    "mamba_expand": 2,
    "mamba_inner_layernorms": True,
    "mamba_proj_bias": False,
    "model_type": "jamba",
    "n_ctx": 262144,
    "num_attention_heads": 32,
    "num_experts": 16,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "output_router_logits": False,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "router_aux_loss_coef": 0.001,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "use_mamba_kernels": True,
    "vocab_size": 65536,
}


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def test_the_published_configs(tmp_path: Path) -> None:
    pure, jamba = read(tmp_path, PURE), read(tmp_path, JAMBA)
    assert pure.layers[0].mixers == (Mamba1Spec(1536, 16, 48, 4, True, False),)
    assert pure.tie_embeddings and not pure.attention_layers and len(pure.recurrent_layers) == 24
    assert [layer.index for layer in jamba.attention_layers] == [4, 12, 20, 28]
    assert [isinstance(layer.feed_forward, MoeSpec) for layer in jamba.layers[:4]] == [False, True, False, True]
    assert jamba.layers[0].mixers == (Mamba1Spec(8192, 16, 256, 4, True, False, 1e-6),)
    assert jamba.max_position_embeddings == 262144


def test_an_automatic_rank_is_a_sixteenth_rounded_up(tmp_path: Path) -> None:
    spec = read(tmp_path, {**TINY_CONFIGS["mamba"], "hidden_size": 40, "time_step_rank": "auto"})
    assert isinstance(spec.layers[0].mixers[0], Mamba1Spec) and spec.layers[0].mixers[0].dt_rank == 3


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "unknown key": ("mamba", {"conv_kernels": 4}, "conv_kernels is a key that the parser of mamba doesn't know"),
    "unknown key of jamba": ("jamba", {"attn_layer_every": 4}, "attn_layer_every is a key"),
    "width": ("mamba", {"intermediate_size": 100}, "intermediate_size=100.*hidden_size=64"),
    "other norm": ("mamba", {"rms_norm": False}, "rms_norm=False"),
    "inner options": ("mamba", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg"),
    "layers": ("mamba", {"n_layer": 3}, "n_layer=3"),
    "rank": ("mamba", {"time_step_rank": "full"}, "time_step_rank='full'"),
    "offset": ("jamba", {"attn_layer_offset": 3}, "attn_layer_offset=3 must be less than attn_layer_period=3"),
    "expert offset": ("jamba", {"expert_layer_offset": 2}, "expert_layer_offset=2"),
    "kv heads": ("jamba", {"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "unknown layer": ("jamba", {"layers_block_type": ["mamba2"] * 4}, "unknown layers mamba2"),
    "length": ("jamba", {"layer_types": ["linear_attention"]}, "num_hidden_layers=4 disagrees with layer_types: 1"),
    "pattern": ("jamba", {"layers_block_type": ["mamba"] * 4}, "disagrees with attn_layer_period=3"),
    "no inner norms": ("jamba", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms"),
    "taken": ("jamba", {"num_experts_per_tok": 5}, "num_experts_per_tok=5"),
    "window": ("jamba", {"sliding_window": 128}, "sliding_window=128"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    family, overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY_CONFIGS[family], **overrides})
