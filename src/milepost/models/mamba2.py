"""Mamba-2 (arXiv 2405.21060), pure: no attention at all, so nothing grows with the context.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: one mixer a layer, `expand` x hidden = heads x head_dim, and no longest
context: `max_position_embeddings` isn't among its keys, so the limit here is only a number to plan with.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.body import ONE_BLOCK, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import read_common, refuse_variants
from milepost.models.spec import LayerSpec, Mamba2Spec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_NO_LIMIT = 1 << 20
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(
    [
        "chunk_size",
        "initializer_range",
        "rescale_prenorm_residual",
        "time_step_floor",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
    ]
)


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Mamba-2. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="mamba2", aliases={"torch_dtype": "dtype"})
    hidden, eps = read.integer("hidden_size", 4096), read.number("layer_norm_epsilon", 1e-5)
    mixer = _mixer(read, hidden, eps)
    spec = ModelSpec(
        family="mamba2",
        architecture="Mamba2ForCausalLM",
        hidden_size=hidden,
        layers=tuple(LayerSpec(index, (mixer,)) for index in range(read.integer("num_hidden_layers", 64))),
        norm_eps=eps,
        **read_common(read, vocab_size=32768, tied=False, positions=_NO_LIMIT),
        residual_in_fp32=read.flag("residual_in_fp32", True),
    )
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _mixer(read: ConfigReader, hidden: int, eps: float) -> Mamba2Spec:
    heads, head_dim, groups = read.integer("num_heads", 128), read.integer("head_dim", 64), read.integer("n_groups", 8)
    inner = read.integer("expand", 2) * hidden
    if heads * head_dim != inner:
        read.complain("head_dim", f"num_heads={heads} x head_dim={head_dim} isn't expand x hidden_size={inner}")
    if heads % groups:
        read.complain("n_groups", f"n_groups={groups} doesn't divide num_heads={heads}")
    read.choice("hidden_act", "silu", ("silu", "swish"))
    low, high = read.limits("time_step_limit", (0.0, float("inf")))
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state_size=read.integer("state_size", 128),
        groups=groups,
        conv_kernel=read.integer("conv_kernel", 4, least=2),
        conv_bias=read.flag("use_conv_bias", True),
        proj_bias=read.flag("use_bias", False),
        dt_min=low,
        dt_max=high,
        norm_eps=eps,
    )


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `backbone.`."""
    return body_weights(spec, ONE_BLOCK)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("backbone.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """One residual block a layer."""
    from milepost.models.layers.stack import one_block

    return one_block(spec, weights, backends, ONE_BLOCK)
