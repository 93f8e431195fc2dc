"""The generated checkpoint: whole, repeatable, and every token is read back as itself."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from milepost.bench.checkpoint import SPECIAL_TOKENS, checkpoint, words
from milepost.config import EngineConfig
from milepost.models.registry import load_spec
from milepost.request import SamplingParams
from milepost.text import Text


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("tiny", tmp_path_factory.mktemp("made"))


@pytest.fixture(scope="module")
def text(tiny: Path) -> Text:
    return Text.load(tiny, EngineConfig(model=str(tiny)))


def test_is_made_once_and_leaves_nothing_beside_it(tiny: Path) -> None:
    before = (tiny / "model.safetensors").stat().st_mtime_ns
    assert checkpoint("tiny", tiny.parent) == tiny
    assert (tiny / "model.safetensors").stat().st_mtime_ns == before
    assert list(tiny.parent.iterdir()) == [tiny]


def test_same_seed_same_weights(tiny: Path, tmp_path: Path) -> None:
    again, other = checkpoint("tiny", tmp_path), checkpoint("tiny", tmp_path, seed=1)
    first, second, third = (load_file(path / "model.safetensors") for path in (tiny, again, other))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], third["lm_head.weight"])


def test_scales_are_those_of_a_model_that_can_be_trained(tiny: Path) -> None:
    tensors = load_file(tiny / "model.safetensors")
    step = torch.nn.functional.softplus(tensors["backbone.layers.0.mixer.dt_bias"])
    assert step.min() >= 0.001 and step.max() <= 0.1 + 1e-6
    decay = tensors["backbone.layers.0.mixer.A_log"].exp()
    assert decay.min() >= 1.0 and decay.max() <= 16.0 + 1e-5
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())


def test_the_large_one_has_about_a_hundred_million_parameters() -> None:
    from milepost.bench.checkpoint import _COMMON, _SIZES
    from milepost.models.nemotron_h import parse, weights

    spec = parse({**_COMMON, **_SIZES["100m"]})
    count = sum(torch.Size(weight.shape).numel() for weight in weights(spec))
    assert 90e6 < count < 110e6
    assert {mixer.kind for layer in spec.layers for mixer in layer.mixers} == {"mamba2", "attention", "mlp"}


def test_whatever_the_model_says_is_read_back_as_the_same_tokens(text: Text, tiny: Path) -> None:
    tokenizer = text.tokenizer
    assert tokenizer.size == load_spec(tiny).vocab_size
    said = list(range(len(SPECIAL_TOKENS), tokenizer.size))
    for seed in range(20):
        random.Random(seed).shuffle(said)
        assert list(tokenizer.encode(tokenizer.decode(said), add_special_tokens=False).ids) == said
    for token in said:
        assert tokenizer.encode(tokenizer.decode([token]), add_special_tokens=False).ids == (token,)


def test_a_streamed_answer_comes_back_as_the_same_tokens_in_the_next_turn(text: Text) -> None:
    answer = random.Random(0).choices(range(len(SPECIAL_TOKENS), text.tokenizer.size), k=40)
    watch = text.watch(SamplingParams(max_tokens=40))
    streamed = "".join(watch.push(token) for token in answer) + watch.flush()
    question = {"role": "user", "content": f" {words(1, 0)[0]}"}
    asked = text.chat([question])
    followed = text.chat([question, {"role": "assistant", "content": streamed}, question])
    assert followed.tokens[: len(asked.tokens) + 40] == (*asked.tokens, *answer)


def test_the_template_has_a_boundary_after_every_message(text: Text) -> None:
    content = " ".join(["", *words(5, 0)])
    prompt = text.chat([{"role": "system", "content": content}, {"role": "user", "content": content}])
    assert [boundary.position for boundary in prompt.boundaries] == [7, 14]
    assert len(prompt.tokens) == 15
    assert SPECIAL_TOKENS.index("<|unknown|>") not in prompt.tokens
