"""The gated delta net (arXiv 2412.06464): hidden rows in, hidden rows out, window and matrix updated in place.

The law kept here: decay, write strength and the unit vectors q and k are fp32 (fp64 in an fp64 run). Families store their
projections in different orders; here they are one product, q | k | v | gate | beta | decay.
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
from milepost.models.spec import GatedDeltaSpec


class GatedDeltaMixer:
    """in_proj -> convolution and SiLU over q | k | v -> scan -> norm per head, times silu(gate) -> out_proj.

    Reads `in_proj`, `out_proj`, `conv1d`, `A_log`, `dt_bias` and `norm` under `prefix`.
    """

    def __init__(self, spec: GatedDeltaSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.in_proj = Linear.of(weights, f"{prefix}.in_proj")
        self.out_proj = Linear.of(weights, f"{prefix}.out_proj")
        self.taps = weights[f"{prefix}.conv1d.weight"].squeeze(1)
        self.a = -weights[f"{prefix}.A_log"].exp()
        self.dt_bias = weights[f"{prefix}.dt_bias"]
        self.norm_weight = weights[f"{prefix}.norm.weight"]

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; updates the layer's `window` and `recurrent` pools."""
        spec, states = self.spec, memory.states
        key, value = spec.key_width, spec.value_width
        qkv, gate, beta, decay = torch.split(self.in_proj(x), [2 * key + value, value, spec.heads, spec.heads], -1)
        qkv = self.backend.convolution(qkv, self.taps, None, states["window"], step.recurrent)
        q, k, v = torch.split(qkv, [key, key, value], -1)
        wide = self.a.dtype
        y = self.backend.scan_gated_delta(
            unit(q.reshape(-1, spec.key_heads, spec.key_dim)) * spec.key_dim**-0.5,
            unit(k.reshape(-1, spec.key_heads, spec.key_dim)),
            v.reshape(-1, spec.heads, spec.value_dim),
            self.a * functional.softplus(decay.to(wide) + self.dt_bias),
            beta.to(wide).sigmoid() * spec.beta_scale,
            states["recurrent"],
            step.recurrent,
        )
        normed = rms_norm(y, self.norm_weight, spec.norm_eps).flatten(1)
        return self.out_proj((normed * functional.silu(gate.to(wide))).to(x.dtype))
