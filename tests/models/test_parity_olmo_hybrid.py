"""Olmo-Hybrid: what its parser reads and refuses, and how its convolutions must be stored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from milepost.bench.parity.cases import case
from milepost.bench.parity.theirs import Theirs
from milepost.errors import UnsupportedModel
from milepost.models import load_spec
from milepost.models.spec import GatedDeltaSpec, ModelSpec
from tests.families import TINY_CONFIGS
from tests.models.pools import load


def test_convolutions_cut_into_thirds_are_refused_by_shape(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    Theirs("OlmoHybrid", case("olmo_hybrid", "odd").settings).model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match=r"q_conv1d.weight \[34, 1, 3\] instead of \[30, 1, 3\]"):
        load(tmp_path)


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def test_the_defaults_are_the_released_sizes(tmp_path: Path) -> None:
    spec = read(tmp_path, {"architectures": ["OlmoHybridForCausalLM"]})
    assert [layer.index for layer in spec.attention_layers] == list(range(3, 32, 4))
    assert spec.layers[0].mixers == (GatedDeltaSpec(30, 30, 96, 192, 4, 1e-5, beta_scale=2.0),)
    attention = spec.layers[3].attention
    assert attention is not None and attention.rotary is None and (attention.heads, attention.kv_heads) == (30, 30)


def test_a_short_model_ends_in_attention(tmp_path: Path) -> None:
    tiny = {name: value for name, value in TINY_CONFIGS["olmo_hybrid"].items() if name != "layer_types"}
    assert [layer.index for layer in read(tmp_path, {**tiny, "num_hidden_layers": 3}).attention_layers] == [2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"linear_heads": 4}, "linear_heads is a key that the parser of olmo_hybrid doesn't know"),
    "unknown layer": ({"layer_types": ["conv"] * 4}, "unknown layers conv"),
    "length": ({"layer_types": ["full_attention"]}, "num_hidden_layers=4 disagrees with layer_types: 1"),
    "key heads": ({"linear_num_key_heads": 3}, "linear_num_key_heads=3 doesn't divide"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "heads": ({"num_attention_heads": 6}, "num_attention_heads=6 doesn't divide hidden_size=32"),
    "scaled rotary": ({"rope_parameters": {"rope_theta": 1e4, "rope_type": "yarn"}}, "rope_type='yarn'"),
    "window": ({"sliding_window": 64}, "sliding_window=64"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY_CONFIGS["olmo_hybrid"], **overrides})
