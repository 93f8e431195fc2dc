"""What the tensors of parts that several families share are called, and their shapes.

In: a spec and a prefix. Out: WeightSpecs. The law kept here: a part is described once; what differs between families (prefixes,
what is optional) is an argument. No torch.
"""

from __future__ import annotations

from milepost.models.spec import (
    AttentionSpec,
    KdaSpec,
    LatentAttentionSpec,
    Mamba1Spec,
    Mamba2Spec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    ShortConvSpec,
    WeightSpec,
)


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
    """Tensors of a router, called `router`, of its `expert_bias`, and of experts stored one by one under `experts.N`."""
    expert = MlpSpec(moe.width, bias=False, activation="silu", gated=True)
    bias = [WeightSpec(f"{prefix}.expert_bias", (moe.experts,), keep_precision=True)] if moe.router.bias else []
    return [
        WeightSpec(f"{prefix}.{router}.weight", (moe.experts, hidden)),
        *bias,
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
