"""Flags follow from the dataclasses; mistakes give one line."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys

import pytest

from milepost import __version__
from milepost.cli import main, parser
from milepost.cli.flags import read_settings
from milepost.config import EngineConfig, ServerConfig


def parse(*argv: str) -> argparse.Namespace:
    return parser().parse_args(argv)


def test_every_setting_has_its_flag() -> None:
    for kind in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(kind):
            if field.name == "model":
                continue
            flag = "--" + field.name.replace("_", "-")
            given = ["--no-" + flag[2:]] if isinstance(field.default, bool) else [flag, _example(field)]
            read = read_settings(kind, parse("serve", *given))
            assert getattr(read, field.name) != field.default or isinstance(field.default, bool), flag


def _example(field: dataclasses.Field[object]) -> str:
    choices = {"dtype": "float32", "scheduling_policy": "priority"}
    for name, value in choices.items():
        if field.name.endswith(name):
            return value
    return "1234" if "int" in str(field.type) or "float" in str(field.type) else "word"


def test_what_is_not_given_keeps_its_default() -> None:
    assert read_settings(EngineConfig, parse("serve")) == EngineConfig()
    assert read_settings(ServerConfig, parse("serve", "clerk")) == ServerConfig()


@pytest.mark.parametrize(("text", "value"), [("4096", 4096), ("8k", 8000), ("8K", 8192), ("8Ki", 8192)])
def test_counts(text: str, value: int) -> None:
    assert read_settings(EngineConfig, parse("serve", "--max-model-len", text)).max_model_len == value


@pytest.mark.parametrize(("text", "value"), [("4GiB", 4 << 30), ("1.5GB", 1_500_000_000), ("64MiB", 64 << 20)])
def test_bytes(text: str, value: int) -> None:
    assert read_settings(EngineConfig, parse("serve", "--kv-cache-memory-bytes", text)).kv_cache_memory_bytes == value


def test_pairs_and_models() -> None:
    read = read_settings(EngineConfig, parse("serve", "/models/x", "--no-enable-prefix-caching", "--poison-freed-memory"))
    assert (read.model, read.enable_prefix_caching, read.poison_freed_memory) == ("/models/x", False, True)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["serve", "--max-model-len", "8q"], "'8q' is not a size"),
        (["serve", "--port", "x"], "'x' is not a whole number"),
        (["serve", "--dtype", "int3"], "invalid choice"),
        (["serve", "--no-such-flag"], "--no-such-flag"),
        (["serve", "--max-model", "5"], "--max-model"),
        (["serve", "--max-num-seqs", "0"], "max_num_seqs must be at least 1"),
        (["serve", "--host", "256.0.0.1"], "can't listen on"),
        (["serve", "--port", "70000"], "can't listen on"),
        (["complete", "/nowhere", "hi"], "no config.json in /nowhere"),
        (["complete", "clerk", "hi", "--temperature", "-1"], "temperature must be at least 0"),
        (["complete", "clerk"], "PROMPT"),
        (["frobnicate"], "frobnicate"),
        ([], "VERB"),
    ],
)
def test_a_mistake_gives_one_line(argv: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(argv)
    except SystemExit as end:
        status = int(str(end.code))
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.startswith("milepost: ") and words in err
    assert err.count("\n") == 1


def test_version_needs_no_torch() -> None:
    code = "import sys, milepost.cli as c\ntry: c.main(['--version'])\nexcept SystemExit: print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == [f"milepost {__version__}", "False"]
