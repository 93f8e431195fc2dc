"""Zamba2: shared blocks stored once, KV for each use, its dialects and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from milepost.bench.parity.cases import case
from milepost.bench.parity.theirs import Theirs
from milepost.errors import UnsupportedModel
from milepost.models.spec import ModelSpec
from milepost.models.zamba2 import parse
from tests.families import TINY_CONFIGS
from tests.models.pools import Sequence, load

transformers = pytest.importorskip("transformers")


def theirs_of(config: str) -> Theirs:
    return Theirs("Zamba2", case("zamba2", config).settings)


def test_weights_are_stored_once_and_kv_is_kept_for_each_use(tmp_path: Path) -> None:
    theirs_of("two-blocks-adapted").model.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    blocks = sorted(name for name in stored if name.endswith("shared_transformer.self_attn.q_proj.weight"))
    assert blocks == [f"model.layers.{layer}.shared_transformer.self_attn.q_proj.weight" for layer in (0, 2)]
    spec = parse(json.loads((tmp_path / "config.json").read_text()))
    assert [layer.shares for layer in spec.attention_layers] == [0, 2, 0]
    assert len(spec.recurrent_layers) == 5
    assert sum(tensor.numel() for tensor in stored.values()) < sum(
        value.numel() for value in theirs_of("two-blocks-adapted").model.state_dict().values()
    )


def test_bfloat16_runs(tmp_path: Path) -> None:
    theirs_of("odd").model.save_pretrained(tmp_path)
    tokens = torch.arange(24)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        found.append(Sequence(load(tmp_path, dtype=dtype), dtype=dtype).feed(tokens))
    assert ((found[1] - found[0]).abs().mean() / found[0].abs().mean()).item() < 0.3


def _tiny(**overrides: Any) -> dict[str, Any]:
    return {name: value for name, value in {**TINY_CONFIGS["zamba2"], **overrides}.items() if value is not ...}


def _parse(**overrides: Any) -> ModelSpec:
    return parse(_tiny(**overrides))


def test_dialects_say_the_same() -> None:
    plain = _parse()
    derived = {"attention_hidden_size": 64, "attention_head_dim": 16, "kv_channels": 8, "num_query_groups": 4}
    published = {"ffn_hidden_size": 48, "mamba_headdim": 16, "time_step_limit": None, "rope_theta": 10000}
    assert _parse(**derived, **published, use_long_context=False) == plain
    saved = ["hybrid", "linear_attention", "hybrid", "hybrid", "linear_attention"]
    assert _parse(layers_block_type=saved) == plain
    assert _parse(layers_block_type=..., layer_types=saved, hybrid_layer_ids=...) == plain
    assert _parse(time_step_limit=[0.0, {"__float__": "Infinity"}]) == plain


def test_keys_of_transformers_are_known() -> None:
    theirs = json.loads(json.dumps(transformers.Zamba2Config(**case("zamba2", "grouped-heads").settings).to_dict()))
    assert [layer.shares for layer in parse(theirs).layers] == [None, 1, 2]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"lora_rank": 128}, "lora_rank"),
    "layers of the oldest checkpoints": ({"layers_block_type": ["m", "g"]}, "layers_block_type has unknown layers g, m"),
    "no layers": ({"layers_block_type": ...}, "layers_block_type=None"),
    "layer count": ({"num_hidden_layers": 4}, "num_hidden_layers=4 disagrees with layers_block_type: 5 layers"),
    "hybrid layers": ({"hybrid_layer_ids": [1]}, r"hybrid_layer_ids=\[1\] disagrees"),
    "mamba heads": ({"n_mamba_heads": 5}, "n_mamba_heads=5 x mamba_headdim=12 isn't mamba_expand x hidden_size=64"),
    "groups": ({"mamba_ngroups": 3}, "mamba_ngroups=3 doesn't divide n_mamba_heads=4"),
    "heads": ({"num_attention_heads": 5}, "num_attention_heads=5 x attention_head_dim=12 isn't 2 x hidden_size=64"),
    "kv heads": ({"num_key_value_heads": 3, "use_shared_attention_adapter": False}, "num_key_value_heads=3 doesn't divide"),
    "adapters over grouped heads": ({"num_key_value_heads": 2}, "num_key_value_heads=2 differs from num_attention_heads=4"),
    "odd head dim": ({"num_attention_heads": 64, "num_key_value_heads": 64}, "attention_head_dim=1 can't be rotated"),
    "width": ({"attention_hidden_size": 32}, "attention_hidden_size=32"),
    "activation": ({"hidden_act": "silu"}, "hidden_act='silu'.*gelu"),
    "long context": ({"use_long_context": True}, "use_long_context=True"),
    "convolution without bias": ({"use_conv_bias": False}, "use_conv_bias=False"),
    "scaled rotary": ({"rope_scaling": {"rope_type": "yarn"}}, "rope_scaling"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message) as caught:
        _parse(**overrides)
    assert caught.value.field
