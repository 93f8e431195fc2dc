"""Kimi delta attention (arXiv 2510.26692): hidden rows in, hidden rows out, window and matrix updated in place.

The law kept here: decays, write strength and the unit vectors q and k are fp32 (fp64 in an fp64 run), and everything that
reads the hidden rows is one product, q | k | v | decay's low rank | gate's low rank | beta.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import rms_norm, unit
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import KdaSpec


class KdaMixer:
    """Projections -> convolution and SiLU over q | k | v -> scan -> norm per head, times sigmoid(gate) -> o_proj.

    Reads `q_proj`, `k_proj`, `v_proj`, `conv1d` (over the three), `f_a_proj` and `f_b_proj` (decay), `g_a_proj` and
    `g_b_proj` (gate), `b_proj` (beta), `A_log`, `dt_bias`, `o_norm` and `o_proj` under `prefix`.
    """

    def __init__(self, spec: KdaSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        from_x = ("q_proj", "k_proj", "v_proj", "f_a_proj", "g_a_proj", "b_proj")
        self.in_proj = Linear(torch.cat([weights[f"{prefix}.{name}.weight"] for name in from_x]))
        self.decay_proj, self.gate_proj = (Linear.of(weights, f"{prefix}.{name}_b_proj") for name in "fg")
        self.o_proj = Linear.of(weights, f"{prefix}.o_proj")
        self.taps = weights[f"{prefix}.conv1d.weight"].squeeze(1)
        self.a = -weights[f"{prefix}.A_log"].exp().view(spec.heads, 1)
        self.dt_bias = weights[f"{prefix}.dt_bias"].view(spec.heads, spec.key_dim)
        self.norm_weight = weights[f"{prefix}.o_norm.weight"]

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` and `recurrent` pools."""
        spec, states = self.spec, memory.states
        key, value, wide = spec.key_width, spec.value_width, self.a.dtype
        sizes = [2 * key + value, spec.rank, spec.rank, spec.heads]
        qkv, decay, gate, beta = torch.split(self.in_proj(x), sizes, -1)
        qkv = self.backend.convolution(qkv, self.taps, None, states["window"], step.recurrent)
        q, k, v = torch.split(qkv, [key, key, value], -1)
        steps = self.decay_proj(decay).to(wide).view(-1, spec.heads, spec.key_dim) + self.dt_bias
        y = self.backend.scan_kda(
            unit(q.reshape(-1, spec.heads, spec.key_dim)) * spec.key_dim**-0.5,
            unit(k.reshape(-1, spec.heads, spec.key_dim)),
            v.reshape(-1, spec.heads, spec.value_dim),
            self.a * functional.softplus(steps),
            beta.to(wide).sigmoid(),
            states["recurrent"],
            step.recurrent,
        )
        normed = rms_norm(y, self.norm_weight, spec.norm_eps).flatten(1)
        return self.o_proj((normed * self.gate_proj(gate).to(wide).sigmoid()).to(x.dtype))
