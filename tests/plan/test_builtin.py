"""Configs that come with the package: found by name, parsed by their families, part of the package's data."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from milepost.errors import ConfigError, UnsupportedModel
from milepost.models.registry import load_spec, parse_config
from milepost.plan.builtin import CONFIGS, names, path_of

ROOT = Path(__file__).parents[2]


def test_names_are_those_of_the_files() -> None:
    assert names() == tuple(sorted(names())) and "nemotron-h-8b" in names() and "llama-3-8b" in names()
    assert all(path_of(name) == CONFIGS / f"{name}.json" and name == name.lower() for name in names())


def test_a_name_is_found_in_any_case() -> None:
    assert path_of("Nemotron-H-8B") == path_of("nemotron-h-8b")


def test_a_wrong_name_is_refused_with_those_close_to_it() -> None:
    with pytest.raises(ConfigError, match="'nemotron-h-9b' is none of the built-in configs; close to it: nemotron-h-8b"):
        path_of("nemotron-h-9b")
    with pytest.raises(ConfigError, match="there are: bamba-9b, "):
        path_of("zzz")
    with pytest.raises(ConfigError):
        path_of("../configs/bamba-9b")


@pytest.mark.parametrize("name", names())
def test_a_config_is_in_a_published_dialect(name: str) -> None:
    config = json.loads(path_of(name).read_text())
    assert config.get("architectures") or config["ssm_cfg"], "the first releases' dialect names no architecture"
    assert parse_config(config, sized=True).layers


@pytest.mark.parametrize(
    ("name", "field", "value"),
    [("bamba-9b", "attn_rotary_emb", 128), ("granite-4.0-h-tiny", "normalization_function", "layernorm")],
)
def test_keys_of_published_dialects_are_read_and_not_only_let_through(
    name: str, field: str, value: object, tmp_path: Path
) -> None:
    config = json.loads(path_of(name).read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert load_spec(tmp_path).vocab_size == config["vocab_size"]
    (tmp_path / "config.json").write_text(json.dumps(config | {field: value}))
    with pytest.raises(UnsupportedModel, match=f"{field}={value!r} is not supported"):
        load_spec(tmp_path)


def test_configs_are_package_data() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["milepost"]
    assert "plan/configs/*.json" in data
