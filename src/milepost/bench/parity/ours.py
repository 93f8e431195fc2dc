"""Our side of the comparison: a checkpoint is loaded, and one sequence runs in memory of its own.

The law kept here: pools start as NaN, so whoever reads what nobody wrote is found.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from milepost.kernels.protocol import Capture, KernelBackend, Run
from milepost.kernels.torch_backend import TorchBackend
from milepost.models import load_spec
from milepost.models.loading import load_model
from milepost.models.protocol import LayerMemory, Memory, Model
from milepost.models.spec import ModelSpec

BLOCK = 8


def load(path: Path, backend: KernelBackend | None = None, dtype: torch.dtype = torch.float32) -> Model:
    """The model in `path`, with one backend for everything (None: torch's). Raises UnsupportedModel."""
    backend = backend or TorchBackend()
    return load_model(path, load_spec(path), dtype=dtype, recurrent=backend, attention=backend)


def make_memory(spec: ModelSpec, *, slots: int, blocks: int, dtype: torch.dtype) -> Memory:
    """Pools for every layer, all of NaN."""

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    return tuple(
        LayerMemory(
            {component.name: empty(slots, *component.shape) for component in layer.components},
            empty(blocks, *layer.attention.block_shape(BLOCK)) if layer.attention else None,
        )
        for layer in spec.layers
    )


@dataclass
class Sequence:
    """A sequence in slot 0 whose captures go to slots 1 and on."""

    model: Model
    dtype: torch.dtype = torch.float32
    room: int = 512
    slots: int = 8
    position: int = 0
    memory: Memory = field(init=False)

    def __post_init__(self) -> None:
        blocks = -(-self.room // BLOCK)
        self.memory = make_memory(self.model.spec, slots=self.slots, blocks=blocks, dtype=self.dtype)

    def feed(self, tokens: Tensor, captures: tuple[tuple[int, int], ...] = ()) -> Tensor:
        """Apply tokens [T]; `captures` are (offset, slot). Returns logits [T, vocab_size] of every row."""
        run = Run(
            starts=(0, len(tokens)),
            positions=(self.position,),
            slots=(0,),
            fresh=(self.position == 0,),
            blocks=(tuple(range(-(-self.room // BLOCK))),),
            block_size=BLOCK,
            captures=tuple(Capture(0, offset, slot) for offset, slot in captures),
        )
        self.position += len(tokens)
        return self.model.forward(tokens, self.model.prepare(run), self.memory, torch.arange(len(tokens)))

    def states(self, slot: int = 0) -> dict[str, Tensor]:
        """Every layer's state in a slot, by "layer.component"."""
        return {
            f"{index}.{name}": pool[slot].clone()
            for index, layer in enumerate(self.memory)
            for name, pool in layer.states.items()
        }
