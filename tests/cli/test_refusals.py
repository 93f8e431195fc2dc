"""What `milepost serve` says to a model or a setting that can't work: one line that names it, status 2, no weight loaded."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from milepost.cli import main
from milepost.embedded import resolve_model
from tests.checkpoints import make_nemotron_h


def _config(path: Path, **changes: object) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **changes}))


def _truncate(path: Path) -> None:
    whole = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(whole[: len(whole) // 2])


CASES: dict[str, tuple[Callable[[Path], object], list[str], tuple[str, ...]]] = {
    "unknown config key": (lambda path: _config(path, mamba_rotary_dim=8), [], ("mamba_rotary_dim",)),
    "unknown layer type": (lambda path: _config(path, hybrid_override_pattern="M-XM"), [], ("hybrid_override_pattern", "X")),
    "unknown architecture": (lambda path: _config(path, architectures=["Other"]), [], ("architectures", "NemotronH")),
    "truncated safetensors": (_truncate, [], ("model.safetensors",)),
    "no weights": (lambda path: (path / "model.safetensors").unlink(), [], ("model.safetensors",)),
    "wrong tokenizer": (lambda path: make_nemotron_h(path, vocab_size=97), [], ("tokenizer", "97")),
    "corrupt tokenizer": (lambda path: (path / "tokenizer.json").write_text("{"), [], ("tokenizer.json",)),
    "no tokenizer": (lambda path: (path / "tokenizer.json").unlink(), [], ("tokenizer.json",)),
    "budget too small": (lambda path: None, ["--kv-cache-memory-bytes", "100kB"], ("kv_cache_memory_bytes", "it needs ")),
    "too long": (lambda path: None, ["--max-model-len", "1m"], ("max_model_len", "max_position_embeddings")),
    "unknown backend": (lambda path: None, ["--mamba-backend", "cuda"], ("mamba_backend", "torch, reference")),
    "size that is none": (lambda path: None, ["--max-model-len", "many"], ("--max-model-len", "many")),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random checkpoint that would serve, with the embedded model's tokenizer."""
    path = make_nemotron_h(tmp_path_factory.mktemp("refusals") / "good", vocab_size=261)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(resolve_model("clerk") / name, path / name)
    return path


@pytest.mark.parametrize("case", CASES)
def test_refused_in_one_line_that_names_it(case: str, good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path(shutil.copytree(good, tmp_path / "model"))
    damage, flags, named = CASES[case]
    damage(path)
    try:
        status = main(["serve", str(path), "--port", "0", *flags])
    except SystemExit as stopped:  # argparse's own way out
        status = int(stopped.code or 0)
    said = capsys.readouterr().err
    assert status == 2, said
    assert "Traceback" not in said
    last = said.strip().splitlines()[-1]
    assert last.startswith("milepost"), said
    for name in named:
        assert name in last, said
