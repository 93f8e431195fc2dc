"""`milepost bench planners`: reading what planners say, factors, the table. Nothing is installed and nobody is asked here.

The recorded answers are figures of kvfit 0.3.0, ridgepoint 0.1.2, vramscout 0.7.0 and vllm-sr-sim 0.1.0.dev20260713123629.
"""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from milepost.bench.planners import report
from milepost.bench.planners.answers import CONTEXTS, PLANNERS, QUANTITIES, factor, in_words, quantities, rows_of
from milepost.bench.planners.ask import ASK
from milepost.bench.planners.environment import answer_of, python_of
from milepost.cli import main
from milepost.errors import ConfigError
from milepost.plan.builtin import path_of


def _at(name: str, values: tuple[float, ...], **others: float) -> dict[str, Any]:
    """One planner's form of an answer at each context: `name` is a path with dots."""
    found = {}
    for context, value in zip(CONTEXTS, values, strict=True):
        outer, _, inner = name.partition(".")
        found[str(context)] = {outer: {inner: value, **others} if inner else value}
    return found


_OTHERS = {"Model weights / rank": 8.85, "CUDA / runtime": 0.75, "Prefill scratch": 0.19, "Safety reserve": 4.0}
RECORDED: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "kvfit": (  # Nemotron-H-8B
        _at("bytes_per_sequence", (118915072.0, 135692288.0, 236355584.0, 2249621504.0)),
        (16384, 102137856, 236355584, 2249621504),
    ),
    "ridgepoint": (  # Nemotron-H-8B
        _at("capacity.bytes_per_seq", (218103808, 436207616, 1744830464, 27917287424)),
        (212992, 0, 1744830464, 27917287424),
    ),
    "vramscout": (  # RecurrentGemma-2b
        _at("parts_gib.KV cache", (0.025390625, 0.05078125, 0.203125, 3.25), **_OTHERS),
        (26624, 0, 218103808, 3489660928),
    ),
    "vllm-sr-sim": (_at("kv_bytes_per_token", (34944,) * 4), (34944, 0, 286261248, 4580179968)),  # Nemotron-3-Nano
}
"""Raw answers and the four quantities in them."""

EXPECTED = {
    "nemotron-h-8b": (16384, 102137856),
    "nemotron-3-nano-30b-a3b": (6144, 49082368),
    "jamba-v0.1": (16384, 16056320),
    "zamba2-2.7b": (184320, 72479232),
    "bamba-9b": (12288, 123104768),
    "granite-4.0-h-tiny": (8192, 57341952),
    "falcon-h1-7b": (45056, 139358208),
    "lfm2-1.2b": (12288, 81920),
    "qwen3-next-80b-a3b": (24576, 77266944),
    "recurrentgemma-2b": (8192, 460800),
}
"""KV of a token and state of a sequence, computed elsewhere from published values."""


@pytest.mark.parametrize("planner", PLANNERS)
def test_recorded_answers_are_read(planner: str) -> None:
    at, expected = RECORDED[planner]
    assert tuple(quantities(planner, at)[name] for name in QUANTITIES) == expected


def test_a_state_is_what_does_not_grow_whatever_its_part_is_called() -> None:
    at = RECORDED["vramscout"][0]
    for said in at.values():
        said["parts_gib"] = said["parts_gib"] | {"Mamba-2 recurrent state": 0.0955810546875}
    said = quantities("vramscout", at)
    assert (said["kv_bytes_per_token"], said["state_bytes_per_sequence"]) == (26624, 102629376)


def test_every_planner_can_be_asked_and_read() -> None:
    assert set(ASK) == set(PLANNERS) == set(RECORDED)


