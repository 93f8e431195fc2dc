"""The contract of a model at run time: tokens and a step in, logits out, states updated in place.

The law kept here: a model owns weights only. What a sequence remembers stands in `Memory`, views into the arena that
the caller passes in, so a model never knows which request it works for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from milepost.kernels.protocol import KernelBackend, Run, Step
from milepost.models.spec import ComponentName, ModelSpec


@dataclass(frozen=True, slots=True)
class LayerMemory:
    """Pools of one layer.

    `states[name]` is [slots, *component shape]; `kv` is [blocks, 2, block_size, kv_heads, head_dim].
    """

    states: Mapping[ComponentName, Tensor]
    kv: Tensor | None


Memory = tuple[LayerMemory, ...]
"""One entry per layer, in layer order."""


@dataclass(frozen=True, slots=True)
class ModelStep:
    """A run as each of a model's two backends prepared it; one object twice if the backends are the same."""

    run: Run
    recurrent: Step
    attention: Step
    positions: Tensor
    """Absolute position of each row, [T] int64."""


@dataclass(frozen=True, slots=True)
class Backends:
    """What a model runs on: `recurrent` for convolutions and scans, `attention` for KV and attention; may be one object."""

    recurrent: KernelBackend
    attention: KernelBackend
    device: torch.device


class Model(Protocol):
    """A loaded model."""

    spec: ModelSpec
    recurrent_backend: KernelBackend
    attention_backend: KernelBackend

    def prepare(self, run: Run) -> ModelStep:
        """Derive what the backends need from a run, once per step. Raises ValueError for a run that can't be."""
        ...

    def forward(self, tokens: Tensor, step: ModelStep, memory: Memory, rows: Tensor) -> Tensor:
        """Run one step. tokens [T] int64; rows [R] int64 picks the rows whose logits are wanted.

        Returns logits [R, vocab_size] in fp32 (fp64 if the weights are). States and KV change in place.
        """
        ...
