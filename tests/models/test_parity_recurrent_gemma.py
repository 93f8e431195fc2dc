"""RecurrentGemma: its window against transformers', blocks behind it gone, what its parser reads and refuses.

Logits, states and greedy tokens of its cases are compared in test_parity.py.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from milepost.bench.parity.cases import case as parity_case
from milepost.bench.parity.theirs import Theirs
from milepost.errors import UnsupportedModel
from milepost.kernels.protocol import Run
from milepost.kernels.reference import ReferenceBackend
from milepost.models import load_spec
from milepost.models.spec import AttentionSpec, MlpSpec, ModelSpec, RgLruSpec
from tests.checkpoints import make_checkpoint
from tests.families import TINY_CONFIGS
from tests.models.pools import BLOCK, Sequence, load
from tests.models.test_parity_nemotron_h import check

transformers = pytest.importorskip("transformers")


def test_the_window_is_seen_in_what_is_compared(tmp_path: Path) -> None:
    case = parity_case("recurrent_gemma", "plain")
    theirs = Theirs(case.architecture, case.settings)
    theirs.save(tmp_path)
    model, tokens = load(tmp_path), torch.arange(40) % 83
    wanted = theirs.uncut(tokens)[0]
    for window, good in ((7, False), (8, True), (9, False)):
        for block in model.blocks:  # type: ignore[attr-defined]
            if isinstance(getattr(block.part, "spec", None), AttentionSpec):
                block.part.spec = replace(block.part.spec, window=window)
        error = (Sequence(model).feed(tokens) - wanted).abs().max() / wanted.abs().max()
        assert bool(error < 1e-4) is good, (window, error)


@pytest.mark.parametrize("reference", [False, True])
def test_blocks_behind_the_window_may_be_gone(reference: bool, tmp_path: Path) -> None:
    """Their numbers are -1 and what they held is NaN; logits and states are those of a run that kept them."""
    path = make_checkpoint(tmp_path, {**TINY_CONFIGS["recurrent_gemma"], "attention_window_size": 11})
    model = load(path, ReferenceBackend() if reference else None)
    tokens = torch.arange(61) % 97
    kept, freed = Sequence(model), Sequence(model)
    wanted = kept.feed(tokens)
    rows, start = [], 0
    for piece in tokens.split([20, 1, 1, 17, 1, 2, 19]):
        gone = max(0, start - 10) // BLOCK
        for layer in freed.memory:
            if layer.kv is not None:
                layer.kv[:gone] = float("nan")
        blocks = (-1,) * gone + tuple(range(gone, 8))
        run = Run((0, len(piece)), (start,), (0,), (start == 0,), (blocks,), BLOCK)
        rows.append(model.forward(piece, model.prepare(run), freed.memory, torch.arange(len(piece))))
        start += len(piece)
    assert gone == 4
    check({"logits": torch.cat(rows), **freed.states()}, {"logits": wanted, **kept.states()}, 1e-5)


def test_bf16_stays_near_fp32(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path, TINY_CONFIGS["recurrent_gemma"])
    exact, narrow = Sequence(load(path)), Sequence(load(path, dtype=torch.bfloat16), torch.bfloat16)
    tokens = torch.arange(40) + 3
    wanted, found = exact.feed(tokens), narrow.feed(tokens)
    assert found.dtype == torch.float32
    assert (found - wanted).abs().max() / wanted.abs().max() < 0.1


# google/recurrentgemma-2b as it was first published, every key of it; a copy adds rotary_emb_base.
FIRST: dict[str, Any] = {
    "_block_types": ["recurrent", "recurrent", "attention"],
    "architectures": ["RecurrentGemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_window_size": 2048,
    "bos_token_id": 2,
    "conv1d_width": 4,
    "embeddings_scale_by_sqrt_dim": True,
    "eos_token_id": 1,
    "final_w_init_variance_scale": 0.07692307692307693,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2560,
    "intermediate_size": 15360,
    "logits_soft_cap": 30.0,
    "lru_width": 2560,
    "model_type": "recurrent_gemma",
    "num_attention_heads": 10,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.40.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
    "w_init_variance_scale": 0.01,
}
_9B: dict[str, Any] = {
    "final_w_init_variance_scale": 0.05263157894736842,
    "hidden_size": 4096,
    "intermediate_size": 24576,
    "lru_width": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 38,
    "transformers_version": "4.42.0.dev0",
}


def read(path: Path, config: dict[str, Any]) -> ModelSpec:
    (path / "config.json").write_text(json.dumps(config))
    return load_spec(path)


def without(config: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in names}


def test_the_published_config_of_2b(tmp_path: Path) -> None:
    spec = read(tmp_path, {**FIRST, "rotary_emb_base": 50000.0})
    assert [layer.index for layer in spec.attention_layers] == [2, 5, 8, 11, 14, 17, 20, 23]
    attention = spec.layers[2].attention
    assert isinstance(attention, AttentionSpec) and attention.rotary is not None
    assert (attention.heads, attention.kv_heads, attention.head_dim, attention.window) == (10, 1, 256, 2048)
    assert (attention.rotary.dim, attention.rotary.theta, attention.bias, attention.out_bias) == (128, 10000.0, False, True)
    assert spec.layers[25].mixers == (RgLruSpec(2560, 10, 4),)
    assert [component.shape for component in spec.layers[0].components] == [(2560, 3), (2560,)]
    assert spec.layers[0].feed_forward == MlpSpec(7680, bias=True, activation="gelu_tanh", gated=True)
    assert spec.embedding_multiplier == torch.tensor(2560**0.5, dtype=torch.bfloat16).item() == 50.5
    assert (spec.logits_soft_cap, spec.norm_offset, spec.tie_embeddings) == (30.0, 1.0, True)
    assert (spec.dtype, spec.recurrent_dtype, spec.eos_token_ids, spec.bos_token_id) == ("bfloat16", "float32", (1,), 2)


def test_the_published_config_of_9b(tmp_path: Path) -> None:
    newer = {**without(FIRST, "_block_types", "embeddings_scale_by_sqrt_dim"), "block_types": FIRST["_block_types"], **_9B}
    spec = read(tmp_path, newer)
    assert [layer.index for layer in spec.attention_layers] == list(range(2, 38, 3))
    assert spec.layers[0].mixers == (RgLruSpec(4096, 16, 4),)
    assert spec.embedding_multiplier == 64.0


def test_what_transformers_5_writes_gives_the_same_spec(tmp_path: Path) -> None:
    transformers.RecurrentGemmaConfig(**{**FIRST, "block_types": FIRST["_block_types"]}).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_parameters"]["partial_rotary_factor"] == 0.5 and "partial_rotary_factor" not in written
    found = load_spec(tmp_path)
    kinds = ["sliding_attention" if index % 3 == 2 else "linear_attention" for index in range(26)]
    assert found == read(tmp_path, FIRST) == read(tmp_path, {**FIRST, "layer_types": kinds})
    assert found == read(tmp_path, {**without(FIRST, "attention_window_size"), "sliding_window": 2048})


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "unknown key": ({"attention_window": 8}, "attention_window is a key that the parser of recurrent_gemma doesn't know"),
    "unknown block": ({"block_types": ["recurrent", "mamba"]}, "block_types=.* is not a list of recurrent and attention"),
    "no blocks": ({"block_types": []}, r"block_types=\[\] is not a list"),
    "two patterns": ({"_block_types": ["recurrent"]}, "block_types=.* disagrees"),
    "layer types": ({"layer_types": ["linear_attention"] * 5}, "layer_types=.* disagrees with block_types"),
    "lru width": ({"lru_width": 34}, "num_attention_heads=4 doesn't divide lru_width=34"),
    "head": ({"head_dim": 16}, "head_dim=16 is not supported: it must be hidden_size / num_attention_heads"),
    "kv heads": ({"num_key_value_heads": 3}, "num_key_value_heads=3 doesn't divide"),
    "window": ({"attention_window_size": 0}, "attention_window_size=0 is less than 1"),
    "two windows": ({"sliding_window": 21}, "sliding_window=21 disagrees with attention_window_size=20"),
    "convolution": ({"conv1d_width": 1}, "conv1d_width=1 is less than 2"),
    "activation": ({"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
    "cap": ({"logits_soft_cap": 0.0}, "logits_soft_cap=0.0 must be finite and greater than 0"),
    "no cap": ({"logits_soft_cap": None}, "logits_soft_cap=None is not supported"),
    "embeddings": ({"embeddings_scale_by_sqrt_dim": False}, "embeddings_scale_by_sqrt_dim=False is not supported"),
    "odd rotary": ({"partial_rotary_factor": 0.4}, "3 rotated channels of a head don't pair up"),
    "scaled rotary": ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str, tmp_path: Path) -> None:
    overrides, message = REFUSED[case]
    with pytest.raises(UnsupportedModel, match=message):
        read(tmp_path, {**TINY_CONFIGS["recurrent_gemma"], **overrides})
