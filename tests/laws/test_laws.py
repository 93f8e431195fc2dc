"""Laws 1 to 5 on a real Nemotron-H in fp64, states compared as well as answers, against the uncut reference."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from milepost.request import Boundary
from milepost.state.arena import Tag
from tests.checkpoints import make_nemotron_h
from tests.laws.oracle import Bench, Oracle, states_at, worst_error

few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nemotron_h(tmp_path_factory.mktemp("laws") / "tiny", max_position_embeddings=400)


@pytest.fixture(scope="module")
def oracle(path: Path) -> Oracle:
    return Oracle(path)


@pytest.fixture
def bench(path: Path, oracle: Oracle) -> Callable[..., Bench]:
    return lambda **settings: Bench(path, oracle, **settings)


_rng = random.Random(3)
STEM = tuple(_rng.randrange(97) for _ in range(160))


# --- 1. Split invariance ------------------------------------------------------------------------------------------------


@few
@given(budget=st.integers(4, 40), lengths=st.lists(st.integers(1, 60), min_size=1, max_size=5), late=st.integers(0, 6))
def test_any_chunking_beside_any_other_requests_gives_the_same(
    bench: Callable[..., Bench], budget: int, lengths: list[int], late: int
) -> None:
    """10 (public kind): decay accumulated wrongly across a chunk's edge. 9: padding advances the state."""
    b = bench(max_num_batched_tokens=budget)
    for number, length in enumerate(lengths):
        if number == 2:
            for _ in range(late):
                b.engine.step()
        b.submit(f"r{number}", STEM[:length] if number % 2 else STEM[100 - length : 100], 1 + number)
    b.finish()


def test_eight_identical_prompts_in_one_batch_answer_alike(bench: Callable[..., Bench]) -> None:
    """12 (public kind): identical prompts in one batch give different answers."""
    b = bench(max_num_seqs=8, max_num_batched_tokens=512)
    for number in range(8):
        b.submit(f"r{number}", STEM[:45], 6)
    b.finish()
    assert len({tuple(tokens) for tokens in b.got.values()}) == 1


# --- 2. Restore = recompute -----------------------------------------------------------------------------------------------


@few
@given(moments=st.sets(st.integers(0, 14), max_size=6), budget=st.integers(4, 30))
def test_preempted_and_resumed_at_any_steps_gives_the_same(
    bench: Callable[..., Bench], moments: set[int], budget: int
) -> None:
    """8 (public kind): resumed after preemption from someone else's or a stale state."""
    b = bench(max_num_batched_tokens=budget)
    for number in range(3):
        b.submit(f"r{number}", STEM[number * 7 : number * 7 + 30], 5)
    for step in range(15):
        if step in moments and b.engine.scheduler.running:
            b.engine.scheduler.preempt(b.engine.scheduler.running[step % len(b.engine.scheduler.running)])
        b.engine.step()
    b.finish()


def test_preemption_at_every_step_resumes_from_its_own_checkpoint(bench: Callable[..., Bench]) -> None:
    b = bench(max_num_batched_tokens=8)
    b.submit("r", STEM[:40], 8)
    steps = 0
    while b.engine.step():
        steps += 1
        if b.engine.scheduler.running:
            b.engine.scheduler.preempt(b.engine.scheduler.running[0])
    b.check()
    assert b.engine.stats().preemptions >= steps - 1
    assert b.last["r"].usage.recomputed.get("preempted", 0) == 0, "it resumed where it had stopped"


def test_rows_of_different_ages_in_one_step(bench: Callable[..., Bench]) -> None:
    """7 (public kind): requests' windows mixed, because two kinds of id indexed one table."""
    b = bench()
    b.run("warm", STEM[:50])
    for number, length in enumerate((51, 3, 50)):
        b.submit(f"r{number}", STEM[:length], 9 - 3 * number)
        b.engine.step()
    b.finish()


# --- 3. A hit is a minimum ------------------------------------------------------------------------------------------------


