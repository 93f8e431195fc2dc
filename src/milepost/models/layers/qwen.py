"""Qwen's hybrids from their parts: loaded tensors in, a `Stack` out.

The law kept here: whatever order a checkpoint stores a delta net's projections in, the mixer sees one product,
q | k | v | gate | beta | decay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from milepost.models.body import Body
from milepost.models.layers.linear import Linear
from milepost.models.layers.mlp import Dimmed, GatedMlp, Sum
from milepost.models.layers.stack import Part, Stack, feed_forward_of, mixer_of, two_blocks
from milepost.models.protocol import Backends
from milepost.models.spec import FeedForwardSpec, GatedDeltaSpec, LayerSpec, ModelSpec, MoeSpec

Joined = Callable[[GatedDeltaSpec, Mapping[str, Tensor], str], Tensor]
"""How a family's input projections of a delta net become one [q | k | v | gate | beta | decay, hidden]."""


def hybrid(
    spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends, body: Body, joined: Joined
) -> Stack:
    """Two residual blocks a layer: the mixer, then the feed-forward or the experts."""

    def mixer(layer: LayerSpec, weights: Mapping[str, Tensor], prefix: str, stack: Stack) -> Part:
        (own,) = layer.mixers
        inner = f"{prefix}.{body.mixers[own.kind]}"
        if isinstance(own, GatedDeltaSpec):
            found = {name: tensor for name, tensor in weights.items() if name.startswith(f"{inner}.")}
            weights = {**found, f"{inner}.in_proj.weight": joined(own, weights, inner)}
        return mixer_of(own, weights, inner, stack)

    return two_blocks(spec, weights, backends, body, first=mixer, second=_feed_forward)


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


def _feed_forward(part: FeedForwardSpec, weights: Mapping[str, Tensor], prefix: str) -> Part:
    experts = feed_forward_of(part, weights, prefix)
    if not isinstance(part, MoeSpec):
        return experts
    shared = GatedMlp.of(weights, f"{prefix}.shared_expert")
    return Sum(experts, Dimmed(shared, Linear.of(weights, f"{prefix}.shared_expert_gate")))
