"""A feed-forward block with the squared ReLU (arXiv 2109.08668): hidden rows in, hidden rows out, no memory."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from milepost.models.layers.linear import Linear


class Relu2Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.up_proj = Linear.of(weights, f"{prefix}.up_proj")
        self.down_proj = Linear.of(weights, f"{prefix}.down_proj")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down_proj(self.up_proj(x).relu_().square_())
