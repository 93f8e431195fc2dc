"""Hymba (NVIDIA, arXiv 2411.13676), to size it by: attention and Mamba-1 side by side in every layer. It isn't served.

In: a `config.json`. Out: a spec. The law kept here: a key that isn't known is refused by name. No torch.

Facts of the family, checked against published files: layers in `global_attn_idx` attend to all tokens, the others to
`sliding_window`; layers in a group of `kv_reuse_group` could share their KV; `num_memory_tokens` learnt tokens stand before
every prompt. The last two aren't counted here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from milepost.models.reader import ATTRIBUTES_WITHOUT_EFFECT, ConfigReader
from milepost.models.reading import DTYPES, read_attention, read_indices, read_rank, read_token_ids
from milepost.models.spec import LayerSpec, Mamba1Spec, MlpSpec, ModelSpec

_UNCOUNTED = """
    attention_dropout attn_implementation_new calc_logits_for_entire_prompt initializer_range kq_norm kv_reuse_every_i_layer
    kv_reuse_group kv_weight_reuse layer_type mamba_inner_layernorms mamba_proj_bias memory_tokens_interspersed_every
    mlp_hidden_act num_logits_to_keep num_memory_tokens orig_max_position_embeddings rope rope_theta rope_type
    router_aux_loss_coef seq_length use_mamba_kernels hidden_act
    """
_WITHOUT_EFFECT = ATTRIBUTES_WITHOUT_EFFECT | frozenset(_UNCOUNTED.split())


def parse(config: Mapping[str, Any]) -> ModelSpec:
    """Read a `config.json` of Hymba. Raises UnsupportedModel naming every field that can't be read."""
    read = ConfigReader(config, family="hymba", aliases={"torch_dtype": "dtype"})
    hidden, count = read.integer("hidden_size", 4096), read.integer("num_hidden_layers", 32)
    attention = read_attention(read, hidden, kv_heads=8)
    inner, widths = read.integer("mamba_expand", 2) * hidden, read.raw("conv_dim")
    if isinstance(widths, dict) and set(widths.values()) != {inner}:
        read.complain("conv_dim", f"conv_dim={widths!r} isn't mamba_expand x hidden_size={inner} in every layer")
    mamba = Mamba1Spec(
        inner=inner,
        state_size=read.integer("mamba_d_state", 16),
        dt_rank=read_rank(read, "mamba_dt_rank", hidden),
        conv_kernel=read.integer("mamba_d_conv", 4, least=2),
        conv_bias=read.flag("mamba_conv_bias", True),
        proj_bias=False,
    )
    windowed = replace(attention, window=read.integer("sliding_window", 1024) if read.has("sliding_window") else None)
    everywhere = read_indices(read, "global_attn_idx", count) or frozenset()
    for name in ("num_experts", "num_experts_per_tok", "num_mamba"):
        read.unless(name, lambda value: value == 1, "only one is known")
    for name in ("attn_hidden_size", "kq_head_dim", "v_head_dim"):
        read.unless(name, lambda value: value == -1, "only -1, hidden_size's share, is known")
    mlp = MlpSpec(read.integer("intermediate_size", 14336), bias=False, activation="silu", gated=True)
    spec = ModelSpec(
        family="hymba",
        architecture="HymbaForCausalLM",
        vocab_size=read.integer("vocab_size", 65536),
        hidden_size=hidden,
        layers=tuple(
            LayerSpec(index, (attention if index in everywhere else windowed, mamba), mlp) for index in range(count)
        ),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        tie_embeddings=read.flag("tie_word_embeddings", False),
        max_position_embeddings=read.integer("max_position_embeddings", 262144),
        dtype=DTYPES[read.choice("dtype", "bfloat16", DTYPES)],
        recurrent_dtype="float32",
        eos_token_ids=read_token_ids(read, "eos_token_id"),
        bos_token_id=next(iter(read_token_ids(read, "bos_token_id")), None),
    )
    read.finish(_WITHOUT_EFFECT)
    return spec
