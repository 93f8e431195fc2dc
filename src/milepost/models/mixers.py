"""Parts that several families share: how each is read from a config, and what its tensors are called.

In: a ConfigReader, or a spec and a prefix. Out: specs, WeightSpecs. The law kept here: a part is described once; what
differs between families (prefixes, defaults, key names) is an argument. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.models.reader import ConfigReader
from milepost.models.spec import AttentionSpec, DType, Mamba2Spec, MlpSpec, RotarySpec, WeightSpec

DTYPES: dict[str, DType] = {
    "float64": "float64",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
    "torch.float32": "float32",
    "torch.bfloat16": "bfloat16",
    "torch.float16": "float16",
}

MAMBA_N_WITHOUT_EFFECT = frozenset(["mamba_chunk_size", "initializer_range", "num_logits_to_keep", "attention_dropout"])
"""Keys beside the `mamba_n_*` ones that change no forward pass."""

LAYER_TYPES = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
}
"""Names that published configs, and those that transformers 5 writes, give to the two kinds of layer."""


# --- reading a config ---------------------------------------------------------------------------------------------------


def read_mamba_n(read: ConfigReader, hidden: int, eps: float, *, heads: int, state_size: int) -> Mamba2Spec:
    """A Mamba-2 mixer from the `mamba_n_heads`, `mamba_d_head`, … keys; `mamba_d_head` may be "auto"."""
    count, groups = read.integer("mamba_n_heads", heads), read.integer("mamba_n_groups", 1)
    inner = read.integer("mamba_expand", 2) * hidden
    if read.raw("mamba_d_head") in (None, "auto"):
        head_dim = inner // count
    else:
        head_dim = read.integer("mamba_d_head", 64)
    if count * head_dim != inner:
        read.complain("mamba_d_head", f"mamba_n_heads={count} x mamba_d_head={head_dim} isn't mamba_expand x hidden_size={inner}")
    if count % groups:
        read.complain("mamba_n_groups", f"mamba_n_groups={groups} doesn't divide mamba_n_heads={count}")
    low, high = read.limits("time_step_limit", (0.0, float("inf")))
    return Mamba2Spec(
        heads=count,
        head_dim=head_dim,
        state_size=read.integer("mamba_d_state", state_size),
        groups=groups,
        conv_kernel=read.integer("mamba_d_conv", 4, least=2),
        conv_bias=read.flag("mamba_conv_bias", True),
        proj_bias=read.flag("mamba_proj_bias", False),
        dt_min=low,
        dt_max=high,
        norm_eps=eps,
    )


def read_attention(
    read: ConfigReader, hidden: int, *, kv_heads: int | None, scale: float | None = None, rotary: float | None = None
) -> AttentionSpec:
    """Grouped attention whose head dim is hidden / heads. `rotary`: the share of a head that is rotated; None: none is."""
    heads = read.integer("num_attention_heads", 32)
    kv = read.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv:
        read.complain("num_key_value_heads", f"num_key_value_heads={kv} doesn't divide num_attention_heads={heads}")
    if hidden % heads:
        read.complain("num_attention_heads", f"num_attention_heads={heads} doesn't divide hidden_size={hidden}")
    head_dim = read.integer("head_dim", max(1, hidden // heads))
    embedding = None if rotary is None else RotarySpec(int(head_dim * rotary), read_theta(read))
    own_scale = head_dim**-0.5 if scale is None else scale
    return AttentionSpec(heads, kv, head_dim, read.flag("attention_bias", False), own_scale, embedding)


def read_theta(read: ConfigReader) -> float:
    """`rope_theta`, from its own key or inside `rope_parameters`; a scaled rotary embedding is refused by name."""
    parameters = read.raw("rope_parameters")
    inner: Mapping[str, Any] = parameters if isinstance(parameters, dict) else {}
    kind = inner.get("rope_type", "default")
    if kind != "default":
        read.complain("rope_parameters", f"rope_parameters: rope_type={kind!r} is not supported (supported: default)")
    read.unless("rope_scaling", lambda value: value.get("rope_type") == "default", "only the default rotary embedding is served")
    theta = read.number("rope_theta", 10000.0)
    found = inner.get("rope_theta", theta)
    return float(found) if isinstance(found, (int, float)) else theta


def read_layer_types(read: ConfigReader, name: str, count: int, default: str) -> list[str]:
    """`mamba2` or `attention` for each of `count` layers; a list of another length or with an unknown name is refused."""
    listed = read.raw(name)
    if listed is None:
        return [default] * count
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        read.complain(name, f"{name}={listed!r} is not a list of layer types")
        return [default] * count
    unknown = sorted(set(listed) - LAYER_TYPES.keys())
    if unknown:
        read.complain(name, f"{name} has unknown layers {', '.join(unknown)} (known: {', '.join(LAYER_TYPES)})")
    if len(listed) != count:
        read.complain("num_hidden_layers", f"num_hidden_layers={count} disagrees with {name}: {len(listed)} layers")
    return [LAYER_TYPES.get(item, default) for item in listed]


def read_token_ids(read: ConfigReader, name: str) -> tuple[int, ...]:
    """A token id or a list of them; null or missing: none."""
    value = read.raw(name)
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in ids):
        read.complain(name, f"{name}={value!r} is not a token id or a list of them")
        return ()
    return tuple(ids)


def refuse_variants(read: ConfigReader) -> None:
    """What no family here does, whatever its config says."""
    read.unless("sliding_window", lambda value: False, "attention here is over all tokens; it must be null")
    read.unless("is_encoder_decoder", lambda value: value is False, "only decoders are served")
    read.unless("add_cross_attention", lambda value: value is False, "only decoders are served")
    read.unless("pruned_heads", lambda value: value == {}, "heads can't be pruned at load time")
    read.unless("per_layer_config", lambda value: value == {}, "layers can't differ in size")


# --- naming the tensors -------------------------------------------------------------------------------------------------


def mamba2_weights(prefix: str, mixer: Mamba2Spec, hidden: int) -> list[WeightSpec]:
    """Tensors of a Mamba-2 mixer; A_log, D and dt_bias keep their precision."""
    width = mixer.inner + mixer.conv_channels + mixer.heads
    tensors = [
        WeightSpec(f"{prefix}.conv1d.weight", (mixer.conv_channels, 1, mixer.conv_kernel)),
        WeightSpec(f"{prefix}.norm.weight", (mixer.inner,)),
        *(WeightSpec(f"{prefix}.{name}", (mixer.heads,), True) for name in ("A_log", "D", "dt_bias")),
        *linear_weights(f"{prefix}.in_proj", width, hidden, bias=mixer.proj_bias),
        *linear_weights(f"{prefix}.out_proj", hidden, mixer.inner, bias=mixer.proj_bias),
    ]
    if mixer.conv_bias:
        tensors.append(WeightSpec(f"{prefix}.conv1d.bias", (mixer.conv_channels,)))
    return tensors


def attention_weights(prefix: str, mixer: AttentionSpec, hidden: int, *, optional_bias: bool = False) -> list[WeightSpec]:
    """Tensors of q, k, v and o projections. `optional_bias`: the checkpoint decides whether biases are used."""
    q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    sizes = (("q_proj", q, hidden), ("k_proj", kv, hidden), ("v_proj", kv, hidden), ("o_proj", hidden, q))
    return [
        tensor
        for name, rows, columns in sizes
        for tensor in linear_weights(f"{prefix}.{name}", rows, columns, bias=mixer.bias, optional=optional_bias)
    ]


def mlp_weights(prefix: str, mlp: MlpSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of up, down and, if gated, gate projections."""
    return [
        *(linear_weights(f"{prefix}.gate_proj", mlp.width, hidden, bias=mlp.bias) if mlp.gated else []),
        *linear_weights(f"{prefix}.up_proj", mlp.width, hidden, bias=mlp.bias),
        *linear_weights(f"{prefix}.down_proj", hidden, mlp.width, bias=mlp.bias),
    ]


def linear_weights(name: str, rows: int, columns: int, *, bias: bool, optional: bool = False) -> list[WeightSpec]:
    """A weight [rows, columns] and, if there is one, a bias [rows]."""
    tensors = [WeightSpec(f"{name}.weight", (rows, columns))]
    if bias:
        tensors.append(WeightSpec(f"{name}.bias", (rows,), optional=optional))
    return tensors
