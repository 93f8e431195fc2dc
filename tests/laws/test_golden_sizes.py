"""Law 9, against figures computed elsewhere: what `doctor` says of published models equals the golden file, family by family.

A family adds a function that writes a golden entry in the dialect that it publishes, and its line in PUBLISHED.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from milepost.cli.doctor import doctor
from milepost.config import EngineConfig

GOLDEN = Path(__file__).parents[3] / "shared" / "golden" / "sizes.json"
ENTRIES: dict[str, Any] = json.loads(GOLDEN.read_text())["models"] if GOLDEN.exists() else {}


def _nemotron_h(entry: dict[str, Any]) -> dict[str, Any]:
    """Dense ones and, with E in the pattern, those of Nemotron-3, whose experts remember nothing."""
    experts = {"n_routed_experts": entry["num_experts"], "num_experts_per_tok": 6} if "num_experts" in entry else {}
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hybrid_override_pattern": entry["pattern"],
        "num_hidden_layers": entry["num_layers"],
        "hidden_size": entry["hidden_size"],
        "mamba_num_heads": entry["mamba_num_heads"],
        "mamba_head_dim": entry["mamba_head_dim"],
        "ssm_state_size": entry["ssm_state_size"],
        "n_groups": entry["n_groups"],
        "conv_kernel": entry["conv_kernel"],
        "use_conv_bias": entry["conv_bias"],
        "num_attention_heads": entry["num_attention_heads"],
        "num_key_value_heads": entry["num_key_value_heads"],
        "attention_head_dim": entry["head_dim"],
        "intermediate_size": entry["intermediate_size"],
        "torch_dtype": "bfloat16",
        **experts,
    }


def _falcon_h1(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "num_hidden_layers": entry["num_layers"],
        "hidden_size": entry["hidden_size"],
        "mamba_d_ssm": entry["mamba_d_ssm"],
        "mamba_n_heads": entry["mamba_num_heads"],
        "mamba_d_head": entry["mamba_head_dim"],
        "mamba_d_state": entry["ssm_state_size"],
        "mamba_n_groups": entry["n_groups"],
        "mamba_d_conv": entry["conv_kernel"],
        "mamba_conv_bias": entry["conv_bias"],
        "num_attention_heads": entry["num_attention_heads"],
        "num_key_value_heads": entry["num_key_value_heads"],
        "head_dim": entry["head_dim"],
        "rope_theta": entry["rope_theta"],
        "torch_dtype": "bfloat16",
    }


def _attention(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "hidden_size": entry["hidden_size"],
        "num_hidden_layers": entry["num_layers"],
        "num_attention_heads": entry["num_attention_heads"],
        "num_key_value_heads": entry["num_key_value_heads"],
        "torch_dtype": "bfloat16",
    }


def _mamba_n(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "mamba_n_heads": entry["mamba_num_heads"],
        "mamba_d_head": entry["mamba_head_dim"],
        "mamba_d_state": entry["ssm_state_size"],
        "mamba_n_groups": entry["n_groups"],
        "mamba_d_conv": entry["conv_kernel"],
        "mamba_conv_bias": entry["conv_bias"],
    }


def _kinds(entry: dict[str, Any], recurrent: str, attention: str) -> list[str]:
    attending = entry["attention_layer_indices"]
    return [attention if index in attending else recurrent for index in range(entry["num_layers"])]


def _granite(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "layer_types": _kinds(entry, "mamba", "attention"),
        "position_embedding_type": entry["position_embedding"],
        "num_local_experts": entry.get("num_experts", 0),
        "num_experts_per_tok": entry.get("num_experts_per_tok", 0),
        **_attention(entry),
        **_mamba_n(entry),
    }


def _bamba(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["BambaForCausalLM"],
        "model_type": "bamba",
        "attn_layer_indices": entry["attention_layer_indices"],
        **_attention(entry),
        **_mamba_n(entry),
    }


def _mamba2(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "num_hidden_layers": entry["num_layers"],
        "hidden_size": entry["hidden_size"],
        "num_heads": entry["mamba_num_heads"],
        "head_dim": entry["mamba_head_dim"],
        "state_size": entry["ssm_state_size"],
        "n_groups": entry["n_groups"],
        "conv_kernel": entry["conv_kernel"],
        "use_conv_bias": entry["conv_bias"],
        "torch_dtype": "bfloat16",
    }


def _mamba(entry: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": ["MambaForCausalLM"],
        "model_type": "mamba",
        "num_hidden_layers": entry["num_layers"],
        "hidden_size": entry["hidden_size"],
        "expand": entry["mamba_expand"],
        "state_size": entry["mamba_d_state"],
        "conv_kernel": entry["mamba_d_conv"],
        "time_step_rank": entry["mamba_dt_rank"],
        "use_conv_bias": entry["conv_bias"],
        "torch_dtype": "bfloat16",
    }


def _jamba(entry: dict[str, Any]) -> dict[str, Any]:
    keys = [name for name in entry if name.startswith(("mamba_", "attn_layer_", "expert_layer_", "num_experts"))]
    return {
        "architectures": ["JambaForCausalLM"],
        "model_type": "jamba",
        **{name: entry[name] for name in keys if name != "mamba_version"},
        **_attention(entry),
    }


def _lfm2(entry: dict[str, Any]) -> dict[str, Any]:
    common = {"conv_L_cache": entry["conv_L_cache"], "conv_bias": entry["conv_bias"], **_attention(entry)}
    if "num_experts" not in entry:
        indices = {"full_attn_idxs": entry["attention_layer_indices"], "conv_dim": entry["hidden_size"]}
        return {"architectures": ["Lfm2ForCausalLM"], "model_type": "lfm2", **indices, **common}
    return {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "layer_types": _kinds(entry, "conv", "full_attention"),
        "num_experts": entry["num_experts"],
        "num_experts_per_tok": entry["num_experts_per_tok"],
        "num_dense_layers": entry["num_dense_layers"],
        **common,
    }


def _qwen(entry: dict[str, Any]) -> dict[str, Any]:
    """Qwen3-Next is the one of 512 experts; hidden size and heads, where the file leaves them out, change no size here."""
    experts = entry.get("num_experts")
    names = {512: ("Qwen3NextForCausalLM", "qwen3_next"), None: ("Qwen3_5ForCausalLM", "qwen3_5_text")}
    architecture, model_type = names.get(experts, ("Qwen3_5MoeForCausalLM", "qwen3_5_moe_text"))
    seen = {**entry, "hidden_size": entry["hidden_size"] or 4096, "num_attention_heads": entry["num_attention_heads"] or 32}
    moe = {"num_experts": experts, "num_experts_per_tok": entry["num_experts_per_tok"]} if experts else {}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "full_attention_interval": entry["full_attention_interval"],
        "head_dim": entry["head_dim"],
        "partial_rotary_factor": entry["partial_rotary_factor"],
        **{name: value for name, value in entry.items() if name.startswith("linear_")},
        **moe,
        **_attention(seen),
    }


def _zamba2(entry: dict[str, Any]) -> dict[str, Any]:
    hybrid = entry["hybrid_layer_ids"]
    return {
        "architectures": ["Zamba2ForCausalLM"],
        "model_type": "zamba2",
        "num_hidden_layers": entry["num_layers"],
        "layers_block_type": ["hybrid" if layer in hybrid else "mamba" for layer in range(entry["num_layers"])],
        "hybrid_layer_ids": hybrid,
        "hidden_size": entry["hidden_size"],
        "n_mamba_heads": entry["mamba_num_heads"],
        "mamba_headdim": entry["mamba_head_dim"],
        "mamba_d_state": entry["ssm_state_size"],
        "mamba_ngroups": entry["n_groups"],
        "mamba_d_conv": entry["conv_kernel"],
        "num_attention_heads": entry["num_attention_heads"],
        "num_key_value_heads": entry["num_key_value_heads"],
        "attention_head_dim": entry["head_dim"],
        "attention_hidden_size": entry["attention_hidden_size"],
        "num_mem_blocks": entry["num_mem_blocks"],
        "torch_dtype": "bfloat16",
    }


def _recurrent_gemma(entry: dict[str, Any]) -> dict[str, Any]:
    names = ("block_types", "lru_width", "conv1d_width", "attention_window_size", "head_dim")
    return {
        "architectures": ["RecurrentGemmaForCausalLM"],
        "model_type": "recurrent_gemma",
        **{name: entry[name] for name in names},
        **_attention(entry),
    }


def _mamba2_hybrid(entry: dict[str, Any]) -> dict[str, Any]:
    """The first release's dialect, which names no architecture."""
    return {
        "d_model": entry["hidden_size"],
        "d_intermediate": 0,
        "n_layer": entry["num_layers"],
        "vocab_size": 50277,
        "ssm_cfg": {"layer": "Mamba2"},
        "attn_layer_idx": entry["attention_layer_indices"],
        "attn_cfg": {
            "causal": True,
            "d_conv": entry["attn_d_conv"],
            "head_dim": entry["head_dim"],
            "num_heads": entry["num_attention_heads"],
            "out_proj_bias": False,
            "qkv_proj_bias": False,
            "rotary_emb_dim": entry["rotary_emb_dim"],
        },
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }


