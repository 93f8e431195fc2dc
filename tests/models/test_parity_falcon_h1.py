"""Falcon-H1 against transformers' uncut forward (both mixers, every multiplier), its dialects, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import UnsupportedModel
from milepost.models.falcon_h1 import parse
from milepost.models.spec import Mamba2Spec
from tests.families import TINY_CONFIGS
from tests.models.test_parity_mamba2_families import Theirs, agree, transformers

_BODY: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64, "mamba_d_state": 16,
    "mamba_chunk_size": 32, "num_hidden_layers": 3, "rope_parameters": {"rope_theta": 1e11, "rope_type": "default"},
}  # fmt: skip
_MULTIPLIERS: dict[str, Any] = {
    "embedding_multiplier": 5.65, "ssm_in_multiplier": 1.25, "ssm_out_multiplier": 0.4, "attention_in_multiplier": 0.8,
    "attention_out_multiplier": 0.9, "key_multiplier": 0.39, "mlp_multipliers": [0.88, 0.58], "lm_head_multiplier": 0.25,
    "ssm_multipliers": [0.35, 0.75, 1.5, 0.5, 0.7],
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "plain": _BODY,
    "multipliers": {**_BODY, **_MULTIPLIERS},
    "gate-first-groups": {
        **_BODY, **_MULTIPLIERS, "mamba_n_groups": 2, "mamba_rms_norm": True, "mamba_norm_before_gate": False,
        "num_hidden_layers": 2, "mamba_proj_bias": True,
    },
    "norm-first-groups": {
        **_BODY, **_MULTIPLIERS, "mamba_n_groups": 4, "mamba_rms_norm": True, "mamba_norm_before_gate": True,
        "num_hidden_layers": 2, "projectors_bias": True, "attention_bias": True, "mlp_bias": True,
    },
    "odd": {
        **_BODY, **_MULTIPLIERS, "num_hidden_layers": 2, "hidden_size": 40, "num_attention_heads": 6, "num_key_value_heads": 3,
        "head_dim": 10, "mamba_n_heads": 3, "mamba_d_head": 20, "mamba_d_ssm": 60, "mamba_d_state": 24, "mamba_d_conv": 3,
        "vocab_size": 61, "mamba_conv_bias": False, "tie_word_embeddings": True, "time_step_limit": [0.01, 0.6],
    },
    "width-by-expansion": {**_BODY, "mamba_d_ssm": None, "mamba_d_head": "auto", "num_hidden_layers": 1},
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_states_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    agree(Theirs("FalconH1", CASES[case]), tmp_path)


def _tiny(**overrides: Any) -> dict[str, Any]:
    return {name: value for name, value in {**TINY_CONFIGS["falcon_h1"], **overrides}.items() if value is not ...}


def test_dialects_say_the_same() -> None:
    plain = parse(_tiny(rope_theta=1e11))
    published = {"mamba_use_mlp": True, "attn_layer_indices": None, "rope_scaling": None, "time_step_rank": "auto"}
    assert parse(_tiny(rope_theta=1e11, mlp_expansion_factor=8, **published)) == plain
    assert parse(_tiny(rope_theta=..., rope_parameters={"rope_theta": 1e11, "rope_type": "default"})) == plain
    assert parse(_tiny(rope_theta=1e11, layers_block_type=["hybrid", "hybrid"])) == plain
    assert parse(_tiny(rope_theta=1e11, time_step_limit=[0.0, {"__float__": "Infinity"}])) == plain


def test_keys_of_transformers_are_known() -> None:
    theirs = transformers.FalconH1Config(**CASES["multipliers"]).to_dict()
    (first, *_) = parse(json.loads(json.dumps(theirs))).layers
    mixer = next(mixer for mixer in first.mixers if isinstance(mixer, Mamba2Spec))
    assert mixer.section_multipliers == (0.35, 0.75, 1.5, 0.5, 0.7)
    assert first.attention is not None and first.components


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"expert_num": 4}, "expert_num"),
    "layer type": ({"layers_block_type": ["hybrid", "sliding"]}, "layers_block_type.*hybrid"),
    "layer count": ({"layer_types": ["hybrid"] * 3}, "layers_block_type.*2 layers"),
    "attention in some layers": ({"attn_layer_indices": [0]}, "attn_layer_indices"),
    "no feed-forward": ({"mamba_use_mlp": False}, "mamba_use_mlp"),
    "heads": ({"mamba_n_heads": 5}, "mamba_n_heads=5 x mamba_d_head=16 isn't mamba_d_ssm=64"),
    "groups": ({"mamba_n_groups": 3}, "mamba_n_groups=3 doesn't divide mamba_n_heads=4"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "head dim": ({"num_attention_heads": 6, "head_dim": ...}, "num_attention_heads=6 doesn't divide hidden_size=32"),
    "odd head dim": ({"head_dim": 7}, "head_dim=7"),
    "sections": ({"ssm_multipliers": [1.0, 1.0]}, "ssm_multipliers.*5 positive numbers"),
    "zero multiplier": ({"mlp_multipliers": [0.0, 1.0]}, "mlp_multipliers.*2 positive numbers"),
    "key multiplier": ({"key_multiplier": 0}, "key_multiplier=0"),
    "scaled rotary": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message) as caught:
        parse(_tiny(**overrides))
    assert caught.value.field
