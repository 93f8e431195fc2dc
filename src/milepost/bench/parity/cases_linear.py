"""Cases of the families built on short convolutions, delta rules and gated linear recurrences. The law kept here: data only."""

from __future__ import annotations

from typing import Any

from milepost.bench.parity.cases import Case

# fmt: off
_BODY: dict[str, Any] = {"vocab_size": 83, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512}
_LFM2: dict[str, Any] = {**_BODY, "pad_token_id": None}
_LFM2_MOE: dict[str, Any] = {**_LFM2, "intermediate_size": 40, "moe_intermediate_size": 24}
_DELTA: dict[str, Any] = {**_BODY, "intermediate_size": 40, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16}
_QWEN: dict[str, Any] = {**_DELTA, "head_dim": 16}
_QWEN_MOE: dict[str, Any] = {**_QWEN, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20}
_QWEN_ODD: dict[str, Any] = {"hidden_size": 44, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 20,
    "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
    "linear_conv_kernel_dim": 3, "vocab_size": 61}
_ROPE: dict[str, Any] = {"rope_theta": 500.0, "rope_type": "default"}
_HALF: dict[str, Any] = {**_ROPE, "partial_rotary_factor": 0.5}
_OLMO: dict[str, Any] = {**_DELTA, "pad_token_id": None}
_UNROTATED: dict[str, Any] = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
_KIMI: dict[str, Any] = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 40, "moe_intermediate_size": 24,
    "num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4,
    "v_head_dim": 8, "linear_num_heads": 2, "linear_head_dim": 16, "num_local_experts": 6, "num_experts_per_tok": 2,
    "max_position_embeddings": 512, "pad_token_id": None, "bos_token_id": None}
_GRIFFIN: dict[str, Any] = {"vocab_size": 83, "hidden_size": 32, "intermediate_size": 96, "num_attention_heads": 4,
    "num_key_value_heads": 1, "attention_window_size": 8, "num_hidden_layers": 4}

