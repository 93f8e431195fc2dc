"""The prefix tree: which tokens were seen, where a checkpoint stands, which blocks hold the KV up to it.

In: token ids. Out: the deepest checkpoint on their path with the KV before it. Edges may have any length, so a
checkpoint stands at an exact position, not at a block's edge.

The law kept here: a hit is a minimum (law 3). A node holds KV if and only if a checkpoint stands at its end or below it:
KV beyond the deepest checkpoint serves nobody. Nodes without KV are ghosts: they remember that tokens were shared.

    root --[0..900)--> A * --[900..964)--> B *      * checkpoint at the node's end
                        \\--[900..950)--> C (ghost)
    A node owns the blocks that its tokens touch; where attention has a window, a checkpoint's node owns those in its reach, and
    no other node any. Where A ends inside a block, B has a block of its own for that index,
    which holds A's tokens too: along a path, the deepest block of an index is the one to read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from milepost.state.arena import Arena, BlockHandle, StateHandle
from milepost.state.fingerprint import Tokens
from milepost.state.layout import Layout
from milepost.state.placement import Reason


@dataclass(slots=True)
class Checkpoint:
    """An immutable state after exactly `position` tokens."""

    handle: StateHandle
    position: int
    fingerprint: bytes
    reason: Reason
    uses: int = 0


class Node:
    """An edge with its end: tokens start..end of a path."""

    __slots__ = ("below", "blocks", "checkpoint", "children", "parent", "pins", "start", "tokens", "touched")

    def __init__(self, parent: Node | None, start: int, tokens: Tokens) -> None:
        self.parent = parent
        self.start = start
        self.tokens = tokens
        self.children: dict[int, Node] = {}
        self.blocks: dict[int, BlockHandle] = {}
        self.checkpoint: Checkpoint | None = None
        self.below = 0
        """Checkpoints at this node's end and beneath it."""
        self.pins = 0
        self.touched = 0

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + len(self.tokens)


@dataclass(frozen=True, slots=True)
class Walk:
    """How far tokens agree with the tree: nodes wholly passed, and positions."""

    path: tuple[Node, ...]
    shared: int
    """Tokens that agree, ghosts included."""
    held: int
    """Tokens that agree and whose KV is held."""
    within: Node | None = None
    """The node inside which the tokens end or part, if they do."""


