"""The arena's bytes, and views of them as the tensors that kernels read and write in place.

In: a layout and a geometry. Out: `Memory` for models: every pool is a view with one row per page, so the index of a unit
is its first page. Rows overlap where a unit takes several pages; the arena sees to it that units don't.

The law kept here: planned = allocated (law 9): one allocation of `pages * page_bytes`, every view derived from the layout.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.models.protocol import LayerMemory, Memory
from milepost.models.spec import ComponentName, DType
from milepost.state.geometry import Geometry
from milepost.state.layout import Layout, Part

TORCH_DTYPES: dict[DType, torch.dtype] = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_POISON = 0xFF
"""All bits set reads as NaN in every float dtype."""


class Pools:
    """One byte buffer. Implements `Storage` for the arena."""

    def __init__(self, layout: Layout, geometry: Geometry, layers: int, *, device: str = "cpu", poison: bool = False) -> None:
        self.layout = layout
        self.geometry = geometry
        self.poison = poison
        self.buffer = torch.empty(geometry.pages * geometry.page_bytes, dtype=torch.uint8, device=device)
        if poison:
            self.buffer.fill_(_POISON)
        self.memory = self._memory(layers)

    @property
    def allocated_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.buffer.numel()

    def move(self, source: int, target: int, pages: int) -> None:
        """Copy pages as they were before the copy, even if the two ranges overlap."""
        held = self._bytes(source, pages)
        self._bytes(target, pages).copy_(held.clone() if abs(source - target) < pages else held)

    def freed(self, page: int, pages: int) -> None:
        """Poison pages that belong to nobody, where asked for."""
        if self.poison:
            self._bytes(page, pages).fill_(_POISON)

    def copy_state(self, source: int, target: int) -> None:
        """Copy a state from one first page to another: restore, or fork."""
        self.move(source, target, self.geometry.state_pages)

    def copy_block(self, source: int, target: int) -> None:
        """Copy a block from one first page to another: the part of a hit that ends inside a block."""
        self.move(source, target, self.geometry.block_pages)

    def _bytes(self, page: int, pages: int) -> Tensor:
        size = self.geometry.page_bytes
        return self.buffer[page * size : (page + pages) * size]

    def _memory(self, layers: int) -> Memory:
        states: list[dict[ComponentName, Tensor]] = [{} for _ in range(layers)]
        kv: list[Tensor | None] = [None] * layers
        for part in self.layout.state:
            if part.name != "kv":
                states[part.layer][part.name] = self._view(part, self.geometry.state_pages)
        for part in self.layout.block:
            kv[part.layer] = self._view(part, self.geometry.block_pages)
        return tuple(LayerMemory(states[layer], kv[layer]) for layer in range(layers))

    def _view(self, part: Part, unit_pages: int) -> Tensor:
        dtype = TORCH_DTYPES[part.dtype]
        rows = max(0, self.geometry.pages - unit_pages + 1)
        stride = [1]
        for size in reversed(part.shape[1:]):
            stride.insert(0, stride[0] * size)
        items = self.buffer[: self.buffer.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        page_items = self.geometry.page_bytes // dtype.itemsize
        return items.as_strided((rows, *part.shape), (page_items, *stride), part.offset // dtype.itemsize)