@pytest.mark.parametrize(
    ("said", "right", "ratio", "words"),
    [
        (16384, 16384, 1.0, "exact"),
        (212992, 16384, 13.0, "13x"),
        (2048, 8192, 0.25, "1/4"),
        (0, 100, 0.0, "not seen"),
        (102629376, 102137856, 1.0048, "+0.5%"),
        (97, 100, 0.97, "-3.0%"),
        (None, 100, None, "–"),
        (100, None, None, "–"),
        (100, 0, None, "–"),
    ],
)
def test_factors(said: int | None, right: int | None, ratio: float | None, words: str) -> None:
    assert factor(said, right) == ratio
    assert in_words(ratio) == words


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ({"version": "1", "why": "UnsupportedArchitecture: no"}, "UnsupportedArchitecture: no"),
        ({"version": "1", "at": {}}, "its answer can't be read: KeyError: '1024'"),
        ({"version": "1"}, "its answer can't be read: KeyError: 'at'"),
        ({"version": "1", "at": _at("parts_gib.KV cache", (1, 2, 3, 4))}, "its answer can't be read: KeyError: 'Model weights"),
    ],
)
def test_what_can_not_be_read_is_a_row_that_says_why(answer: dict[str, Any], why: str) -> None:
    rows = rows_of("m", "vramscout", answer, dict.fromkeys(QUANTITIES, 7))
    assert [row.quantity for row in rows] == list(QUANTITIES)
    for row in rows:
        assert (row.said, row.right, row.factor, row.version) == (None, 7, None, "1")
        assert row.why is not None and row.why.startswith(why)


def test_a_model_that_we_do_not_serve_has_no_factor() -> None:
    rows = rows_of("m", "kvfit", {"version": "1", "at": RECORDED["kvfit"][0]}, "LlamaForCausalLM is not supported")
    assert rows[0].said == 16384 and rows[0].factor is None
    assert rows[0].why == "no right value: LlamaForCausalLM is not supported"


def test_a_planner_that_is_not_there_answers_why(tmp_path: Path) -> None:
    """The real script, run by this Python: what it can't find, what it doesn't know and what can't be run."""
    config = path_of("lfm2-1.2b")
    absent = answer_of(Path(sys.executable), "vllm-sr-sim", config, CONTEXTS)
    assert absent["version"] is None and absent["why"].startswith("PackageNotFoundError")
    assert answer_of(tmp_path / "python", "kvfit", config, CONTEXTS)["why"].startswith("can't be run: ")


def _stub(place: Path, script: str) -> Path:
    place.parent.mkdir(parents=True)
    place.write_text(f"#!/bin/sh\n{script}\n")
    place.chmod(0o755)
    return place


@pytest.mark.skipif(sys.platform == "win32", reason="stubs are shell scripts")
@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("echo Segmentation >&2; exit 139", "exit status 139: Segmentation"),
        ("exit 3", "exit status 3: no answer"),
        ("echo oops", "exit status 0: no answer"),
        ("echo 7", "its answer is a int"),
    ],
)
def test_a_planner_that_crashes_answers_why(tmp_path: Path, script: str, why: str) -> None:
    assert answer_of(_stub(tmp_path / "bin" / "python", script), "kvfit", path_of("lfm2-1.2b"), CONTEXTS) == {"why": why}


@pytest.mark.skipif(sys.platform == "win32", reason="stubs are shell scripts")
def test_planners_that_can_not_be_installed_do_not_end_the_bench(tmp_path: Path) -> None:
    _stub(tmp_path / "kvfit" / "bin" / "python", "echo 'No matching distribution' >&2; exit 1")
    _stub(tmp_path / "vllm-sr-sim" / "bin" / "python", f"""case "$1" in -m) ;; *) echo '{_answer("vllm-sr-sim")}' ;; esac""")
    rows = report.measure(("kvfit", "vllm-sr-sim"), ("lfm2-1.2b", "nemotron-h-8b"), tmp_path)
    assert [(row.model, row.planner) for row in rows[::4]] == [
        (model, planner) for model in ("lfm2-1.2b", "nemotron-h-8b") for planner in ("kvfit", "vllm-sr-sim")
    ]
    failed = rows[:4]
    assert {row.why for row in failed} == {"pip install kvfit failed: No matching distribution"}
    assert [row.right for row in failed[:2]] == list(EXPECTED["lfm2-1.2b"])
    assert [row.said for row in rows[4:8]] == list(RECORDED["vllm-sr-sim"][1])
    assert rows[4].factor == round(34944 / 12288, 4)


