"""The recurrent block of Griffin (arXiv 2402.19427): hidden rows in, hidden rows out, window and state updated in place.

The law kept here: the gates, the decay and the state that they act on are fp32 (fp64 in an fp64 run), and only x passes
the convolution, which no activation follows.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.mlp import activation_of
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import RgLruSpec

_SHARPNESS = 8.0
"""c in a = exp(-c softplus(param) r)."""


class RgLruMixer:
    """linear_x -> convolution -> RG-LRU, times the activation of linear_y -> linear_out.

    Inside, i and r are the sigmoids of two block-diagonal maps of what the convolution gives: the recurrence reads i * x and
    decays by exp(-8 softplus(recurrent_param) r). Each pair of maps that reads the same rows is one product.
    """

    def __init__(self, spec: RgLruSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        pair = [f"{prefix}.linear_{name}" for name in "xy"]
        weight, bias = (torch.cat([weights[f"{name}.{part}"] for name in pair]) for part in ("weight", "bias"))
        self.in_proj = Linear(weight, bias)
        self.linear_out = Linear.of(weights, f"{prefix}.linear_out")
        self.taps = weights[f"{prefix}.conv_1d.weight"].squeeze(1)
        self.conv_bias = weights[f"{prefix}.conv_1d.bias"]
        gates = [f"{prefix}.rg_lru.{name}_gate" for name in ("input", "recurrent")]
        self.gate_maps = torch.cat([weights[f"{name}_weight"] for name in gates], -1)
        self.gate_bias = torch.cat([weights[f"{name}_bias"] for name in gates], -1).unsqueeze(1)
        self.log_decay = functional.softplus(weights[f"{prefix}.rg_lru.recurrent_param"]).mul_(-_SHARPNESS)
        self.activation = activation_of(spec.activation)

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` and `recurrent` pools."""
        values, beside = self.in_proj(x).chunk(2, -1)
        pool = memory.states["window"]
        values = self.backend.convolution(values, self.taps, self.conv_bias, pool, step.recurrent, None)
        read, forgotten = self._gates(values)
        h = self.backend.scan_rglru(values * read, self.log_decay * forgotten, memory.states["recurrent"], step.recurrent)
        return self.linear_out((h * self.activation(beside)).to(x.dtype))

    def _gates(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """i and r, each [T, width] in the decay's dtype, from values [T, width]."""
        blocks = values.reshape(values.shape[0], self.spec.heads, -1).transpose(0, 1)
        both = torch.baddbmm(self.gate_bias, blocks, self.gate_maps).transpose(0, 1).to(self.log_decay.dtype).sigmoid()
        read, forgotten = both.chunk(2, -1)
        return read.flatten(1), forgotten.flatten(1)
