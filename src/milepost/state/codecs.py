"""How a checkpoint may be stored, as data: raw, bf16, or int8 with scales. In: a layout, a codec. Out: pieces, exact bytes.

The law kept here: planned = allocated (law 9): `encode` writes these pieces and no others. The convolution window is never
touched, and nothing is ever widened. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from milepost.models.spec import DTYPE_BYTES, DType
from milepost.state.layout import Layout, Part

Codec = Literal["raw", "bf16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
StoredDType = DType | Literal["int8"]
_BYTES: Mapping[str, int] = {str(name): size for name, size in DTYPE_BYTES.items()} | {"int8": 1}
_MOST_TOGETHER = 64
"""Channels of a Mamba-1 state that share a scale, at most: it has no heads."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One tensor of an encoded checkpoint; `offset` is in bytes from its start."""

    shape: tuple[int, ...]
    dtype: StoredDType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor."""
        return math.prod(self.shape) * _BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Encoded:
    """One part of a state as it is stored: its values and, for int8, one scale for each (head, state column)."""

    part: Part
    values: Piece
    scales: Piece | None


@dataclass(frozen=True, slots=True)
class EncodedLayout:
    """A whole checkpoint as it is stored."""

    codec: Codec
    parts: tuple[Encoded, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one checkpoint."""
        return sum(each.values.nbytes + (each.scales.nbytes if each.scales else 0) for each in self.parts)


def encoded_layout(layout: Layout, codec: Codec) -> EncodedLayout:
    """Lay out a state under a codec: scales first, then the values, widest first, so that each piece is aligned."""
    plans = [(part, *_stored(part, codec)) for part in layout.state]
    offset, scales = 0, {}
    for part, shape, dtype in plans:
        if dtype == "int8":
            scales[part] = Piece((shape[0], shape[2]), "float32", offset)
            offset += scales[part].nbytes
    found: dict[Part, Encoded] = {}
    for part, shape, dtype in sorted(plans, key=lambda plan: -_BYTES[plan[2]]):
        values = Piece(shape, dtype, offset)
        offset += values.nbytes
        found[part] = Encoded(part, values, scales.get(part))
    return EncodedLayout(codec, tuple(found[part] for part in layout.state))


def heads_of(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """A recurrent matrix as [heads, rows, columns]: a scale belongs to a head's column.

    Mamba-1's [channels, state] has no heads; the largest even share of at most 64 channels stands for one.
    """
    if len(shape) == 3:
        return shape[0], shape[1], shape[2]
    channels, columns = shape
    together = max(size for size in range(1, _MOST_TOGETHER + 1) if channels % size == 0)
    return channels // together, together, columns


def _stored(part: Part, codec: Codec) -> tuple[tuple[int, ...], StoredDType]:
    """Shape and dtype of a part's values. A vector (RG-LRU's state) is as small as a window and stays as it is."""
    if part.name != "recurrent" or codec == "raw" or len(part.shape) < 2:
        return part.shape, part.dtype
    if codec == "bf16":
        return part.shape, "bfloat16" if DTYPE_BYTES[part.dtype] > DTYPE_BYTES["bfloat16"] else part.dtype
    return heads_of(part.shape), "int8"
