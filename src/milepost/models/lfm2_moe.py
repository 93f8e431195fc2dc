"""LFM2-MoE (Liquid AI): LFM2 whose feed-forward, from layer `num_dense_layers` on, is a mixture of experts.

In comes a `config.json`, out comes the spec; names and shapes of the weights and the model are LFM2's. The law kept here: a
key that isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: the width of the dense layers is `intermediate_size` as it stands;
scores are sigmoids, the best are chosen with `expert_bias` added and weighed without it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.models.lfm2 import ALIASES, WITHOUT_EFFECT, build, canonical_name, read_model, weights
from milepost.models.reader import ConfigReader
from milepost.models.reading import read_taken
from milepost.models.spec import MlpSpec, ModelSpec, MoeSpec, RouterSpec

__all__ = ["build", "canonical_name", "parse", "weights"]

_WITHOUT_EFFECT = WITHOUT_EFFECT | {"router_aux_loss_coef"}
_EPSILON = 1e-6


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of LFM2-MoE. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="lfm2_moe", aliases=ALIASES)
    if not read.has("layer_types") and not read.has("full_attn_idxs"):
        read.complain("layer_types", "layer_types isn't in the config: it must say which layers are convolutions")
    hidden, dense = read.integer("hidden_size", 2048), read.integer("num_dense_layers", 2, least=0)
    mlp = MlpSpec(read.integer("intermediate_size", 7168), bias=False, activation="silu", gated=True)
    router = RouterSpec(
        scores="sigmoid",
        normalise=read.flag("norm_topk_prob", True),
        bias=read.flag("use_expert_bias", True),
        scaling=read.number("routed_scaling_factor", 1.0),
        epsilon=_EPSILON,
    )
    experts, taken = read_taken(read, "num_experts", 32, 4)
    moe = MoeSpec(experts, taken, read.integer("moe_intermediate_size", 1792), 0, router)
    family, architecture = "lfm2_moe", "Lfm2MoeForCausalLM"
    spec = read_model(read, hidden, lambda index: mlp if index < dense else moe, family=family, architecture=architecture)
    read.finish(_WITHOUT_EFFECT)
    return spec
