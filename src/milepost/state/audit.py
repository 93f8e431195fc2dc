"""Does everything add up? Findings, not exceptions: an audit of a live engine reports and never stops it.

In: the store and what running sequences say they hold. Out: findings, empty when all is well.
The law kept here: conservation (law 8). Cost: one pass over pages, units and tree nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from milepost.errors import StaleHandle
from milepost.state.arena import FREE, BlockHandle, StateHandle
from milepost.state.prefix import Node, PrefixTree
from milepost.state.store import StateStore


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that doesn't add up: where, and what was found against what was expected."""

    place: str
    message: str


def check(store: StateStore, slots: Iterable[StateHandle], blocks: Iterable[BlockHandle]) -> list[Finding]:
    """Compare arena, trees and holders. `slots`, `blocks`: what running sequences hold, with repetitions for blocks."""
    return [*_pages(store), *_states(store, list(slots)), *_blocks(store, Counter(blocks)), *_trees(store)]


def _pages(store: StateStore) -> Iterable[Finding]:
    arena, geometry = store.arena, store.arena.geometry
    expected = np.full(geometry.pages, FREE, dtype=np.int64)
    for kind, units, size in ((0, arena.states, geometry.state_pages), (1, arena.blocks, geometry.block_pages)):
        for index, unit in enumerate(units):
            if unit.page == FREE:
                continue
            span = expected[unit.page : unit.page + size]
            if (span != FREE).any() or len(span) != size:
                yield Finding("pages", f"unit {index} at page {unit.page} overlaps another or leaves the arena")
            span[:] = 2 * index + kind
    if not np.array_equal(expected, arena.owner):
        yield Finding("pages", f"{int((expected != arena.owner).sum())} pages are owned by another than the unit there")
    free = int((arena.owner == FREE).sum())
    if free != arena.free_pages:
        yield Finding("pages", f"{free} pages are free, the ledger says {arena.free_pages}")


def _states(store: StateStore, slots: list[StateHandle]) -> Iterable[Finding]:
    arena = store.arena
    standing = [node.checkpoint.handle for _, node in store.checkpoints() if node.checkpoint is not None]
    known = Counter([*standing, *slots])
    for handle, count in known.items():
        if count > 1:
            yield Finding("states", f"state {handle} has {count} owners")
        try:
            arena.tag(handle)
        except StaleHandle as error:
            yield Finding("states", str(error))
    if len(known) != arena.states_used:
        yield Finding("states", f"{arena.states_used} states are taken, {len(known)} have an owner")


def _blocks(store: StateStore, held: Counter[BlockHandle]) -> Iterable[Finding]:
    arena = store.arena
    cached: Counter[BlockHandle] = Counter()
    for tree in store.trees.values():
        for node in tree.nodes():
            cached.update(node.blocks.values())
    for handle in held.keys() | cached.keys():
        try:
            holders = arena.block_holders(handle)
        except StaleHandle as error:
            yield Finding("blocks", str(error))
            continue
        if holders != (held[handle], cached[handle]):
            yield Finding("blocks", f"block {handle} counts {holders}, is held by {(held[handle], cached[handle])}")
    if len(held.keys() | cached.keys()) != arena.blocks_used:
        yield Finding("blocks", f"{arena.blocks_used} blocks are taken, {len(held.keys() | cached.keys())} are held")
    if arena.held_blocks != len(held):
        yield Finding("blocks", f"the ledger says that sequences hold {arena.held_blocks} blocks, they hold {len(held)}")


def _trees(store: StateStore) -> Iterable[Finding]:
    for tree in store.trees.values():
        ghosts = 0
        for node in tree.nodes():
            yield from _node(tree, node)
            ghosts += 0 if node.below else len(node.tokens)
        if ghosts != tree.ghost_tokens:
            yield Finding("tree", f"{ghosts} tokens are ghosts, the tree says {tree.ghost_tokens}")


def _node(tree: PrefixTree, node: Node) -> Iterable[Finding]:
    below = sum(child.below for child in node.children.values()) + (node.checkpoint is not None)
    if below != node.below:
        yield Finding("tree", f"{below} checkpoints at or below {node.start}..{node.end}, the node says {node.below}")
    if node.checkpoint is not None and node.checkpoint.position != node.end:
        yield Finding("tree", f"the checkpoint at {node.end} says position {node.checkpoint.position}")
    if not tree.arena.geometry.block_pages:
        return
    windowed = tree.layout.window is not None
    first = tree.layout.first_block(node.end) if windowed else node.start // tree.block_size
    holds = node.checkpoint is not None if windowed else node.below
    wanted = set(range(first, (node.end - 1) // tree.block_size + 1)) if holds else set()
    if wanted != set(node.blocks):
        yield Finding("tree", f"{node.start}..{node.end} holds blocks {sorted(node.blocks)}, should hold {sorted(wanted)}")
