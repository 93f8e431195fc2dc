"""Softmax attention with grouped heads: hidden rows in, hidden rows out, KV written.

The law kept here: K and V of this step's tokens are in the pool before any of them is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.rotary import rotate
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import AttentionSpec


class AttentionMixer:
    """q, k, v projections -> write KV -> attention over the sequence's blocks -> o_proj."""

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear.of(weights, f"{prefix}.{name}_proj") for name in "qkvo")

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; writes the layer's KV. Raises ValueError if the layer was given no pool."""
        spec, pool = self.spec, memory.kv
        if pool is None:
            raise ValueError("an attention layer was given no KV pool")
        q = self.q_proj(x).view(-1, spec.heads, spec.head_dim)
        k = self.k_proj(x).view(-1, spec.kv_heads, spec.head_dim)
        v = self.v_proj(x).view(-1, spec.kv_heads, spec.head_dim)
        if spec.rotary is not None:
            q, k = rotate(q, step.positions, spec.rotary), rotate(k, step.positions, spec.rotary)
        self.backend.write_kv(k, v, pool, step.attention)
        return self.o_proj(self.backend.attention(q, pool, spec.scale, step.attention).flatten(1))
