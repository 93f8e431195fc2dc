"""Asks the planners, sets their answers beside the right values, prints. In: parsed arguments. Out: an exit status.

The law kept here: nothing is left out. What a planner doesn't say, and why, stands where its figure would stand.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from milepost.bench.planners.answers import CONTEXTS, PLANNERS, QUANTITIES, SHOWN, Row, in_words, rows_of
from milepost.bench.planners.environment import ROOT, Absent, answer_of, python_of
from milepost.config import EngineConfig
from milepost.engine.settings import settle
from milepost.errors import ConfigError
from milepost.models.registry import load_spec
from milepost.plan.builtin import path_of
from milepost.plan.sizes import sizes_of

MODELS = (
    "nemotron-h-8b",
    "nemotron-3-nano-30b-a3b",
    "jamba-v0.1",
    "zamba2-2.7b",
    "bamba-9b",
    "granite-4.0-h-tiny",
    "falcon-h1-7b",
    "lfm2-1.2b",
    "qwen3-next-80b-a3b",
    "recurrentgemma-2b",
)
BEGIN, END = "<!-- bench planners: begin -->", "<!-- bench planners: end -->"

_HEADS = ("KV of a token", "state of a sequence", *(f"cache at {context:,}" for context in SHOWN))
_UNITS = (("KiB", 1024, 2), ("MiB", 1024**2, 2), ("MiB", 1024**2, 1), ("MiB", 1024**2, 1))
_LEGEND = (
    "bytes of one sequence: KV in bf16, convolution window in bf16, recurrent matrix in fp32. "
    "Beside each figure: how many times too much (2x) or too little (1/2) it is"
)


def main(given: argparse.Namespace) -> int:
    """Measure and print. Raises ConfigError for an unknown planner or an unfit document."""
    wanted = tuple(given.planner or PLANNERS)
    unknown = [name for name in wanted if name not in PLANNERS]
    if unknown:
        raise ConfigError(f"--planner {unknown[0]} is unknown (known: {', '.join(PLANNERS)})", field="planner")
    if given.write:
        _around(Path(given.write))
    rows = measure(wanted, MODELS)
    Console(width=None if sys.stdout.isatty() else 150).print(table_of(rows), highlight=False)
    if given.write:
        write(Path(given.write), rows)
    if given.json:
        print(json.dumps({"rows": [row.to_json() for row in rows]}, ensure_ascii=False), flush=True)
    return 0 if any(row.said is not None for row in rows) else 1


def measure(planners: Sequence[str], models: Sequence[str], root: Path = ROOT) -> list[Row]:
    """Rows for every model and planner, by model; a bar on stderr where that is a terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    configs = {model: _laid_out(model, root) for model in models}
    rows: dict[tuple[str, str], list[Row]] = {}
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("bench planners", total=len(planners) * len(models))
        for planner in planners:
            progress.update(task, description=planner)
            python, why = _python(planner, root)
            for model in models:
                answer = {"why": why} if python is None else answer_of(python, planner, configs[model], CONTEXTS)
                rows[model, planner] = rows_of(model, planner, answer, right_of(configs[model].parent))
                progress.advance(task)
    return [row for model in models for planner in planners for row in rows[model, planner]]


def right_of(directory: Path) -> dict[str, int] | str:
    """The quantities as the layout has them; a text where the model isn't served: why not.

    A sequence keeps KV of at most a window of tokens, where all its attention has one.
    """
    try:
        spec = load_spec(directory)
        config = EngineConfig(
            model=str(directory),
            kv_cache_dtype="bfloat16",
            mamba_cache_dtype="bfloat16",
            mamba_ssm_cache_dtype="float32",
        )
        sizes = sizes_of(spec, settle(config, spec, check=False))
    except ConfigError as error:
        return str(error)
    kv, state, window = sizes.kv_bytes_per_token, sizes.state_bytes_per_sequence, sizes.attention_window
    right = {"kv_bytes_per_token": kv, "state_bytes_per_sequence": state}
    return right | {f"cache_bytes_at_{at}": state + kv * min(at, window or at) for at in SHOWN}


def table_of(rows: Sequence[Row]) -> Table:
    """A model's right values, and under them what each planner says."""
    title = f"one sequence, as others plan it ({versions(rows)})"
    table = Table(title=title, title_justify="left", caption=_LEGEND, caption_justify="left")
    for head in ("model", "planner", *_HEADS):
        table.add_column(head, justify="left" if head in ("model", "planner") else "right")
    table.add_column("why", max_width=44)
    last = None
    for model, planner, cells, why in _lines(rows):
        if last not in (None, model):
            table.add_section()
        last, name = model, "" if model == last else model
        table.add_row(name, planner, *cells, why)
    return table


def markdown(rows: Sequence[Row]) -> str:
    """The same table for a document."""
    lines = ["| model | planner | " + " | ".join(_HEADS) + " | why |", "|---|---|" + "--:|" * len(_HEADS) + "---|"]
    for model, planner, cells, why in _lines(rows):
        lines.append("| " + " | ".join((model, planner, *cells, why.replace("|", "\\|"))) + " |")
    return "\n".join([*lines, "", f"Versions: {versions(rows)}."])


def versions(rows: Sequence[Row]) -> str:
    """Each planner with its version, in the order of the rows."""
    found = {row.planner: row.version for row in rows}
    return ", ".join(f"{planner} {version or '(not there)'}" for planner, version in found.items())


def write(document: Path, rows: Sequence[Row]) -> None:
    """Put the table between the markers of a document. Raises ConfigError if they aren't there."""
    before, after = _around(document)
    document.write_text(f"{before}{BEGIN}\n{markdown(rows)}\n{END}{after}", encoding="utf-8")


def _lines(rows: Sequence[Row]) -> Iterator[tuple[str, str, list[str], str]]:
    """Model, planner, a cell for each quantity, why; the right values come first for each model."""
    groups: dict[tuple[str, str], dict[str, Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.planner), {})[row.quantity] = row
    seen = None
    for (model, planner), by_quantity in groups.items():
        ordered = [by_quantity[quantity] for quantity in QUANTITIES]
        if model != seen:
            yield model, "right value", [_size(index, row.right) for index, row in enumerate(ordered)], ""
        seen = model
        yield model, planner, [_cell(index, row) for index, row in enumerate(ordered)], _short(ordered[0].why or "")


def _short(why: str) -> str:
    """The first clause of a reason, without the name of an exception."""
    return re.sub(r"^[A-Za-z]+: ", "", why).partition(";")[0]


def _cell(index: int, row: Row) -> str:
    if row.said is None:
        return "–"
    return f"{_size(index, row.said)} {in_words(row.factor)}" if row.said else in_words(row.factor)


def _size(index: int, count: int | None) -> str:
    unit, size, digits = _UNITS[index]
    return "–" if count is None else f"{count / size:,.{digits}f} {unit}"


def _python(planner: str, root: Path) -> tuple[Path | None, str]:
    try:
        return python_of(planner, root), ""
    except Absent as error:
        return None, str(error)


def _laid_out(model: str, root: Path) -> Path:
    """A directory with the model's config alone, as planners and `load_spec` expect it."""
    place = root / "configs" / model
    place.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copyfile(path_of(model), place / "config.json"))


def _around(document: Path) -> tuple[str, str]:
    """What stands before and after the table. Raises ConfigError."""
    try:
        text = document.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--write {document}: can't be read ({error})", field="write") from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ConfigError(f"--write {document}: it has no lines {BEGIN} and {END}", field="write")
    return before, after
