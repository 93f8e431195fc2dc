"""Feed-forward blocks: squared ReLU (arXiv 2109.08668), SwiGLU (2002.05202), experts. Hidden rows in, hidden rows out.

The law kept here: no memory. What a row gets depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.models.layers.linear import Linear
from milepost.models.protocol import LayerMemory, ModelStep


class Relu2Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.up_proj = Linear.of(weights, f"{prefix}.up_proj")
        self.down_proj = Linear.of(weights, f"{prefix}.down_proj")

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down_proj(self.up_proj(x).relu_().square_())


class GatedMlp:
    """down(silu(gate(x)) * up(x)); gate and up are one product, gate first."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up = gate_up
        self.down = down

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], prefix: str) -> GatedMlp:
        """From `gate_proj`, `up_proj` and `down_proj`, stored one by one."""
        gate, up = (Linear.of(weights, f"{prefix}.{name}_proj") for name in ("gate", "up"))
        bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
        return cls(Linear(torch.cat((gate.weight, up.weight)), bias), Linear.of(weights, f"{prefix}.down_proj"))

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down(_glu(self.gate_up(x)))


class Experts:
    """Each row takes the `per_token` experts of the largest router logits, weighted by the softmax over those.

    gate_up [experts, 2 * width, hidden], gate first; down [experts, hidden, width]. Rows are gathered by expert, so no
    row is padded and what a row gets doesn't depend on the others.
    """

    def __init__(self, router: Linear, gate_up: Tensor, down: Tensor, per_token: int) -> None:
        self.router = router
        self.gate_up = gate_up
        self.down = down
        self.per_token = per_token

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        best, chosen = self.router(x).float().topk(self.per_token, -1)
        shares = best.softmax(-1).to(x.dtype)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            inner = _glu(functional.linear(x[rows], self.gate_up[expert]))
            out.index_add_(0, rows, functional.linear(inner, self.down[expert]) * shares[rows, place, None])
        return out


class Sum:
    """Several parts that read the same rows, added: experts beside a shared one."""

    def __init__(self, *parts: GatedMlp | Experts) -> None:
        self.parts = parts

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        total = self.parts[0](x, memory, step)
        for part in self.parts[1:]:
            total = total + part(x, memory, step)
        return total


def _glu(both: Tensor) -> Tensor:
    """silu(first half) * second half, over the last dimension."""
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up
