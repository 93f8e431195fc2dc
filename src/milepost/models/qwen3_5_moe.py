"""Qwen3.5-MoE, text only: Qwen3.5 with experts beside a shared one in place of the feed-forward.

In comes a `config.json`, out comes the spec; names and shapes of the weights and the model are Qwen3.5's. The law kept here:
a key that isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: every layer has experts; shares are the softmax over the chosen ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.models.qwen3_5 import build, canonical_name, read_text, weights
from milepost.models.qwen3_next import read_experts
from milepost.models.reader import ConfigReader
from milepost.models.spec import ModelSpec

__all__ = ["build", "canonical_name", "parse", "weights"]


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Qwen3.5-MoE. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="qwen3_5_moe", aliases={"torch_dtype": "dtype"})
    read.unless("norm_topk_prob", lambda value: value is True, "shares of the chosen experts sum to 1 in this family")
    read.raw("intermediate_size")  # of dense layers, which this family hasn't
    moe, name = read_experts(read, 256, 8, least=1), "Qwen3_5MoeForCausalLM"
    return read_text(read, moe, hidden=2048, layers=40, kv_heads=2, family="qwen3_5_moe", architecture=name)
