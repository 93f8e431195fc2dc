"""Falcon-H1's dialects, the keys that transformers saves, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from milepost.bench.parity.cases import case
from milepost.errors import UnsupportedModel
from milepost.models.falcon_h1 import parse
from milepost.models.spec import Mamba2Spec
from tests.families import TINY_CONFIGS

transformers = pytest.importorskip("transformers")


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
    theirs = transformers.FalconH1Config(**case("falcon_h1", "multipliers").settings).to_dict()
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
