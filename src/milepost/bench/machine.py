"""What this machine can do at most: products, reading, copying, updating in place, hashing. Out: rates; a device for `plan`.

What bounds each: a product is bound by arithmetic; reading, copying and updating by memory, since their buffers are many times
the caches. A recurrent update reads and writes its state once, so `update_bytes_per_s` counts both. Medians of several rounds.
The law kept here: nothing is assumed; what can't be measured here (another dtype) is left out.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from milepost.errors import ConfigError

_DTYPES = ("float32", "bfloat16")
_LEAST = 3


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is measured."""

    rounds: int = 7
    seconds: float = 1.5
    """For one measurement; a slow one has fewer rounds, but three."""
    buffer_bytes: int = 512 * 1024**2
    rows: int = 512
    width: int = 2048


@dataclass(frozen=True, slots=True)
class Machine:
    """Rates a second. `gemm_flops` by dtype: a linear map [rows, width] x [width, width], a multiply-add counted as two."""

    gemm_flops: dict[str, float]
    read_bytes_per_s: float
    copy_bytes_per_s: float
    """Read and written, both counted."""
    update_bytes_per_s: float
    """Read and written in place, both counted."""
    hash_bytes_per_s: dict[str, float]
    threads: int
    memory_bytes: int

    def toml(self, name: str) -> str:
        """As a device that `milepost plan --device FILE` reads."""
        flops = ", ".join(f"{dtype} = {rate:.4g}" for dtype, rate in self.gemm_flops.items())
        return (
            f'[device.{name}]\ntitle = "this machine, {self.threads} threads"\nsource = "measured by milepost bench machine"\n'
            f"memory_bytes = {self.memory_bytes}\nbytes_per_s = {self.read_bytes_per_s:.4g}\nflops = {{ {flops} }}\n"
        )


def measure(scale: Scale, advance: Callable[[], None] = lambda: None) -> Machine:
    """Run everything; `advance` is called after each of `steps()` measurements."""
    import torch
    from torch.nn import functional

    from milepost.engine.settings import available_memory

    def rate(amount: float, action: Callable[[], object]) -> float:
        action()
        times: list[float] = []
        while len(times) < scale.rounds and (len(times) < _LEAST or sum(times) < scale.seconds):
            start = time.perf_counter()
            action()
            times.append(time.perf_counter() - start)
        advance()
        return amount / max(statistics.median(times), 1e-9)

    with torch.inference_mode():
        gemm = {}
        for dtype in _DTYPES:
            left = torch.randn(scale.rows, scale.width).to(getattr(torch, dtype))
            right = torch.randn(scale.width, scale.width).to(getattr(torch, dtype))
            gemm[dtype] = rate(2.0 * scale.rows * scale.width**2, lambda a=left, b=right: functional.linear(a, b))  # type: ignore[misc]
        one = torch.ones(scale.buffer_bytes // 4)
        other = torch.empty_like(one)
        read = rate(one.nbytes, one.sum)
        copied = rate(2 * one.nbytes, lambda: other.copy_(one))
        updated = rate(2 * one.nbytes, lambda: one.mul_(1.0))
    data = os.urandom(min(scale.buffer_bytes, 32 * 1024**2))
    hashes: dict[str, Callable[[bytes], object]] = {
        "blake2b": lambda raw: hashlib.blake2b(raw).digest(),
        "sha256": lambda raw: hashlib.sha256(raw).digest(),
        "crc32": zlib.crc32,
    }
    hashed = {name: rate(len(data), lambda run=run: run(data)) for name, run in hashes.items()}  # type: ignore[misc]
    return Machine(gemm, read, copied, updated, hashed, torch.get_num_threads(), available_memory())


def steps() -> int:
    """How many measurements there are."""
    return len(_DTYPES) + 3 + 3


def main(arguments: argparse.Namespace, scale: Scale | None = None) -> int:
    """Measure, print a table, and end with one line of JSON if asked to."""
    console = Console(stderr=arguments.json)
    with Progress(console=console, transient=True) as progress:
        task = progress.add_task("measuring", total=steps())
        found = measure(scale or Scale(), lambda: progress.advance(task))
    table = Table(title=f"This machine, {found.threads} threads", title_justify="left")
    table.add_column("what")
    table.add_column("rate", justify="right")
    for dtype, flops in found.gemm_flops.items():
        table.add_row(f"product, {dtype}", f"{flops / 1e9:,.3g} Gflop/s")
    rates = {"read": found.read_bytes_per_s, "copy": found.copy_bytes_per_s, "update in place": found.update_bytes_per_s}
    for name, value in {**rates, **{f"hash, {name}": value for name, value in found.hash_bytes_per_s.items()}}.items():
        table.add_row(name, f"{value / 1e9:,.2f} GB/s")
    console.print(table)
    if arguments.write:
        try:
            Path(arguments.write).write_text(found.toml("this-machine"), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"write={arguments.write!r} can't be written: {error.strerror}", field="write") from error
    if arguments.json:
        print(json.dumps({"bench": "machine", **asdict(found)}))
    return 0
