"""The Mamba-1 mixer (arXiv 2312.00752): hidden rows in, hidden rows out, window and matrix updated in place.

The law kept here: dt, A and D are fp32 (fp64 in an fp64 run), and only x passes the convolution.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import rms_norm
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import Mamba1Spec


class Mamba1Mixer:
    """in_proj gives x | z -> convolution and SiLU of x -> dt, B, C from x (normed in Jamba) -> scan -> gate -> out_proj."""

    def __init__(self, spec: Mamba1Spec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.in_proj = Linear.of(weights, f"{prefix}.in_proj")
        self.x_proj = Linear.of(weights, f"{prefix}.x_proj")
        self.dt_proj = weights[f"{prefix}.dt_proj.weight"]
        self.dt_bias = weights[f"{prefix}.dt_proj.bias"]
        self.out_proj = Linear.of(weights, f"{prefix}.out_proj")
        self.taps = weights[f"{prefix}.conv1d.weight"].squeeze(1)
        self.conv_bias = weights.get(f"{prefix}.conv1d.bias")
        self.a = -weights[f"{prefix}.A_log"].exp()
        self.d = weights[f"{prefix}.D"]
        self.norms = [weights.get(f"{prefix}.{name}_layernorm.weight") for name in ("dt", "b", "c")]

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` and `recurrent` pools."""
        spec, states = self.spec, memory.states
        values, z = self.in_proj(x).chunk(2, -1)
        values = self.backend.convolution(values, self.taps, self.conv_bias, states["window"], step.recurrent)
        low, b, c = self._normed(torch.split(self.x_proj(values), [spec.dt_rank, spec.state_size, spec.state_size], -1))
        dt = functional.softplus(functional.linear(low, self.dt_proj).to(self.dt_bias.dtype) + self.dt_bias)
        y = self.backend.scan_mamba1(values, dt, self.a, b, c, self.d, states["recurrent"], step.recurrent)
        return self.out_proj(y * functional.silu(z))

    def _normed(self, parts: tuple[Tensor, ...]) -> list[Tensor]:
        """dt, B and C, each under its RMS norm if it has one."""
        eps = self.spec.norm_eps
        return [
            part if weight is None or eps is None else rms_norm(part, weight, eps)
            for part, weight in zip(parts, self.norms, strict=True)
        ]