def _answer(planner: str) -> str:
    return json.dumps({"version": "9", "at": RECORDED[planner][0]})


@pytest.mark.skipif(sys.platform == "win32", reason="stubs are shell scripts")
def test_an_environment_is_used_by_its_own_path(tmp_path: Path) -> None:
    """A virtual environment's Python is a link: resolved, it would be the Python outside."""
    real = _stub(tmp_path / "outside" / "python", "exit 0")
    link = tmp_path / "kvfit" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    assert python_of("kvfit", tmp_path) == link


@pytest.mark.parametrize("model", report.MODELS)
def test_right_values_equal_figures_computed_elsewhere(model: str, tmp_path: Path) -> None:
    kv, state = EXPECTED[model]
    kept = (2048, 2048) if model == "recurrentgemma-2b" else (8192, 131072)
    (tmp_path / "config.json").write_bytes(path_of(model).read_bytes())
    expected = (kv, state, *(state + kv * tokens for tokens in kept))
    assert report.right_of(tmp_path) == dict(zip(QUANTITIES, expected, strict=True))


def _rows() -> list[Any]:
    right = dict(zip(QUANTITIES, (16384, 102137856, 236355584, 2249621504), strict=True))
    refusal = {"version": "0.7.0", "why": "UnsupportedArchitecture: it is not modeled; relevant fields: a, b"}
    return [
        *rows_of("nemotron-h-8b", "ridgepoint", {"version": "0.1.2", "at": RECORDED["ridgepoint"][0]}, right),
        *rows_of("nemotron-h-8b", "vramscout", refusal, right),
    ]


def test_the_table_shows_right_values_factors_and_reasons() -> None:
    console = Console(width=150, record=True, file=io.StringIO())
    console.print(report.table_of(_rows()))
    text = console.export_text()
    for part in ("right value", "16.00 KiB", "208.00 KiB 13x", "not seen", "7.38x", "it is not modeled", "ridgepoint 0.1.2"):
        assert part in text
    assert "relevant fields" not in text and "UnsupportedArchitecture" not in text


def test_a_document_gets_the_table_between_its_markers(tmp_path: Path) -> None:
    document = tmp_path / "planners.md"
    document.write_text(f"before\n{report.BEGIN}\nold\n{report.END}\nafter\n")
    report.write(document, _rows())
    text = document.read_text()
    assert text.startswith(f"before\n{report.BEGIN}\n| model |") and text.endswith(f"{report.END}\nafter\n")
    assert "| nemotron-h-8b | ridgepoint | 208.00 KiB 13x | not seen |" in text and "old" not in text
    report.write(document, _rows())
    assert document.read_text() == text
    document.write_text("no markers")
    with pytest.raises(ConfigError, match="it has no lines"):
        report.write(document, _rows())


def test_json_is_the_last_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "measure", lambda planners, models: _rows())
    assert main(["bench", "planners", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert set(rows[0]) >= {"model", "planner", "version", "quantity", "said", "right", "factor"}
    assert (rows[0]["said"], rows[0]["right"], rows[0]["factor"]) == (212992, 16384, 13.0)
    assert rows[4]["said"] is None and rows[4]["why"].startswith("UnsupportedArchitecture: ")


def test_a_bench_without_one_answer_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "measure", lambda planners, models: _rows()[4:])
    assert main(["bench", "planners"]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["planners", "--planner", "kvfti"], "--planner kvfti is unknown (known: kvfit, ridgepoint, vramscout, vllm-sr-sim)"),
        (["planners", "somewhere"], "unrecognized arguments: somewhere"),
        (["planners", "--family", "jamba"], "unrecognized arguments: --family jamba"),
        (["prefix", "--planner", "kvfit"], "unrecognized arguments: --planner"),
    ],
)
def test_wrong_flags_are_refused(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        assert main(["bench", *flags]) == 2
    except SystemExit as stopped:
        assert stopped.code == 2
    assert message in capsys.readouterr().err
