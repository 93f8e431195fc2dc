"""Olmo-Hybrid against transformers' uncut forward; what its parser reads and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from milepost.errors import UnsupportedModel
from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.loading import load_model
from milepost.models.spec import GatedDeltaSpec, ModelSpec
from tests.families import TINY_CONFIGS
from tests.models.test_parity_mamba2_families import Theirs, agree

_BODY: dict[str, Any] = {
    "vocab_size": 83, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 40,
    "max_position_embeddings": 512, "pad_token_id": None, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
_UNROTATED: dict[str, Any] = {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}

CASES: dict[str, dict[str, Any]] = {
    "unrotated": {**_BODY, **_UNROTATED, "num_hidden_layers": 4},
    "rotated": {
        **_BODY, "num_hidden_layers": 3, "layer_types": ["full_attention", "linear_attention", "full_attention"],
        "rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}, "linear_allow_neg_eigval": False,
        "attention_bias": True,
    },
    "odd": {
        **_BODY, **_UNROTATED, "num_hidden_layers": 2, "hidden_size": 42, "num_attention_heads": 3, "num_key_value_heads": 1,
        "linear_num_key_heads": 3, "linear_num_value_heads": 3, "linear_key_head_dim": 10, "linear_value_head_dim": 14,
        "linear_conv_kernel_dim": 3, "vocab_size": 61, "tie_word_embeddings": True,
    },
}  # fmt: skip


class TheirsAsPublished(Theirs):
    """Saved with one convolution each for q, k and v; transformers cuts the three into thirds, whatever their widths."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__("OlmoHybrid", settings)
        key = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
        self.widths = (key, key, settings["linear_num_value_heads"] * settings["linear_value_head_dim"])
        self.save, self.model.save_pretrained = self.model.save_pretrained, self._save

    def _save(self, path: Path) -> None:
        self.save(path)
        tensors = load_file(path / "model.safetensors")
        for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
            names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
            pieces = torch.cat([tensors[name] for name in names]).split(self.widths)
            tensors |= {name: piece.contiguous() for name, piece in zip(names, pieces, strict=True)}
        save_file(tensors, path / "model.safetensors", {"format": "pt"})


@pytest.mark.parametrize("case", CASES)
def test_logits_states_and_greedy_tokens(case: str, tmp_path: Path) -> None:
    agree(TheirsAsPublished(CASES[case]), tmp_path)


def test_convolutions_cut_into_thirds_are_refused_by_shape(tmp_path: Path) -> None:
    Theirs("OlmoHybrid", CASES["odd"]).model.save_pretrained(tmp_path)
    spec, backend = load_spec(tmp_path), TorchBackend()
    with pytest.raises(UnsupportedModel, match=r"q_conv1d.weight \[34, 1, 3\] instead of \[30, 1, 3\]"):
        load_model(tmp_path, spec, dtype=torch.float32, recurrent=backend, attention=backend)


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
