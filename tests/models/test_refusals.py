"""What no family may take for granted: each config below is refused by an error that names the field and what would work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from milepost.cli import main
from milepost.errors import UnsupportedModel
from milepost.models.registry import families, load_spec, parse_config
from tests.families import TINY_CONFIGS

LISTS = ("layer_types", "layers_block_type", "block_types")
SPLIT = ("mamba2", "mamba")
"""Families without attention."""


def _refused(config: dict[str, Any], field: str | tuple[str, ...], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message) as refused:
        parse_config(config)
    assert refused.value.field in ((field,) if isinstance(field, str) else field)


@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_what_every_family_refuses(name: str) -> None:
    """36 (public kind): an unknown key or layer is treated as dense attention."""
    config = TINY_CONFIGS[name]
    parse_config(config)
    _refused({**config, "frobnicate": 1}, "frobnicate", "frobnicate is a key that the parser of .* doesn't know")
    _refused({**config, "quantization_config": {"quant_method": "fp8"}}, "quantization_config", "fp8.*float32, bfloat16")
    _refused({**config, "compression_config": {"quant_method": "int4"}}, "quantization_config", "int4")
    for modality in ("vision_config", "audio_config", "text_config"):
        _refused({**config, modality: {}}, modality, "only text models are served")
    for wrong in (0, -1, "x", True, 1.5, []):
        _refused({**config, "hidden_size": wrong}, "hidden_size", "hidden_size=.* (is less than 1|is not an integer)")
        _refused({**config, "vocab_size": wrong}, "vocab_size", "vocab_size=.* (is less than 1|is not an integer)")
    _refused({**config, "torch_dtype": "float8_e4m3fn"}, "dtype", "dtype='float8_e4m3fn' is not supported")
    _refused({**config, "sliding_window": 64}, "sliding_window", "sliding_window=64")
    _refused({**config, "is_encoder_decoder": True}, "is_encoder_decoder", "only decoders")


@pytest.mark.parametrize("name", [name for name in TINY_CONFIGS if name not in SPLIT])
def test_heads_that_do_not_divide(name: str) -> None:
    config = TINY_CONFIGS[name]
    _refused({**config, "num_key_value_heads": 3}, "num_key_value_heads", "num_key_value_heads=3 .*num_attention_heads=4")


def _with_lists() -> Iterator[tuple[str, str]]:
    """Each family with each spelling of a list of layers that its parser reads."""
    for name, config in TINY_CONFIGS.items():
        for key in LISTS:
            if f"{key} is a key that" not in _message({**config, key: ["nonsense"] * 4}):
                yield name, key


def _message(config: dict[str, Any]) -> str:
    try:
        parse_config(config)
    except UnsupportedModel as error:
        return str(error)
    return ""


@pytest.mark.parametrize(("name", "key"), list(_with_lists()))
def test_an_unknown_layer_in_any_spelling(name: str, key: str) -> None:
    message = _message({**TINY_CONFIGS[name], key: ["nonsense"] * 4})
    assert "nonsense" in message and any(spelling in message for spelling in LISTS), message


def test_every_family_with_several_kinds_of_layer_reads_a_list_pattern_or_indices() -> None:
    read = {name for name, _ in _with_lists()}
    patterns = {"hybrid_override_pattern", "full_attn_idxs", "attn_layer_indices", "linear_attn_config", "attn_layer_period"}
    rest = {name for name in TINY_CONFIGS if name not in read and not patterns & TINY_CONFIGS[name].keys()}
    assert rest == set(SPLIT)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("nemotron_h", {"hybrid_override_pattern": "MX*"}, "unknown layers X"),
        ("nemotron_h", {"num_hidden_layers": 9}, "num_hidden_layers=9 disagrees with hybrid_override_pattern: 4 layers"),
        ("granitemoehybrid", {"num_hidden_layers": 4}, "num_hidden_layers=4 disagrees with layer_types: 3 layers"),
        ("lfm2_moe", {"num_hidden_layers": 4}, "num_hidden_layers=4 disagrees with layer_types: 3 layers"),
        ("lfm2", {"full_attn_idxs": [9]}, r"full_attn_idxs=\[9\] must list layers from 0 to 3"),
        ("bamba", {"attn_layer_indices": [9]}, r"attn_layer_indices=\[9\] must list layers from 0 to 2"),
        ("olmo_hybrid", {"num_hidden_layers": 5}, "num_hidden_layers=5 disagrees with layer_types: 4 layers"),
        ("zamba2", {"num_hidden_layers": 6}, "num_hidden_layers=6 disagrees with layers_block_type: 5 layers"),
        ("kimi_linear", {"num_hidden_layers": 5}, "kda_layers and full_attn_layers must hold each of 1 to 5 once"),
        ("qwen3_next", {"linear_num_key_heads": 3}, "linear_num_key_heads=3 doesn't divide"),
        ("nemotron_h", {"n_groups": 3}, "n_groups=3 doesn't divide mamba_num_heads=4"),
        ("mamba2", {"n_groups": 3}, "n_groups=3 doesn't divide num_heads=4"),
        ("bamba", {"num_attention_heads": 5, "num_key_value_heads": 1}, "num_attention_heads=5 doesn't divide hidden_size=32"),
        ("bamba", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "only the default rotary embedding"),
        ("qwen3_5", {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "rope_type='llama3' is not supported"),
    ],
)
def test_layers_and_heads_that_cannot_be(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        parse_config({**TINY_CONFIGS[name], **change})


def test_an_unknown_architecture_is_told_which_are_known() -> None:
    for config in ({"architectures": ["GPT2LMHeadModel"]}, {"model_type": "gpt2"}, {}):
        message = _message(config)
        assert all(name in message for family in families() for name in family.architectures), message
    assert "not a list" in _message({"architectures": "MambaForCausalLM"})


def test_a_multimodal_checkpoint_is_refused_by_its_nested_config() -> None:
    config = {"architectures": ["Qwen3_5ForConditionalGeneration"], "text_config": TINY_CONFIGS["qwen3_5"], "vision_config": {}}
    assert "vision_config is not supported: only text models" in _message(config)


FIRST_RELEASE: dict[str, Any] = {"d_model": 64, "n_layer": 3, "vocab_size": 97, "ssm_cfg": {}, "rms_norm": True}


def test_the_dialect_of_the_first_releases() -> None:
    one = parse_config(FIRST_RELEASE)
    assert (one.family, one.vocab_size, len(one.layers), one.tie_embeddings) == ("mamba", 104, 3, True)
    two = parse_config({**FIRST_RELEASE, "ssm_cfg": {"layer": "Mamba2", "headdim": 32}, "attn_layer_idx": [], "attn_cfg": {}})
    assert two.family == "mamba2" and two.layers[0].components[1].shape == (4, 32, 128)
    for change, message in (
        ({"ssm_cfg": {"layer": "Mamba3"}}, "layer='Mamba3' is not supported"),
        ({"ssm_cfg": {"frobnicate": 1}}, "frobnicate is a key that the parser of ssm_cfg doesn't know"),
        ({"d_intermediate": 8}, "d_intermediate=8"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"rms_norm": False}, "rms_norm=False"),
    ):
        assert message in _message({**FIRST_RELEASE, **change})


def test_what_can_be_sized_is_not_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    listed = {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2}}
    mixed = {**FIRST_RELEASE, "ssm_cfg": {"layer": "Mamba2", "headdim": 32}, **listed}
    assert "can be sized but not served" in _message(mixed)
    spec = parse_config(mixed, sized=True)
    assert [layer.index for layer in spec.attention_layers] == [1]
    (tmp_path / "config.json").write_text(json.dumps(mixed))
    with pytest.raises(UnsupportedModel):
        load_spec(tmp_path)
    assert main(["doctor", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["attention_layers"] == 1 and any("can be sized but not served" in each for each in found["refusals"])
    assert any("not counted" in note for note in found["notes"])
    with pytest.raises(UnsupportedModel, match="must list layers from 0 to 2"):
        parse_config({**mixed, "attn_layer_idx": [7]}, sized=True)
    with pytest.raises(UnsupportedModel, match="causal"):
        parse_config({**mixed, "attn_cfg": {"causal": False}}, sized=True)


@pytest.mark.parametrize("verb", ["doctor", "serve"])
def test_the_command_line_refuses_in_one_line(verb: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**TINY_CONFIGS["jamba"], "frobnicate": 1}))
    assert main([verb, str(tmp_path)]) == 2
    captured = capsys.readouterr().err.strip()
    assert captured.startswith("milepost: frobnicate is a key") and "\n" not in captured


def test_experts_of_lfm2_must_say_their_layers() -> None:
    config = {key: value for key, value in TINY_CONFIGS["lfm2_moe"].items() if key != "layer_types"}
    assert "layer_types isn't in the config" in _message({**config, "layer_types": None})


def test_a_null_list_of_layers_is_no_list() -> None:
    for name in ("lfm2", "qwen3_next", "jamba"):
        assert parse_config({**TINY_CONFIGS[name], "layer_types": None}) == parse_config(TINY_CONFIGS[name])
