"""Falcon-H1 (TII, arXiv 2507.22448): attention and Mamba-2 side by side in every layer, then SwiGLU, with muP multipliers.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24:
- both mixers read one norm's output; each has its multipliers of input and output, and their sum is one residual;
- `mamba_d_ssm` (null: mamba_expand x hidden_size) is the width of the Mamba-2 mixer; without `mamba_rms_norm` its output is
  gated and not normed; with it, `mamba_norm_before_gate` says which comes first;
- `ssm_multipliers` scale z, x, B, C and dt after in_proj (its bias too), `key_multiplier` k before rotation, `mlp_multipliers`
  the gate before its activation and what down_proj gives, `lm_head_multiplier` the logits;
- in_proj has a bias by `mamba_proj_bias`, out_proj by `projectors_bias`; heads x head_dim needn't be hidden_size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

from milepost.models.body import Body, body_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import (
    MAMBA_N_WITHOUT_EFFECT,
    read_attention,
    read_common,
    read_mamba_n,
    read_multipliers,
    refuse_variants,
)
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, MlpSpec, ModelSpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.layers.stack import Part, Stack
    from milepost.models.protocol import Backends, Model

_BODY = Body(
    frame=("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight"),
    norms=("input_layernorm", "pre_ff_layernorm"),
    mixers={"mamba2": "mamba", "attention": "self_attn"},
    feed_forward="feed_forward",
)
_ATTRIBUTES = """
    add_bos_token expansion_factor mlp_expansion_factor
    time_step_floor time_step_max time_step_min time_step_rank
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | MAMBA_N_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Falcon-H1. Raises UnsupportedModel naming every field that can't be served."""
    aliases = {"torch_dtype": "dtype", "layer_types": "layers_block_type"}
    read = ConfigReader(config, family="falcon_h1", aliases=aliases)
    hidden, eps = read.integer("hidden_size", 4096), read.number("rms_norm_eps", 1e-5)
    mixers, mlp = (_mamba2(read, hidden, eps), _attention(read, hidden)), _mlp(read)
    count = read.integer("num_hidden_layers", 32)
    spec = ModelSpec(
        family="falcon_h1",
        architecture="FalconH1ForCausalLM",
        hidden_size=hidden,
        layers=tuple(LayerSpec(index, mixers, mlp) for index in range(count)),
        norm_eps=eps,
        **read_common(read, vocab_size=128000, tied=False, positions=8192),
        embedding_multiplier=read.number("embedding_multiplier", 1.0),
        logits_divisor=1.0 / read.number("lm_head_multiplier", 1.0),
    )
    _refuse_variants(read, count)
    read.finish(_WITHOUT_EFFECT)
    return spec


def _mamba2(read: ConfigReader, hidden: int, eps: float) -> Mamba2Spec:
    inner: int | None = read.integer("mamba_d_ssm", 1024)
    if read.present("mamba_d_ssm") and not read.has("mamba_d_ssm"):
        inner = None
    mixer = read_mamba_n(read, hidden, eps, heads=128, state_size=256, inner=inner)
    order: Literal["norm_first", "gate_first"] = "norm_first" if read.flag("mamba_norm_before_gate", True) else "gate_first"
    normed = read.flag("mamba_rms_norm", False)
    if normed and mixer.inner % mixer.groups:
        read.complain("mamba_n_groups", f"mamba_n_groups={mixer.groups} doesn't divide mamba_d_ssm={mixer.inner}")
    return replace(
        mixer,
        norm=order if normed else "none",
        out_bias=read.flag("projectors_bias", False),
        section_multipliers=read_multipliers(read, "ssm_multipliers", 5),
        input_multiplier=read.number("ssm_in_multiplier", 1.0),
        output_multiplier=read.number("ssm_out_multiplier", 1.0),
    )


def _attention(read: ConfigReader, hidden: int) -> AttentionSpec:
    return replace(
        read_attention(read, hidden, kv_heads=8, rotary=1.0),
        key_multiplier=read.number("key_multiplier", 1.0),
        input_multiplier=read.number("attention_in_multiplier", 1.0),
        output_multiplier=read.number("attention_out_multiplier", 1.0),
    )


def _mlp(read: ConfigReader) -> MlpSpec:
    read.choice("hidden_act", "silu", ("silu", "swish"))
    gate, down = read_multipliers(read, "mlp_multipliers", 2)
    width, bias = read.integer("intermediate_size", 14336), read.flag("mlp_bias", False)
    return MlpSpec(width, bias, "silu", gated=True, gate_multiplier=gate, down_multiplier=down)


def _refuse_variants(read: ConfigReader, count: int) -> None:
    refuse_variants(read)
    listed = read.raw("layers_block_type")
    if listed is not None and listed != ["hybrid"] * count:
        read.complain("layers_block_type", f"layers_block_type={listed!r} is not `hybrid` for each of {count} layers")
    read.unless("attn_layer_indices", lambda value: value == list(range(count)), "every layer has attention; it must be null")
    read.unless("mamba_use_mlp", lambda value: value is True, "every layer has a feed-forward")


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`."""
    return body_weights(spec, _BODY)


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """Two residual blocks a layer: both mixers in parallel, then the feed-forward."""
    from milepost.models.layers.stack import two_blocks

    return two_blocks(spec, weights, backends, _BODY, first=_parallel)


def _parallel(layer: LayerSpec, weights: Mapping[str, Tensor], prefix: str, stack: Stack) -> Part:
    """Both mixers of a layer, each between its multipliers."""
    from milepost.models.layers.parallel import Branch, Parallel
    from milepost.models.layers.stack import mixer_of

    branches = []
    for mixer in layer.mixers:
        if isinstance(mixer, (Mamba2Spec, AttentionSpec)):
            part = mixer_of(mixer, weights, f"{prefix}.{_BODY.mixers[mixer.kind]}", stack)
            branches.append(Branch(part, mixer.input_multiplier, mixer.output_multiplier))
    return Parallel(*branches)
