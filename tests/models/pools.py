"""Memory for one model in a test: pools of NaN, one sequence that runs in them, and what is read back."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from milepost.kernels.protocol import Capture, Run
from milepost.models.protocol import LayerMemory, Memory, Model
from milepost.models.spec import ModelSpec

BLOCK = 8


def make_memory(spec: ModelSpec, *, slots: int, blocks: int, dtype: torch.dtype) -> Memory:
    """Pools for every layer, all of NaN."""

    def empty(*shape: int) -> Tensor:
        return torch.full(shape, float("nan"), dtype=dtype)

    return tuple(
        LayerMemory(
            {component.name: empty(slots, *component.shape) for component in layer.components},
            empty(blocks, 2, BLOCK, layer.attention.kv_heads, layer.attention.head_dim) if layer.attention else None,
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
        """Apply tokens; `captures` are (offset, slot). Returns logits of every row."""
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
