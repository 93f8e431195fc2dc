"""The machine bench: its keys, on a tiny scale, and that `plan` reads the device that it writes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from milepost.bench import machine
from milepost.cli import main
from milepost.plan.devices import device

TINY = machine.Scale(rounds=2, buffer_bytes=1 << 16, rows=8, width=16)


def test_keys_and_the_device_that_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "Scale", lambda: TINY)
    file = tmp_path / "here.toml"
    assert main(["bench", "machine", "--json", "--write", str(file)]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    rates = ("read_bytes_per_s", "copy_bytes_per_s", "update_bytes_per_s")
    assert set(found["gemm_flops"]) == {"float32", "bfloat16"}
    assert set(found["hash_bytes_per_s"]) == {"blake2b", "sha256", "crc32"}
    assert all(value > 0 for value in (*found["gemm_flops"].values(), *(found[name] for name in rates)))
    here = device(str(file))
    assert here.bytes_per_s == pytest.approx(found["read_bytes_per_s"], rel=1e-3)
    assert here.peak("float32") == pytest.approx(found["gemm_flops"]["float32"], rel=1e-3)
    assert main(["plan", "lfm2-350m", "--device", str(file), "--memory", "16GB", "--json"]) == 0
    assert main(["bench", "machine", "--write", str(tmp_path / "no" / "where")]) == 2


def test_every_measurement_moves_the_bar() -> None:
    moved: list[None] = []
    machine.measure(TINY, lambda: moved.append(None))
    assert len(moved) == machine.steps()
