"""Advice: what it says follows from the workload, and can be set."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from milepost.cli import main, parser
from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.plan.advice import Workload, read_trace, told
from milepost.plan.devices import device
from milepost.plan.plan import Plan, Question, make_plan

TRACES = Path(__file__).parents[3] / "shared" / "traces"


def plan(workload: Workload, model: str = "nemotron-h-8b") -> Plan:
    return make_plan(EngineConfig(model=model), Question(workload=workload, device=device("h100"), contexts=(1024, 8192)))


def flags(found: Plan) -> dict[str, str]:
    assert found.advice is not None
    return {each.flag: each.value for each in found.advice.settings}


def test_a_trace_is_read_and_what_it_shares_is_counted(tmp_path: Path) -> None:
    lines = [
        {"ts": 0.0, "in_len": 30, "out_len": 5, "segs": [[1, 10], [2, 20]]},
        {"ts": 1.0, "in_len": 40, "out_len": 7, "segs": [[1, 10], [2, 20], [3, 10]]},
        {"ts": 4.0, "in_len": 20, "out_len": 6, "segs": [[2, 20]]},
    ]
    plain, packed = tmp_path / "t.jsonl", tmp_path / "t.jsonl.gz"
    plain.write_text("\n".join(map(json.dumps, lines)))
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for file in (plain, packed):
        assert read_trace(file) == Workload(3, 30.0, 6.0, 47, 10.0, 0.75)
    for content, message in (("", "holds no requests"), ('{"ts": 1}', "line 1: KeyError"), ("{", "line 1")):
        plain.write_text(content)
        with pytest.raises(ConfigError, match=message) as refused:
            read_trace(plain)
        assert refused.value.field == "trace"
    with pytest.raises(ConfigError, match="can't be read"):
        read_trace(tmp_path / "nowhere")


@pytest.mark.skipif(not TRACES.exists(), reason="the traces are not part of a clone")
def test_a_public_trace_shares_what_its_bounds_say() -> None:
    found = read_trace(TRACES / "canon_agentic32k_200s.jsonl.gz")
    assert found.requests == 1280 and found.longest <= 32768 + 8192
    assert 0.85 < found.shared_tokens / found.prompt_tokens < 0.90, "88.5 % at best, 64-token pieces lose a little"


def test_settings_follow_the_workload() -> None:
    calm, busy = plan(told(2000, 200, 1500, 1.0)), plan(told(2000, 200, 1500, 40.0))
    assert int(flags(calm)["--max-num-seqs"]) < int(flags(busy)["--max-num-seqs"])
    assert flags(calm)["--max-model-len"] == "3072"
    assert busy.advice is not None and "requests a second" in busy.advice.settings[1].why
    assert "--no-enable-prefix-caching" in flags(plan(told(2000, 200, 0, 1.0)))
    assert "--prefix-cache-retention-interval" not in flags(calm), "a prompt shorter than the interval needs none"
    assert flags(plan(told(8000, 100, 7000, 1.0)))["--prefix-cache-retention-interval"] == "6240"
    low, high = plan(told(7000, 100, 0, 1.0)).advice.attention  # type: ignore[union-attr]
    assert 0 < low.prefill_flops < high.prefill_flops < 1 and 0 < low.decode_bytes < high.decode_bytes < 1


def test_what_is_advised_can_be_given_to_serve() -> None:
    for model in ("nemotron-h-8b", "lfm2-1.2b", "recurrentgemma-2b", "mamba2-2.7b"):
        advised = flags(plan(told(8000, 100, 7000, 1.0), model))
        given = [part for setting in advised.items() for part in setting if part]
        assert parser().parse_args(["serve", model, *given])


def test_the_command_advises_and_names_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    workload = ["--prompt-tokens", "4000", "--shared-prefix-tokens", "3000", "--rate", "2"]
    assert main(["plan", "nemotron-h-8b", "--device", "h100", *workload]) == 0
    shown = capsys.readouterr().out
    assert "Advice for prompts of 4,000 tokens, 3,000 of them" in shown and "--max-num-seqs" in shown
    assert main(["plan", "nemotron-h-8b", "--json", *workload]) == 0
    assert json.loads(capsys.readouterr().out)["advice"]["workload"]["rate"]["value"] == 2
    five = ["--prompt-tokens", "5"]
    wrongs = (["--prompt-tokens", "0"], [*five, "--shared-prefix-tokens", "6"], [*five, "--rate", "0"], ["--trace", "x"])
    for wrong in (*wrongs, [*five, "--trace", "x"]):
        assert main(["plan", "nemotron-h-8b", *wrong]) == 2
        assert capsys.readouterr().err.startswith("milepost: ")
