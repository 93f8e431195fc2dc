"""Where every byte of a state and of a block lies. The only place in the project that computes these sizes.

In: a ModelSpec and three dtypes. Out: parts with shapes, dtypes and offsets, and their exact sums.
The law kept here: planned = allocated (law 9). Pools, doctor and fingerprint all read this layout.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from milepost.models.spec import DTYPE_BYTES, AttentionSpec, DType, ModelSpec

PartName = Literal["recurrent", "window", "kv"]
ALIGNMENT = 8
"""Bytes: every unit starts at a multiple of this, so that any dtype can be read in place."""


@dataclass(frozen=True, slots=True)
class StateDTypes:
    """dtypes of what a sequence remembers."""

    kv: DType
    window: DType
    recurrent: DType


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor inside a unit (a state or a block): `offset` is in bytes from the unit's start."""

    layer: int
    name: PartName
    shape: tuple[int, ...]
    dtype: DType
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of this tensor."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class Layout:
    """Parts of one state (all recurrent layers) and of one block of KV (all attention layers)."""

    state: tuple[Part, ...]
    block: tuple[Part, ...]
    block_size: int
    dtypes: StateDTypes
    window: int | None = None
    """How many tokens back any attention layer reads, its own included; None: some layer reads all."""

    @property
    def state_bytes(self) -> int:
        """Bytes of one state: the fixed memory of one sequence, and of one checkpoint."""
        return sum(part.nbytes for part in self.state)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of KV."""
        return sum(part.nbytes for part in self.block)

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of KV that one token adds over all attention layers."""
        return self.block_bytes // self.block_size

    @property
    def state_stride(self) -> int:
        """`state_bytes` rounded up to the alignment."""
        return _aligned(self.state_bytes)

    @property
    def block_stride(self) -> int:
        """`block_bytes` rounded up to the alignment."""
        return _aligned(self.block_bytes)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold the KV of so many tokens; 0 for a model without attention."""
        return -(-tokens // self.block_size) if self.block else 0

    def blocks_kept(self, tokens: int) -> int:
        """Most blocks that a sequence of so many tokens keeps between steps: with a window, those that it still reaches."""
        blocks = self.blocks_for(tokens)
        return blocks if self.window is None else min(blocks, -(-(self.window - 1) // self.block_size) + 1)

    def first_block(self, position: int) -> int:
        """Index of the first block that the token at `position` reads; those before it serve nobody from there on."""
        return 0 if self.window is None else max(0, position - self.window + 1) // self.block_size

    def blocks_at_once(self, lengths: Iterable[int], step: int) -> int:
        """Most blocks that sequences of these lengths hold during steps of at most `step` tokens in all."""
        lengths = list(lengths)
        whole = sum(map(self.blocks_for, lengths))
        return whole if self.window is None else min(whole, sum(map(self.blocks_kept, lengths)) + -(-step // self.block_size))

    @property
    def digest(self) -> bytes:
        """Hash over every part's layer, name, shape, dtype and offset: two layouts of equal size still differ."""
        text = repr((self.state, self.block, self.block_size))
        return hashlib.blake2b(text.encode(), digest_size=16).digest()


def layout_of(spec: ModelSpec, dtypes: StateDTypes, block_size: int) -> Layout:
    """Lay out the parts of a model: widest dtype first, so that each part is aligned to its own items."""
    wanted: list[tuple[int, PartName, tuple[int, ...], DType]] = []
    for layer in spec.recurrent_layers:
        for component in layer.components:
            dtype = dtypes.recurrent if component.name == "recurrent" else dtypes.window
            wanted.append((layer.index, component.name, component.shape, dtype))
    wanted.sort(key=lambda part: -DTYPE_BYTES[part[3]])
    kv: list[tuple[int, PartName, tuple[int, ...], DType]] = [
        (layer.index, "kv", layer.attention.block_shape(block_size), dtypes.kv)
        for layer in spec.attention_layers
        if layer.attention is not None
    ]
    return Layout(_packed(wanted), _packed(kv), block_size, dtypes, _window(spec))


def _window(spec: ModelSpec) -> int | None:
    attentions = [layer.attention for layer in spec.attention_layers]
    windows = [attention.window for attention in attentions if isinstance(attention, AttentionSpec) and attention.window]
    return max(windows) if windows and len(windows) == len(attentions) else None


def _packed(wanted: list[tuple[int, PartName, tuple[int, ...], DType]]) -> tuple[Part, ...]:
    parts: list[Part] = []
    offset = 0
    for layer, name, shape, dtype in wanted:
        part = Part(layer, name, shape, dtype, offset)
        parts.append(part)
        offset += part.nbytes
    return tuple(parts)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
