"""`milepost bench parity`: runs the cases, prints the matrix, keeps it in docs/models.md.

The law kept here: the exit status is 1 if any component is over its tolerance or any greedy token differs, and a matrix
that fails, or that lacks a family, is never written into a document.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from milepost.bench.parity.cases import Case, cases
from milepost.errors import ConfigError

if TYPE_CHECKING:
    from milepost.bench.parity.compare import Outcome

START, END = "<!-- milepost bench parity -->", "<!-- end of milepost bench parity -->"
"""What `--write` replaces stands between these lines."""
COMPONENTS = ("logits", "recurrent", "window")
HEADINGS = ("family", "config", *COMPONENTS, "tolerance", "reference's noise", "64 greedy tokens")


@dataclass(frozen=True, slots=True)
class Row:
    """One component of one config: the worst over layers, over whole, pieces and captures."""

    family: str
    config: str
    component: str
    max_rel_err: float
    tolerance: float
    greedy_equal: bool
    worst_at: str
    reference_rel_err: float
    """transformers' fp32 against our fp64."""
    tolerance_reason: str

    @property
    def good(self) -> bool:
        """Whether the row is what it should be."""
        return self.greedy_equal and self.max_rel_err < self.tolerance


def run(case: Case) -> Outcome:
    """Compare one case, in a directory that is gone afterwards. Raises ConfigError without transformers."""
    from milepost.bench.parity.compare import compare
    from milepost.bench.parity.theirs import Theirs

    theirs = Theirs(case.architecture, case.settings, config=case.config_class, seed=case.seed)
    with tempfile.TemporaryDirectory(prefix="milepost-parity-") as path:
        return compare(theirs, Path(path))


def rows_of(case: Case, outcome: Outcome) -> list[Row]:
    """A row for each component that the case has."""

    def worst(errors: dict[str, dict[str, float]]) -> dict[str, tuple[float, str]]:
        found: dict[str, tuple[float, str]] = {}
        for way, names in errors.items():
            for name, error in names.items():
                component = name.rpartition(".")[2]
                found[component] = max(found.get(component, (-1.0, "")), (error, f"{name}, {way}"))
        return found

    noise = worst(outcome.reference)
    return [
        Row(
            case.family, case.config, component, error, case.tolerance, outcome.greedy_equal, place,
            noise.get(component, (math.inf, ""))[0], case.reason,
        )
        for component, (error, place) in worst(outcome.errors).items()
    ]  # fmt: skip


def main(given: argparse.Namespace) -> int:
    """Measure, print, judge. Raises ConfigError without transformers, for an unknown family or an unfit document."""
    if given.write and given.family:
        raise ConfigError("--write keeps the matrix of all families; leave out --family", field="write")
    if given.write:
        _around(Path(given.write))
    rows = measure(cases(given.family))
    bad = [f"{row.family}/{row.config} {row.component}: {_why(row)}" for row in rows if not row.good]
    Console(width=None if sys.stdout.isatty() else 140).print(_table(rows))
    for line in bad:
        print(f"milepost: bench parity: {line}", file=sys.stderr)
    if given.write and not bad:
        write(Path(given.write), rows)
    if given.json:
        print(json.dumps(document(rows, bad), ensure_ascii=False), flush=True)
    return 1 if bad else 0


def measure(wanted: Sequence[Case]) -> list[Row]:
    """Every case's rows, with a bar on stderr where that is a terminal. One thread: the arrays are tiny."""
    import torch

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    rows, threads = [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("bench parity", total=len(wanted))
            for case in wanted:
                progress.update(task, description=case.name)
                rows += rows_of(case, run(case))
                progress.advance(task)
    finally:
        torch.set_num_threads(threads)
    return rows


def document(rows: Sequence[Row], bad: Sequence[str]) -> dict[str, Any]:
    """The last line with `--json`. An error that isn't finite is null."""
    from milepost.bench.parity.theirs import library

    worst = max(rows, key=lambda row: row.max_rel_err)
    listed = [{name: _finite(value) for name, value in asdict(row).items()} for row in rows]
    return {
        "bench": "parity", "transformers": library().__version__, "dtype": "float32", "rows": listed,
        "worst": _finite(worst.max_rel_err), "worst_row": f"{worst.family}/{worst.config} {worst.component}",
        "violations": list(bad), "ok": not bad,
    }  # fmt: skip


def write(path: Path, rows: Sequence[Row]) -> None:
    """Replace what stands between the markers. Raises ConfigError if they aren't there."""
    before, after = _around(path)
    lines = [f"| {' | '.join(cells)} |" for cells in (HEADINGS, ["---"] * len(HEADINGS), *_cells(rows))]
    loose = [row for row in rows if row.tolerance_reason]
    reasons = {f"`{row.family}` {row.config} is held to {row.tolerance:.0e}: {row.tolerance_reason}." for row in loose}
    path.write_text(f"{before}{START}\n" + "\n".join([*lines, "", *sorted(reasons), END]) + after, encoding="utf-8")


def _around(path: Path) -> tuple[str, str]:
    """What stands before and after the markers."""
    try:
        before, rest = path.read_text(encoding="utf-8").split(START)
        _, after = rest.split(END)
    except (OSError, ValueError) as error:
        message = f"--write {path}: no text with the lines {START} and {END} once each ({error})"
        raise ConfigError(message, field="write") from error
    return before, after


def _cells(rows: Iterable[Row]) -> list[list[str]]:
    """A line for each config."""
    lines = []
    for (family, config), group in groupby(rows, lambda row: (row.family, row.config)):
        found = {row.component: row for row in group}
        first = next(iter(found.values()))
        errors = [f"{found[name].max_rel_err:.1e}" if name in found else "–" for name in COMPONENTS]
        noise = max(row.reference_rel_err for row in found.values())
        greedy = "same" if first.greedy_equal else "DIFFER"
        lines.append([family, config, *errors, f"{first.tolerance:.0e}", f"{noise:.1e}", greedy])
    return lines


def _table(rows: Sequence[Row]) -> Table:
    bad = {(row.family, row.config) for row in rows if not row.good}
    table = Table(title="largest relative error against transformers' uncut forward, fp32", title_justify="left")
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="left" if index < 2 else "right")
    last = ""
    for cells in _cells(rows):
        if last not in ("", cells[0]):
            table.add_section()
        last = cells[0]
        table.add_row(*cells, style="bold red" if (cells[0], cells[1]) in bad else None)
    return table


def _why(row: Row) -> str:
    greedy = "" if row.greedy_equal else "; greedy tokens differ"
    return f"relative error {row.max_rel_err:.1e} ({row.worst_at}), tolerance {row.tolerance:.0e}{greedy}"


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
