"""Feed-forward blocks: squared ReLU (arXiv 2109.08668), SwiGLU (2002.05202), experts. Hidden rows in, hidden rows out.

The law kept here: no memory. What a row gets depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from milepost.models.layers.linear import Linear
from milepost.models.layers.router import Router
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import GateActivation


class Relu2Mlp:
    """down(relu(up(x))^2)."""

    def __init__(self, weights: Mapping[str, Tensor], prefix: str) -> None:
        self.up_proj = Linear.of(weights, f"{prefix}.up_proj")
        self.down_proj = Linear.of(weights, f"{prefix}.down_proj")

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.down_proj(_relu2(self.up_proj(x)))


class GatedMlp:
    """down(silu(gate(x)) * up(x)); gate and up are one product, gate first.

    `multipliers` are those of gate(x), before its activation, and of what down gives. A gelu may stand for silu.
    """

    def __init__(
        self,
        gate_up: Linear,
        down: Linear,
        multipliers: tuple[float, float] = (1.0, 1.0),
        activation: GateActivation = "silu",
    ) -> None:
        self.gate_up = gate_up
        self.down = down
        self.multipliers = multipliers
        self.activation = activation_of(activation)

    @classmethod
    def of(
        cls,
        weights: Mapping[str, Tensor],
        prefix: str,
        multipliers: tuple[float, float] = (1.0, 1.0),
        activation: GateActivation = "silu",
    ) -> GatedMlp:
        """From `gate_proj`, `up_proj` and `down_proj`, stored one by one."""
        gate, up = (Linear.of(weights, f"{prefix}.{name}_proj") for name in ("gate", "up"))
        bias = None if gate.bias is None or up.bias is None else torch.cat((gate.bias, up.bias))
        both, down = Linear(torch.cat((gate.weight, up.weight)), bias), Linear.of(weights, f"{prefix}.down_proj")
        return cls(both, down, multipliers, activation)

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        gate, down = self.multipliers
        out = self.down(_glu(self.gate_up(x), gate, self.activation))
        return out if down == 1.0 else out.mul_(down)


class Experts:
    """Each row takes the experts that the router names, in the shares that it gives.

    up[expert] [2 * width, hidden], gate first ("relu2": [width, hidden], no gate); down[expert] [hidden, width]. With a
    `latent` pair of maps, experts work between them and hidden is the latent width. Rows are gathered by expert, so no row
    is padded and what a row gets doesn't depend on the others.
    """

    def __init__(
        self,
        router: Router,
        up: Sequence[Tensor],
        down: Sequence[Tensor],
        *,
        activation: Literal["silu", "relu2"] = "silu",
        latent: tuple[Linear, Linear] | None = None,
    ) -> None:
        self.router = router
        self.up = up
        self.down = down
        self.activation = _glu if activation == "silu" else _relu2
        self.latent = latent

    @classmethod
    def of(cls, weights: Mapping[str, Tensor], prefix: str, router: Router, count: int) -> Experts:
        """From `N.gate_proj`, `N.up_proj` and `N.down_proj` of `count` experts, stored one by one."""
        each = [GatedMlp.of(weights, f"{prefix}.{expert}") for expert in range(count)]
        return cls(router, [mlp.gate_up.weight for mlp in each], [mlp.down.weight for mlp in each])

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        chosen, shares = self.router(x)
        if self.latent is not None:
            x = self.latent[0](x)
        out = torch.zeros_like(x)
        for expert in sorted(set(chosen.flatten().tolist())):
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            inner = self.activation(functional.linear(x[rows], self.up[expert]))
            out.index_add_(0, rows, functional.linear(inner, self.down[expert]) * shares[rows, place, None])
        return out if self.latent is None else self.latent[1](out)


class Dimmed:
    """A feed-forward times the sigmoid of one score a row: Qwen's shared expert."""

    def __init__(self, part: GatedMlp, score: Linear) -> None:
        self.part = part
        self.score = score

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        return self.part(x, memory, step) * self.score(x).sigmoid()


class _Rowwise(Protocol):
    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor: ...


class Sum:
    """Several parts that read the same rows, added: experts beside a shared one."""

    def __init__(self, *parts: _Rowwise) -> None:
        self.parts = parts

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]."""
        total = self.parts[0](x, memory, step)
        for part in self.parts[1:]:
            total = total + part(x, memory, step)
        return total


def activation_of(name: GateActivation) -> Callable[[Tensor], Tensor]:
    """The function by its name."""
    match name:
        case "silu":
            return functional.silu
        case "gelu":
            return functional.gelu
        case "gelu_tanh":
            return partial(functional.gelu, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    """relu(x)^2, in place."""
    return x.relu_().square_()


def _glu(both: Tensor, multiplier: float = 1.0, activation: Callable[[Tensor], Tensor] = functional.silu) -> Tensor:
    """activation(multiplier * first half) * second half, over the last dimension."""
    gate, up = both.chunk(2, -1)
    return activation(gate if multiplier == 1.0 else gate * multiplier) * up
