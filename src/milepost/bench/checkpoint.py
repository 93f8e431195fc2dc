"""A seeded checkpoint with random weights in Hugging Face layout, so that figures need no download.

In: a size and a directory. Out: the directory of config.json, model.safetensors, tokenizer.json and a chat template.
The law kept here: every token is one word of its own, so whatever the model says is read back as the tokens that it picked;
and a checkpoint that stands is whole, since it is written elsewhere and moved into place.
"""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from milepost.models.spec import ModelSpec, WeightSpec

Size = Literal["tiny", "100m"]

SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>", "<|unknown|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
_VERSION = 1
"""Part of the directory's name; count up when anything below changes what is written."""
_CONSONANTS, _VOWELS = "bdfghjklmnprstvwyz", "aeiou"

_COMMON: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "mlp_hidden_act": "relu2",
    "conv_kernel": 4,
    "use_conv_bias": True,
    "use_bias": False,
    "layer_norm_epsilon": 1e-5,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "pad_token_id": SPECIAL_TOKENS.index("<|pad|>"),
    "eos_token_id": SPECIAL_TOKENS.index("<|end|>"),
    "bos_token_id": None,
    "torch_dtype": "float32",
}
_SIZES: dict[Size, dict[str, Any]] = {
    "tiny": {
        "hybrid_override_pattern": "M-M*M",
        "vocab_size": 512,
        "hidden_size": 32,
        "intermediate_size": 64,
        "mamba_num_heads": 4,
        "mamba_head_dim": 16,
        "ssm_state_size": 16,
        "n_groups": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
    },
    "100m": {
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M*-M-M-",
        "vocab_size": 4096,
        "hidden_size": 768,
        "intermediate_size": 2816,
        "mamba_num_heads": 24,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}


def checkpoint(size: Size, parent: Path, *, seed: int = 0) -> Path:
    """The directory of the checkpoint of this size and seed under `parent`; made if it isn't there."""
    path = parent / f"random-{size}-seed{seed}-v{_VERSION}"
    if path.is_dir():
        return path
    parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=parent))
    try:
        _write(draft, {**_COMMON, **_SIZES[size]}, seed)
        draft.chmod(0o755)
        os.rename(draft, path)
    except OSError:
        if not path.is_dir():  # else another run was faster, and its checkpoint is this one
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return path


def _write(path: Path, config: dict[str, Any], seed: int) -> None:
    from safetensors.torch import save_file

    from milepost.models.nemotron_h import parse

    spec = parse(config)
    config["num_hidden_layers"] = len(spec.layers)
    _write_json(path / "config.json", config)
    _write_json(path / "tokenizer.json", _tokenizer(spec.vocab_size, seed))
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "pad_token": "<|pad|>",
            "eos_token": "<|end|>",
            "unk_token": "<|unknown|>",
            "clean_up_tokenization_spaces": False,
            "model_max_length": spec.max_position_embeddings,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    save_file(_tensors(spec, seed), path / "model.safetensors", {"format": "pt"})


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def words(count: int, seed: int) -> list[str]:
    """Distinct words of two syllables, in an order that the seed decides."""
    syllables = [consonant + vowel for consonant in _CONSONANTS for vowel in _VOWELS]
    every = [first + second for first in syllables for second in syllables]
    return random.Random(seed).sample(every, count)


def _tokenizer(vocab_size: int, seed: int) -> dict[str, Any]:
    """A vocabulary of whole words, each with the space before it, spelt as byte-level tokenizers spell bytes."""
    spelt = [*SPECIAL_TOKENS, *("Ġ" + word for word in words(vocab_size - len(SPECIAL_TOKENS), seed))]
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": index, "content": text, **flags} for index, text in enumerate(SPECIAL_TOKENS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "WordLevel",
            "vocab": {piece: index for index, piece in enumerate(spelt)},
            "unk_token": "<|unknown|>",
        },
    }


def _tensors(spec: ModelSpec, seed: int) -> dict[str, Tensor]:
    import torch

    from milepost.models.nemotron_h import weights

    generator = torch.Generator().manual_seed(seed)
    return {
        weight.name if weight.name.startswith("lm_head") else f"backbone.{weight.name}": _draw(weight, generator)
        for weight in weights(spec)
        if not weight.optional
    }


def _draw(weight: WeightSpec, generator: torch.Generator) -> Tensor:
    """Scales at which a deep stack neither dies nor explodes: what Mamba-2 and linear layers are initialised with."""
    import torch

    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(weight.shape).uniform_(low, high, generator=generator)

    def normal(deviation: float) -> Tensor:
        return torch.empty(weight.shape).normal_(0.0, deviation, generator=generator)

    match weight.name.rsplit(".", 2)[-2:]:
        case [_, "A_log"]:
            return uniform(1.0, 16.0).log()
        case [_, "dt_bias"]:
            step = uniform(math.log(0.001), math.log(0.1)).exp()
            return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
        case [_, "D"]:
            return torch.ones(weight.shape)
        case ["norm" | "norm_f", "weight"]:
            return uniform(0.9, 1.1)
        case ["embeddings", "weight"]:
            return normal(1.0)
        case ["conv1d", "weight"]:
            return normal(weight.shape[-1] ** -0.5)
        case [_, "bias"]:
            return torch.zeros(weight.shape)
        case _:
            return normal(weight.shape[-1] ** -0.5)
