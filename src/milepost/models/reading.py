"""Parts that several families share: how each is read from a config.

In: a ConfigReader. Out: specs. The law kept here: a part is described once; what differs between families (defaults, key
names) is an argument. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypedDict

from milepost.models.reader import ConfigReader
from milepost.models.spec import (
    AttentionSpec,
    DType,
    GatedDeltaSpec,
    Mamba2Spec,
    RotarySpec,
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


class Common(TypedDict):
    """Fields of a ModelSpec that every config spells alike."""

    vocab_size: int
    tie_embeddings: bool
    max_position_embeddings: int
    dtype: DType
    recurrent_dtype: DType
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def read_common(read: ConfigReader, *, vocab_size: int, tied: bool, positions: int) -> Common:
    """What every config spells alike; the numbers are the family's defaults. `auto` means fp32 for a recurrent matrix."""
    return Common(
        vocab_size=read.integer("vocab_size", vocab_size),
        tie_embeddings=read.flag("tie_word_embeddings", tied),
        max_position_embeddings=read.integer("max_position_embeddings", positions),
        dtype=DTYPES[read.choice("dtype", "float32", DTYPES)],
        recurrent_dtype="float32",
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
    )


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
