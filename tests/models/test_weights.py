"""Reading weights: what is missing, extra, misshapen or damaged is named, and identities tell checkpoints apart."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from milepost.errors import ConfigError, UnsupportedModel
from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.loading import load_model
from milepost.models.nemotron_h import canonical_name, weights
from milepost.models.weights import load_weights, weights_identity
from tests.checkpoints import make_nemotron_h


def load(path: Path, dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, Tensor]:
    spec = load_spec(path)
    return load_weights(path, weights(spec), canonical_name, dtype=dtype, device=torch.device("cpu"), **options)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_nemotron_h(tmp_path / "model")


def edit(path: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def shard(path: Path, *, count: int = 3) -> dict[str, str]:
    """Split model.safetensors into shards with an index; returns the weight map."""
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map: dict[str, str] = {}
    for part in range(count):
        name = f"model-{part + 1:05}-of-{count:05}.safetensors"
        names = sorted(tensors)[part::count]
        save_file({each: tensors[each] for each in names}, path / name)
        weight_map |= dict.fromkeys(names, name)
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return weight_map


def test_dtypes(model: Path) -> None:
    narrow, wide = load(model, torch.bfloat16), load(model, torch.float64)
    for name in ("A_log", "D", "dt_bias"):
        assert narrow[f"layers.0.mixer.{name}"].dtype == torch.float32
        assert wide[f"layers.0.mixer.{name}"].dtype == torch.float64
    assert narrow["layers.0.mixer.in_proj.weight"].dtype == torch.bfloat16
    assert wide["norm_f.weight"].dtype == torch.float64


def test_shards_and_prefixes_give_the_same_weights(model: Path, tmp_path: Path) -> None:
    whole = load(model)
    other = make_nemotron_h(tmp_path / "other", prefix="model.")
    shard(other)
    found = load(other)
    assert whole.keys() == found.keys()
    assert all(torch.equal(whole[name], found[name]) for name in whole)


def test_progress_ends_at_the_total(model: Path) -> None:
    seen: list[tuple[int, int]] = []
    load(model, progress=lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen) and seen[-1][0] == seen[-1][1] > 0


def test_missing_extra_and_misshapen_are_all_named(model: Path) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors["backbone.layers.0.mixer.A_log"]
        tensors["backbone.layers.9.norm.weight"] = torch.ones(32)
        tensors["backbone.norm_f.weight"] = torch.ones(31)

    edit(model, change)
    with pytest.raises(UnsupportedModel) as caught:
        load(model)
    text = str(caught.value)
    assert "1 missing tensors: layers.0.mixer.A_log" in text
    assert "1 tensors that the model doesn't use: backbone.layers.9.norm.weight" in text
    assert "backbone.norm_f.weight [31] instead of [32]" in text


def test_ten_names_of_many_are_spelled_out(model: Path) -> None:
    edit(model, lambda tensors: tensors.update({f"extra.{index}": torch.ones(1) for index in range(12)}))
    with pytest.raises(UnsupportedModel, match=r"12 tensors that the model doesn't use: .*extra\.9, \.\.\.|, \.\.\."):
        load(model)


def test_an_integer_tensor_is_refused(model: Path) -> None:
    edit(model, lambda tensors: tensors.update({"lm_head.weight": torch.ones(97, 32, dtype=torch.int8)}))
    with pytest.raises(UnsupportedModel, match=r"lm_head.weight \(I8\)"):
        load(model)


def test_a_tensor_under_both_prefixes_is_refused(model: Path) -> None:
    edit(model, lambda tensors: tensors.update({"model.norm_f.weight": torch.ones(32)}))
    with pytest.raises(UnsupportedModel, match=r"norm_f.weight and .*norm_f.weight are the same tensor"):
        load(model)


def test_attention_biases_are_used_if_they_are_there(tmp_path: Path) -> None:
    path = make_nemotron_h(tmp_path / "model", attention_bias=True)
    assert "layers.2.mixer.q_proj.bias" not in load(path)
    edit(path, lambda tensors: tensors.update({"backbone.layers.2.mixer.q_proj.bias": torch.ones(32)}))
    assert "layers.2.mixer.q_proj.bias" in load(path)


def test_multi_token_prediction_is_left_aside(model: Path) -> None:
    edit(model, lambda tensors: tensors.update({"mtp.layers.0.norm.weight": torch.ones(32)}))
    assert "mtp.layers.0.norm.weight" not in load(model)


@pytest.mark.parametrize("keep", [0, 5, 200, -1])
def test_a_truncated_file_is_named(model: Path, keep: int) -> None:
    file = model / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    for read in (load, weights_identity):
        with pytest.raises(ConfigError, match=r"model\.safetensors"):
            read(model)


@pytest.mark.parametrize("content", [b"{}", b"\x02\0\0\0\0\0\0\0{]", b"\x14\0\0\0\0\0\0\0" + b'{"a":{"dtype":"F32"}}'])
def test_a_file_that_is_not_safetensors(model: Path, content: bytes) -> None:
    (model / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        load(model)


def test_missing_files(model: Path) -> None:
    (model / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="has neither"):
        load(model)


def test_damaged_indexes(model: Path) -> None:
    weight_map = shard(model)
    index = model / "model.safetensors.index.json"
    name = "backbone.norm_f.weight"
    for change, message in (
        ({name: "../elsewhere.safetensors"}, "weight_map"),
        ({name: "absent.safetensors"}, "absent.safetensors"),
        ({"ghost.weight": weight_map[name]}, "ghost.weight"),
        ({name: next(file for file in weight_map.values() if file != weight_map[name])}, "norm_f"),
    ):
        index.write_text(json.dumps({"weight_map": {**weight_map, **change}}))
        with pytest.raises(ConfigError, match=message):
            load(model)


def test_identity_tells_checkpoints_apart(tmp_path: Path) -> None:
    plain = make_nemotron_h(tmp_path / "plain")
    same = make_nemotron_h(tmp_path / "same", transformers_version="5.0")
    shard(same)
    others = [
        make_nemotron_h(tmp_path / "seed", seed=1),
        make_nemotron_h(tmp_path / "dtype", torch_dtype="bfloat16"),
        make_nemotron_h(tmp_path / "config", layer_norm_epsilon=1e-6),
        make_nemotron_h(tmp_path / "shape", intermediate_size=72),
    ]
    assert weights_identity(plain) == weights_identity(same)
    identities = {weights_identity(path) for path in (plain, *others)}
    assert len(identities) == 5 and all(len(identity) == 64 for identity in identities)


def test_identity_samples_large_tensors(tmp_path: Path) -> None:
    # 4 MiB of embeddings: the first and the last page are always read.
    path = make_nemotron_h(tmp_path / "model", vocab_size=32768)
    before = weights_identity(path)
    for row in (0, -1):
        edit(path, lambda tensors, row=row: tensors["backbone.embeddings.weight"][row].zero_())
        after = weights_identity(path)
        assert after != before
        before = after


def test_a_model_refuses_tokens_that_are_not_the_steps(model: Path) -> None:
    from milepost.kernels.protocol import Run

    backend = TorchBackend()
    loaded = load_model(model, load_spec(model), dtype=torch.float32, recurrent=backend, attention=backend)
    step = loaded.prepare(Run((0, 2), (0,), (0,), (True,), ((0,),), 8))
    with pytest.raises(ValueError, match="the step has 2 tokens"):
        loaded.forward(torch.zeros(3, dtype=torch.int64), step, (), torch.zeros(1, dtype=torch.int64))
