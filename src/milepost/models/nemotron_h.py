"""Nemotron-H (arXiv 2504.03624), Nemotron-3: Mamba-2, attention, squared-ReLU and expert layers by a pattern, one a layer.

In comes a `config.json` of either dialect (NVIDIA's `hybrid_override_pattern`, transformers' `layers_block_type`),
out come the spec, the names and shapes of the weights, and the model. The law kept here: a key that isn't
known, and a value that this code wouldn't honour, is refused by name. This file doesn't import torch.

Facts of the family, checked against transformers 5.24 and NVIDIA's published configs:
- no rotary embedding, so `rope_theta` and `partial_rotary_factor` are without effect;
- every norm takes `layer_norm_epsilon`; both projections of a Mamba-2 layer take their bias from `use_bias`
  (`mamba_proj_bias` is read by nobody); d_inner is heads x head_dim (`expand` is read by nobody);
- dt is clamped to `time_step_limit` only; `time_step_min`, `_max`, `_floor` and `_rank` serve initialisation;
- experts (squared ReLU, no bias) are chosen by sigmoid + `e_score_correction_bias` among the best `topk_group` of `n_group`
  groups, and weighed by the sigmoid alone; the router is fp32. With `moe_latent_size` they work between two maps; the
  shared expert reads the rows themselves. Checkpoints hold experts one by one (`experts.N.up_proj.weight`) or merged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from milepost.models.naming import attention_weights, frame_weights, linear_weights, mamba2_weights, mlp_weights
from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import DTYPES, read_groups, read_token_ids, refuse_variants
from milepost.models.spec import (
    AttentionSpec,
    LayerSpec,
    Mamba2Spec,
    MixerSpec,
    MlpSpec,
    ModelSpec,
    MoeSpec,
    RouterSpec,
    WeightSpec,
)

if TYPE_CHECKING:
    from torch import Tensor

    from milepost.models.layers.mlp import Sum
    from milepost.models.protocol import Backends, Model

_ALIASES = {
    "attention_head_dim": "head_dim",
    "hidden_act": "mlp_hidden_act",
    "layer_types": "layers_block_type",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_init_floor": "time_step_floor",
    "mamba_dt_limit": "time_step_limit",
    "mamba_dt_max": "time_step_max",
    "mamba_dt_min": "time_step_min",
    "mamba_expand": "expand",
    "mamba_n_groups": "n_groups",
    "mamba_state_dim": "ssm_state_size",
    "num_local_experts": "n_routed_experts",
    "norm_eps": "layer_norm_epsilon",
    "num_query_groups": "num_key_value_heads",
    "rms_norm_eps": "layer_norm_epsilon",
    "torch_dtype": "dtype",
}

# Initialisation, training, kernels' own choices, positions that aren't used.
_ATTRIBUTES = """
    attention_dropout chunk_size expand hidden_dropout initializer_range mamba_proj_bias
    num_logits_to_keep partial_rotary_factor rescale_prenorm_residual rope_theta
    time_step_floor time_step_max time_step_min time_step_rank use_mamba_kernels
    moe_shared_expert_overlap mtp_hybrid_override_pattern mtp_layers_block_type
    """
_OF_EXPERTS = """
    moe_intermediate_size moe_latent_size moe_shared_expert_intermediate_size n_group n_routed_experts n_shared_experts
    norm_topk_prob num_experts_per_tok routed_scaling_factor topk_group
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_ATTRIBUTES.split())
_EPSILON = 1e-20

_PATTERN = {"M": "mamba2", "*": "attention", "-": "mlp", "E": "moe"}
_LAYER_TYPES = {
    "mamba": "mamba2",
    "linear_attention": "mamba2",
    "attention": "attention",
    "full_attention": "attention",
    "mlp": "mlp",
    "moe": "moe",
}


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Nemotron-H. Raises UnsupportedModel naming every field that can't be served."""
    read = ConfigReader(config, family="nemotron_h", aliases=_ALIASES)
    kinds = _layer_kinds(read)
    eps = read.number("layer_norm_epsilon", 1e-5)
    mlp = _mlp(read)
    mixers: dict[str, MixerSpec] = {"mamba2": _mamba2(read, eps), "attention": _attention(read), "mlp": mlp}
    experts = _experts(read, mlp.bias) if "moe" in kinds else None
    architectures = config.get("architectures") or ["NemotronHForCausalLM"]
    spec = ModelSpec(
        family="nemotron_h",
        architecture=str(architectures[0]),
        vocab_size=read.integer("vocab_size", 131072),
        hidden_size=read.integer("hidden_size", 4096),
        layers=tuple(
            LayerSpec(index, (), experts) if kind == "moe" else LayerSpec(index, (mixers[kind],))
            for index, kind in enumerate(kinds)
        ),
        norm_eps=eps,
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_position_embeddings=read.integer("max_position_embeddings", 4096),
        dtype=DTYPES[read.choice("dtype", "float32", DTYPES)],
        recurrent_dtype=DTYPES[read.choice("mamba_ssm_cache_dtype", "float32", DTYPES)],
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
        residual_in_fp32=read.flag("residual_in_fp32", False),
    )
    _refuse_variants(read)
    read.finish(_WITHOUT_EFFECT if experts else _WITHOUT_EFFECT | frozenset(_OF_EXPERTS.split()))
    return spec


