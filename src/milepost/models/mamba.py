"""Mamba-1 (arXiv 2312.00752), pure: no attention at all, so nothing grows with the context.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24: one mixer a layer, `expand` x hidden channels, dt of rank hidden / 16
rounded up if it is "auto", embeddings tied, and no longest context: `max_position_embeddings` isn't among its keys, so the
limit here is only a number to plan with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from operator import eq
from typing import TYPE_CHECKING, Any

from milepost.models.body import ONE_BLOCK, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import read_common, read_rank, refuse_variants
from milepost.models.spec import LayerSpec, Mamba1Spec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.protocol import Backends, Model

_NO_LIMIT = 1 << 20
_INITIAL = """
    initializer_range rescale_prenorm_residual time_step_floor time_step_init_scheme time_step_max time_step_min time_step_scale
    use_mambapy use_associative_scan
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_INITIAL.split())


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Mamba. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="mamba", aliases={"torch_dtype": "dtype"})
    hidden, count = read.integer("hidden_size", 768), read.integer("num_hidden_layers", 32)
    mixer = _mixer(read, hidden)
    spec = ModelSpec(
        family="mamba",
        architecture="MambaForCausalLM",
        hidden_size=hidden,
        layers=tuple(LayerSpec(index, (mixer,)) for index in range(count)),
        norm_eps=read.number("layer_norm_epsilon", 1e-5),
        **read_common(read, vocab_size=50280, tied=True, positions=_NO_LIMIT),
        residual_in_fp32=read.flag("residual_in_fp32", True),
    )
    _first_release(read, hidden, count, mixer)
    refuse_variants(read)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _mixer(read: ConfigReader, hidden: int) -> Mamba1Spec:
    inner = read.integer("expand", 2) * hidden
    read.unless("intermediate_size", lambda value: value == inner, f"it must be expand x hidden_size={inner}")
    read.choice("hidden_act", "silu", ("silu", "swish"))
    return Mamba1Spec(
        inner=inner,
        state_size=read.integer("state_size", 16),
        dt_rank=read_rank(read, "time_step_rank", hidden),
        conv_kernel=read.integer("conv_kernel", 4, least=2),
        conv_bias=read.flag("use_conv_bias", True),
        proj_bias=read.flag("use_bias", False),
    )


def _first_release(read: ConfigReader, hidden: int, count: int, mixer: Mamba1Spec) -> None:
    """Keys that the published conversions still carry beside the present ones; they must say the same."""
    wanted: dict[str, object] = {"d_model": hidden, "d_inner": mixer.inner, "n_layer": count, "ssm_cfg": {}, "rms_norm": True}
    for name, value in wanted.items():
        read.unless(name, partial(eq, value), f"it must be {value!r}")
    for name in ("fused_add_norm", "pad_vocab_size_multiple"):
        read.raw(name)  # how its kernels run, and how its embeddings were padded


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `backbone.`."""
    return body_weights(spec, ONE_BLOCK)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix; the first release called the embeddings `embedding`."""
    return name.removeprefix("backbone.").replace("embedding.weight", "embeddings.weight")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """One residual block a layer."""
    from milepost.models.layers.stack import one_block

    return one_block(spec, weights, backends, ONE_BLOCK)
