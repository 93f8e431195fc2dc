"""An affine map over the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Linear:
    """y = x W^T + bias; weight [out, in], bias [out] or None."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], name: str) -> Linear:
        """The map stored under `name`.weight and, if there is one, `name`.bias."""
        return cls(weights[f"{name}.weight"], weights.get(f"{name}.bias"))

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., in] to [..., out], in x's dtype."""
        return functional.linear(x, self.weight, self.bias)
