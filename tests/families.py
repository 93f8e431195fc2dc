"""One tiny config for each family that can be served, in the dialect that it publishes. The laws run over all of them."""

from __future__ import annotations

from typing import Any

_BODY: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "max_position_embeddings": 400,
    "torch_dtype": "float32",
    "eos_token_id": 2,
}
_ATTENTION: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
_MAMBA_N: dict[str, Any] = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16}

TINY_CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "architectures": ["NemotronHForCausalLM"],
        "hybrid_override_pattern": "M-*M",
        "intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "head_dim": 8,
        **_ATTENTION,
        **_BODY,
    },
    "mamba2": {
        "architectures": ["Mamba2ForCausalLM"],
        "num_hidden_layers": 2,
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 16,
        "n_groups": 1,
        **_BODY,
    },
    "bamba": {
        "architectures": ["BambaForCausalLM"],
        "num_hidden_layers": 3,
        "attn_layer_indices": [1],
        "intermediate_size": 48,
        **_MAMBA_N,
        **_ATTENTION,
        **_BODY,
    },
    "granitemoehybrid": {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "num_hidden_layers": 3,
        "layer_types": ["mamba", "attention", "mamba"],
        "intermediate_size": 48,
        "shared_intermediate_size": 40,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "embedding_multiplier": 6.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
        "logits_scaling": 3.0,
        "position_embedding_type": "nope",
        **_MAMBA_N,
        **_ATTENTION,
        **_BODY,
    },
}