CASES: tuple[Case, ...] = (
    Case("lfm2", "plain", "Lfm2", {**_LFM2, "num_hidden_layers": 4, "full_attn_idxs": [1, 3], "intermediate_size": 60,
        "block_multiple_of": 16}, seed=12),
    Case("lfm2", "bias", "Lfm2", {**_LFM2, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention", "conv"],
        "conv_bias": True, "conv_L_cache": 4, "block_auto_adjust_ff_dim": False, "intermediate_size": 50,
        "tie_word_embeddings": False}),
    Case("lfm2", "odd", "Lfm2", {**_LFM2, "num_hidden_layers": 3, "full_attn_idxs": [2], "hidden_size": 50,
        "num_attention_heads": 5, "num_key_value_heads": 1, "conv_L_cache": 2, "intermediate_size": 70, "block_multiple_of": 7,
        "block_ffn_dim_multiplier": 1.3, "vocab_size": 61, "rope_parameters": _ROPE}),
    Case("lfm2_moe", "plain", "Lfm2Moe", {**_LFM2_MOE, "num_hidden_layers": 3, "layer_types": ["conv", "full_attention",
        "conv"], "num_dense_layers": 1, "num_experts": 6, "num_experts_per_tok": 2}),
    Case("lfm2_moe", "scaled", "Lfm2Moe", {**_LFM2_MOE, "num_hidden_layers": 2, "layer_types": ["full_attention", "conv"],
        "num_dense_layers": 0, "num_experts": 4, "num_experts_per_tok": 4, "routed_scaling_factor": 2.5,
        "norm_topk_prob": False, "tie_word_embeddings": False}),
    Case("lfm2_moe", "odd", "Lfm2Moe", {**_LFM2_MOE, "num_hidden_layers": 3, "layer_types": ["conv", "conv", "full_attention"],
        "num_dense_layers": 1, "hidden_size": 42, "num_attention_heads": 7, "num_key_value_heads": 1, "num_experts": 5,
        "num_experts_per_tok": 3, "use_expert_bias": False, "conv_bias": True, "conv_L_cache": 5, "vocab_size": 61}),
    Case("qwen3_next", "plain", "Qwen3Next", {**_QWEN_MOE, "num_hidden_layers": 4}),
    Case("qwen3_next", "mixed", "Qwen3Next", {**_QWEN_MOE, "num_hidden_layers": 3, "layer_types": ["full_attention",
        "linear_attention", "full_attention"], "mlp_only_layers": [0], "attention_bias": True, "norm_topk_prob": False,
        "linear_num_key_heads": 1, "tie_word_embeddings": True}),
    Case("qwen3_next", "odd", "Qwen3Next", {**_QWEN_MOE, **_QWEN_ODD, "num_hidden_layers": 3, "decoder_sparse_step": 2,
        "num_experts": 5, "num_experts_per_tok": 5, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
        "rope_parameters": _HALF}),
    Case("qwen3_5", "plain", "Qwen3_5", {**_QWEN, "num_hidden_layers": 4}, "TextConfig"),
    Case("qwen3_5", "bias", "Qwen3_5", {**_QWEN, "num_hidden_layers": 2, "layer_types": ["full_attention", "linear_attention"],
        "attention_bias": True, "linear_num_value_heads": 2, "tie_word_embeddings": True}, "TextConfig"),
    Case("qwen3_5", "odd", "Qwen3_5", {**_QWEN, **_QWEN_ODD, "num_hidden_layers": 2, "layer_types": ["linear_attention",
        "full_attention"], "rope_parameters": {**_HALF, "mrope_section": [2, 2, 1], "mrope_interleaved": True}}, "TextConfig"),
    Case("qwen3_5_moe", "plain", "Qwen3_5Moe", {**_QWEN_MOE, "num_hidden_layers": 4}, "TextConfig"),
    Case("qwen3_5_moe", "one-key-head", "Qwen3_5Moe", {**_QWEN_MOE, "num_hidden_layers": 4, "linear_num_key_heads": 1,
        "num_experts": 2}, "TextConfig"),
    Case("qwen3_5_moe", "odd", "Qwen3_5Moe", {**_QWEN_MOE, **_QWEN_ODD, "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"], "rope_parameters": {**_HALF, "rope_theta": 1e6}}, "TextConfig"),
    Case("olmo_hybrid", "unrotated", "OlmoHybrid", {**_OLMO, **_UNROTATED, "num_hidden_layers": 4}),
    Case("olmo_hybrid", "rotated", "OlmoHybrid", {**_OLMO, "num_hidden_layers": 3, "layer_types": ["full_attention",
        "linear_attention", "full_attention"], "rope_parameters": _ROPE, "linear_allow_neg_eigval": False,
        "attention_bias": True}),
    Case("olmo_hybrid", "odd", "OlmoHybrid", {**_OLMO, **_UNROTATED, "num_hidden_layers": 2, "hidden_size": 42,
        "num_attention_heads": 3, "num_key_value_heads": 1, "linear_num_key_heads": 3, "linear_num_value_heads": 3,
        "linear_key_head_dim": 10, "linear_value_head_dim": 14, "linear_conv_kernel_dim": 3, "vocab_size": 61,
        "tie_word_embeddings": True}),
    Case("kimi_linear", "plain", "KimiLinear", {**_KIMI, "num_hidden_layers": 5}),
    Case("kimi_linear", "groups", "KimiLinear", {**_KIMI, "num_hidden_layers": 3, "layer_types": ["full_attention",
        "linear_attention", "full_attention"], "mlp_layer_types": ["sparse", "dense", "sparse"], "q_lora_rank": 12,
        "attention_bias": True, "n_group": 3, "topk_group": 2, "num_experts_per_tok": 3, "n_shared_experts": 2,
        "norm_topk_prob": False}),
    Case("kimi_linear", "odd", "KimiLinear", {**_KIMI, "num_hidden_layers": 3, "layer_types": ["linear_attention",
        "full_attention", "linear_attention"], "hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 3,
        "kv_lora_rank": 11, "qk_nope_head_dim": 7, "qk_rope_head_dim": 5, "v_head_dim": 9, "q_lora_rank": 13,
        "linear_num_heads": 5, "linear_head_dim": 10, "linear_conv_kernel_dim": 3, "num_local_experts": 5,
        "num_experts_per_tok": 5, "moe_intermediate_size": 15, "routed_scaling_factor": 1.3, "vocab_size": 61}),
    Case("kimi_linear", "dense", "KimiLinear", {**_KIMI, "num_hidden_layers": 3, "layer_types": ["linear_attention",
        "linear_attention", "full_attention"], "mlp_layer_types": ["dense"] * 3, "linear_num_heads": 1, "linear_head_dim": 24,
        "linear_conv_kernel_dim": 2}),
    Case("recurrent_gemma", "plain", "RecurrentGemma", _GRIFFIN),
    Case("recurrent_gemma", "wide", "RecurrentGemma", {**_GRIFFIN, "block_types": ["attention", "recurrent"], "lru_width": 52,
        "attention_window_size": 13, "conv1d_width": 2, "attention_bias": True, "num_key_value_heads": 2,
        "logits_soft_cap": 1.5, "tie_word_embeddings": False}),
    Case("recurrent_gemma", "odd", "RecurrentGemma", {**_GRIFFIN, "hidden_size": 60, "num_attention_heads": 5,
        "num_key_value_heads": 5, "lru_width": 35, "conv1d_width": 6, "intermediate_size": 75, "attention_window_size": 1,
        "vocab_size": 61, "block_types": ["recurrent", "attention"], "num_hidden_layers": 3, "rms_norm_eps": 1e-3,
        "rope_parameters": {**_ROPE, "partial_rotary_factor": 1.0}}),
    Case("recurrent_gemma", "narrow", "RecurrentGemma", {**_GRIFFIN, "hidden_size": 42, "num_attention_heads": 3,
        "num_key_value_heads": 3, "lru_width": 9, "conv1d_width": 3, "attention_window_size": 31, "block_types": ["attention",
        "attention", "recurrent"], "hidden_activation": "gelu", "rope_parameters": {**_ROPE, "partial_rotary_factor": 0.3}}),
    Case("recurrent_gemma", "whole", "RecurrentGemma", {**_GRIFFIN, "attention_window_size": 2048, "block_types": ["recurrent",
        "recurrent", "recurrent", "attention"], "hidden_activation": "silu", "num_attention_heads": 1, "lru_width": 11}),
)
# fmt: on
