"""Qwen3.5, text only and dense: gated delta nets, every fourth layer gated attention, SwiGLU after every mixer.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: as Qwen3-Next, but a delta net's projections are stored one by one, in
head order. `mrope_section` tells how the three coordinates of an image's patch share a head; a token of text has the same
position in all three, so it has no effect here. Tensors of vision and of multi-token prediction are left aside.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.naming import linear_weights
from milepost.models.qwen3_next import BODY, WITHOUT_EFFECT, delta_core_weights, model_weights, read_model
from milepost.models.reader import ConfigReader
from milepost.models.reading import read_gated_delta
from milepost.models.spec import FeedForwardSpec, GatedDeltaSpec, MlpSpec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_WITHOUT_EFFECT = WITHOUT_EFFECT | {"mtp_num_hidden_layers", "mtp_use_dedicated_embeddings"}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Qwen3.5. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="qwen3_5", aliases={"torch_dtype": "dtype"})
    mlp = MlpSpec(read.integer("intermediate_size", 12288), bias=False, activation="silu", gated=True)
    return read_text(read, mlp, hidden=4096, layers=32, kv_heads=4, family="qwen3_5", architecture="Qwen3_5ForCausalLM")


def read_text(
    read: ConfigReader,
    feed_forward: FeedForwardSpec,
    *,
    hidden: int,
    layers: int,
    kv_heads: int,
    family: str,
    architecture: str,
) -> ModelSpec:
    """The rest of a config: every layer has the same feed-forward; the numbers are this family's defaults."""
    delta = read_gated_delta(read, read.number("rms_norm_eps", 1e-6), key_heads=16, heads=32)
    read.unless("attn_output_gate", lambda value: value is True, "attention is gated in this family")
    read.unless("mlp_only_layers", lambda value: value == [], "all layers have the same feed-forward in this family")
    spec = read_model(
        read,
        read.integer("hidden_size", hidden),
        read.integer("num_hidden_layers", layers),
        delta,
        lambda index: feed_forward,
        family=family,
        architecture=architecture,
        kv_heads=kv_heads,
        vocab_size=248320,
    )
    read.finish(_WITHOUT_EFFECT)
    return spec


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefixes `model.` and `language_model.`."""
    return model_weights(spec, _delta_weights)


def _delta_weights(prefix: str, mixer: GatedDeltaSpec, hidden: int) -> list[WeightSpec]:
    key, value = mixer.key_width, mixer.value_width
    rows = {"qkv": 2 * key + value, "z": value, "b": mixer.heads, "a": mixer.heads}
    projections = [linear_weights(f"{prefix}.in_proj_{name}", count, hidden, bias=False) for name, count in rows.items()]
    return [*delta_core_weights(prefix, mixer, hidden), *(tensor for each in projections for tensor in each)]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefixes; None for tensors of vision and of multi-token prediction."""
    if name.startswith(("mtp.", "model.visual.")):
        return None
    return name.removeprefix("model.").removeprefix("language_model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    from milepost.models.layers.qwen import by_kind, hybrid

    return hybrid(spec, weights, backends, BODY, by_kind)
