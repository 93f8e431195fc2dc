"""Law 8, conservation, and law 7, shortage is not death: on the exact fake model, in arenas that are always too small."""

from __future__ import annotations

import random

import pytest

from tests.fakes import VOCAB, Harness, answer_of, fake_spec, harness

SHAPES = {
    "state larger than block": (fake_spec(head_dim=8, state_size=16, max_len=96), {}),
    "block larger than state": (fake_spec(head_dim=1, state_size=1, max_len=96), {"block_size": 16}),
    "uneven": (fake_spec(head_dim=3, state_size=5, max_len=96), {"block_size": 4}),
    "window": (
        fake_spec(head_dim=3, state_size=5, max_len=96, window=11),
        {"block_size": 4, "max_num_batched_tokens": 9},
    ),
}


def _family(rng: random.Random) -> list[list[int]]:
    """Prompts that share prefixes at odd places."""
    stem = [rng.randrange(VOCAB) for _ in range(60)]
    return [stem[: rng.randrange(1, 60)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(1, 12))] for _ in range(12)]


def _tight(shape: str, extra: float, **settings: object) -> Harness:
    spec, more = SHAPES[shape]
    probe = harness(spec=spec, **{**more, **settings})
    engine = probe.engine
    one = engine.parts.settings.geometry.pages_for(engine.store.layout, 96, engine.config.max_num_batched_tokens)
    return harness(spec=spec, pages=int(one * extra), **{**more, **settings})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("extra", [1.0, 1.3, 2.5, 8.0])
def test_every_request_finishes_and_is_right_however_small_the_arena(shape: str, extra: float) -> None:
    rng = random.Random(f"{shape}{extra}")
    h = _tight(shape, extra)
    prompts = _family(rng) * 3
    for number, prompt in enumerate(prompts):
        h.submit(f"r{number}", prompt, rng.randrange(1, 24))
    h.finish()
    for number, prompt in enumerate(prompts):
        got = h.got[f"r{number}"]
        assert h.last[f"r{number}"].finish == "length"
        assert got == h.right(prompt, len(got))
    assert h.engine.audit() == []
    assert h.engine.stats().pools.slots_used == 0
    assert h.engine.stats().pools.blocks_used == 0


@pytest.mark.parametrize(("shape", "steps"), [("uneven", 10_000), ("window", 4_000)])
def test_fuzz_thousands_of_steps_of_arrivals_aborts_preemptions_and_faults_balance_the_ledger(shape: str, steps: int) -> None:
    """30 (public kind): slots leak on abort, failed admission, disconnect."""
    rng = random.Random(7)
    h = _tight(shape, 2.0, max_num_seqs=5)
    live: dict[str, list[int]] = {}
    stems = _family(rng)
    aborted = 0
    for step in range(steps):
        event = rng.random()
        if event < 0.12 and len(live) < 12:
            prompt = rng.choice(stems)[: rng.randrange(1, 70)] + [rng.randrange(VOCAB) for _ in range(rng.randrange(0, 3))]
            live[f"r{step}"] = prompt
            h.submit(f"r{step}", prompt, rng.randrange(1, 20))
        elif event < 0.16 and live:
            h.engine.abort(rng.choice(list(live)))
            aborted += 1
        elif event < 0.18 and h.engine.scheduler.running:
            h.engine.scheduler.preempt(rng.choice(h.engine.scheduler.running))
        elif event < 0.181:
            h.engine.reset_prefix_cache()
        elif event < 0.183:
            h.model.fail_next = True
        h.engine.step()
        h.model.runs.clear()
        for name in [name for name in live if name in h.last]:
            prompt = live.pop(name)
            got = h.got.pop(name)
            assert got == h.right(prompt, len(got)), f"{name} went wrong at step {step}"
        if step % 50 == 0:
            assert h.engine.audit() == []
    h.finish()
    assert h.engine.audit() == []
    stats = h.engine.stats()
    assert stats.pools.slots_used == 0 and stats.pools.blocks_used == 0
    h.engine.reset_prefix_cache()
    empty = h.engine.stats().pools
    assert empty.free_bytes == empty.budget_bytes, "something is left over in an idle, cleared arena"
    assert aborted > 40 and stats.preemptions > 20 and stats.evictions > 50 and stats.prefix_hits > 1000
    assert stats.finished["error"] > 0


def test_a_long_sequence_keeps_only_the_blocks_that_a_window_reaches() -> None:
    """Blocks behind the window serve others: 96 tokens run in an arena of 8 blocks, and a hit holds its window alone."""
    spec = fake_spec(head_dim=1, state_size=1, max_len=96, window=11)
    h = harness(spec=spec, block_size=4, max_num_batched_tokens=8, max_num_seqs=1)
    blocks = []
    h.submit("long", list(range(70)), 20)
    while h.engine.step():
        held = [sequence.held for sequence in h.engine.scheduler.running]
        blocks.append(max(held, default=0))
    assert h.got["long"] == h.right(list(range(70)), 20)
    assert max(blocks) == 4  # (11 - 1) / 4, rounded up, and one
    store = h.engine.store
    assert store.arena.blocks_used == len({b for _, node in store.checkpoints() for b in node.blocks.values()})
    assert h.run("again", list(range(70)), 3).usage.cached_tokens == 69
    assert h.engine.audit() == []


def test_freed_memory_is_poisoned() -> None:
    import torch

    h = harness()
    h.run("a", list(range(20)), 3)
    h.engine.reset_prefix_cache()
    assert bool((h.engine.parts.runner.pools.buffer == 0xFF).all())
    assert torch.isnan(h.engine.parts.runner.pools.memory[1].kv).all()  # type: ignore[arg-type]


def test_more_requests_than_slots_wait_and_all_finish() -> None:
    """29 (public kind): no slot left, and an assertion kills the scheduler."""
    h = harness(max_num_seqs=3)
    for number in range(3 + 5):
        h.submit(f"r{number}", [number + 1] * (number + 2), 6)
    h.engine.step()
    assert len(h.engine.scheduler.running) == 3
    h.finish()
    assert all(h.got[f"r{n}"] == answer_of([n + 1] * (n + 2), 6) for n in range(8))
    assert h.engine.stats().bound_by["max_num_seqs"] > 0
