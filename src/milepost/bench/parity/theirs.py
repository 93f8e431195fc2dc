"""transformers' side of the comparison: a model with random weights, its uncut forward, and the states that it ends with.

The law kept here: weights are drawn so that every part matters (decays, time steps, norms, biases that route), and what
transformers itself does differently in prefill and decode is undone before anything is compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from milepost.errors import ConfigError

CLAMPED = ("NemotronH", "Zamba2")
"""Their prefill clamps dt to `time_step_min`, which the config calls an initialiser's and their decode doesn't do."""


def library() -> Any:
    """The module transformers. Raises ConfigError, naming what installs it."""
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            f"bench parity compares with transformers, which can't be imported ({error}): pip install 'milepost[parity]'"
        ) from error
    transformers.utils.logging.disable_progress_bar()
    transformers.utils.logging.set_verbosity_error()  # that faster kernels aren't installed is no news
    return transformers


class Theirs:
    """A transformers model in fp32. `architecture` and `config` name its classes, as in Bamba + ForCausalLM, Bamba + Config."""

    def __init__(self, architecture: str, settings: Mapping[str, Any], *, config: str = "Config", seed: int = 11) -> None:
        module = library()
        torch.manual_seed(seed)
        self.architecture, self.settings = architecture, settings
        self.model = getattr(module, f"{architecture}ForCausalLM")(
            getattr(module, f"{architecture}{config}")(eos_token_id=None, **settings)
        ).eval()
        self.model.set_experts_implementation("eager")  # the fused ones want widths that are multiples of 16 bytes
        with torch.no_grad():
            for name, value in self.model.named_parameters():
                _stir(name.rsplit(".", 1)[-1], value)
            for name, value in self.model.named_buffers():
                if name.endswith("_bias"):  # added to an expert's score; zero unless trained
                    value.normal_(0.0, 0.3)
        if architecture in CLAMPED:
            for part in self.model.modules():
                if hasattr(part, "time_step_limit"):
                    part.time_step_limit = (0.0, float("inf"))

    def save(self, path: Path) -> None:
        """Write the checkpoint that ours is to load."""
        self.model.save_pretrained(path)
        if self.architecture == "OlmoHybrid":
            _recut(path / "model.safetensors", self.settings)

    @torch.no_grad()
    def uncut(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Logits [T, vocab_size] of every row, and by "layer.component" the states after the last of tokens [T]."""
        result = self.model(tokens.unsqueeze(0), use_cache=True)
        held = self.architecture == "RecurrentGemma"  # returns no cache: its modules keep the states
        return result.logits[0], _kept_by_modules(self.model) if held else cached(result)


def _stir(name: str, value: Tensor) -> None:
    match name, value.dim():
        case "A_log", _:
            value.uniform_(-1.0, 2.0)
        case "dt_bias", _:
            value.uniform_(-4.0, 0.0)
        case "D" | "bias", _:
            value.normal_(0.0, 0.5)
        case "recurrent_param", _:
            value.uniform_(-7.0, -1.0)  # a, the decay, from 0.08 to 0.99 where its gate is open
        case _, 1:
            value.uniform_(0.5, 1.5)
        case _:
            value.normal_(0.0, value.shape[-1] ** -0.5)


def cached(result: Any) -> dict[str, Tensor]:
    cache = getattr(result, "cache", None)
    cache = result.past_key_values if cache is None else cache
    states: dict[str, Tensor] = {}
    for index, layer in enumerate(cache.layers):
        matrix, window = (getattr(layer, f"{name}_states", None) or [None] for name in ("recurrent", "conv"))
        if matrix[0] is not None:
            states[f"{index}.recurrent"] = matrix[0][0]
        if window[0] is not None:
            states[f"{index}.window"] = window[0][0][:, 1:]  # they keep one column more than the next token needs
    return states


def _kept_by_modules(model: Any) -> dict[str, Tensor]:
    states: dict[str, Tensor] = {}
    for index, layer in enumerate(model.model.layers):
        block = layer.temporal_block
        if hasattr(block, "rg_lru"):
            states[f"{index}.recurrent"] = block.rg_lru.recurrent_states[0].clone()
            states[f"{index}.window"] = block.conv1d_state[0].clone()
    return states


def _recut(file: Path, settings: Mapping[str, Any]) -> None:
    """One convolution each for q, k and v, as published: transformers saves the three cut in thirds, whatever their widths."""
    from safetensors.torch import load_file, save_file

    key = settings["linear_num_key_heads"] * settings["linear_key_head_dim"]
    widths = [key, key, settings["linear_num_value_heads"] * settings["linear_value_head_dim"]]
    tensors = load_file(file)
    for first in [name for name in tensors if name.endswith("q_conv1d.weight")]:
        names = [first.replace("q_conv1d", f"{part}_conv1d") for part in "qkv"]
        pieces = torch.split(torch.cat([tensors[name] for name in names]), widths)
        tensors |= {name: piece.contiguous() for name, piece in zip(names, pieces, strict=True)}
    save_file(tensors, file, {"format": "pt"})
