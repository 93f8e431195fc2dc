"""Random-weight checkpoints in Hugging Face layout, for tests: the spec's own weight list says what to generate.

Scales are chosen so that states neither vanish nor explode: unit-variance projections, decays from a few tokens to a
few hundred, time steps around 0.1. Nothing here needs transformers.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from milepost.models.nemotron_h import parse, weights
from milepost.models.registry import family_of, load_spec
from milepost.models.spec import DTYPE_BYTES, ModelSpec, WeightSpec

TINY: dict[str, Any] = {
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M-*M",
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 64,
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "conv_kernel": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "layer_norm_epsilon": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
"""What `make_nemotron_h` writes unless told otherwise; a key overridden with `...` is left out."""


def nemotron_h_config(**overrides: Any) -> dict[str, Any]:
    """The tiny config with these keys replaced; `...` drops a key."""
    merged = {**TINY, **overrides}
    return {name: value for name, value in merged.items() if value is not ...}


def make_nemotron_h(path: Path, *, seed: int = 0, prefix: str = "backbone.", **overrides: Any) -> Path:
    """Write a random Nemotron-H checkpoint (config.json, model.safetensors) to `path`, which is made; return it.

    `overrides` are keys of config.json, e.g. hybrid_override_pattern="M*M-". Weights are stored in `torch_dtype`.
    """
    config = nemotron_h_config(**overrides)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(nemotron_h_tensors(config, seed=seed, prefix=prefix), path / "model.safetensors", {"format": "pt"})
    return path


def make_checkpoint(path: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """Write a random checkpoint of whatever family a config asks for, without prefixes in its tensors' names."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    spec = load_spec(path)
    save_file(_tensors(spec, family_of(spec).weights(spec), seed, prefix=""), path / "model.safetensors", {"format": "pt"})
    return path


def nemotron_h_tensors(config: dict[str, Any], *, seed: int = 0, prefix: str = "backbone.") -> dict[str, Tensor]:
    """Random tensors for a config, by the names of a checkpoint; the optional ones are left out."""
    spec = parse(config)
    return _tensors(spec, weights(spec), seed, prefix)


def _tensors(spec: ModelSpec, wanted: tuple[WeightSpec, ...], seed: int, prefix: str) -> dict[str, Tensor]:
    assert spec.dtype in DTYPE_BYTES
    dtype = getattr(torch, spec.dtype)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, Tensor] = {}
    for weight in wanted:
        if weight.optional:
            continue
        name = weight.name if weight.name.startswith("lm_head") else prefix + weight.name
        value = _random(weight, generator, depth=len(spec.layers))
        tensors[name] = value.to(torch.float32 if weight.keep_precision else dtype)
    return tensors


def _random(weight: WeightSpec, generator: torch.Generator, depth: int) -> Tensor:
    def uniform(low: float, high: float) -> Tensor:
        return torch.empty(weight.shape).uniform_(low, high, generator=generator)

    def normal(std: float) -> Tensor:
        return torch.empty(weight.shape).normal_(0.0, std, generator=generator)

    match weight.name.rsplit(".", 2)[-2:]:
        case [_, "A_log"]:
            return uniform(math.log(0.2), math.log(8.0))
        case [_, "dt_bias"]:
            step = uniform(math.log(0.01), math.log(0.3)).exp()
            return step + torch.log(-torch.expm1(-step))  # the inverse of softplus
        case [_, "recurrent_param"]:
            return uniform(-7.0, -1.0)  # a, the decay, from 0.08 to 0.99 where its gate is open
        case [_, "D"]:
            return normal(1.0)
        case ["conv1d", "weight"]:
            return normal(0.6)
        case ["embeddings", "weight"]:
            return normal(1.0)
        case ["norm" | "norm_f", "weight"]:
            return uniform(0.5, 1.5)
        case ["out_proj" | "o_proj" | "down_proj", "weight"]:
            return normal(1.0 / math.sqrt(weight.shape[1] * depth) * 1.5)
        case [_, "bias"]:
            return normal(0.2)
        case _ if len(weight.shape) == 1:  # norms by other names
            return uniform(0.5, 1.5)
        case _:
            return normal(1.0 / math.sqrt(weight.shape[-1]))
