"""`complete` and `chat` over a fake engine, `serve` with the embedded model in a process of its own."""

from __future__ import annotations

import io
import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from milepost.cli import main, verbs
from milepost.llm import LLM
from tests.server.fake import FakeEngine, make_text


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> FakeEngine:
    made = FakeEngine(make_text())
    monkeypatch.setattr(verbs, "_llm", lambda arguments: LLM.over(made, made.text))
    return made


def test_complete_prints_the_text(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "clerk", "say", "--stop", "wö"]) == 0
    assert capsys.readouterr().out == "hello \n"
    assert engine.requests[0].params.max_tokens == 64


def test_complete_as_json(engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("from stdin"))
    assert main(["complete", "clerk", "-", "--json", "--max-tokens", "5", "--temperature", "0", "--top-k", "7"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["text"], answer["finish_reason"], answer["prompt"]) == ("hello", "length", "from stdin")
    assert answer["usage"]["cached_tokens"] == 4
    assert (engine.requests[0].params.greedy, engine.requests[0].params.top_k) == (True, 7)


def test_chat_goes_on_turn_by_turn(
    engine: FakeEngine, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    system = tmp_path / "system.txt"
    system.write_text("be kind")
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo"))
    engine.max_model_len = 1000
    assert main(["chat", "clerk", "--system", str(system), "--max-tokens", "100"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello wörld\n" * 2
    assert err.count("prompt tokens cached") == 2 and "1 again (last_token)" in err
    second = engine.text.tokenizer.decode(engine.requests[1].prompt)
    assert "be kind" in second and second.count("hello wörld") == 1 and "one" in second and "two" in second
    assert len(engine.requests[1].boundaries) == 4


def test_an_engine_that_fails_gives_one_line(engine: FakeEngine, capsys: pytest.CaptureFixture[str]) -> None:
    engine.broken = True
    assert main(["complete", "clerk", "x"]) == 2
    assert capsys.readouterr().err == "milepost: out of luck\n"


def test_serve_from_start_to_end() -> None:
    command = [sys.executable, "-m", "milepost", "serve", "--port", "0", "--kv-cache-memory-bytes", "16MiB"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        address = process.stdout.readline().removeprefix("milepost: serving at ").strip()
        try:
            assert httpx.get(f"{address}/health").status_code == 200
            answer = httpx.post(f"{address}/v1/completions", json={"model": "clerk", "prompt": "a", "max_tokens": 2})
            assert answer.json()["usage"]["prompt_tokens"] == 1
        finally:
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
    assert process.returncode == 0
    assert "Traceback" not in errors


def test_doctor_reports(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "clerk", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)
