"""Tensor-parallel ranks: each is a spec of its own, their rows make up the whole, their bytes are what pools allocate."""

from __future__ import annotations

import pytest

from milepost.errors import ConfigError
from milepost.models.registry import families
from milepost.models.sharding import shard_of, slices
from milepost.models.spec import AttentionSpec, LatentAttentionSpec, Mamba2Spec, ModelSpec
from milepost.state.geometry import geometry_of
from milepost.state.layout import StateDTypes, layout_of
from milepost.state.pools import Pools
from tests.fakes import fake_spec
from tests.families import TINY_CONFIGS

DTYPES = StateDTypes("bfloat16", "bfloat16", "float32")
_KNOWN = {name: family for family in families() for name in family.architectures}


def spec_of(name: str) -> ModelSpec:
    """A tiny config; Kimi's with counts that can be split."""
    config = dict(TINY_CONFIGS[name])
    if name == "kimi_linear":
        config |= {"num_attention_heads": 4, "num_key_value_heads": 4, "moe_intermediate_size": 20, "intermediate_size": 40}
        config["linear_attn_config"] = {**config["linear_attn_config"], "num_heads": 4}
    return _KNOWN[config["architectures"][0]].load().parse(config)


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_the_ranks_rows_are_the_whole_and_their_bytes_are_the_pools(name: str, ranks: int) -> None:
    spec = spec_of(name)
    shard = shard_of(spec, ranks)
    for whole, own in zip(spec.layers, shard.layers, strict=True):
        for component, part in zip(whole.components, own.components, strict=True):
            rows = [row for rank in range(ranks) for s in slices(component, part, ranks, rank) for row in _rows(s)]
            assert set(rows) == set(range(component.shape[0])), "a row that no rank keeps, or one that isn't there"
            assert component.shape[1:] == part.shape[1:] and sum(size for _, size in part.blocks) == part.shape[0]
    layout = layout_of(shard, DTYPES, 16)
    pools = Pools(layout, geometry_of(layout, 2**18), len(shard.layers))
    assert layout.state_bytes == sum(pool[0].nbytes for layer in pools.memory for pool in layer.states.values())
    assert layout.block_bytes == sum(layer.kv[0].nbytes for layer in pools.memory if layer.kv is not None)
    assert layout.state_bytes * ranks >= layout_of(spec, DTYPES, 16).state_bytes


def _rows(piece: object) -> range:
    return range(piece.start, piece.start + piece.length)  # type: ignore[attr-defined]


def test_groups_are_split_while_there_are_enough_and_then_kept_by_several() -> None:
    mixer = Mamba2Spec(8, 4, 16, 2, 4, True, False, 0.0, 1.0, 1e-5)
    spec = fake_spec()
    spec = type(spec)(**{**{f: getattr(spec, f) for f in spec.__slots__}, "layers": (type(spec.layers[0])(0, (mixer,)),)})
    window = mixer.components[0]
    widths = {}
    for ranks in (1, 2, 4, 8):
        own = shard_of(spec, ranks).layers[0].components[0]
        widths[ranks] = own.shape[0]
        for rank in range(ranks):
            x, b, c = slices(window, own, ranks, rank)
            assert (x.start, x.length) == (rank * 32 // ranks, 32 // ranks)
            group = rank * 2 // ranks  # heads 4 * group .. read this one
            assert b.start == 32 + (group * 16 if ranks > 1 else 0) and c.start == b.start + 32
    assert widths == {1: 32 + 64, 2: 16 + 32, 4: 8 + 32, 8: 4 + 32}


def test_kv_heads_are_kept_where_they_are_too_few_and_a_latent_row_by_all() -> None:
    attention = shard_of(spec_of("recurrent_gemma"), 2).attention_layers[0].attention
    whole = spec_of("recurrent_gemma").attention_layers[0].attention
    assert isinstance(attention, AttentionSpec) and isinstance(whole, AttentionSpec)
    assert attention.heads * 2 == whole.heads and attention.kv_heads == max(1, whole.kv_heads // 2)
    latent = shard_of(spec_of("kimi_linear"), 4).attention_layers[0].attention
    before = spec_of("kimi_linear").attention_layers[0].attention
    assert isinstance(latent, LatentAttentionSpec) and isinstance(before, LatentAttentionSpec)
    assert latent.heads == 1 and latent.kv_elements_per_token == before.kv_elements_per_token


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("nemotron_h", 3, "tensor_parallel_size=3 neither divides 2 groups"),
        ("mamba", 5, "tensor_parallel_size=5 doesn't divide 64 Mamba channels"),
        ("mamba", 0, "tensor_parallel_size=0 is less than 1"),
    ],
)
def test_what_cannot_be_split_is_named(name: str, ranks: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        shard_of(spec_of(name), ranks)
    assert refused.value.field == "tensor_parallel_size"
