"""The engine as its clients see it: threads, aborts, limits, bad requests, faults."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from milepost.config import EngineConfig
from milepost.engine.loop import Engine
from milepost.errors import ConfigError, Overloaded, RequestError
from milepost.request import Delta, Request, SamplingParams
from tests.checkpoints import make_nemotron_h
from tests.fakes import VOCAB, answer_of, harness
from tests.laws.oracle import Oracle


def test_clients_of_many_threads_are_all_served_and_nothing_is_left() -> None:
    h = harness(max_num_seqs=3)
    h.engine.start()
    done = {name: threading.Event() for name in range(12)}
    got: dict[int, list[int]] = {name: [] for name in done}

    def client(name: int) -> None:
        def sink(delta: Delta) -> None:
            got[name].extend(delta.tokens)
            if delta.finish:
                done[name].set()

        params = SamplingParams(max_tokens=7, temperature=0.0)
        h.engine.submit(Request(f"{name}", (name, 1, 2, 3), params), sink)
        if name % 4 == 3:
            h.engine.abort(f"{name}")

    threads = [threading.Thread(target=client, args=(name,)) for name in done]
    for thread in threads:
        thread.start()
    assert all(event.wait(30) for event in done.values())
    for name in done:
        whole = answer_of([name, 1, 2, 3], 7)
        assert got[name] == (whole if name % 4 != 3 else whole[: len(got[name])])
    assert h.engine.healthy and h.engine.audit() == []
    assert h.engine.stats().pools.slots_used == 0
    h.engine.stop()
    assert not h.engine.healthy
    assert h.engine.stats().running == 0, "a stopped engine still answers"


def test_stopping_ends_every_request() -> None:
    h = harness()
    h.engine.start()
    ended = threading.Event()
    params = SamplingParams(max_tokens=150, temperature=0.0)
    h.engine.submit(Request("r", (1, 2), params), lambda delta: ended.set() if delta.finish == "abort" else None)
    h.engine.stop()
    assert ended.is_set() or h.engine.stats().finished["length"] == 1
    assert h.engine.audit() == []


def test_abort_while_waiting_running_and_unknown() -> None:
    h = harness(max_num_seqs=1)
    h.submit("runs", [1, 2, 3], 50)
    h.submit("waits", [4, 5, 6], 50)
    h.engine.step()
    h.engine.abort("waits")
    h.engine.abort("runs")
    h.engine.abort("never was")
    assert h.last["waits"].finish == h.last["runs"].finish == "abort"
    assert h.engine.idle and h.engine.audit() == []


def test_bad_requests_are_refused_by_name() -> None:
    h = harness(max_num_queued_reqs=2)
    cases: list[tuple[tuple[int, ...], dict[str, object], str]] = [
        ((), {}, "prompt"),
        ((1,) * 200, {}, "prompt"),
        ((1,) * 190, {"max_tokens": 11}, "max_tokens"),
        ((1, VOCAB), {}, "prompt"),
        ((1,), {"allowed_token_ids": (VOCAB,)}, "allowed_token_ids"),
        ((1,), {"logit_bias": {-1: 1.0}}, "logit_bias"),
        ((1,), {"stop_token_ids": (VOCAB,)}, "stop_token_ids"),
    ]
    for prompt, params, name in cases:
        with pytest.raises(RequestError) as refused:
            h.engine.submit(Request("r", prompt, SamplingParams(**params)), lambda delta: None)  # type: ignore[arg-type]
        assert refused.value.param == name
    for params, name in (({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_k": -2}, "top_k"),
                         ({"min_p": 1.5}, "min_p"), ({"max_tokens": 0}, "max_tokens"), ({"stop": ("",)}, "stop"),
                         ({"temperature": float("nan")}, "temperature"), ({"logprobs": -1}, "logprobs")):  # fmt: skip
        with pytest.raises(RequestError) as refused:
            SamplingParams(**params)  # type: ignore[arg-type]
        assert refused.value.param == name
    h.submit("a", [1], 5)
    h.submit("b", [2], 5)
    with pytest.raises(Overloaded, match="max_num_queued_reqs"):
        h.submit("c", [3], 5)
    h.finish()
    assert h.engine.audit() == []


def test_the_longest_request_that_fits_is_served_to_the_last_token() -> None:
    h = harness()
    assert h.run("r", [3] * 190, 10).finish == "length"
    h.submit("open", [3] * 150, 50)
    h.finish()
    assert len(h.got["open"]) == 50


def test_one_id_is_one_request() -> None:
    h = harness()
    h.submit("r", [1, 2], 9)
    said: list[Delta] = []
    h.engine.submit(Request("r", (1, 2), SamplingParams()), said.append)
    assert said[0].finish == "error" and said[0].error is not None and "in use" in said[0].error
    h.finish()
    assert h.got["r"] == answer_of([1, 2], 9)


def test_a_failed_step_ends_its_requests_and_the_engine_goes_on() -> None:
    h = harness()
    h.submit("a", [1, 2, 3], 5)
    h.engine.step()
    h.model.fail_next = True
    h.engine.step()
    assert h.last["a"].finish == "error"
    assert h.engine.audit() == []
    h.run("b", [1, 2, 3], 5)


def test_a_bug_in_the_loop_leaves_no_client_waiting() -> None:
    h = harness()
    ended = threading.Event()

    def broken() -> None:
        raise ZeroDivisionError

    h.engine.scheduler.schedule = broken  # type: ignore[method-assign,assignment]
    h.engine.start()
    h.engine.submit(Request("r", (1, 2), SamplingParams()), lambda delta: ended.set() if delta.finish == "error" else None)
    assert ended.wait(10)
    assert not h.engine.healthy
    with pytest.raises(Overloaded, match="stopped"):
        h.submit("later", [1], 1)


@pytest.mark.parametrize("pattern", ["MM", "*-*", "M", "*"])
def test_a_model_without_kv_or_without_a_state_runs(tmp_path: Path, pattern: str) -> None:
    from tests.laws.oracle import Bench

    path = make_nemotron_h(tmp_path / "m", hybrid_override_pattern=pattern, max_position_embeddings=128)
    bench = Bench(path, Oracle(path), max_num_batched_tokens=9, kv_cache_memory_bytes=2**20)
    for number in range(6):
        bench.submit(f"r{number}", tuple(range(2, 30 + number % 3)), 5)
    bench.finish()
    assert bench.run("again", tuple(range(2, 30)), 3).usage.cached_tokens == 27
    bench.engine.reset_prefix_cache()
    pools = bench.engine.stats().pools
    assert pools.free_bytes == pools.budget_bytes


def test_stats_do_not_wait_for_a_long_step() -> None:
    h = harness()
    h.run("before", [1, 2, 3], 4)
    running, go_on = threading.Event(), threading.Event()
    forward = h.model.forward

    def slow(*arguments: object) -> object:
        running.set()
        go_on.wait(30)
        return forward(*arguments)  # type: ignore[arg-type]

    h.model.forward = slow  # type: ignore[method-assign,assignment]
    h.engine.start()
    h.engine.submit(Request("long", (4, 5), SamplingParams(max_tokens=1)), lambda delta: None)
    assert running.wait(10)
    assert h.engine.stats().generation_tokens in (0, 4), "what held before the step"
    assert not go_on.is_set()
    go_on.set()
    h.engine.stop()
    assert h.engine.stats().generation_tokens == 5


def test_a_sink_that_raises_hurts_nobody_else() -> None:
    h = harness()

    def broken(delta: Delta) -> None:
        raise OSError("the client is gone")

    h.engine.submit(Request("bad", (5, 6), SamplingParams(max_tokens=3, temperature=0.0)), broken)
    h.run("good", [1, 2, 3], 5)
    assert h.engine.audit() == []


def test_priority_goes_first_and_age_breaks_ties() -> None:
    h = harness(max_num_seqs=1, scheduling_policy="priority")
    order: list[str] = []
    for name, priority in (("first", 5), ("later", 5), ("urgent", 0)):
        def sink(delta: Delta, name: str = name) -> None:
            if delta.finish:
                order.append(name)

        h.engine.submit(Request(name, (1, 2), SamplingParams(max_tokens=2), priority=priority), sink)
    while h.engine.step():
        pass
    assert order == ["urgent", "first", "later"]


def test_fcfs_ignores_priority() -> None:
    h = harness(max_num_seqs=1)
    order: list[str] = []
    for name, priority in (("first", 5), ("urgent", 0)):
        def sink(delta: Delta, name: str = name) -> None:
            if delta.finish:
                order.append(name)

        h.engine.submit(Request(name, (1, 2), SamplingParams(max_tokens=2), priority=priority), sink)
    while h.engine.step():
        pass
    assert order == ["first", "urgent"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_nemotron_h(tmp_path_factory.mktemp("engine") / "tiny", max_position_embeddings=128)


def test_prompt_logprobs_are_those_of_an_uncut_run_whatever_was_cached(tiny: Path) -> None:
    oracle = Oracle(tiny)
    engine = Engine(EngineConfig(model=str(tiny), dtype="float64", max_num_batched_tokens=16, kv_cache_memory_bytes=2**22))
    prompt = tuple(range(3, 43))
    said: dict[str, Delta] = {}

    def run(name: str, **params: object) -> None:
        def sink(delta: Delta) -> None:
            if delta.prompt_logprobs is not None or delta.finish:
                said.setdefault(name, delta)

        engine.submit(Request(name, prompt, SamplingParams(max_tokens=2, temperature=0.0, **params)), sink)  # type: ignore[arg-type]
        while engine.step():
            pass

    run("warm")
    run("scored", prompt_logprobs=2)
    scores = said["scored"].prompt_logprobs
    assert scores is not None and scores[0] is None and len(scores) == len(prompt)
    assert said["scored"].usage.cached_tokens == 0
    assert said["scored"].usage.recomputed == {"prompt_logprobs": 39, "last_token": 1}
    for position, score in enumerate(scores[1:], start=1):
        expected = oracle.after(prompt[:position])[1].float().log_softmax(-1)
        assert score is not None and score.token == prompt[position]
        assert abs(score.logprob - float(expected[prompt[position]])) < 1e-5
        assert score.top[0][0] == int(expected.argmax())


def test_in_fp32_checkpoints_equal_the_reference_within_rounding(tiny: Path) -> None:
    from tests.laws.oracle import Bench

    bench = Bench(tiny, Oracle(tiny, dtype="float32"), prefix_cache_retention_interval=9, max_num_batched_tokens=23)
    for number in range(3):
        bench.submit(f"r{number}", tuple(range(2 + number, 60 + number)), 1)
    while bench.engine.step():
        pass
    bench.check(tolerance=1e-4)


def test_the_reference_backend_serves_too_when_asked_for(tiny: Path) -> None:
    from tests.laws.oracle import Bench

    bench = Bench(tiny, Oracle(tiny), mamba_backend="reference", attention_backend="reference", max_num_batched_tokens=9)
    bench.run("a", tuple(range(2, 40)), 3)
    assert bench.run("b", tuple(range(2, 40)), 3).usage.cached_tokens == 37


def test_other_weights_give_other_fingerprints(tiny: Path, tmp_path: Path) -> None:
    """16, 17 (public kinds): right bytes under the wrong identity; two layouts of equal size read as one another."""
    other = make_nemotron_h(tmp_path / "other", seed=1, max_position_embeddings=128)
    roots = set()
    dtypes = {"dtype": "float64"}, {"mamba_ssm_cache_dtype": "bfloat16"}
    for path, settings in ((tiny, {}), (other, {}), (tiny, dtypes[0]), (tiny, dtypes[1])):
        engine = Engine(EngineConfig(model=str(path), kv_cache_memory_bytes=2**22, **settings))  # type: ignore[arg-type]
        roots.add(engine.store.chain("").root)
        roots.add(engine.store.chain("tenant").root)
    assert len(roots) == 8


def test_settings_that_cannot_work_are_refused_by_name(tiny: Path) -> None:
    for settings, field in (
        ({"max_model_len": 4096}, "max_model_len"),
        ({"mamba_backend": "fast"}, "mamba_backend"),
        ({"attention_backend": "fast"}, "attention_backend"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_batched_tokens": 2}, "max_num_batched_tokens"),
        ({"scheduling_policy": "random"}, "scheduling_policy"),
    ):
        with pytest.raises(ConfigError, match=field) as refused:
            Engine(EngineConfig(model=str(tiny), **settings))  # type: ignore[arg-type]
        assert refused.value.field == field
