"""What one sequence remembers at a length, as a function: a fixed state and KV that grows up to each layer's window.

In: a spec and its layout. Out: bytes at any length, and the lengths at which two such functions cross.
The law kept here: planned = allocated (law 9): every byte comes from the layout's parts. Whole blocks are `capacity`'s affair;
here KV is counted token by token. No torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from milepost.models.spec import AttentionSpec, ModelSpec
from milepost.state.layout import Layout

_FAR = 1 << 40
"""Tokens; a crossing beyond it is none."""


@dataclass(frozen=True, slots=True)
class Growth:
    """KV of one layer: bytes a token, and after how many tokens it stops growing (None: never)."""

    layer: int
    bytes_per_token: int
    window: int | None


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of one sequence of one model."""

    state_bytes: int
    growth: tuple[Growth, ...]

    @property
    def bytes_per_token(self) -> int:
        """What a token adds before any window is full."""
        return sum(each.bytes_per_token for each in self.growth)

    def kv_at(self, tokens: int) -> int:
        """Bytes of KV that a sequence of so many tokens needs."""
        return sum(g.bytes_per_token * (tokens if g.window is None else min(tokens, g.window)) for g in self.growth)

    def at(self, tokens: int) -> int:
        """Bytes of state and KV of a sequence of so many tokens."""
        return self.state_bytes + self.kv_at(tokens)


def memory_of(spec: ModelSpec, layout: Layout) -> Memory:
    """Read it off a layout."""
    windows = {
        layer.index: layer.attention.window for layer in spec.attention_layers if isinstance(layer.attention, AttentionSpec)
    }
    growth = tuple(
        Growth(part.layer, part.nbytes // layout.block_size, windows.get(part.layer)) for part in layout.block
    )
    return Memory(layout.state_bytes, growth)


def tokens_worth(size: int, memory: Memory) -> float | None:
    """Length at which the KV of `memory` comes to `size` bytes, a fraction where that falls inside a token; None: never.

    KV grows in straight pieces between the windows' ends, so the answer is exact.
    """
    ends = sorted({g.window for g in memory.growth if g.window is not None})
    start = 0
    for end in (*ends, _FAR):
        if memory.kv_at(end) >= size:
            slope = memory.kv_at(start + 1) - memory.kv_at(start)
            return start + (size - memory.kv_at(start)) / slope if slope else float(start)
        start = end
    return None


def smaller_from(one: Memory, other: Memory) -> float | None:
    """Length from which `one` takes less than `other`, a fraction where it falls inside a token; None: never for good.

    The difference is straight between the windows' ends; the last crossing counts.
    """
    ends = sorted({g.window for g in (*one.growth, *other.growth) if g.window is not None})
    points = [0, *ends, _FAR]
    if one.at(_FAR) >= other.at(_FAR):
        return None
    for low, high in reversed(list(pairwise(points))):
        if one.at(low) >= other.at(low):
            gap = one.at(low) - other.at(low)
            gain = ((one.at(low) - one.at(high)) - (other.at(low) - other.at(high))) / (high - low)
            return low + gap / gain
    return 0.0
