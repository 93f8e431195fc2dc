"""The demo as users run it, and its failures."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from milepost import demo
from milepost.demo import CONVERSATIONS, DIRECTORY, Answered
from milepost.errors import MilepostError

NUMBERS = dict(line.split(": ") for line in DIRECTORY.splitlines()[1:])
POOLS = {
    "budget_bytes": 100, "free_bytes": 70, "slots_used": 0, "slots_total": 16, "slot_bytes": 10, "checkpoints": 1,
    "checkpoint_bytes": 10, "blocks_used": 0, "blocks_cached": 4, "block_bytes": 5, "block_size": 16,
}  # fmt: skip


def test_directory_is_one_that_the_clerk_can_read() -> None:
    assert DIRECTORY.splitlines()[0] == "Directory:"
    assert len(NUMBERS) == len(set(NUMBERS.values())) == len(DIRECTORY.splitlines()) - 1 == 32
    assert all(number.isdigit() and 3 <= len(number) <= 6 for number in NUMBERS.values())
    asked = [name for conversation in CONVERSATIONS for name, _ in conversation]
    assert len(asked) == len(set(asked)) == 9
    assert len([name for name in asked if name not in NUMBERS]) == 1


def test_whole_demo_with_a_real_server_and_client(capsys: pytest.CaptureFixture[str]) -> None:
    assert demo.main(["--json"]) == 0
    out, _ = capsys.readouterr()
    [line] = out.splitlines()
    document = json.loads(line)
    assert document["ok"] is True and document["audit"] == []
    rows = document["rows"]
    assert len(rows) == document["asked"] == 9
    assert document["right"] == sum(row["answer"] == row["expected"] for row in rows)
    directory_end = len(DIRECTORY) + 2  # one token a byte, one before it and one after
    assert rows[0]["cached_tokens"] == 0
    for before, row in pairwise(rows):
        again = row["conversation"] == before["conversation"]
        assert row["cached_tokens"] >= (before["prompt_tokens"] if again else directory_end)
        assert row["cached_tokens"] < row["prompt_tokens"] and row["ttft_s"] > 0
    assert document["pools"]["slots_used"] == 0 and document["pools"]["checkpoints"] > 0


def test_missing_client_is_said_before_a_server_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "openai", None)
    monkeypatch.setattr(demo, "serving", lambda model: pytest.fail("a server was started"))
    assert demo.main([]) == 1
    assert capsys.readouterr().err == (
        "milepost demo: the openai client isn't installed; run: pip install 'milepost[demo]'\n"
    )


def test_server_that_does_not_start_is_named_with_its_last_words() -> None:
    starts = demo.serving("no-such-model")
    with pytest.raises(MilepostError, match=r"the server didn't start: milepost: .*no-such-model"), starts:
        pass


def test_server_that_ends_badly_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    script = "import sys, time; print('milepost: serving at http://there', flush=True); time.sleep(60)"
    monkeypatch.setattr(subprocess, "Popen", _instead([sys.executable, "-c", script], subprocess.Popen))
    with pytest.raises(MilepostError, match="the server ended with status -15"), demo.serving("clerk") as address:
        assert address == "http://there"


def _instead(command: list[str], real: Any) -> Any:
    return lambda _, **settings: real(command, **settings)


def test_bytes_that_do_not_add_up_are_faults() -> None:
    info: dict[str, Any] = {"pools": POOLS, "audit": []}
    assert demo.faults_of(info) == []
    found = demo.faults_of({"pools": {**POOLS, "free_bytes": 69}, "audit": [{"place": "pages", "message": "one is lost"}]})
    assert found == ["pages: one is lost", "pools: 99 bytes are held or free, the budget is 100"]
    held = {**POOLS, "slots_used": 1, "free_bytes": 60}
    assert demo.faults_of({"pools": held, "audit": []}) == ["pools: nothing runs, yet 1 slots and 0 blocks are in use"]


def test_table_shows_right_wrong_and_the_audit(capsys: pytest.CaptureFixture[str]) -> None:
    answers = [Answered(1, "A?", "1", "1", True, 10, 0, 0.5), Answered(2, "B?", "[2]", "3", False, 12, 9, 0.01)]
    console = Console(width=120)
    demo.show(answers, {"pools": POOLS, "audit": []}, [], console)
    out = capsys.readouterr().out
    assert "1 of 2 answers right; 9 of 22 prompt tokens were not computed again" in out
    assert "wrong ([2])" in out and "10.0 ms" in out
    assert "audit: every byte accounted for (100 bytes)" in out
    demo.show(answers, {"pools": POOLS, "audit": []}, ["pages: one is lost"], console)
    out = capsys.readouterr().out
    assert "pages: one is lost" in out and "accounted for" not in out
