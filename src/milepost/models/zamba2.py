"""Zamba2 (Zyphra, arXiv 2411.15242): Mamba-2 in every layer; before some of them, one of a few shared transformer blocks.

In comes a `config.json`, out come the spec, the weights' names and shapes, and the model. The law kept here: a key that
isn't known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24:
- the use number i of a shared block (i counts hybrid layers) takes the weights of hybrid layer i mod `num_mem_blocks`, where
  the checkpoint holds them, and its own adapters, low-rank maps beside gate_up and, if `use_shared_attention_adapter`, q, k, v;
- the block reads the stream next to the embeddings, so attention is 2 x hidden_size wide; its scale is (head_dim / 2)^-1/2;
  it has no residual: its output, through the layer's own `linear`, is added to what the layer's Mamba-2 reads, and only there;
- each use keeps its own KV; positions are rotated only with `use_mem_rope`;
- dt isn't clamped to `time_step_min` (transformers does so in prefill and not in decoding); the gated norm's epsilon is 1e-5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.naming import attention_weights, frame_weights, linear_weights, mamba2_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import read_common, read_theta, refuse_variants
from milepost.models.spec import AttentionSpec, LayerSpec, Mamba2Spec, MlpSpec, ModelSpec, RotarySpec, WeightSpec

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.layers.shared import SharedStack, SharedUse
    from milepost.models.protocol import Backends, Model

_NAMES = ("embed_tokens.weight", "final_layernorm.weight", "lm_head.weight")
_LAYER_TYPES = ("mamba", "linear_attention", "hybrid")
_NORM_EPS = 1e-5
_ALIASES = {
    "ffn_hidden_size": "intermediate_size",
    "head_dim": "attention_head_dim",
    "layer_types": "layers_block_type",
    "torch_dtype": "dtype",
}
_ATTRIBUTES = """
    attention_dropout chunk_size initializer_range kv_channels num_logits_to_keep num_query_groups
    time_step_floor time_step_max time_step_min use_mamba_kernels use_mem_eff_path
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Zamba2. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="zamba2", aliases=_ALIASES)
    hidden, bias = read.integer("hidden_size", 2560), read.flag("add_bias_linear", False)
    hybrid, count = _hybrid_layers(read)
    spec = ModelSpec(
        family="zamba2",
        architecture="Zamba2ForCausalLM",
        hidden_size=hidden,
        layers=_layers(hybrid, count, read.integer("num_mem_blocks", 1), _Parts(read, hidden, bias)),
        norm_eps=read.number("rms_norm_eps", 1e-5),
        **read_common(read, vocab_size=32000, tied=True, positions=4096),
    )
    refuse_variants(read)
    read.unless("use_long_context", lambda value: value is False, "its rescaled rotary base isn't served")
    read.unless("use_conv_bias", lambda value: value is True, "the convolution always has a bias")
    read.finish(_WITHOUT_EFFECT)
    return spec


class _Parts:
    """What layers are made of, read once."""

    def __init__(self, read: ConfigReader, hidden: int, bias: bool) -> None:
        self.mamba = _mamba2(read, hidden, bias)
        rank = read.integer("adapter_rank", 128)
        self.attention = _attention(read, hidden, rank)
        read.choice("hidden_act", "gelu", ("gelu",))
        width = read.integer("intermediate_size", 4 * hidden)
        self.mlp = MlpSpec(width, bias, "gelu", gated=True, adapter_rank=rank)


def _layers(hybrid: list[int], count: int, blocks: int, parts: _Parts) -> tuple[LayerSpec, ...]:
    holders = {index: hybrid[number % blocks] for number, index in enumerate(hybrid)}
    return tuple(
        LayerSpec(index, (parts.attention, parts.mamba), parts.mlp, shares=holders[index])
        if index in holders
        else LayerSpec(index, (parts.mamba,))
        for index in range(count)
    )


