"""Parts that several families share: how each is read from a config, and what its tensors are called.

In: a ConfigReader, or a spec and a prefix. Out: specs, WeightSpecs. The law kept here: a part is described once; what
differs between families (prefixes, defaults, key names) is an argument. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from milepost.models.reader import ConfigReader
from milepost.models.spec import (
    AttentionSpec,
    DType,
    GatedDeltaSpec,
    KdaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RotarySpec,
    ShortConvSpec,
    WeightSpec,
)

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


def read_mamba_n(
    read: ConfigReader, hidden: int, eps: float, *, heads: int, state_size: int, inner: int | None = None
) -> Mamba2Spec:
    """A Mamba-2 mixer from the `mamba_n_heads`, `mamba_d_head`, … keys; `mamba_d_head` may be "auto".

    `inner`: its channels where they aren't mamba_expand x hidden_size (Falcon-H1's `mamba_d_ssm`).
    """
    count, groups = read.integer("mamba_n_heads", heads), read.integer("mamba_n_groups", 1)
    said = "mamba_expand x hidden_size" if inner is None else "mamba_d_ssm"
    expanded = read.integer("mamba_expand", 2) * hidden
    inner = expanded if inner is None else inner
    head_dim = inner // count if read.raw("mamba_d_head") in (None, "auto") else read.integer("mamba_d_head", 64)
    if count * head_dim != inner:
        read.complain("mamba_d_head", f"mamba_n_heads={count} x mamba_d_head={head_dim} isn't {said}={inner}")
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
    read: ConfigReader,
    hidden: int,
    *,
    kv_heads: int | None,
    scale: float | None = None,
    rotary: float | None = None,
    theta: float = 10000.0,
    head_dim: int | None = None,
    heads: int = 32,
) -> AttentionSpec:
    """Grouped attention; `head_dim` None: hidden / heads, unless the config says otherwise.

    `rotary`: the share of a head that is rotated; None: none is. `theta`, `heads`: the family's own, where the config has none.
    """
    heads = read.integer("num_attention_heads", heads)
    kv = read.integer("num_key_value_heads", kv_heads or heads)
    if heads % kv:
        read.complain("num_key_value_heads", f"num_key_value_heads={kv} doesn't divide num_attention_heads={heads}")
    if hidden % heads and head_dim is None and not read.has("head_dim"):
        read.complain("num_attention_heads", f"num_attention_heads={heads} doesn't divide hidden_size={hidden}")
    head_dim = read.integer("head_dim", head_dim or max(1, hidden // heads))
    embedding = None if rotary is None else RotarySpec(int(head_dim * rotary), read_theta(read, theta))
    if embedding is not None and embedding.dim % 2:
        read.complain("head_dim", f"head_dim={head_dim}: {embedding.dim} rotated channels of a head don't pair up")
    own_scale = head_dim**-0.5 if scale is None else scale
    return AttentionSpec(heads, kv, head_dim, read.flag("attention_bias", False), own_scale, embedding)


def read_theta(read: ConfigReader, default: float = 10000.0) -> float:
    """`rope_theta`, from its own key or inside `rope_parameters`; a scaled rotary embedding is refused by name."""
    parameters = read.raw("rope_parameters")
    inner: Mapping[str, Any] = parameters if isinstance(parameters, dict) else {}
    kind = inner.get("rope_type", "default")
    if kind != "default":
        read.complain("rope_parameters", f"rope_parameters: rope_type={kind!r} is not supported (supported: default)")
    read.unless("rope_scaling", _is_default_rope, "only the default rotary embedding is served")
    theta = read.number("rope_theta", default)
    found = inner.get("rope_theta", theta)
    return float(found) if isinstance(found, (int, float)) else theta


def _is_default_rope(scaling: Any) -> bool:
    return isinstance(scaling, dict) and scaling.get("rope_type", scaling.get("type")) == "default"


def read_rotary_share(read: ConfigReader, default: float) -> float:
    """The share of a head that is rotated: `partial_rotary_factor`, from its own key or inside `rope_parameters`."""
    parameters = read.raw("rope_parameters")
    share = read.number("partial_rotary_factor", default)
    found = parameters.get("partial_rotary_factor", share) if isinstance(parameters, dict) else share
    if not isinstance(found, (int, float)) or not 0.0 < found <= 1.0:
        read.complain("partial_rotary_factor", f"partial_rotary_factor={found!r} must be above 0 and at most 1")
        return default
    return float(found)


def read_layer_types(
    read: ConfigReader, name: str, count: int, default: str, known: Mapping[str, str] = LAYER_TYPES
) -> list[str]:
    """What `known` says for each of `count` layers; a list of another length or with an unknown name is refused."""
    listed = read.raw(name)
    if listed is None:
        return [default] * count
    if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
        read.complain(name, f"{name}={listed!r} is not a list of layer types")
        return [default] * count
    unknown = sorted(set(listed) - known.keys())
    if unknown:
        read.complain(name, f"{name} has unknown layers {', '.join(unknown)} (known: {', '.join(known)})")
    if len(listed) != count:
        read.complain("num_hidden_layers", f"num_hidden_layers={count} disagrees with {name}: {len(listed)} layers")
    return [known.get(item, default) for item in listed]


def read_multipliers(read: ConfigReader, name: str, count: int) -> tuple[float, ...]:
    """A list of `count` finite positive numbers; missing or null: all 1."""
    value = read.raw(name)
    ones = (1.0,) * count
    if value is None:
        return ones
    listed = value if isinstance(value, list) else []
    numbers = [item for item in listed if isinstance(item, (int, float)) and not isinstance(item, bool)]
    if len(listed) != count or len(numbers) != count or not all(0 < item < float("inf") for item in numbers):
        read.complain(name, f"{name}={value!r} is not a list of {count} positive numbers")
        return ones
    return tuple(float(item) for item in numbers)


def read_gated_delta(
    read: ConfigReader, eps: float, *, key_heads: int, heads: int, key_dim: int = 128, value_dim: int = 128
) -> GatedDeltaSpec:
    """A gated delta net from the `linear_*` keys; `eps` is its output norm's."""
    keys, count = read.integer("linear_num_key_heads", key_heads), read.integer("linear_num_value_heads", heads)
    if count % keys:
        read.complain("linear_num_key_heads", f"linear_num_key_heads={keys} doesn't divide linear_num_value_heads={count}")
    return GatedDeltaSpec(
        key_heads=keys,
        heads=count,
        key_dim=read.integer("linear_key_head_dim", key_dim),
        value_dim=read.integer("linear_value_head_dim", value_dim),
        conv_kernel=read.integer("linear_conv_kernel_dim", 4, least=2),
        norm_eps=eps,
    )


