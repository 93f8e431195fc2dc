"""An affine map over the last dimension, with or without a low-rank one beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; weight [out, in], bias [out] or None.

    `adapter` (down [rank, in], up [out, rank]) adds x down^T up^T: several maps may share a weight and differ in it.
    """

    weight: Tensor
    bias: Tensor | None = None
    adapter: tuple[Tensor, Tensor] | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> Linear:
        """The map stored under `name`.weight and, if they are there, `name`.bias, `name`.adapter.down and `name`.adapter.up."""
        down, up = (weights.get(f"{name}.adapter.{side}") for side in ("down", "up"))
        adapter = None if down is None or up is None else (down, up)
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"), adapter)

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        y = functional.linear(x, self.weight, self.bias)
        if self.adapter is None:
            return y
        down, up = self.adapter
        return y + functional.linear(functional.linear(x, down), up)
