"""What only Olmo-Hybrid has: norms behind a part, and a delta net's tensors stored piece by piece.

The law kept here: the pieces are joined in the mixer's order, q | k | v | gate | beta | decay, convolutions likewise.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from milepost.models.layers.norm import rms_norm
from milepost.models.layers.stack import Part
from milepost.models.protocol import LayerMemory, ModelStep


class PostNormed:
    """norm(part(x)): for a block that norms what is added to the residual stream, and not what is read from it."""

    def __init__(self, part: Part, weight: Tensor, eps: float) -> None:
        self.part = part
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return rms_norm(self.part(x, memory, step), self.weight, self.eps)


def delta_tensors(weights: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """The tensors under `prefix` by the names that `GatedDeltaMixer` reads."""
    return {
        f"{prefix}.in_proj.weight": torch.cat([weights[f"{prefix}.{name}_proj.weight"] for name in "qkvgba"]),
        f"{prefix}.conv1d.weight": torch.cat([weights[f"{prefix}.{name}_conv1d.weight"] for name in "qkv"]),
        f"{prefix}.out_proj.weight": weights[f"{prefix}.o_proj.weight"],
        f"{prefix}.norm.weight": weights[f"{prefix}.o_norm.weight"],
        **{f"{prefix}.{name}": weights[f"{prefix}.{name}"] for name in ("A_log", "dt_bias")},
    }
