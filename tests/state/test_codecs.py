"""Codecs: bytes as planned, raw exact, int8 within half a step, for every family, dtype and shard."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from milepost.models.sharding import shard_of
from milepost.models.spec import DType
from milepost.state.codecs import CODECS, Codec, encoded_layout, heads_of
from milepost.state.encode import decode, encode
from milepost.state.layout import Layout, StateDTypes, layout_of
from milepost.state.pools import TORCH_DTYPES
from tests.families import TINY_CONFIGS
from tests.laws.test_shards import spec_of


def parts_of(layout: Layout) -> list[torch.Tensor]:
    torch.manual_seed(3)
    return [torch.randn(part.shape).mul(10).to(TORCH_DTYPES[part.dtype]) for part in layout.state]


@pytest.mark.parametrize("recurrent", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("name", TINY_CONFIGS)
def test_bytes_and_errors_are_what_the_layout_says(name: str, ranks: int, recurrent: DType) -> None:
    layout = layout_of(shard_of(spec_of(name), ranks), StateDTypes("bfloat16", "bfloat16", recurrent), 16)
    parts = parts_of(layout)
    for codec in CODECS:
        encoded = encoded_layout(layout, codec)
        buffer = encode(encoded, parts)
        assert buffer.nbytes == encoded.nbytes
        for each, before, after in zip(encoded.parts, parts, decode(encoded, buffer), strict=True):
            assert after.dtype == before.dtype and after.shape == before.shape
            if codec == "raw" or each.part.name == "window" or len(each.part.shape) == 1:
                assert torch.equal(before, after)
            elif each.scales is None:
                assert torch.equal(after, before.bfloat16().to(before.dtype))
            else:
                heads, rows, columns = heads_of(each.part.shape)
                off = (after.double() - before.double()).view(heads, rows, columns).abs().amax(1)
                step = before.double().view(heads, rows, columns).abs().amax(1) / 127
                slack = after.double().abs().max() * torch.finfo(after.dtype).eps
                assert bool((off <= step / 2 * 1.001 + slack).all())
        spans = sorted((piece.offset, piece.nbytes) for e in encoded.parts for piece in (e.values, e.scales) if piece)
        assert all(start + size == following for (start, size), (following, _) in pairwise(spans))


def test_nemotron_h_8b_in_int8() -> None:
    """24 layers of [128, 64, 128]: a byte each, a scale for each of 128 x 128 columns, windows of 61,440 bytes."""
    from milepost.models.registry import parse_config

    pattern = "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-"
    spec = parse_config({"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": pattern})
    layout = layout_of(spec, StateDTypes("bfloat16", "bfloat16", "float32"), 16)
    found = {codec: encoded_layout(layout, codec).nbytes for codec in CODECS}
    assert found == {"raw": 102_137_856, "bf16": 51_806_208, "int8": 28_213_248}
    assert found["raw"] / found["int8"] > 3.5


def test_extremes_come_back() -> None:
    layout = layout_of(spec_of("nemotron_h"), StateDTypes("bfloat16", "bfloat16", "float32"), 16)
    encoded = encoded_layout(layout, "int8")
    parts = [torch.zeros(part.shape, dtype=TORCH_DTYPES[part.dtype]) for part in layout.state]
    matrix = next(i for i, part in enumerate(layout.state) if part.name == "recurrent")
    parts[matrix][0, 0, 0] = 3e38
    parts[matrix][0, 1, 1] = 1e-30
    back = decode(encoded, encode(encoded, parts))
    assert float(back[matrix][0, 0, 0]) == pytest.approx(3e38, rel=1e-6)
    assert float(back[matrix][0, 1, 1]) == pytest.approx(1e-30, rel=1e-2)
    assert int(torch.count_nonzero(back[matrix])) == 2
    parts[matrix][0, 0, 0] = float("inf")
    with pytest.raises(ValueError, match="aren't finite"):
        encode(encoded, parts)
    with pytest.raises(ValueError, match="isn't uint8"):
        decode(encoded, torch.zeros(3, dtype=torch.uint8))
    with pytest.raises(ValueError, match="shape"):
        encode(encoded, [part[:1] for part in parts])


@pytest.mark.parametrize("codec", CODECS)
def test_a_model_without_states_has_empty_checkpoints(codec: Codec) -> None:
    from tests.fakes import fake_spec

    spec = fake_spec()
    plain = type(spec)(**{**{name: getattr(spec, name) for name in spec.__slots__}, "layers": spec.layers[1:]})
    assert encoded_layout(layout_of(plain, StateDTypes("bfloat16", "bfloat16", "float32"), 16), codec).nbytes == 0
