"""Nemotron-H beyond `test_parity.py`: published dialects against transformers, other backends, other dtypes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.bench.parity.compare import errors
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.loading import load_model
from tests.checkpoints import make_nemotron_h
from tests.models.pools import Sequence, load

transformers = pytest.importorskip("transformers")

PROMPT = 75

# What transformers saves is compared in test_parity.py; these are dialects that it reads, or should.
CONFIGS: dict[str, dict[str, Any]] = {
    "pattern": {"time_step_limit": [0.0, {"__float__": "Infinity"}]},
    "legacy-names": {
        "hybrid_override_pattern": "M*M*-M",
        "head_dim": ...,
        "attention_head_dim": 16,
        "n_groups": ...,
        "mamba_n_groups": 4,
        "num_hidden_layers": 6,
        "rms_norm_eps": 1e-5,
        "auto_map": {"AutoConfig": "configuration_nemotron_h.NemotronHConfig"},
        "time_step_limit": [0.0, float("inf")],
        "layer_norm_epsilon": 1e-5,
        "vocab_size": 61,
    },
    "tied": {"tie_word_embeddings": True, "hybrid_override_pattern": "*M-", "vocab_size": 50},
}


class Oracle:
    """transformers' model, with the limits of dt that its prefill would otherwise narrow."""

    def __init__(self, path: Path) -> None:
        self.model = transformers.NemotronHForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        for layer in self.model.model.layers:
            if hasattr(layer.mixer, "time_step_limit"):
                layer.mixer.time_step_limit = (0.0, float("inf"))

    @torch.no_grad()
    def uncut(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits of every row, and the states after the last."""
        result = self.model(tokens.unsqueeze(0), use_cache=True)
        states: dict[str, Tensor] = {}
        for index, layer in enumerate(result.cache.layers):
            if getattr(layer, "recurrent_states", None):
                states[f"{index}.recurrent"] = layer.recurrent_states[0][0]
                states[f"{index}.window"] = layer.conv_states[0][0][:, 1:]
        return result.logits[0], states


def check(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-4) -> None:
    for name, error in errors(found, wanted).items():
        assert error < tolerance, f"{name}: relative error {error:.1e}"


def for_transformers(path: Path, overrides: dict[str, Any]) -> Path:
    """The same checkpoint as transformers wants it: it never ties, and doesn't read `attention_head_dim`."""
    overrides = {"chunk_size": 32, **overrides}
    if "attention_head_dim" in overrides:
        overrides = {**overrides, "head_dim": overrides["attention_head_dim"]}
    make_nemotron_h(path, **overrides)
    if overrides.get("tie_word_embeddings"):
        from safetensors.torch import load_file, save_file

        tensors = load_file(path / "model.safetensors")
        tensors["lm_head.weight"] = tensors["backbone.embeddings.weight"].clone()
        save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_and_states(name: str, tmp_path: Path) -> None:
    oracle = Oracle(for_transformers(tmp_path / "theirs", CONFIGS[name]))
    model = load(make_nemotron_h(tmp_path / "ours", **CONFIGS[name]))
    tokens = torch.randint(model.spec.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(7))
    logits, states = oracle.uncut(tokens)
    whole = Sequence(model)
    check({"logits": whole.feed(tokens), **whole.states()}, {"logits": logits, **states})
    # The same in pieces with a capture, against the uncut forward over the capture's prefix.
    pieces = Sequence(model)
    parts = [
        pieces.feed(tokens[:31], ((2, 1), (30, 2))),
        pieces.feed(tokens[31:32]),
        pieces.feed(tokens[32:34]),
        pieces.feed(tokens[34:]),
    ]
    check({"logits": torch.cat(parts), **pieces.states()}, {"logits": logits, **states})
    for offset, slot in ((2, 1), (30, 2)):
        check(pieces.states(slot), oracle.uncut(tokens[:offset])[1])


def test_a_checkpoint_that_transformers_saved(tmp_path: Path) -> None:
    # It writes `linear_attention`, {"__float__": "Infinity"} and the prefix `model.` or `backbone.`.
    oracle = Oracle(make_nemotron_h(tmp_path / "first", use_bias=True))
    oracle.model.save_pretrained(tmp_path / "second")
    written = json.loads((tmp_path / "second" / "config.json").read_text())
    assert "linear_attention" in written["layers_block_type"]
    sequence = Sequence(load(tmp_path / "second"))
    tokens = torch.arange(40) + 3
    logits, states = oracle.uncut(tokens)
    check({"logits": sequence.feed(tokens), **sequence.states()}, {"logits": logits, **states})


def test_reference_backend_runs_the_same_model(tmp_path: Path) -> None:
    path = make_nemotron_h(tmp_path / "model")
    fast, plain = Sequence(load(path)), Sequence(load(path, ReferenceBackend()))
    tokens = torch.arange(12) + 5
    check({"logits": fast.feed(tokens), **fast.states()}, {"logits": plain.feed(tokens), **plain.states()}, 1e-5)


def test_different_backends_for_recurrent_and_attention(tmp_path: Path) -> None:
    path = make_nemotron_h(tmp_path / "model")
    spec = load_spec(path)
    mixed = load_model(path, spec, dtype=torch.float32, recurrent=TorchBackend(), attention=ReferenceBackend())
    one, other = Sequence(mixed), Sequence(load(path))
    tokens = torch.arange(12) + 5
    check({"logits": one.feed(tokens), **one.states()}, {"logits": other.feed(tokens), **other.states()}, 1e-5)


def test_fp64_is_split_invariant(tmp_path: Path) -> None:
    model = load(make_nemotron_h(tmp_path / "model"), dtype=torch.float64)
    tokens = torch.arange(80) % 97
    whole, pieces = Sequence(model, torch.float64), Sequence(model, torch.float64)
    wanted = whole.feed(tokens)
    assert wanted.dtype == torch.float64
    found = torch.cat([pieces.feed(part) for part in tokens.split([1, 2, 3, 41, 33])])
    check({"logits": found, **pieces.states()}, {"logits": wanted, **whole.states()}, 1e-10)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    path = make_nemotron_h(tmp_path / "model", residual_in_fp32=True)
    exact, narrow = Sequence(load(path)), Sequence(load(path, dtype=torch.bfloat16), torch.bfloat16)
    tokens = torch.arange(40) + 3
    wanted, found = exact.feed(tokens), narrow.feed(tokens)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() / wanted.abs().max() < 0.1