def _hybrid_layers(read: ConfigReader) -> tuple[list[int], int]:
    """Which layers use a shared block, and how many layers there are."""
    listed, ids = read.raw("layers_block_type"), read.raw("hybrid_layer_ids")
    if not isinstance(listed, list) or not listed:
        read.complain("layers_block_type", f"layers_block_type={listed!r} is not a list with an entry for each layer")
        return [], 0
    unknown = sorted({str(kind) for kind in listed if kind not in _LAYER_TYPES})
    if unknown:
        known = ", ".join(_LAYER_TYPES)
        read.complain("layers_block_type", f"layers_block_type has unknown layers {', '.join(unknown)} (known: {known})")
    count = read.integer("num_hidden_layers", len(listed))
    if count != len(listed):
        message = f"num_hidden_layers={count} disagrees with layers_block_type: {len(listed)} layers"
        read.complain("num_hidden_layers", message)
    hybrid = [index for index, kind in enumerate(listed) if kind == "hybrid"]
    if ids is not None and ids != hybrid:
        read.complain("hybrid_layer_ids", f"hybrid_layer_ids={ids!r} disagrees with layers_block_type: {hybrid}")
    return hybrid, len(listed)


def _mamba2(read: ConfigReader, hidden: int, bias: bool) -> Mamba2Spec:
    heads, groups = read.integer("n_mamba_heads", 8), read.integer("mamba_ngroups", 1)
    inner = read.integer("mamba_expand", 2) * hidden
    head_dim = read.integer("mamba_headdim", max(1, inner // heads))
    if heads * head_dim != inner:
        message = f"n_mamba_heads={heads} x mamba_headdim={head_dim} isn't mamba_expand x hidden_size={inner}"
        read.complain("n_mamba_heads", message)
    if heads % groups:
        read.complain("mamba_ngroups", f"mamba_ngroups={groups} doesn't divide n_mamba_heads={heads}")
    low, high = read.limits("time_step_limit", (0.0, float("inf")))
    return Mamba2Spec(
        heads=heads,
        head_dim=head_dim,
        state_size=read.integer("mamba_d_state", 64),
        groups=groups,
        conv_kernel=read.integer("mamba_d_conv", 4, least=2),
        conv_bias=True,
        proj_bias=bias,
        dt_min=low,
        dt_max=high,
        norm_eps=_NORM_EPS,
    )


def _attention(read: ConfigReader, hidden: int, rank: int) -> AttentionSpec:
    wide, heads = 2 * hidden, read.integer("num_attention_heads", 32)
    kv, adapted = read.integer("num_key_value_heads", heads), read.flag("use_shared_attention_adapter", False)
    head_dim = read.integer("attention_head_dim", max(1, wide // heads))
    if heads * head_dim != wide:
        message = f"num_attention_heads={heads} x attention_head_dim={head_dim} isn't 2 x hidden_size={wide}"
        read.complain("num_attention_heads", message)
    if heads % kv or (adapted and kv != heads):
        why = "differs from" if adapted else "doesn't divide"
        read.complain("num_key_value_heads", f"num_key_value_heads={kv} {why} num_attention_heads={heads}")
    read.unless("attention_hidden_size", lambda value: value == wide, f"it is 2 x hidden_size={wide}")
    rotated, theta = read.flag("use_mem_rope", False), read_theta(read)
    if rotated and head_dim % 2:
        read.complain("attention_head_dim", f"attention_head_dim={head_dim} can't be rotated in pairs")
    return AttentionSpec(
        heads,
        kv,
        head_dim,
        bias=False,
        scale=(head_dim / 2) ** -0.5,
        rotary=RotarySpec(head_dim, theta) if rotated else None,
        input_width=wide,
        adapter_rank=rank if adapted else 0,
    )


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the prefix `model.`; those of a shared block once, at its first use."""
    hidden = spec.hidden_size
    tensors = frame_weights(spec, _NAMES)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        own = f"{prefix}.mamba_decoder" if layer.attention else prefix
        tensors.append(WeightSpec(f"{own}.input_layernorm.weight", (hidden,)))
        tensors += [t for m in layer.mixers if isinstance(m, Mamba2Spec) for t in mamba2_weights(f"{own}.mamba", m, hidden)]
        if layer.attention:
            tensors.append(WeightSpec(f"{prefix}.linear.weight", (hidden, hidden)))
            if layer.shares == layer.index:
                tensors += _block_weights(f"{prefix}.shared_transformer", layer, hidden)
    for use, layer in enumerate(spec.attention_layers):
        tensors += _adapter_weights(f"layers.{layer.shares}.shared_transformer", layer, use, hidden)
    return tuple(tensors)


def _block_weights(prefix: str, layer: LayerSpec, hidden: int) -> list[WeightSpec]:
    """Tensors that all uses of a shared block have in common."""
    tensors = [
        WeightSpec(f"{prefix}.input_layernorm.weight", (2 * hidden,)),
        WeightSpec(f"{prefix}.pre_ff_layernorm.weight", (hidden,)),
    ]
    if isinstance(layer.attention, AttentionSpec):
        tensors += attention_weights(f"{prefix}.self_attn", layer.attention, hidden)
    if isinstance(layer.feed_forward, MlpSpec):
        mlp, inner = layer.feed_forward, f"{prefix}.feed_forward"
        tensors += linear_weights(f"{inner}.gate_up_proj", 2 * mlp.width, hidden, bias=mlp.bias)
        tensors += linear_weights(f"{inner}.down_proj", hidden, mlp.width, bias=mlp.bias)
    return tensors


def _adapter_weights(prefix: str, layer: LayerSpec, use: int, hidden: int) -> list[WeightSpec]:
    """The low-rank maps of one use of a shared block: 0 goes down to the rank, 1 comes up from it."""
    maps: list[tuple[str, int, int, int]] = []
    if isinstance(layer.attention, AttentionSpec) and layer.attention.adapter_rank:
        rank, wide = layer.attention.adapter_rank, 2 * hidden
        maps += [(f"{prefix}.self_attn.linear_{name}_adapter_list.{use}", wide, rank, wide) for name in "qkv"]
    if isinstance(layer.feed_forward, MlpSpec):
        mlp = layer.feed_forward
        maps.append((f"{prefix}.feed_forward.gate_up_proj_adapter_list.{use}", hidden, mlp.adapter_rank, 2 * mlp.width))
    return [
        tensor
        for name, read, rank, given in maps
        for tensor in (WeightSpec(f"{name}.0.weight", (rank, read)), WeightSpec(f"{name}.1.weight", (given, rank)))
    ]


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix."""
    return name.removeprefix("model.")


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """One residual Mamba-2 block a layer; in hybrid layers it reads through a use of a shared block."""
    from milepost.models.layers.shared import SharedStack
    from milepost.models.layers.stack import mixer_of

    stack = SharedStack(spec, weights, backends, _NAMES)
    for layer in spec.layers:
        own = f"layers.{layer.index}.mamba_decoder" if layer.attention else f"layers.{layer.index}"
        stack.add(
            layer.index, weights[f"{own}.input_layernorm.weight"], mixer_of(layer.mixers[-1], weights, f"{own}.mamba", stack)
        )
    for use, layer in enumerate(spec.attention_layers):
        stack.uses[layer.index] = _use(layer, use, weights, stack)
    return stack


def _use(layer: LayerSpec, use: int, weights: Mapping[str, Tensor], stack: SharedStack) -> SharedUse:
    """A use of a shared block: its weights, and this use's adapters under the names that `Linear.of` looks for."""
    from milepost.models.layers.attention import AttentionMixer
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import GatedMlp
    from milepost.models.layers.shared import SharedUse

    if not isinstance(layer.attention, AttentionSpec):
        raise ValueError(f"layer {layer.index} uses no shared block")
    prefix = f"layers.{layer.shares}.shared_transformer"
    named = {name.removeprefix(f"{prefix}."): tensor for name, tensor in weights.items() if name.startswith(f"{prefix}.")}
    pairs = [(f"self_attn.{name}_proj", f"self_attn.linear_{name}_adapter_list.{use}") for name in "qkv"]
    for target, source in (*pairs, ("feed_forward.gate_up_proj", f"feed_forward.gate_up_proj_adapter_list.{use}")):
        for side, number in (("down", 0), ("up", 1)):
            if f"{source}.{number}.weight" in named:
                named[f"{target}.adapter.{side}"] = named[f"{source}.{number}.weight"]
    gate_up, down = (Linear.of(named, f"feed_forward.{name}_proj") for name in ("gate_up", "down"))
    return SharedUse(
        norm=named["input_layernorm.weight"],
        attention=AttentionMixer(layer.attention, named, "self_attn", stack.attention_backend),
        mlp_norm=named["pre_ff_layernorm.weight"],
        mlp=GatedMlp(gate_up, down, activation="gelu"),
        linear=Linear.of(weights, f"layers.{layer.index}.linear"),
        eps=stack.spec.norm_eps,
    )