def test_same_prompt_twice_hits_all_but_the_last_token_for_every_length(bench: Callable[..., Bench]) -> None:
    """14, 22, 23 (public kinds): a full hit applies the last token twice; short or identical prompts never hit."""
    b = bench(kv_cache_memory_bytes=2**25)
    b.oracle.after(STEM[:70])
    for length in range(1, 71):
        assert b.run(f"cold{length}", STEM[:length], 1, salt=f"{length}").usage.cached_tokens == 0
        warm = b.run(f"warm{length}", STEM[:length], 1, salt=f"{length}").usage
        assert warm.cached_tokens == length - 1
        assert warm.recomputed == {"last_token": 1}


def test_suffix_of_every_length_after_a_hit_uses_the_restored_state(bench: Callable[..., Bench]) -> None:
    """3 (public kind): a short suffix after a hit ignores the restored state."""
    b = bench(kv_cache_memory_bytes=2**25)
    mark = (Boundary(37, "message_end"),)
    turn = ((STEM[37] + 1) % 97,)
    b.oracle.after(STEM[:37] + turn + STEM[90:159])
    for suffix in range(1, 71):
        prompt = STEM[:37] + turn + STEM[90 : 90 + suffix - 1]
        b.run(f"first{suffix}", STEM[:38], 1, boundaries=mark, salt=f"{suffix}")
        assert b.run(f"s{suffix}", prompt, 1, salt=f"{suffix}").usage.cached_tokens == 37


def test_without_the_state_the_kv_alone_is_no_hit(bench: Callable[..., Bench]) -> None:
    """13 (public kind): attention hits, the recurrence starts from an arbitrary slot."""
    b = bench()
    b.run("first", STEM[:50], boundaries=(Boundary(20, "message_end"),))
    for tree, node in b.engine.store.checkpoints():
        if node.end > 20:
            b.engine.store._drop(tree, node)
    usage = b.run("second", STEM[:50]).usage
    assert usage.cached_tokens == 20
    assert usage.recomputed["evicted"] == 29


def test_branch_is_captured_when_seen_and_hit_exactly(bench: Callable[..., Bench]) -> None:
    """21 (public kind): a shared prefix never hits, because the only checkpoint lies in the unique tail."""
    b = bench()
    tails = [(90 + n, 3, 5, 7) for n in range(4)]
    cached = [b.run(f"r{n}", STEM[:33] + tail, 2).usage for n, tail in enumerate(tails)]
    assert [usage.cached_tokens for usage in cached] == [0, 0, 33, 33]
    assert cached[1].recomputed == {"no_checkpoint": 33}


def test_twenty_short_turns_never_recompute_an_earlier_one(bench: Callable[..., Bench]) -> None:
    """24 (public kind): short turns never get a checkpoint."""
    b = bench(kv_cache_memory_bytes=2**25)
    history: tuple[int, ...] = ()
    fed = 0
    for turn in range(20):
        history += STEM[turn * 5 : turn * 5 + 10]
        b.submit(f"t{turn}", history, 4, boundaries=(Boundary(len(history), "message_end"),))
        while b.engine.step():
            pass
        assert b.last[f"t{turn}"].usage.cached_tokens == fed
        history += tuple(b.got[f"t{turn}"])
        fed = len(history) - 1
    b.oracle.after(history[:-1])
    b.check()


def test_editing_the_last_message_resumes_before_it(bench: Callable[..., Bench]) -> None:
    """25 (public kind): editing or regenerating the last message reprocesses everything."""
    b = bench()
    ends = (Boundary(20, "message_end"), Boundary(40, "message_end"), Boundary(55, "message_end"))
    b.run("first", STEM[:55], boundaries=ends)
    edited = STEM[:40] + (1, 2, 3) + STEM[45:60]
    assert b.run("edited", edited, boundaries=ends[:2]).usage.cached_tokens == 40


