"""The one byte budget from which live slots, checkpoints and blocks of KV are carved.

In: a geometry. Out: handles. A unit (state or block) is known by (index, generation); where its bytes lie is the
arena's own business, so it can move units to make room: nothing that fits in bytes is refused for fragmentation.

The law kept here: conservation (law 8). Each page has one owner or none; each unit has a count of holders; a handle that
outlived its unit raises StaleHandle. No arrays: `Storage` does what must be done to bytes.

    low pages                                                   high pages
    | blocks grow this way ->            free            <- states grow this way |
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

import numpy as np

from milepost.errors import OutOfBlocks, OutOfSlots, StaleHandle
from milepost.state.geometry import Geometry

Holder = Literal["sequence", "tree"]
FREE = -1


class StateHandle(NamedTuple):
    """A live slot or a checkpoint."""

    unit: int
    generation: int


class BlockHandle(NamedTuple):
    """A block of KV."""

    unit: int
    generation: int


class Storage(Protocol):
    """What happens to bytes when pages change hands."""

    def move(self, source: int, target: int, pages: int) -> None:
        """Copy pages as they were before the copy, even if the two ranges overlap."""
        ...

    def freed(self, page: int, pages: int) -> None:
        """These pages belong to nobody now (tests fill them with NaN)."""
        ...


@dataclass(slots=True)
class Tag:
    """What the step that wrote a state says of it: whose it is and how many tokens it has seen (law 4)."""

    owner: str
    position: int
    fingerprint: bytes | None = None


class _Unit:
    __slots__ = ("generation", "page", "sequences", "tag", "trees")

    def __init__(self) -> None:
        self.generation = 0
        self.page = FREE
        self.sequences = 0
        self.trees = 0
        self.tag: Tag | None = None


class Arena:
    """Pages, and the units that own them. Not thread-safe: the engine's thread alone uses it."""

    def __init__(self, geometry: Geometry, storage: Storage) -> None:
        self.geometry = geometry
        self.storage = storage
        self.states: list[_Unit] = []
        self.blocks: list[_Unit] = []
        self.owner = np.full(geometry.pages, FREE, dtype=np.int64)
        """Per page: FREE, or 2 * index (+ 1 for a block)."""
        self.free_pages = geometry.pages
        self.held_blocks = 0
        """Blocks that at least one running sequence holds."""
        self._spare_states: list[int] = []
        self._spare_blocks: list[int] = []
        self._low = list(range(geometry.pages)) if geometry.block_pages == 1 else []
        self.moves = 0

    # --- states ---------------------------------------------------------------------------------------------------

    def take_state(self) -> StateHandle:
        """Take bytes for one state; its content is undefined. Raises OutOfSlots."""
        pages = self.geometry.state_pages
        page = self._room(pages, high=True)
        if page is None:
            raise OutOfSlots(f"no room for a state of {pages} pages: {self.free_pages} of {self.geometry.pages} are free")
        index = _spare(self._spare_states, self.states)
        unit = self.states[index]
        self._occupy(unit, page, pages, 2 * index)
        return StateHandle(index, unit.generation)

    def give_state(self, handle: StateHandle) -> None:
        """Give a state back. Raises StaleHandle."""
        unit = self._state(handle)
        self._vacate(unit, self.geometry.state_pages)
        self._spare_states.append(handle.unit)

    def tag(self, handle: StateHandle) -> Tag | None:
        """What was last written into a state; None if nothing was. Raises StaleHandle."""
        return self._state(handle).tag

    def write_tag(self, handle: StateHandle, tag: Tag) -> None:
        """Only the runner calls this, for a state that it has just written. Raises StaleHandle."""
        self._state(handle).tag = tag

    def state_page(self, handle: StateHandle) -> int:
        """First page of a state: the index that kernels take. Raises StaleHandle.

        A model without recurrent layers has no pages for it; its index then only tells sequences apart.
        """
        page = self._state(handle).page
        return page if self.geometry.state_pages else handle.unit

    # --- blocks ---------------------------------------------------------------------------------------------------

    def take_block(self) -> BlockHandle:
        """Take a block, held by one sequence; its content is undefined. Raises OutOfBlocks."""
        pages = self.geometry.block_pages
        page = self._lowest() if pages == 1 else self._room(pages, high=False)
        if page is None:
            raise OutOfBlocks(f"no room for a block of {pages} pages: {self.free_pages} of {self.geometry.pages} are free")
        index = _spare(self._spare_blocks, self.blocks)
        unit = self.blocks[index]
        self._occupy(unit, page, pages, 2 * index + 1)
        unit.sequences = 1
        self.held_blocks += 1
        return BlockHandle(index, unit.generation)

    def hold_block(self, handle: BlockHandle, holder: Holder) -> None:
        """One more holder. Raises StaleHandle."""
        unit = self._block(handle)
        if holder == "tree":
            unit.trees += 1
            return
        self.held_blocks += unit.sequences == 0
        unit.sequences += 1

    def give_block(self, handle: BlockHandle, holder: Holder) -> None:
        """One holder less; the last one frees the block. Raises StaleHandle, also if there is no such holder."""
        unit = self._block(handle)
        held = unit.trees if holder == "tree" else unit.sequences
        if held == 0:
            raise StaleHandle(f"block {handle} is not held by a {holder}")
        if holder == "tree":
            unit.trees -= 1
        else:
            unit.sequences -= 1
            self.held_blocks -= unit.sequences == 0
        if unit.trees + unit.sequences == 0:
            self._vacate(unit, self.geometry.block_pages)
            self._spare_blocks.append(handle.unit)

    def block_page(self, handle: BlockHandle) -> int:
        """First page of a block: the index that kernels take. Raises StaleHandle."""
        return self._block(handle).page

    def block_holders(self, handle: BlockHandle) -> tuple[int, int]:
        """(sequences, trees) that hold a block. Raises StaleHandle."""
        unit = self._block(handle)
        return unit.sequences, unit.trees

    # --- counts ---------------------------------------------------------------------------------------------------

    @property
    def states_used(self) -> int:
        """States that are taken: live slots and checkpoints."""
        return len(self.states) - len(self._spare_states)

    @property
    def blocks_used(self) -> int:
        """Blocks that are taken."""
        return len(self.blocks) - len(self._spare_blocks)

    # --- pages ----------------------------------------------------------------------------------------------------

    def _state(self, handle: StateHandle) -> _Unit:
        return _checked(self.states, handle.unit, handle.generation, "state")

    def _block(self, handle: BlockHandle) -> _Unit:
        return _checked(self.blocks, handle.unit, handle.generation, "block")

    def _occupy(self, unit: _Unit, page: int, pages: int, owner: int) -> None:
        unit.page = page
        unit.tag = None
        self.owner[page : page + pages] = owner
        self.free_pages -= pages

    def _vacate(self, unit: _Unit, pages: int) -> None:
        page = unit.page
        unit.page = FREE
        unit.tag = None
        unit.generation += 1
        self._clear(page, pages)
        self.free_pages += pages

    def _clear(self, page: int, pages: int) -> None:
        self.owner[page : page + pages] = FREE
        self.storage.freed(page, pages)
        if self.geometry.block_pages == 1:
            for freed in range(page, page + pages):
                heapq.heappush(self._low, freed)

    def _lowest(self) -> int | None:
        """The lowest free page. The heap may name pages that were taken since; those are dropped here."""
        while self._low:
            page = heapq.heappop(self._low)
            if self.owner[page] == FREE:
                return page
        return None

    def _room(self, pages: int, *, high: bool) -> int | None:
        """Consecutive free pages, from one end; moves units out of the way if the free pages are scattered."""
        if pages > self.free_pages:
            return None
        if pages == 0:  # a model without recurrent layers: its states are handles without bytes
            return 0
        starts = np.flatnonzero(self._window(self.owner != FREE, pages) == 0)
        if not starts.size:
            return self._gather(pages, high=high)
        offset = self.geometry.pages if high else 0  # on a grid from its own end, units of one kind leave no gaps
        grid = starts[(offset - starts) % pages == 0]
        starts = grid if grid.size else starts
        return int(starts[-1] if high else starts[0])

    @staticmethod
    def _window(values: np.ndarray, pages: int) -> np.ndarray:
        sums = np.concatenate(([0], np.cumsum(values)))
        return sums[pages:] - sums[:-pages]

    def _gather(self, pages: int, *, high: bool) -> int:
        """Make one gap out of free pages that lie scattered, by sliding down what stands between them.

        Of all runs of `pages` free pages, the one is taken that spans the fewest used ones. Units never cross the ends of
        such a span, since both are free, so this always succeeds; a unit may slide by less than its size.
        """
        free = np.flatnonzero(self.owner == FREE)
        spans = free[pages - 1 :] - free[: free.size - pages + 1]
        best = spans.size - 1 - int(spans[::-1].argmin()) if high else int(spans.argmin())
        page = target = int(free[best])
        end = int(free[best + pages - 1]) + 1
        while page < end:
            owner = int(self.owner[page])
            size = 1 if owner == FREE else self._size(owner)
            if owner != FREE:
                self._slide(owner, page, target, size)
                target += size
            page += size
        return target

    def _slide(self, owner: int, source: int, target: int, pages: int) -> None:
        """Move a unit down."""
        self.storage.move(source, target, pages)
        self.owner[target : target + pages] = owner
        (self.blocks if owner % 2 else self.states)[owner // 2].page = target
        left = max(source, target + pages)
        self._clear(left, source + pages - left)
        self.moves += 1

    def _size(self, owner: int) -> int:
        return self.geometry.block_pages if owner % 2 else self.geometry.state_pages


def _spare(spare: list[int], units: list[_Unit]) -> int:
    if spare:
        return spare.pop()
    units.append(_Unit())
    return len(units) - 1


def _checked(units: list[_Unit], index: int, generation: int, kind: str) -> _Unit:
    if not 0 <= index < len(units) or units[index].generation != generation or units[index].page == FREE:
        raise StaleHandle(f"{kind} handle ({index}, {generation}) is stale: what it pointed at was given back")
    return units[index]
