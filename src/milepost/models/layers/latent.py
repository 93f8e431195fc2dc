"""Multi-head latent attention (MLA, arXiv 2405.04434): hidden rows in, hidden rows out, one latent row a token stored.

The law kept here: keys and values of heads are never made. The map from latents to a head's keys is applied to its query,
and the map to its values to what attention gives, so a token costs one row however many heads there are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.norm import rms_norm
from milepost.models.protocol import LayerMemory, ModelStep
from milepost.models.spec import LatentAttentionSpec


class LatentAttentionMixer:
    """Latent and query -> write the latent row -> attention over latents -> values of each head -> o_proj.

    Reads `q_proj`, or `q_a_proj`, `q_a_layernorm` and `q_b_proj`; `kv_a_proj_with_mqa` (latent | shared key part),
    `kv_a_layernorm`, `kv_b_proj` (head by head, key rows then value rows) and `o_proj` under `prefix`.
    """

    def __init__(self, spec: LatentAttentionSpec, weights: Mapping[str, Tensor], prefix: str, backend: KernelBackend) -> None:
        self.spec = spec
        self.backend = backend
        low = spec.query_rank is not None
        self.q_a_proj = Linear.of(weights, f"{prefix}.q_a_proj") if low else None
        self.q_norm = weights.get(f"{prefix}.q_a_layernorm.weight")
        self.q_proj = Linear.of(weights, f"{prefix}.q_b_proj" if low else f"{prefix}.q_proj")
        self.kv_a_proj = Linear.of(weights, f"{prefix}.kv_a_proj_with_mqa")
        self.kv_norm = weights[f"{prefix}.kv_a_layernorm.weight"]
        self.o_proj = Linear.of(weights, f"{prefix}.o_proj")
        up = weights[f"{prefix}.kv_b_proj.weight"].view(spec.heads, spec.nope_dim + spec.value_dim, spec.rank)
        # [heads, nope_dim, rank] and [heads, rank, value_dim], each in one piece, as the products of a step read them.
        self.key_up = up[:, : spec.nope_dim].contiguous()
        self.value_up = up[:, spec.nope_dim :].transpose(1, 2).contiguous()

    def __call__(self, x: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x [T, hidden] to [T, hidden]; writes the layer's latents. Raises ValueError if the layer was given no pool."""
        spec, pool = self.spec, memory.kv
        if pool is None:
            raise ValueError("an attention layer was given no KV pool")
        latent, shared = torch.split(self.kv_a_proj(x), [spec.rank, spec.shared_dim], -1)
        row = torch.cat((rms_norm(latent, self.kv_norm, spec.norm_eps), shared), -1)
        self.backend.write_latent(row, pool, step.attention)
        y = self.backend.attention_latent(self._query(x), pool, spec.scale, step.attention, spec.rank)
        return self.o_proj(torch.bmm(y.transpose(0, 1), self.value_up).transpose(0, 1).flatten(1))

    def _query(self, x: Tensor) -> Tensor:
        """x [T, hidden] to queries of latent rows, [T, heads, rank + shared_dim]."""
        spec = self.spec
        if self.q_a_proj is not None and self.q_norm is not None:
            x = rms_norm(self.q_a_proj(x), self.q_norm, spec.norm_eps)
        own, shared = torch.split(self.q_proj(x).view(-1, spec.heads, spec.key_dim), [spec.nope_dim, spec.shared_dim], -1)
        return torch.cat((torch.bmm(own.transpose(0, 1), self.key_up).transpose(0, 1), shared), -1)