def _layer_kinds(read: ConfigReader) -> list[str]:
    """One kind a layer, from the list or the pattern; both may be there if they agree."""
    listed, pattern = read.raw("layers_block_type"), read.raw("hybrid_override_pattern")
    kinds: list[str] = []
    if pattern is not None:
        kinds = _translate(read, "hybrid_override_pattern", pattern, _PATTERN, str)
    if listed is not None:
        named = _translate(read, "layers_block_type", listed, _LAYER_TYPES, list)
        if pattern is not None and named != kinds:
            read.complain("hybrid_override_pattern", "hybrid_override_pattern and layers_block_type disagree")
        kinds = named
    if listed is None and pattern is None:
        read.complain("hybrid_override_pattern", "hybrid_override_pattern or layers_block_type is required")
    count = read.integer("num_hidden_layers", len(kinds))
    if kinds and count != len(kinds):
        field = "hybrid_override_pattern" if listed is None else "layers_block_type"
        read.complain("num_hidden_layers", f"num_hidden_layers={count} disagrees with {field}: {len(kinds)} layers")
    return kinds


def _translate(
    read: ConfigReader, field: str, value: Any, names: dict[str, str], wanted: type[str] | type[list[Any]]
) -> list[str]:
    if not isinstance(value, wanted) or not value:
        read.complain(field, f"{field}={value!r} is not a {wanted.__name__} with an entry for each layer")
        return []
    unknown = sorted({str(item) for item in value if not isinstance(item, str) or item not in names})
    if unknown:
        read.complain(field, f"{field} has unknown layers {', '.join(unknown)} (known: {', '.join(names)})")
        return []
    return [names[item] for item in value]


def _mamba2(read: ConfigReader, eps: float) -> Mamba2Spec:
    heads, groups = read.integer("mamba_num_heads", 128), read.integer("n_groups", 8)
    if heads % groups:
        read.complain("n_groups", f"n_groups={groups} doesn't divide mamba_num_heads={heads}")
    read.choice("mamba_hidden_act", "silu", ("silu", "swish"))
    low, high = read.limits("time_step_limit", (0.0, float("inf")))
    return Mamba2Spec(
        heads=heads,
        head_dim=read.integer("mamba_head_dim", 64),
        state_size=read.integer("ssm_state_size", 128),
        groups=groups,
        conv_kernel=read.integer("conv_kernel", 4, least=2),
        conv_bias=read.flag("use_conv_bias", True),
        proj_bias=read.flag("use_bias", False),
        dt_min=low,
        dt_max=high,
        norm_eps=eps,
    )


def _attention(read: ConfigReader) -> AttentionSpec:
    heads = read.integer("num_attention_heads", 32)
    kv_heads = read.integer("num_key_value_heads", heads if _null(read, "num_key_value_heads") else 8)
    if heads % kv_heads:
        read.complain("num_key_value_heads", f"num_key_value_heads={kv_heads} doesn't divide num_attention_heads={heads}")
    head_dim = read.integer("head_dim", 128)
    return AttentionSpec(heads, kv_heads, head_dim, bias=read.flag("attention_bias", False), scale=head_dim**-0.5)


def _null(read: ConfigReader, name: str) -> bool:
    """Whether the field is there and null."""
    return read.present(name) and not read.has(name)


def _mlp(read: ConfigReader) -> MlpSpec:
    read.choice("mlp_hidden_act", "relu2", ("relu2",))
    return MlpSpec(read.integer("intermediate_size", 21504), bias=read.flag("mlp_bias", False), activation="relu2")


def _experts(read: ConfigReader, bias: bool) -> MoeSpec:
    count, taken = read.integer("n_routed_experts", 8), read.integer("num_experts_per_tok", 2)
    groups, best = read_groups(read, "n_group", "n_routed_experts", count, taken)
    read.unless("n_shared_experts", lambda value: value == 1, "engines disagree on the width of more or fewer than one")
    router = RouterSpec(
        scores="sigmoid",
        normalise=read.flag("norm_topk_prob", True),
        bias=True,
        scaling=read.number("routed_scaling_factor", 1.0),
        epsilon=_EPSILON,
        groups=groups,
        best_groups=best,
    )
    return MoeSpec(
        count,
        taken,
        read.integer("moe_intermediate_size", 7688),
        read.integer("moe_shared_expert_intermediate_size", 7688),
        router,
        activation="relu2",
        latent=None if read.raw("moe_latent_size") is None else read.integer("moe_latent_size", 1),
        bias=bias,
    )


