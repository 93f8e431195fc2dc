"""`milepost bench parity` on one tiny family: the keys that others read, its document, what makes its exit status 1."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from milepost.bench.parity import cases as data
from milepost.bench.parity import report
from milepost.bench.parity.compare import CAPTURES, compare, errors
from milepost.bench.parity.theirs import Theirs
from milepost.cli import main
from milepost.models import families

pytest.importorskip("transformers")

DOCUMENT = Path(__file__).parents[2] / "docs" / "models.md"
TINY = data.case("falcon_h1", "width-by-expansion")


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> data.Case:
    monkeypatch.setattr(report, "cases", lambda families: (TINY,))
    return TINY


def _run(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any], str]:
    status = main(["bench", "parity", "--json", *flags])
    out, err = capsys.readouterr()
    return status, json.loads(out.splitlines()[-1]), err


def test_the_last_line_is_one_document(tiny: data.Case, capsys: pytest.CaptureFixture[str]) -> None:
    status, found, err = _run(capsys, "--family", "falcon_h1")
    assert status == 0 and found["ok"] and not found["violations"] and not err
    assert [row["component"] for row in found["rows"]] == ["logits", "recurrent", "window"]
    for row in found["rows"]:
        assert (row["family"], row["config"], row["tolerance"], row["greedy_equal"]) == (tiny.family, tiny.config, 1e-4, True)
        assert 0 < row["max_rel_err"] < 1e-4 and 0 < row["reference_rel_err"] < 1e-4
    assert found["worst"] == max(row["max_rel_err"] for row in found["rows"])


def test_over_its_tolerance_a_row_makes_the_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "cases", lambda families: (replace(TINY, tolerance=1e-12),))
    status, found, err = _run(capsys)
    assert status == 1 and not found["ok"] and len(found["violations"]) == 3
    assert "milepost: bench parity: falcon_h1/width-by-expansion logits: relative error" in err


def test_another_greedy_token_makes_the_status_1(
    tiny: data.Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    run = report.run
    monkeypatch.setattr(report, "run", lambda case: replace(run(case), greedy_equal=False))
    kept = tmp_path / "kept.md"
    kept.write_text(f"a\n{report.START}\nold\n{report.END}\nb\n")
    status, found, err = _run(capsys, "--write", str(kept))
    assert status == 1 and not any(row["greedy_equal"] for row in found["rows"]) and "greedy tokens differ" in err
    assert "old" in kept.read_text(), "a matrix that fails was written"


def test_a_document_gets_the_matrix_between_its_markers(
    tiny: data.Case, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "kept.md"
    kept.write_text(f"a\n{report.START}\nold\n{report.END}\nb\n")
    assert _run(capsys, "--write", str(kept))[0] == 0
    text = kept.read_text()
    assert text.startswith(f"a\n{report.START}\n| family | config |") and text.endswith(f"{report.END}\nb\n")
    assert "| falcon_h1 | width-by-expansion |" in text and "old" not in text


@pytest.mark.parametrize(
    "flags", [["--write", "F", "--family", "lfm2"], ["--family", "gpt2"], ["--write", "no/such.md"]]
)
def test_what_cannot_be_done_is_said_in_one_line(
    tiny: data.Case, flags: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if "gpt2" in flags:
        monkeypatch.setattr(report, "cases", data.cases)
    assert main(["bench", "parity", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_without_transformers_the_extra_is_named(
    tiny: data.Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(["bench", "parity"]) == 2
    assert "pip install 'milepost[parity]'" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["logits", "0.recurrent", "0.window", "absent"])
def test_one_part_that_is_off_is_found(part: str, tmp_path: Path) -> None:
    class Off(Theirs):
        def uncut(self, tokens: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            logits, states = super().uncut(tokens)
            if part == "absent":
                states.pop("0.window")
            elif part == "logits":
                logits = logits.flip(-1)
            elif len(tokens) == CAPTURES[-1][0]:  # one capture alone
                states[part] = states[part] * 1.001
            return logits, states

    outcome = compare(Off(TINY.architecture, TINY.settings), tmp_path)
    wrong = {(way, name) for way, found in outcome.errors.items() for name, error in found.items() if error > 1e-4}
    everywhere = {"whole", "pieces", *(f"capture at {offset}" for offset, _ in CAPTURES)}
    assert wrong == {
        "logits": {("whole", "logits"), ("pieces", "logits")},
        "absent": {(way, "0.window") for way in everywhere},
    }.get(part, {(f"capture at {CAPTURES[-1][0]}", part)})
    assert outcome.greedy_equal is (part != "logits")


def test_what_is_missing_or_no_number_is_infinitely_wrong() -> None:
    one, nan = torch.ones(3), torch.full((3,), math.nan)
    assert errors({"a": one, "b": one, "c": nan}, {"a": 2 * one, "c": one, "d": one}) == {
        "a": 0.5, "b": math.inf, "c": math.inf, "d": math.inf,
    }  # fmt: skip


def test_the_document_has_every_case_and_every_family() -> None:
    before, rest = DOCUMENT.read_text().split(report.START)
    matrix, after = rest.split(report.END)
    table = [line.strip("|").split("|") for line in matrix.splitlines() if line.startswith("|")]
    lines = [[cell.strip() for cell in line] for line in table]
    assert tuple(lines[0]) == report.HEADINGS
    assert [tuple(cells[:2]) for cells in lines[2:]] == [(case.family, case.config) for case in data.cases()]
    assert all(cells[-1] == "same" for cells in lines[2:])
    for family in families():
        for name in (family.name, *family.architectures):
            assert f"`{name}`" in before + after, name
