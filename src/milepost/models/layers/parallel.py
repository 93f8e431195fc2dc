"""Mixers side by side in one layer: each reads the same normed rows, and what they give is added.

The law kept here: each branch keeps its own memory (states, or KV), and none sees what another wrote.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from milepost.models.layers.stack import Part
from milepost.models.protocol import LayerMemory, ModelStep


@dataclass(frozen=True, slots=True)
class Branch:
    """A part with the multipliers of what it reads and of what it gives."""

    part: Part
    before: float = 1.0
    after: float = 1.0


class Parallel:
    """The sum over branches of after * part(before * x)."""

    def __init__(self, *branches: Branch) -> None:
        self.branches = branches

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; every branch updates its part of the layer's memory."""
        total: Tensor | None = None
        for branch in self.branches:
            given = branch.part(x if branch.before == 1.0 else x * branch.before, memory, step)
            given = given if branch.after == 1.0 else given * branch.after
            total = given if total is None else total + given
        if total is None:
            raise ValueError("a layer needs a branch at least")
        return total
