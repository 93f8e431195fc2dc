"""Transformer blocks whose weights several layers share (Zamba, arXiv 2405.16712): each use has its own KV and adapters.

The law kept here: only weights are shared. What a use remembers stands in the memory of the layer that uses it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.models.layers.attention import AttentionMixer
from milepost.models.layers.linear import Linear
from milepost.models.layers.mlp import GatedMlp
from milepost.models.layers.norm import rms_norm
from milepost.models.layers.stack import Stack
from milepost.models.protocol import Backends, LayerMemory, Memory, ModelStep
from milepost.models.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class SharedUse:
    """One layer's use of a block: linear(mlp(norm(attention(norm(x | embedded))))), without a residual."""

    norm: Tensor
    attention: AttentionMixer
    mlp_norm: Tensor
    mlp: GatedMlp
    linear: Linear
    eps: float

    def __call__(self, x: Tensor, embedded: Tensor, memory: LayerMemory, step: ModelStep) -> Tensor:
        """x and embedded [T, hidden] to [T, hidden]; writes the layer's KV."""
        attended = self.attention(rms_norm(torch.cat((x, embedded), -1), self.norm, self.eps), memory, step)
        return self.linear(self.mlp(rms_norm(attended, self.mlp_norm, self.eps), memory, step))


class SharedStack(Stack):
    """A stack in which some layers' blocks read the stream plus what a shared block made of it and of the embeddings.

    What the shared block gives is read by that layer's mixer only; it doesn't join the stream.
    """

    def __init__(
        self, spec: ModelSpec, weights: Mapping[str, Tensor], backends: Backends, names: tuple[str, str, str]
    ) -> None:
        super().__init__(spec, weights, backends, names)
        self.uses: dict[int, SharedUse] = {}

    def run_blocks(self, x: Tensor, step: ModelStep, memory: Memory) -> Tensor:
        """The residual stream [T, hidden] from the embeddings to the last block."""
        embedded, eps = x, self.spec.norm_eps
        for block in self.blocks:
            use, own = self.uses.get(block.layer), memory[block.layer]
            read = x if use is None else x + use(x, embedded, own, step)
            x = x + block.part(read if block.norm is None else rms_norm(read, block.norm, eps), own, step)
        return x
