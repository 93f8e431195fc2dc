"""The arena: one budget, any mix. Random taking and giving, with every unit's bytes watched."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from milepost.errors import OutOfBlocks, OutOfSlots, StaleHandle
from milepost.state.arena import FREE, Arena
from milepost.state.geometry import Geometry


class Paper:
    """Storage that remembers a mark for each page, so that a moved unit can be recognised."""

    def __init__(self, pages: int) -> None:
        self.marks: list[object] = [None] * pages

    def move(self, source: int, target: int, pages: int) -> None:
        self.marks[target : target + pages] = self.marks[source : source + pages]

    def freed(self, page: int, pages: int) -> None:
        self.marks[page : page + pages] = ["freed"] * pages


def arena_of(pages: int, state: int, block: int) -> tuple[Arena, Paper]:
    paper = Paper(pages)
    return Arena(Geometry(64, pages, state, block), paper), paper


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 10**6), state=st.integers(1, 9), size=st.sampled_from([1, 1, 2, 5]), pages=st.integers(12, 80))
@example(seed=9620, state=2, size=1, pages=13)
def test_whatever_fits_in_bytes_is_had_and_nobody_loses_a_byte(seed: int, state: int, size: int, pages: int) -> None:
    """Units of any sizes: scattered free pages are gathered by moving what stands between them, never refused."""
    rng = random.Random(seed)
    arena, paper = arena_of(pages, state, size)
    states: dict[tuple[int, int], object] = {}
    blocks: dict[tuple[int, int], object] = {}
    for turn in range(300):
        mark = object()
        if rng.random() < 0.55:
            if rng.random() < 0.3:
                if arena.free_pages < state:
                    with pytest.raises(OutOfSlots):
                        arena.take_state()
                    continue
                handle = arena.take_state()
                states[handle] = mark
                page = arena.state_page(handle)
                paper.marks[page : page + state] = [mark] * state
            elif arena.free_pages >= size:
                block = arena.take_block()
                blocks[block] = mark
                page = arena.block_page(block)
                paper.marks[page : page + size] = [mark] * size
            else:
                with pytest.raises(OutOfBlocks):
                    arena.take_block()
        elif blocks and rng.random() < 0.7:
            block = rng.choice(list(blocks))
            del blocks[block]
            arena.give_block(block, "sequence")  # type: ignore[arg-type]
        elif states:
            handle = rng.choice(list(states))  # type: ignore[assignment]
            del states[handle]
            arena.give_state(handle)
        assert arena.free_pages == pages - state * len(states) - size * len(blocks) == int((arena.owner == FREE).sum()), turn
        for owned, kept in states.items():
            page = arena.state_page(owned)  # type: ignore[arg-type]
            assert paper.marks[page : page + state] == [kept] * state
        for owned, kept in blocks.items():
            page = arena.block_page(owned)  # type: ignore[arg-type]
            assert paper.marks[page : page + size] == [kept] * size


def test_blocks_are_moved_out_of_the_way_of_a_state() -> None:
    arena, _ = arena_of(24, 8, 1)
    blocks = [arena.take_block() for _ in range(24)]
    for block in blocks[::2]:
        arena.give_block(block, "sequence")
    assert arena.free_pages == 12
    arena.take_state()
    assert arena.moves > 0
    for block in blocks[::2]:
        with pytest.raises(StaleHandle):
            arena.block_page(block)
    assert len({arena.block_page(block) for block in blocks[1::2]}) == 12


def test_stale_handles_raise_everywhere() -> None:
    arena, _ = arena_of(30, 4, 2)
    state, block = arena.take_state(), arena.take_block()
    arena.give_state(state)
    arena.give_block(block, "sequence")
    again = arena.take_state(), arena.take_block()
    assert again[0].unit == state.unit and again[0] != state
    for action in (arena.tag, arena.state_page, arena.give_state):
        with pytest.raises(StaleHandle):
            action(state)
    for act in (arena.block_page, arena.block_holders):
        with pytest.raises(StaleHandle):
            act(block)
    with pytest.raises(StaleHandle):
        arena.hold_block(block, "tree")


def test_a_lock_released_twice_raises() -> None:
    """32 (public kind): a lock released twice frees what another still holds."""
    arena, _ = arena_of(10, 2, 1)
    block = arena.take_block()
    arena.hold_block(block, "tree")
    arena.give_block(block, "tree")
    with pytest.raises(StaleHandle, match="not held by a tree"):
        arena.give_block(block, "tree")
    assert arena.block_holders(block) == (1, 0)


def test_every_page_can_be_had_and_none_is_handed_out_twice() -> None:
    """31 (public kind): the reserved null slot is handed out. There is none here: every page is a real one."""
    arena, _ = arena_of(12, 3, 1)
    first = [arena.state_page(arena.take_state()) for _ in range(4)]
    assert sorted(first) == [0, 3, 6, 9]
