"""How the arena's one byte budget is cut into pages, so that states and blocks of any sizes mix freely.

In: a layout and a budget. Out: the page size, and how many pages a state, a block and the whole arena have.
The law kept here: no fixed ratio between states and KV. Rounding to pages wastes at most 1 % of either.
"""

from __future__ import annotations

from dataclasses import dataclass

from milepost.errors import ConfigError
from milepost.state.layout import ALIGNMENT, Layout

_WASTE = 0.01
_MOST_PARTS = 256


@dataclass(frozen=True, slots=True)
class Geometry:
    """Pages of `page_bytes`; a unit (state or block) takes consecutive pages and may start at any page."""

    page_bytes: int
    pages: int
    state_pages: int
    block_pages: int

    def pages_for(self, layout: Layout, tokens: int, step: int) -> int:
        """Pages that one sequence of so many tokens takes in steps of at most `step`: one live slot and its blocks."""
        return self.state_pages + layout.blocks_at_once([tokens], step) * self.block_pages

    def sequences(self, layout: Layout, tokens: int, step: int) -> int:
        """How many sequences of so many tokens run at once in steps of at most `step` tokens in all."""
        whole = self.pages // (self.state_pages + layout.blocks_for(tokens) * self.block_pages)
        if layout.window is None:
            return whole
        room = self.pages - -(-step // layout.block_size) * self.block_pages
        return max(whole, room // (self.state_pages + layout.blocks_kept(tokens) * self.block_pages))


def geometry_of(layout: Layout, budget_bytes: int) -> Geometry:
    """Choose the page: the smaller unit, or an even part of it, such that the larger unit loses at most 1 %."""
    state, block = layout.state_stride, layout.block_stride
    small, large = min(state, block), max(state, block)
    if small == 0:
        small = large
    page = small
    for parts in range(1, _MOST_PARTS + 1):
        page = _up(small, parts * ALIGNMENT) // parts
        if _waste(small, page) <= _WASTE and _waste(large, page) <= _WASTE:
            break
    return Geometry(page, budget_bytes // page, -(-state // page), -(-block // page))


def check_budget(layout: Layout, geometry: Geometry, budget_bytes: int, max_model_len: int, step: int) -> None:
    """Refuse a budget in which one sequence of the longest length can't run. Raises ConfigError with both sizes."""
    need = geometry.pages_for(layout, max_model_len, step)
    if geometry.pages < need:
        raise ConfigError(
            f"kv_cache_memory_bytes={budget_bytes} is too small for one sequence of max_model_len={max_model_len}: "
            f"it needs {need * geometry.page_bytes} bytes ({layout.state_bytes} for its state, "
            f"{layout.kv_bytes_per_token} for the KV of each token); raise it, or lower --max-model-len",
            field="kv_cache_memory_bytes",
        )


def _waste(size: int, page: int) -> float:
    return (-(-size // page) * page - size) / size


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
