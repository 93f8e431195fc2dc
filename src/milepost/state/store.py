"""The memory of all sequences: one arena, one prefix tree per tenant, and who gives way when bytes run short.

In: token ids and positions from the scheduler. Out: handles, matches. Integers only.
The laws kept here: identity before use (5), wrong is a miss (6), shortage is not death (7): what can't be had is None.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from milepost.errors import OutOfBlocks, OutOfSlots, StaleHandle
from milepost.state.arena import Arena, BlockHandle, StateHandle, Storage
from milepost.state.fingerprint import Chain, Tokens, root_of
from milepost.state.geometry import Geometry
from milepost.state.layout import Layout
from milepost.state.placement import Reason
from milepost.state.prefix import Checkpoint, Node, PrefixTree, Walk
from milepost.state.retention import Candidate, Costs, first_to_go, value

MOST_GHOST_TOKENS = 4_000_000
"""Tokens remembered without KV, 4 bytes each."""


@dataclass(slots=True)
class Match:
    """A pinned hit: `position` tokens need not be computed. Hand it back with `release` once its state was copied."""

    tree: PrefixTree
    position: int = 0
    node: Node | None = None
    blocks: list[BlockHandle | None] = field(default_factory=list)
    """Blocks of the first `position` tokens, held for the sequence; the last may be partial, None lie behind the window."""
    shared: int = 0
    """Tokens that the tree has seen, whatever it still holds of them."""
    held: int = 0
    """Tokens whose KV is held."""
    present: frozenset[int] = frozenset()
    """Positions on this path where a checkpoint stands."""

    @property
    def handle(self) -> StateHandle | None:
        """The checkpoint to restore from; None: start from zeros."""
        return None if self.node is None or self.node.checkpoint is None else self.node.checkpoint.handle


@dataclass(slots=True)
class Counts:
    """What happened, by named reason."""

    evictions: int = 0
    captures: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)


class StateStore:
    """Arena, trees and policy in one place. Used by the engine's thread alone."""

    def __init__(
        self, layout: Layout, geometry: Geometry, storage: Storage, *, model_identity: str, costs: Costs, caching: bool
    ) -> None:
        self.layout = layout
        self.arena = Arena(geometry, storage)
        self.costs = costs
        self.caching = caching
        self.counts = Counts()
        self.trees: dict[bytes, PrefixTree] = {}
        self._identity = model_identity
        self._standing: dict[StateHandle, tuple[PrefixTree, Node]] = {}

    # --- looking up -----------------------------------------------------------------------------------------------

    def chain(self, salt: str) -> Chain:
        """A new fingerprint chain for one sequence of one tenant."""
        return Chain(root_of(self._identity, self.layout.digest, salt))

    def match(self, tokens: Tokens, chain: Chain, *, read: bool = True, again: bool = False) -> Match:
        """The longest prefix, short of the last token, for which KV and a verified checkpoint exist; pinned.

        read False (prompt logprobs wanted): only learns what is shared, restores nothing.
        again: the same request asked before and found no room; that doesn't age the others.
        """
        tree = self._tree(chain)
        if not self.caching:
            return Match(tree)
        tree.clock += not again
        walk = tree.walk(tokens)
        present = frozenset(node.end for node in walk.path if node.checkpoint is not None)
        found = Match(tree, shared=walk.shared, held=walk.held, present=present)
        node = self._deepest(tree, walk, tokens, chain) if read else None
        if node is None or node.checkpoint is None:
            return found
        found.node, found.position = node, node.end
        found.blocks = tree.blocks_to(walk.path[: walk.path.index(node) + 1], node.end)
        for handle in found.blocks:
            if handle is not None:
                self.arena.hold_block(handle, "sequence")
        node.pins += 1
        node.touched = tree.clock
        node.checkpoint.uses += 1
        return found

    def release(self, match: Match) -> None:
        """Unpin a match's checkpoint. Its blocks stay with the sequence."""
        if match.node is not None:
            match.node.pins -= 1
            match.node = None

    def _deepest(self, tree: PrefixTree, walk: Walk, tokens: Tokens, chain: Chain) -> Node | None:
        for node in reversed(walk.path):
            if node.checkpoint is None or node.end >= len(tokens):
                continue
            fault = self._fault(node.checkpoint, node.end, chain.at(tokens, node.end))
            if fault is None:
                return node
            self.counts.failures[f"match:{fault}"] += 1
            if not node.pins:
                self._drop(tree, node)
        return None

    def _fault(self, checkpoint: Checkpoint, position: int, fingerprint: bytes) -> str | None:
        """Why a checkpoint is not what its reader asks for; None if it is."""
        try:
            tag = self.arena.tag(checkpoint.handle)
        except StaleHandle:
            return "stale_handle"
        if tag is None:
            return "never_written"
        if tag.position != position or checkpoint.position != position:
            return "position"
        if checkpoint.fingerprint != fingerprint or tag.fingerprint != fingerprint:
            return "fingerprint"
        return None

    # --- taking and giving ----------------------------------------------------------------------------------------

    def take_slot(self) -> StateHandle | None:
        """Bytes for a live slot; evicts checkpoints to get them. None: there are none to be had."""
        while True:
            try:
                return self.arena.take_state()
            except OutOfSlots:
                if not self._evict(None):
                    return None

    def take_block(self) -> BlockHandle | None:
        """A block of KV; evicts checkpoints to get it. None: there is none to be had."""
        while True:
            try:
                return self.arena.take_block()
            except OutOfBlocks:
                if not self._evict(None):
                    return None

    def take_capture(self, above: int, position: int) -> StateHandle | None:
        """Bytes for a checkpoint that saves the work of above..position; evicts only what is worth less. Else None."""
        if not self.caching:
            return None
        worth = value(Candidate(0, position, above, self._page_bytes(self.arena.geometry.state_pages), 0), self.costs)
        while True:
            try:
                return self.arena.take_state()
            except OutOfSlots:
                if not self._evict(worth):
                    return None

    def give_slot(self, handle: StateHandle) -> None:
        """Give a live slot, or a checkpoint that was never published, back."""
        self.arena.give_state(handle)

    def give_blocks(self, handles: Iterable[BlockHandle | None]) -> None:
        """A sequence lets go of its blocks."""
        for handle in handles:
            if handle is not None:
                self.arena.give_block(handle, "sequence")

    def available_pages(self) -> int:
        """Pages that nobody runs on: free ones, and those that eviction could free."""
        geometry, arena = self.arena.geometry, self.arena
        running = (arena.states_used - len(self._standing)) * geometry.state_pages
        pinned = sum(geometry.state_pages for _, node in self._standing.values() if node.pins)
        return geometry.pages - running - pinned - arena.held_blocks * geometry.block_pages

    # --- publishing -----------------------------------------------------------------------------------------------

    def publish(
        self,
        handle: StateHandle,
        owner: str,
        tokens: Tokens,
        chain: Chain,
        blocks: Sequence[BlockHandle | None],
        reason: Reason,
    ) -> bool:
        """Make a written state a checkpoint, at the position that its writer tagged it with. The store owns it now.

        A state that its owner never wrote is refused and counted, never published (law 6).
        """
        tag = self.arena.tag(handle)
        fault = "never_written" if tag is None else "owner" if tag.owner != owner else None
        if tag is None or fault is not None or not self.caching or tag.position == 0:
            if fault is not None:
                self.counts.failures[f"publish:{fault}"] += 1
            self.arena.give_state(handle)
            return False
        position = tag.position
        tag.fingerprint = chain.at(tokens, position)
        tree = self._tree(chain)
        checkpoint = Checkpoint(handle, position, tag.fingerprint, reason)
        node = tree.insert(tokens[:position], blocks, checkpoint)
        if node is None:
            self.counts.skipped["present"] += 1
            self.arena.give_state(handle)
            return False
        self._standing[handle] = (tree, node)
        self.counts.captures[reason] += 1
        if sum(each.ghost_tokens for each in self.trees.values()) > MOST_GHOST_TOKENS:
            self._forget(MOST_GHOST_TOKENS // 2)
        return True

    def clear(self) -> None:
        """Drop every checkpoint that nobody is restoring from, and every ghost."""
        for tree, node in list(self._standing.values()):
            if not node.pins:
                self._drop(tree, node)
        self._forget(0)

    def checkpoints(self) -> list[tuple[PrefixTree, Node]]:
        """Every checkpoint that stands, with its tree."""
        return list(self._standing.values())

    def _forget(self, most_ghost_tokens: int) -> None:
        """Each tenant keeps an equal share of the ghosts; tenants of whom nothing is left are dropped."""
        for tree in self.trees.values():
            tree.forget(most_ghost_tokens // len(self.trees))
        self.trees = {root: tree for root, tree in self.trees.items() if tree.root.children}

    # --- giving way -----------------------------------------------------------------------------------------------

    def _evict(self, below: float | None) -> bool:
        """Drop the checkpoint of least value; only if that is under `below`, where given. False: nothing to drop."""
        nodes = [(tree, node) for tree, node in self._standing.values() if not node.pins]
        candidates = [self._candidate(key, tree, node) for key, (tree, node) in enumerate(nodes)]
        victim = first_to_go(candidates, self.costs)
        if victim is None or (below is not None and value(victim, self.costs) >= below):
            return False
        self._drop(*nodes[victim.key])
        self.counts.evictions += 1
        return True

    def _candidate(self, key: int, tree: PrefixTree, node: Node) -> Candidate:
        geometry = self.arena.geometry
        pages = geometry.state_pages + geometry.block_pages * tree.own_blocks(node)
        return Candidate(key, node.end, tree.above(node), self._page_bytes(pages), tree.clock - node.touched)

    def _drop(self, tree: PrefixTree, node: Node) -> None:
        checkpoint = tree.remove(node)
        del self._standing[checkpoint.handle]
        try:
            self.arena.give_state(checkpoint.handle)
        except StaleHandle:
            self.counts.failures["drop:stale_handle"] += 1

    def _page_bytes(self, pages: int) -> int:
        return max(1, pages * self.arena.geometry.page_bytes)

    def _tree(self, chain: Chain) -> PrefixTree:
        if chain.root not in self.trees:
            self.trees[chain.root] = PrefixTree(self.arena, self.layout)
        return self.trees[chain.root]