class PrefixTree:
    """One tree for one root fingerprint (model, layout, tenant)."""

    def __init__(self, arena: Arena, layout: Layout) -> None:
        self.arena = arena
        self.layout = layout
        self.block_size = layout.block_size
        self.root = Node(None, 0, np.empty(0, dtype=np.uint32))
        self.ghost_tokens = 0
        self.clock = 0
        """Lookups so far: the tree's own time."""

    def walk(self, tokens: Tokens) -> Walk:
        """Follow tokens as far as they agree."""
        path: list[Node] = []
        node, position, held = self.root, 0, 0
        while position < len(tokens):
            child = node.children.get(int(tokens[position]))
            if child is None:
                break
            same = _common(child.tokens, tokens[position:])
            position += same
            child.touched = self.clock
            if child.below:
                held = position
            if same < len(child.tokens):
                return Walk(tuple(path), position, held, child)
            path.append(child)
            node = child
        return Walk(tuple(path), position, held)

    def blocks_to(self, path: tuple[Node, ...], position: int) -> list[BlockHandle | None]:
        """Blocks that hold the KV of the first `position` tokens of a path, the deepest of each index; None behind a window."""
        found: dict[int, BlockHandle | None] = dict.fromkeys(range(self.layout.first_block(position)))
        for node in path if self.layout.window is None else path[-1:]:
            found.update(node.blocks)
        return [found[index] for index in range(self.layout.blocks_for(position))]

    def insert(self, tokens: Tokens, blocks: Sequence[BlockHandle | None], checkpoint: Checkpoint) -> Node | None:
        """Put a checkpoint at the end of `tokens`; the tree holds the blocks from now on, beside their sequence.

        Returns the node, or None, having taken nothing, if a checkpoint stands there already.
        """
        node = self._path_to(tokens)
        if node.checkpoint is not None:
            node.touched = self.clock
            return None
        node.checkpoint = checkpoint
        node.touched = self.clock
        step: Node | None = node
        while step is not None and step is not self.root:
            step.below += 1
            if step.below == 1:
                self.ghost_tokens -= len(step.tokens)
                if self.layout.window is None:
                    self._fill(step, blocks)
            step = step.parent
        if self.layout.window is not None:
            self._hold(node, blocks, self.layout.first_block(node.end))
        return node

    def remove(self, node: Node) -> Checkpoint:
        """Take a node's checkpoint out of the tree, with the KV that now serves nobody. The caller gives the state back."""
        checkpoint = node.checkpoint
        if checkpoint is None:
            raise ValueError(f"no checkpoint stands at position {node.end} of this path")
        node.checkpoint = None
        step: Node | None = node
        while step is not None and step is not self.root:
            step.below -= 1
            if step.below == 0:
                self.ghost_tokens += len(step.tokens)
                self._let_go(step)
            step = step.parent
        if self.layout.window is not None:
            self._let_go(node)
        return checkpoint

    def forget(self, most_ghost_tokens: int) -> None:
        """Drop the ghosts that were passed longest ago until at most so many ghost tokens are left."""
        if self.ghost_tokens <= most_ghost_tokens:
            return
        for leaf in sorted((n for n in self.nodes() if not n.children and not n.below), key=lambda n: n.touched):
            step: Node | None = leaf
            while step is not None and step.parent is not None and not step.below and not step.children:
                del step.parent.children[int(step.tokens[0])]
                self.ghost_tokens -= len(step.tokens)
                step = step.parent
            if self.ghost_tokens <= most_ghost_tokens:
                return

    def nodes(self) -> Iterator[Node]:
        """All nodes but the root, in no order."""
        stack = list(self.root.children.values())
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())

    def own_blocks(self, node: Node) -> int:
        """Blocks that the tree holds for this node's checkpoint alone: those of its path up to the next one's."""
        if self.layout.window is not None:
            return sum(self.arena.block_holders(handle)[1] == 1 for handle in node.blocks.values())
        count = 0
        step: Node | None = node
        while step is not None and step.below == 1:
            count += len(step.blocks)
            step = step.parent
        return count

    def above(self, node: Node) -> int:
        """Position of the nearest checkpoint above a node; 0 if there is none."""
        step = node.parent
        while step is not None:
            if step.checkpoint is not None:
                return step.end
            step = step.parent
        return 0

    def _path_to(self, tokens: Tokens) -> Node:
        """The node that ends at the end of `tokens`; made, or cut out of a longer one, where it is missing."""
        node, position = self.root, 0
        while position < len(tokens):
            first = int(tokens[position])
            child = node.children.get(first)
            if child is None:
                child = Node(node, position, np.array(tokens[position:], dtype=np.uint32))
                child.touched = self.clock
                node.children[first] = child
                self.ghost_tokens += len(child.tokens)
                return child
            same = _common(child.tokens, tokens[position:])
            if same < len(child.tokens):
                child = self._split(child, same)
            node = child
            position += same
        return node

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node after its first `at` tokens; returns the upper part. A block across the cut is held twice."""
        upper = Node(node.parent, node.start, node.tokens[:at])
        upper.below, upper.touched, upper.pins = node.below, node.touched, 0
        upper.children[int(node.tokens[at])] = node
        if node.parent is not None:
            node.parent.children[int(upper.tokens[0])] = upper
        node.parent, node.start, node.tokens = upper, node.start + at, node.tokens[at:]
        if self.layout.window is not None:
            return upper
        cut = node.start
        for index, handle in node.blocks.items():
            if index * self.block_size < cut:
                upper.blocks[index] = handle
                if (index + 1) * self.block_size > cut:
                    self.arena.hold_block(handle, "tree")
        node.blocks = {index: handle for index, handle in node.blocks.items() if (index + 1) * self.block_size > cut}
        return upper

    def _fill(self, node: Node, blocks: Sequence[BlockHandle | None]) -> None:
        """Hold the blocks that a node's tokens touch. A parent's partial block that ours contains is exchanged for ours."""
        if not self.layout.block:
            return
        first = node.start // self.block_size
        self._hold(node, blocks, first)
        parent = node.parent
        if node.start % self.block_size and parent is not None:
            old = parent.blocks.get(first)
            if old is not None and old != node.blocks[first]:
                self.arena.hold_block(node.blocks[first], "tree")
                parent.blocks[first] = node.blocks[first]
                self.arena.give_block(old, "tree")

    def _hold(self, node: Node, blocks: Sequence[BlockHandle | None], first: int) -> None:
        """Hold blocks from index `first` to a node's end. Raises ValueError for one that is gone already."""
        for index in range(first, self.layout.blocks_for(node.end)):
            handle = blocks[index]
            if handle is None:
                raise ValueError(f"block {index} of a path of {node.end} tokens is gone, but a checkpoint there needs it")
            self.arena.hold_block(handle, "tree")
            node.blocks[index] = handle

    def _let_go(self, node: Node) -> None:
        for handle in node.blocks.values():
            self.arena.give_block(handle, "tree")
        node.blocks = {}


def _common(left: Tokens, right: Tokens) -> int:
    """How many leading tokens agree."""
    size = min(len(left), len(right))
    differ = left[:size] != right[:size]
    return int(differ.argmax()) if differ.any() else size
