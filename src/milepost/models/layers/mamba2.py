"""The Mamba-2 mixer (arXiv 2405.21060): hidden rows in, hidden rows out, window and matrix updated in place.

The law kept here: dt, A and D are fp32 (fp64 in an fp64 run), and rows of different sequences meet nowhere but
in the backend, which keeps them apart.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import gated_group_norm, norm_then_gate
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import Mamba2Spec


class Mamba2Mixer:
    """in_proj -> convolution and SiLU over x | B | C -> scan -> gate and grouped norm as the spec says -> out_proj."""

    def __init__(self, spec: Mamba2Spec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.in_proj = Linear.of(weights, f"{prefix}.in_proj")
        self.out_proj = Linear.of(weights, f"{prefix}.out_proj")
        self.taps = weights[f"{prefix}.conv1d.weight"].squeeze(1)
        self.conv_bias = weights.get(f"{prefix}.conv1d.bias")
        self.a = -weights[f"{prefix}.A_log"].exp()
        self.d = weights[f"{prefix}.D"]
        self.dt_bias = weights[f"{prefix}.dt_bias"]
        self.norm_weight = weights.get(f"{prefix}.norm.weight")
        self.sections = _section_scale(spec, self.taps)

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` and `recurrent` pools."""
        spec, states = self.spec, memory.states
        projected = self.in_proj(x) if self.sections is None else self.in_proj(x).mul_(self.sections)
        z, xbc, dt = torch.split(projected, [spec.inner, spec.conv_channels, spec.heads], -1)
        xbc = self.backend.convolution(xbc, self.taps, self.conv_bias, states["window"], step.recurrent)
        width = spec.groups * spec.state_size
        values, b, c = torch.split(xbc, [spec.inner, width, width], -1)
        y = self.backend.scan_mamba2(
            values.view(-1, spec.heads, spec.head_dim),
            self._time_step(dt),
            self.a,
            b.view(-1, spec.groups, spec.state_size),
            c.view(-1, spec.groups, spec.state_size),
            self.d,
            states["recurrent"],
            step.recurrent,
        )
        return self.out_proj(self._gate(y.flatten(1), z))

    def _gate(self, y: Tensor, z: Tensor) -> Tensor:
        """y gated by silu(z) and, if the mixer has a norm, normed: [T, inner] to [T, inner]."""
        if self.norm_weight is None:
            return y * functional.silu(z)
        norm = norm_then_gate if self.spec.norm == "norm_first" else gated_group_norm
        return norm(y, z, self.norm_weight, self.spec.groups, self.spec.norm_eps)

    def _time_step(self, dt: Tensor) -> Tensor:
        """clamp(softplus(dt + bias), limits), in fp32: dt [T, heads]."""
        dt = functional.softplus(dt.to(self.dt_bias.dtype) + self.dt_bias)
        if self.spec.dt_min == 0.0 and self.spec.dt_max == float("inf"):
            return dt
        return dt.clamp_(self.spec.dt_min, self.spec.dt_max)


def _section_scale(spec: Mamba2Spec, like: Tensor) -> Tensor | None:
    """One multiplier for each output channel of in_proj, z | x | B | C | dt; None if there are none."""
    if spec.section_multipliers is None:
        return None
    width = spec.groups * spec.state_size
    counts = torch.tensor([spec.inner, spec.inner, width, width, spec.heads])
    return torch.tensor(spec.section_multipliers).repeat_interleave(counts).to(like)
