"""`milepost bench prefix` on a tiny model: the keys that others read, the expectations, the exit status."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from milepost.bench import prefix
from milepost.bench.checkpoint import checkpoint
from milepost.bench.drive import common
from milepost.bench.prefix import Workload
from milepost.bench.prefix_figures import Figures, Repeat, Row, Turn
from milepost.config import EngineConfig
from milepost.errors import ConfigError

SMALL = Workload(shared=(90, 130, 400), question=20, lengths=(1, 2, 3, 15, 16, 17, 33, 100), turns=6, turn_answer=7)


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


@pytest.fixture(scope="module")
def measured(parent: Path) -> tuple[Figures, dict[str, Any]]:
    config = EngineConfig(model=str(checkpoint("tiny", parent)))
    return prefix.run(config, SMALL, generated=True)


def test_second_question_of_a_chat_computes_only_the_question(measured: tuple[Figures, dict[str, Any]]) -> None:
    rows = [row for row in measured[0].rows if row.mode == "chat"]
    assert [(row.shared, row.request) for row in rows] == [(shared, n) for shared in SMALL.shared for n in (1, 2, 3)]
    for row in rows:
        assert row.prompt_tokens == row.shared + SMALL.question + 3
        assert row.cached_tokens in ((0,) if row.request == 1 else (row.shared, row.shared + 1))
        assert row.common_tokens == (0 if row.request == 1 else row.shared + 1)


def test_third_run_of_raw_tokens_resumes_where_the_prompts_part(measured: tuple[Figures, dict[str, Any]]) -> None:
    rows = [row for row in measured[0].rows if row.mode == "tokens"]
    assert [row.cached_tokens for row in rows if row.request == 3] == list(SMALL.shared)
    assert all(row.common_tokens == row.shared for row in rows if row.request > 1)


def test_identical_prompts_compute_their_last_token(measured: tuple[Figures, dict[str, Any]]) -> None:
    assert measured[0].identical == [Repeat(length, length - 1, same_answer=True) for length in SMALL.lengths]


def test_a_chat_feeds_nothing_twice(measured: tuple[Figures, dict[str, Any]]) -> None:
    turns = measured[0].chat_turns
    assert [turn.turn for turn in turns] == list(range(1, SMALL.turns + 1))
    assert all(turn.recomputed_earlier_tokens == 0 for turn in turns)
    fed = [turn.prompt_tokens + SMALL.turn_answer - 1 for turn in turns]
    assert [turn.cached_tokens for turn in turns] == [0, *fed[:-1]]


def test_nothing_is_violated(measured: tuple[Figures, dict[str, Any]]) -> None:
    assert measured[0].violations() == []


def test_without_a_prefix_cache_every_expectation_is_named(parent: Path) -> None:
    load = Workload(shared=(50,), question=10, lengths=(1, 20), turns=2, turn_answer=3)
    config = EngineConfig(model=str(checkpoint("tiny", parent)), enable_prefix_caching=False)
    figures, _ = prefix.run(config, load, generated=True)
    first, *rest = figures.violations()
    assert first == "chat, 50 shared tokens, request 2: cached_tokens=0, expected 50 to 51"
    assert [text.partition(":")[0] for text in rest] == [
        "chat, 50 shared tokens, request 3",
        "tokens, 50 shared tokens, request 3",
        "identical prompt of 20 tokens",
        "chat turn 2",
    ]
    assert figures.chat_turns[1].recomputed_earlier_tokens == figures.chat_turns[0].prompt_tokens + 2


def test_counters_that_disagree_are_a_violation() -> None:
    row = Row(10, "tokens", 3, 20, 10, 10, 10, 0.1, 0.5)
    assert Figures([row], [], []).violations() == []
    assert len(Figures([replace(row, computed_tokens=9)], [], []).violations()) == 1
    assert len(Figures([replace(row, cached_tokens=11, computed_tokens=9)], [], []).violations()) == 1
    assert len(Figures([], [Repeat(5, 3, True)], [Turn(1, 9, 3, 0), Turn(2, 9, 3, 4)]).violations()) == 2


def test_a_model_that_is_too_short_is_refused_by_name(parent: Path) -> None:
    config = EngineConfig(model=str(checkpoint("tiny", parent)), max_model_len=300)
    with pytest.raises(ConfigError, match="limit here is 300") as caught:
        prefix.run(config, SMALL, generated=True)
    assert caught.value.field == "max_model_len"


@pytest.mark.parametrize("named", [False, True])
def test_last_line_is_one_json_document(
    parent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, named: bool
) -> None:
    load = Workload(shared=(900,), question=8, lengths=(1, 9), turns=2, turn_answer=3)
    monkeypatch.setattr(prefix, "Workload", lambda: load)
    size = ["--size", "tiny", "--model-dir", str(parent)]
    given = argparse.Namespace(model=str(checkpoint("tiny", parent)), json=True, config=EngineConfig())
    assert prefix.main(given if named else [*size, "--json"]) == 0
    out, err = capsys.readouterr()
    document = json.loads(out.splitlines()[-1])
    assert document["ok"] is True and document["violations"] == [] and err == ""
    assert {"shared", "mode", "request", "prompt_tokens", "cached_tokens", "ttft_s", "ttft_ratio_to_first"} <= set(
        document["rows"][0]
    )
    assert document["rows"][0]["ttft_ratio_to_first"] == 1.0
    assert [(again["length"], again["cached_tokens"]) for again in document["identical"]] == [(1, 0), (9, 8)]
    assert set(document["chat_turns"][0]) == {"turn", "prompt_tokens", "cached_tokens", "recomputed_earlier_tokens"}
    assert "llama-server 448" in out and "not measured in this run" in out


def test_violations_reach_stderr_and_the_exit_status(
    parent: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prefix, "Workload", lambda: Workload(shared=(), lengths=(5,), turns=0))
    config = EngineConfig(enable_prefix_caching=False)
    given = argparse.Namespace(model="clerk", config=config, json=True, size="tiny", model_dir=str(parent))
    assert prefix.main(given) == 1
    out, err = capsys.readouterr()
    assert err == "milepost: bench prefix: identical prompt of 5 tokens: cached_tokens=0, expected 4\n"
    assert json.loads(out.splitlines()[-1])["ok"] is False


@pytest.mark.slow
def test_a_second_question_to_the_large_model_costs_a_fraction_of_the_first() -> None:
    load = Workload(shared=(1300,), lengths=(), turns=0, turn_system=1)
    figures, _ = prefix.run(EngineConfig(model=str(checkpoint("100m", prefix.CACHE))), load, generated=True)
    assert figures.violations() == []
    [second] = [row for row in figures.rows if row.mode == "chat" and row.request == 2]
    assert second.ttft_ratio_to_first < 0.5  # 67 of 1,367 tokens are computed


def test_common() -> None:
    assert [common((1, 2, 3), other) for other in ((), (1,), (1, 3), (1, 2, 3, 4))] == [0, 1, 1, 3]