def _refuse_variants(read: ConfigReader) -> None:
    refuse_variants(read)
    read.unless("num_nextn_predict_layers", lambda value: value == 0, "multi-token prediction isn't served yet")
    read.unless("rope_scaling", lambda value: False, "this family has no rotary embedding")
    read.unless("rope_parameters", lambda value: False, "this family has no rotary embedding")


def weights(spec: ModelSpec) -> tuple[WeightSpec, ...]:
    """Names and shapes of the tensors, without the checkpoint's prefix (`backbone.` or `model.`)."""
    hidden = spec.hidden_size
    tensors = frame_weights(spec, ("embeddings.weight", "norm_f.weight", "lm_head.weight"))
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        tensors.append(WeightSpec(f"{prefix}.norm.weight", (hidden,)))
        for mixer in layer.mixers:
            tensors += _mixer_weights(f"{prefix}.mixer", mixer, hidden)
        if isinstance(layer.feed_forward, MoeSpec):
            tensors += _expert_weights(f"{prefix}.mixer", layer.feed_forward, hidden)
    return tuple(tensors)


def _mixer_weights(prefix: str, mixer: MixerSpec, hidden: int) -> list[WeightSpec]:
    match mixer:
        case Mamba2Spec():
            return mamba2_weights(prefix, mixer, hidden)
        case AttentionSpec():
            # transformers' code has no bias here whatever the config says, NVIDIA's has: the checkpoint decides.
            return attention_weights(prefix, mixer, hidden, optional_bias=True)
        case MlpSpec():
            return mlp_weights(prefix, mixer, hidden)
        case _:
            raise TypeError(f"Nemotron-H has no {mixer.kind} layers")


def _expert_weights(prefix: str, moe: MoeSpec, hidden: int) -> list[WeightSpec]:
    """Tensors of a layer of experts; a checkpoint may hold those of the experts one by one."""
    inner = moe.latent or hidden
    shapes = (("up_proj", (moe.width, inner)), ("down_proj", (inner, moe.width)))
    tensors = [
        WeightSpec(f"{prefix}.gate.weight", (moe.experts, hidden), True),
        WeightSpec(f"{prefix}.gate.e_score_correction_bias", (moe.experts,), True),
        *mlp_weights(f"{prefix}.shared_experts", MlpSpec(moe.shared_width, moe.bias, "relu2"), hidden),
    ]
    for name, shape in shapes:
        parts = tuple(f"{prefix}.experts.{expert}.{name}.weight" for expert in range(moe.experts))
        tensors.append(WeightSpec(f"{prefix}.experts.{name}", (moe.experts, *shape), parts=parts))
    if moe.latent is not None:
        tensors += linear_weights(f"{prefix}.fc1_latent_proj", moe.latent, hidden, bias=moe.bias)
        tensors += linear_weights(f"{prefix}.fc2_latent_proj", hidden, moe.latent, bias=moe.bias)
    return tensors


def canonical_name(name: str) -> str | None:
    """A checkpoint's name without its prefix; None for tensors of multi-token prediction, which isn't served."""
    if name.startswith("mtp."):
        return None
    for prefix in ("backbone.", "model."):
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def build(spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends) -> Model:
    """A stack of pre-norm residual layers over these weights, one mixer or set of experts a layer."""
    from milepost.models.layers.stack import Part, Stack, mixer_of

    stack = Stack(spec, weights, backends)
    for layer in spec.layers:
        prefix = f"layers.{layer.index}"
        if isinstance(layer.feed_forward, MoeSpec):
            part: Part = _moe_part(layer.feed_forward, weights, f"{prefix}.mixer")
        else:
            part = mixer_of(layer.mixers[0], weights, f"{prefix}.mixer", stack)
        stack.add(layer.index, weights[f"{prefix}.norm.weight"], part)
    return stack


def _moe_part(moe: MoeSpec, weights: Mapping[str, Tensor], prefix: str) -> Sum:
    from milepost.models.layers.linear import Linear
    from milepost.models.layers.mlp import Experts, Relu2Mlp, Sum
    from milepost.models.layers.router import Router

    bias = weights[f"{prefix}.gate.e_score_correction_bias"]
    router = Router(moe.router, moe.per_token, Linear(weights[f"{prefix}.gate.weight"]), bias)
    up, down = (weights[f"{prefix}.experts.{name}_proj"].unbind() for name in ("up", "down"))
    into, back = f"{prefix}.fc1_latent_proj", f"{prefix}.fc2_latent_proj"
    latent = None if moe.latent is None else (Linear.of(weights, into), Linear.of(weights, back))
    experts = Experts(router, up, down, activation=moe.activation, latent=latent)
    return Sum(experts, Relu2Mlp(weights, f"{prefix}.shared_experts"))