# --- 4. Position honesty ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [4, 7, 64])
def test_every_checkpoint_is_of_the_position_that_it_claims(bench: Callable[..., Bench], budget: int) -> None:
    """1 (public kind): a checkpoint labelled one token off, because a scheduler's counter ran ahead of the kernel."""
    b = bench(max_num_batched_tokens=budget, prefix_cache_retention_interval=4, kv_cache_memory_bytes=2**24)
    b.run("r", STEM[:71], 5)
    positions = {node.end for _, node in b.checkpoints()}
    assert positions == {*range(4, 70, 4), 70, 75}


# --- 5. Identity before use, 6. Wrong is a miss ----------------------------------------------------------------------------


def test_a_state_of_something_else_is_a_counted_miss_and_the_answer_stays_right(bench: Callable[..., Bench]) -> None:
    for fault in ("position", "fingerprint", "tag", "never_written"):
        b = bench()
        b.run("first", STEM[:40])
        for _, node in b.engine.store.checkpoints():
            checkpoint = node.checkpoint
            assert checkpoint is not None
            tag = b.engine.store.arena.tag(checkpoint.handle)
            assert tag is not None
            match fault:
                case "position":
                    tag.position -= 1
                case "fingerprint":
                    checkpoint.fingerprint = bytes(16)
                case "tag":
                    b.engine.store.arena.write_tag(checkpoint.handle, Tag(tag.owner, tag.position, bytes(16)))
                case _:
                    b.engine.store.arena._state(checkpoint.handle).tag = None
        usage = b.run("second", STEM[:40]).usage
        assert usage.cached_tokens == 0
        assert sum(b.engine.stats().verification_failures.values()) > 0


def test_tenants_do_not_share(bench: Callable[..., Bench]) -> None:
    b = bench()
    b.run("a", STEM[:40], salt="one")
    assert b.run("b", STEM[:40], salt="two").usage.cached_tokens == 0
    assert b.run("c", STEM[:40], salt="one").usage.cached_tokens == 39


def test_a_fresh_sequence_starts_from_zeros_whoever_had_its_slot(bench: Callable[..., Bench]) -> None:
    """6 (public kind): the first answer depends on whoever used the slot before."""
    b = bench(enable_prefix_caching=False, max_num_seqs=1)
    for number in range(4):
        assert b.run(f"r{number}", STEM[number : number + 25]).usage.cached_tokens == 0


def test_a_state_that_nobody_wrote_is_never_published(bench: Callable[..., Bench]) -> None:
    """15 (public kind): all-zero or null states published under a valid key."""
    b = bench()
    b.submit("r", STEM[:30], 4)
    b.engine.step()
    sequence, store = b.engine.scheduler.running[0], b.engine.store
    handle = store.arena.take_state()
    assert not store.publish(handle, "r", sequence.tokens, sequence.chain, sequence.blocks, "branch")
    other = store.arena.take_state()
    store.arena.write_tag(other, Tag("somebody else", 10))
    assert not store.publish(other, "r", sequence.tokens, sequence.chain, sequence.blocks, "branch")
    assert store.counts.failures == {"publish:never_written": 1, "publish:owner": 1}
    b.finish()


def test_a_published_checkpoint_never_changes_while_others_run_on(bench: Callable[..., Bench]) -> None:
    """2 (public kind): a snapshot raced with the next chunk."""
    b = bench(max_num_batched_tokens=16)
    b.run("first", STEM[:40], boundaries=(Boundary(25, "message_end"),))
    memory, arena = b.engine.parts.runner.pools.memory, b.engine.store.arena
    before = {tokens: states_at(memory, arena.state_page(n.checkpoint.handle)) for tokens, n in b.checkpoints()}  # type: ignore[union-attr]
    for number in range(4):
        b.submit(f"r{number}", STEM[: 25 + number] + (number,) * 9, 6)
    b.finish()
    for tokens, node in b.checkpoints():
        if tokens in before:
            now = states_at(memory, arena.state_page(node.checkpoint.handle))  # type: ignore[union-attr]
            assert worst_error(now, before[tokens]) == 0.0