def _hymba(entry: dict[str, Any]) -> dict[str, Any]:
    count = entry["num_layers"]
    return {
        "architectures": ["HymbaForCausalLM"],
        "attn_hidden_size": -1,
        "attn_implementation_new": "flex",
        "conv_dim": {f"{layer}": entry["conv_dim"] for layer in range(count)},
        "global_attn_idx": entry["global_attn_idx"],
        "kq_head_dim": -1,
        "kv_reuse_group": [[1, 2], [3, 4], [16, 17, 18]],
        "layer_type": ["h"] * count,
        "mamba_d_conv": entry["mamba_d_conv"],
        "mamba_d_state": entry["mamba_d_state"],
        "mamba_dt_rank": 100,
        "model_type": "hymba",
        "num_memory_tokens": entry["num_meta_tokens"],
        "sliding_window": entry["sliding_window"],
        **_attention(entry),
    }


PUBLISHED: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "nemotron_h": _nemotron_h,
    "bamba": _bamba,
    "falcon_h1": _falcon_h1,
    "zamba2": _zamba2,
    "granitemoehybrid": _granite,
    "jamba": _jamba,
    "lfm2": _lfm2,
    "mamba": _mamba,
    "mamba2": _mamba2,
    "qwen_gdn": _qwen,
    "mamba2_hybrid": _mamba2_hybrid,
    "hymba": _hymba,
    "recurrent_gemma": _recurrent_gemma,
}
"""By the golden file's `arch`."""


@pytest.mark.skipif(not GOLDEN.exists(), reason="the golden sizes are not part of a clone")
@pytest.mark.parametrize("name", ENTRIES)
def test_doctor_equals_the_golden_sizes(name: str, tmp_path: Path) -> None:
    """34, 37 (public kinds): a shape computed in two places that disagree; every layer counted as attention."""
    entry, expect = ENTRIES[name]["config"], ENTRIES[name]["expect"]
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED[entry["arch"]](entry)))
    config = EngineConfig(model=str(tmp_path / "config.json"), kv_cache_dtype="bfloat16", mamba_cache_dtype="bfloat16")
    found = doctor(config).to_json()
    assert found["attention_layers"] == expect["attention_layers"]
    assert found["recurrent_layers"] == expect["recurrent_layers"]
    assert found["state_bytes_per_layer"] == expect["state_bytes_per_layer_fp32_bf16"]
    assert found["state_bytes_per_sequence"] == expect["state_bytes_per_sequence_ssm_fp32_conv_bf16"]
    assert found["kv_bytes_per_token"] == expect.get("kv_bytes_per_token_bf16", 0)
    assert found["kv_bytes_per_token_per_layer"] == expect.get("kv_bytes_per_token_per_layer_bf16", 0)
