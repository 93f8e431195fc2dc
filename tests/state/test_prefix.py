"""The prefix tree against a plain model of it: a dictionary from token prefixes to checkpoints."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.state.arena import BlockHandle, Tag
from milepost.state.retention import Candidate, Costs, first_to_go, value
from milepost.state.store import StateStore
from tests.fakes import fake_spec, harness


def _tokens(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.uint32)


def _publish(store: StateStore, tokens: list[int], salt: str = "") -> bool:
    """As if a sequence had computed `tokens` and left its state as a checkpoint."""
    chain = store.chain(salt)
    handle = store.take_slot()
    assert handle is not None
    store.arena.write_tag(handle, Tag("owner", len(tokens)))
    match = store.match(_tokens(tokens), chain)
    whole = match.position // store.layout.block_size
    blocks: list[BlockHandle | None] = match.blocks[:whole]
    while len(blocks) < store.layout.blocks_for(len(tokens)):
        block = store.take_block()
        assert block is not None
        blocks.append(block)
    kept = store.publish(handle, "owner", _tokens(tokens), chain, blocks, "branch")
    store.give_blocks([*blocks, *match.blocks[whole:]])
    store.release(match)
    return kept


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), window=st.sampled_from([None, 1, 2, 5, 8]))
def test_the_deepest_checkpoint_on_the_path_and_nothing_else(seed: int, window: int | None) -> None:
    rng = random.Random(seed)
    h = harness(spec=fake_spec(window=window))
    store = h.engine.store
    known: set[tuple[int, ...]] = set()
    for _ in range(40):
        tokens = [rng.randrange(2) for _ in range(rng.randrange(1, 14))]
        action = rng.random()
        if action < 0.5:
            assert _publish(store, tokens) == (tuple(tokens) not in known)
            known.add(tuple(tokens))
        elif action < 0.6 and known:
            tree, node = rng.choice(store.checkpoints())
            path: list[int] = []
            step = node
            while step is not tree.root:
                path = [int(t) for t in step.tokens] + path
                assert step.parent is not None
                step = step.parent
            known.discard(tuple(path))
            store._drop(tree, node)
        match = store.match(_tokens(tokens), store.chain(""))
        deepest = max((len(k) for k in known if len(k) < len(tokens) and tuple(tokens[: len(k)]) == k), default=0)
        assert match.position == deepest
        assert len(match.blocks) == store.layout.blocks_for(deepest)
        reached = range(deepest if window is None else min(window - 1, deepest))  # tokens before it that its next one reads
        for index, block in enumerate(match.blocks):
            needed = any((deepest - 1 - back) // store.layout.block_size == index for back in reached)
            assert block is not None or not needed
            assert block is None or store.arena.block_holders(block)[0] == 1
        store.give_blocks(match.blocks)
        store.release(match)
        assert h.engine.audit() == []
    store.clear()
    assert store.arena.free_pages == store.arena.geometry.pages


def test_ghosts_remember_what_was_shared_and_are_bounded() -> None:
    h = harness()
    store = h.engine.store
    tokens = list(range(40))
    _publish(store, tokens)
    tree, node = store.checkpoints()[0]
    store._drop(tree, node)
    match = store.match(_tokens(tokens[:30] + [1]), store.chain(""))
    assert (match.shared, match.held, match.position) == (30, 0, 0)
    assert tree.ghost_tokens == 40
    tree.forget(10)
    assert tree.ghost_tokens == 0 and not tree.root.children


def test_a_pinned_checkpoint_is_not_evicted() -> None:
    """32 (public kind): eviction asserts on a node that another lock still holds."""
    h = harness(pages=240)
    store = h.engine.store
    _publish(store, [1, 2, 3, 4, 5])
    match = store.match(_tokens([1, 2, 3, 4, 5, 6]), store.chain(""))
    taken = []
    while (slot := store.take_slot()) is not None:
        taken.append(slot)
    assert match.handle is not None and store.arena.tag(match.handle) is not None
    store.give_blocks(match.blocks)
    store.release(match)
    assert store.take_slot() is not None, "unpinned, it gives way"
    assert store.checkpoints() == []


def test_a_capture_evicts_only_what_is_worth_less() -> None:
    h = harness(pages=240)
    store = h.engine.store
    _publish(store, list(range(90)))
    while store.arena.free_pages >= store.arena.geometry.state_pages:
        store.arena.take_state()
    assert store.take_capture(0, 1) is None, "one token's work is worth less than ninety tokens'"
    assert store.take_capture(0, 10_000) is not None


def test_the_value_of_a_checkpoint() -> None:
    costs = Costs(per_token=10.0, per_token_and_context=1.0)
    near = Candidate(0, position=110, above=100, own_bytes=100, idle=0)
    far = Candidate(1, position=110, above=0, own_bytes=100, idle=0)
    old = Candidate(2, position=110, above=0, own_bytes=100, idle=99)
    assert value(near, costs) == pytest.approx((10 * 10 + 10 * 105) / 100)
    assert value(near, costs) < value(far, costs)
    assert first_to_go([near, far, old], costs) == old
    assert first_to_go([], costs) is None
