"""Qwen's hybrids from their parts: loaded tensors in, a `Stack` out.

The law kept here: whatever order a checkpoint stores a delta net's projections in, the mixer sees one product,
q | k | v | gate | beta | decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from milepost.kernels.protocol import KernelBackend
from milepost.models.layers.linear import Linear
from milepost.models.layers.mlp import Dimmed, Experts, GatedMlp, Sum
from milepost.models.layers.router import Router
from milepost.models.layers.stack import Stack, mixer_of
from milepost.models.spec import GatedDeltaSpec, ModelSpec, MoeSpec

Joined = Callable[[GatedDeltaSpec, Mapping[str, Tensor], str], Tensor]
"""How a family's input projections of a delta net become one [q | k | v | gate | beta | decay, hidden]."""


def hybrid(
    spec: ModelSpec,
    weights: Mapping[str, Tensor],
    joined: Joined,
    *,
    recurrent: KernelBackend,
    attention: KernelBackend,
    device: torch.device,
    names: tuple[str, str, str],
) -> Stack:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""
    stack = Stack(spec, weights, recurrent=recurrent, attention=attention, device=device, names=names)
    for layer in spec.layers:
        prefix, (mixer,) = f"layers.{layer.index}", layer.mixers
        inner = f"{prefix}.linear_attn" if isinstance(mixer, GatedDeltaSpec) else f"{prefix}.self_attn"
        found = weights
        if isinstance(mixer, GatedDeltaSpec):
            own = {name: tensor for name, tensor in weights.items() if name.startswith(f"{inner}.")}
            found = {**own, f"{inner}.in_proj.weight": joined(mixer, weights, inner)}
        stack.add(layer.index, weights[f"{prefix}.input_layernorm.weight"], mixer_of(mixer, found, inner, stack))
        moe, inner = layer.feed_forward, f"{prefix}.mlp"
        part = _mixture(moe, weights, inner) if isinstance(moe, MoeSpec) else GatedMlp.of(weights, inner)
        stack.add(layer.index, weights[f"{prefix}.post_attention_layernorm.weight"], part)
    return stack


def by_key_head(spec: GatedDeltaSpec, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """From `in_proj_qkvz` and `in_proj_ba`, whose rows are grouped by key head (Qwen3-Next)."""
    share = spec.heads // spec.key_heads
    width = share * spec.value_dim
    parts: list[Tensor] = []
    for name, sizes in (("qkvz", [spec.key_dim, spec.key_dim, width, width]), ("ba", [share, share])):
        stored = weights[f"{prefix}.in_proj_{name}.weight"]
        grouped = torch.split(stored.view(spec.key_heads, -1, stored.shape[1]), sizes, 1)
        parts += [part.reshape(-1, stored.shape[1]) for part in grouped]
    return torch.cat(parts)


def by_kind(spec: GatedDeltaSpec, weights: Mapping[str, Tensor], prefix: str) -> Tensor:
    """From `in_proj_qkv`, `in_proj_z`, `in_proj_b` and `in_proj_a`, each in head order (Qwen3.5)."""
    return torch.cat([weights[f"{prefix}.in_proj_{name}.weight"] for name in ("qkv", "z", "b", "a")])


def _mixture(moe: MoeSpec, weights: Mapping[str, Tensor], prefix: str) -> Sum:
    router = Router(moe.router, moe.per_token, Linear.of(weights, f"{prefix}.gate"))
    experts = Experts.of(weights, f"{prefix}.experts", router, moe.experts)
    shared = GatedMlp.of(weights, f"{prefix}.shared_expert")
    return Sum(experts, Dimmed(shared, Linear.of(weights, f"{prefix}.shared_expert_gate")))