def read_rank(read: ConfigReader, name: str, hidden: int) -> int:
    """The rank of Mamba-1's time step; missing or "auto": hidden / 16, rounded up."""
    return -(-hidden // 16) if read.raw(name) in (None, "auto") else read.integer(name, 1)


def read_indices(read: ConfigReader, name: str, count: int) -> frozenset[int] | None:
    """A list of layers from 0 to count - 1; None if it is missing or null."""
    listed = read.raw(name)
    if listed is None:
        return None
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < count for i in listed):
        read.complain(name, f"{name}={listed!r} must list layers from 0 to {count - 1}")
        return frozenset()
    return frozenset(listed)


def read_taken(read: ConfigReader, name: str, experts: int, taken: int, *, least: int = 1) -> tuple[int, int]:
    """How many experts there are, by the key `name`, and how many of them each token takes."""
    count, chosen = read.integer(name, experts, least=least), read.integer("num_experts_per_tok", taken, least=least)
    if count and not 1 <= chosen <= count:
        read.complain("num_experts_per_tok", f"num_experts_per_tok={chosen} must be from 1 to {name}={count}")
    return count, chosen


def read_groups(read: ConfigReader, name: str, experts: str, count: int, taken: int) -> tuple[int, int]:
    """Groups of `count` experts, by the key `name`, and from how many of them a token's `taken` experts may come."""
    groups, best = read.integer(name, 1), read.integer("topk_group", 1)
    if count % groups or (groups > 1 and count // groups < 2):
        read.complain(name, f"{name}={groups} doesn't divide {experts}={count} into groups of two or more")
    if best > groups:
        read.complain("topk_group", f"topk_group={best} is more than {name}={groups}")
    if taken > best * (count // groups):
        read.complain(
            "num_experts_per_tok", f"num_experts_per_tok={taken} is more than {best} groups of {count // groups} hold"
        )
    return groups, best


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


def frame_weights(spec: ModelSpec, names: tuple[str, str, str]) -> list[WeightSpec]:
    """Embeddings, last norm and head, by a family's names. A tied checkpoint that holds a head all the same uses it."""
    embeddings, norm, head = names
    return [
        WeightSpec(embeddings, (spec.vocab_size, spec.hidden_size)),
        WeightSpec(norm, (spec.hidden_size,)),
        WeightSpec(head, (spec.vocab_size, spec.hidden_size), optional=spec.tie_embeddings),
    ]


def mamba2_weights(prefix: str, mixer: Mamba2Spec, hidden: int) -> list[WeightSpec]:
    """Tensors of a Mamba-2 mixer; A_log, D and dt_bias keep their precision."""
    width = mixer.inner + mixer.conv_channels + mixer.heads
    out_bias = mixer.proj_bias if mixer.out_bias is None else mixer.out_bias
    tensors = [
        WeightSpec(f"{prefix}.conv1d.weight", (mixer.conv_channels, 1, mixer.conv_kernel)),
        *(WeightSpec(f"{prefix}.{name}", (mixer.heads,), True) for name in ("A_log", "D", "dt_bias")),
        *linear_weights(f"{prefix}.in_proj", width, hidden, bias=mixer.proj_bias),
        *linear_weights(f"{prefix}.out_proj", hidden, mixer.inner, bias=out_bias),
    ]
    if mixer.norm != "none":
        tensors.append(WeightSpec(f"{prefix}.norm.weight", (mixer.inner,)))
    if mixer.conv_bias:
        tensors.append(WeightSpec(f"{prefix}.conv1d.bias", (mixer.conv_channels,)))
    return tensors


def attention_weights(prefix: str, mixer: AttentionSpec, hidden: int, *, optional_bias: bool = False) -> list[WeightSpec]:
    """Tensors of q, k, v and o projections and of the norms of q and k.

    `optional_bias`: the checkpoint decides whether biases are used.
    """
    q, kv = mixer.heads * mixer.head_dim, mixer.kv_heads * mixer.head_dim
    queries, read = 2 * q if mixer.gated else q, mixer.input_width or hidden
    out_bias = mixer.bias if mixer.out_bias is None else mixer.out_bias
    inner = (("q_proj", queries, read, mixer.bias), ("k_proj", kv, read, mixer.bias), ("v_proj", kv, read, mixer.bias))
    tensors = [
        tensor
        for name, rows, columns, bias in (*inner, ("o_proj", hidden, q, out_bias))
        for tensor in linear_weights(f"{prefix}.{name}", rows, columns, bias=bias, optional=optional_bias)
    ]
    if mixer.qk_norm is not None:
        widths = (mixer.head_dim, mixer.head_dim) if mixer.qk_norm.per_head else (q, kv)
        tensors += [WeightSpec(f"{prefix}.{name}_norm.weight", (width,)) for name, width in zip("qk", widths, strict=True)]
    return tensors


def short_conv_weights(prefix: str, mixer: ShortConvSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of a gated short convolution."""
    tensors = [
        WeightSpec(f"{prefix}.conv.weight", (mixer.channels, 1, mixer.kernel)),
        *linear_weights(f"{prefix}.in_proj", 3 * mixer.channels, hidden, bias=mixer.bias),
        *linear_weights(f"{prefix}.out_proj", hidden, mixer.channels, bias=mixer.bias),
    ]
    return [*tensors, WeightSpec(f"{prefix}.conv.bias", (mixer.channels,))] if mixer.bias else tensors


def mamba1_weights(prefix: str, mixer: Mamba1Spec, hidden: int) -> list[WeightSpec]:
    """Tensors of a Mamba-1 mixer; A_log, D and the bias of dt keep their precision."""
    inner, state, rank = mixer.inner, mixer.state_size, mixer.dt_rank
    tensors = [
        WeightSpec(f"{prefix}.conv1d.weight", (inner, 1, mixer.conv_kernel)),
        WeightSpec(f"{prefix}.A_log", (inner, state), True),
        WeightSpec(f"{prefix}.D", (inner,), True),
        WeightSpec(f"{prefix}.dt_proj.weight", (inner, rank)),
        WeightSpec(f"{prefix}.dt_proj.bias", (inner,), True),
        WeightSpec(f"{prefix}.x_proj.weight", (rank + 2 * state, inner)),
        *linear_weights(f"{prefix}.in_proj", 2 * inner, hidden, bias=mixer.proj_bias),
        *linear_weights(f"{prefix}.out_proj", hidden, inner, bias=mixer.proj_bias),
    ]
    if mixer.conv_bias:
        tensors.append(WeightSpec(f"{prefix}.conv1d.bias", (inner,)))
    if mixer.norm_eps is not None:
        norms = (("dt", rank), ("b", state), ("c", state))
        tensors += [WeightSpec(f"{prefix}.{name}_layernorm.weight", (width,)) for name, width in norms]
    return tensors


def kda_weights(prefix: str, mixer: KdaSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of Kimi delta attention; A_log and dt_bias keep their precision.

    The convolution may come in three parts where q, k and v are equally wide.
    """
    key, value = mixer.key_width, mixer.value_width
    maps = {"q": key, "k": key, "v": value, "b": mixer.heads, "f_a": mixer.rank, "g_a": mixer.rank}
    taps = (2 * key + value, 1, mixer.conv_kernel)
    parts = tuple(f"{prefix}.{name}_conv1d.weight" for name in "qkv" if key == value)
    return [
        *(WeightSpec(f"{prefix}.{name}_proj.weight", (rows, hidden)) for name, rows in maps.items()),
        WeightSpec(f"{prefix}.conv1d.weight", taps, parts=parts, part_shape=(value, 1, mixer.conv_kernel)),
        WeightSpec(f"{prefix}.f_b_proj.weight", (key, mixer.rank)),
        WeightSpec(f"{prefix}.g_b_proj.weight", (value, mixer.rank)),
        WeightSpec(f"{prefix}.A_log", (1, 1, mixer.heads, 1), True),
        WeightSpec(f"{prefix}.dt_bias", (key,), True),
        WeightSpec(f"{prefix}.o_norm.weight", (mixer.value_dim,)),
        WeightSpec(f"{prefix}.o_proj.weight", (hidden, value)),
    ]


def latent_weights(prefix: str, mixer: LatentAttentionSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of latent attention."""
    rank, queries = mixer.rank, mixer.heads * mixer.key_dim
    tensors = [
        *linear_weights(f"{prefix}.kv_a_proj_with_mqa", mixer.kv_elements_per_token, hidden, bias=mixer.bias),
        WeightSpec(f"{prefix}.kv_a_layernorm.weight", (rank,)),
        WeightSpec(f"{prefix}.kv_b_proj.weight", (mixer.heads * (mixer.nope_dim + mixer.value_dim), rank)),
        *linear_weights(f"{prefix}.o_proj", hidden, mixer.heads * mixer.value_dim, bias=mixer.bias),
    ]
    if mixer.query_rank is None:
        return [*tensors, WeightSpec(f"{prefix}.q_proj.weight", (queries, hidden))]
    return [
        *tensors,
        *linear_weights(f"{prefix}.q_a_proj", mixer.query_rank, hidden, bias=mixer.bias),
        WeightSpec(f"{prefix}.q_a_layernorm.weight", (mixer.query_rank,)),
        WeightSpec(f"{prefix}.q_b_proj.weight", (queries, mixer.query_rank)),
    ]


def expert_weights(prefix: str, moe: MoeSpec, hidden: int, *, router: str) -> list[WeightSpec]:
    """Tensors of a router, called `router`, and of experts that are stored one by one under `experts.N`."""
    expert = MlpSpec(moe.width, bias=False, activation="silu", gated=True)
    return [
        WeightSpec(f"{prefix}.{router}.weight", (moe.experts, hidden)),
        *(tensor for index in range(moe.experts) for tensor in mlp_weights(f"{prefix}.experts.{index}", expert, hidden)),
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
