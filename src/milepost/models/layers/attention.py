"""Softmax attention with grouped heads: hidden rows in, hidden rows out, KV written.

The law kept here: K and V of this step's tokens are in the pool before any of them is read.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import rms_norm
from milepost.models.layers.rotary import rotate
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import AttentionSpec


class AttentionMixer:
    """q, k, v projections -> norm and rotary -> write KV -> attention over the sequence's blocks -> gate -> o_proj."""

    def __init__(self, spec: AttentionSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (Linear.of(weights, f"{prefix}.{name}_proj") for name in "qkvo")
        self.q_norm, self.k_norm = (weights.get(f"{prefix}.{name}_norm.weight") for name in "qk")

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; writes the layer's KV. Raises ValueError if the layer was given no pool."""
        spec, pool = self.spec, memory.kv
        if pool is None:
            raise ValueError("an attention layer was given no KV pool")
        q, gate = self._query(x)
        q = self._normed(q, self.q_norm, spec.heads)
        k = self._normed(self.k_proj(x), self.k_norm, spec.kv_heads)
        v = self.v_proj(x).view(-1, spec.kv_heads, spec.head_dim)
        if spec.key_multiplier != 1.0:
            k = k * spec.key_multiplier
        if spec.rotary is not None:
            q, k = rotate(q, step.positions, spec.rotary), rotate(k, step.positions, spec.rotary)
        self.backend.write_kv(k, v, pool, step.attention)
        y = self.backend.attention(q, pool, spec.scale, step.attention, spec.window).flatten(1)
        return self.o_proj(y if gate is None else y * gate.sigmoid())

    def _query(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries [T, heads * head_dim] and, in a gated model, their gates of the same shape, stored head by head."""
        q = self.q_proj(x)
        if not self.spec.gated:
            return q, None
        query, gate = q.view(q.shape[0], self.spec.heads, -1).chunk(2, -1)
        return query.flatten(1), gate.flatten(1)

    def _normed(self, x: Tensor, weight: Tensor | None, heads: int) -> Tensor:
        """x [T, heads * head_dim] to [T, heads, head_dim], normed over whatever the weight is as long as."""
        spec = self.spec
        shape = (x.shape[0], heads, spec.head_dim)
        if spec.qk_norm is None or weight is None:
            return x.view(shape)
        return rms_norm(x.view(x.shape[0], -1, weight.shape[0]), weight, spec.qk_norm.eps, spec.qk_norm.offset).view(shape)
