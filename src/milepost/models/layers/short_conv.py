"""The gated short convolution of LFM2 (arXiv 2511.23404): hidden rows in, hidden rows out, the window updated in place.

The law kept here: the window holds columns of B * x, which is what the convolution reads; there is no other state.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import ShortConvSpec


class ShortConvMixer:
    """in_proj gives B | C | x -> convolution of B * x, without activation -> times C -> out_proj."""

    def __init__(self, spec: ShortConvSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.in_proj = Linear.of(weights, f"{prefix}.in_proj")
        self.out_proj = Linear.of(weights, f"{prefix}.out_proj")
        self.taps = weights[f"{prefix}.conv.weight"].squeeze(1)
        self.bias = weights.get(f"{prefix}.conv.bias")

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` pool."""
        b, c, values = self.in_proj(x).chunk(3, -1)
        y = self.backend.convolution(b * values, self.taps, self.bias, memory.states["window"], step.recurrent, None)
        return self.out_proj(c * y)
