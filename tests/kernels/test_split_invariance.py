"""A prompt in one piece, in any pieces, alone or beside others gives the same outputs and states (law 1).

In fp64 to 1e-10; a sequence's neighbours in a step change nothing at all, not even the last bit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from milepost.kernels.protocol import KernelBackend, Run
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend
from tests.kernels.arena import CPU, Inputs, Sizes, copy_pool, random_inputs, run_all

SIZES = Sizes(heads=2, head_dim=3, state_size=4, groups=1, channels=5)
BLOCKS = ((2, 0, 3, 1),)
ROWS = ("x", "dt", "b", "c", "columns", "q", "k", "v")


def in_pieces(backend: KernelBackend, given: Inputs, pieces: tuple[int, ...]) -> dict[str, Tensor]:
    """Run one sequence piece by piece over the same pools; outputs joined, states of slot 0."""
    states, windows, kv = copy_pool(given.states), copy_pool(given.windows), copy_pool(given.kv)
    outputs: dict[str, list[Tensor]] = {"y": [], "convolved": [], "mixed": []}
    position = 0
    for size in pieces:
        run = Run((0, size), (position,), (0,), (position == 0,), BLOCKS, 4)
        part = replace(given, **{name: getattr(given, name)[position : position + size] for name in ROWS})
        step = backend.prepare(run, CPU)
        outputs["y"].append(backend.scan_mamba2(part.x, part.dt, part.a, part.b, part.c, part.d, states, step))
        outputs["convolved"].append(backend.convolution(part.columns, part.weight, part.bias, windows, step))
        backend.write_kv(part.k, part.v, kv, step)
        outputs["mixed"].append(backend.attention(part.q, kv, 0.35, step))
        position += size
    joined = {name: torch.cat(parts) for name, parts in outputs.items()}
    return {**joined, "state": states[0].clone(), "window": windows[0].clone()}


def compositions(total: int) -> list[tuple[int, ...]]:
    """Every way to cut a run into pieces."""
    if total == 0:
        return [()]
    return [(size, *rest) for size in range(1, total + 1) for rest in compositions(total - size)]


@pytest.mark.parametrize("length", [1, 2, 3, 5, 7])
def test_every_split(length: int) -> None:
    given = random_inputs(Run((0, length), (0,), (0,), (True,), BLOCKS, 4), SIZES, torch.float64, length)
    wanted = in_pieces(ReferenceBackend(), given, (length,))
    for pieces in compositions(length):
        found = in_pieces(TorchBackend(chunk=3), given, pieces)
        for name, value in wanted.items():
            assert torch.allclose(found[name], value, rtol=1e-10, atol=1e-10), f"{name} in pieces of {pieces}"


@pytest.mark.parametrize("length", [9, 10, 11, 12, 13])
def test_every_cut_in_two(length: int) -> None:
    given = random_inputs(Run((0, length), (0,), (0,), (True,), BLOCKS, 4), SIZES, torch.float64, length)
    wanted = in_pieces(ReferenceBackend(), given, (length,))
    for first in range(1, length):
        found = in_pieces(TorchBackend(chunk=4), given, (first, length - first))
        for name, value in wanted.items():
            torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-10)


def test_neighbours_change_no_bit() -> None:
    rng = random.Random(0)
    lengths = [17, 1, 40, 1, 2]
    starts = [sum(lengths[:index]) for index in range(6)]
    blocks = tuple(tuple(range(12 * index, 12 * index + 12)) for index in range(5))
    run = Run(tuple(starts), (0, 5, 3, 8, 1), (4, 1, 0, 3, 2), (True, False, False, False, False), blocks, 4)
    given = random_inputs(run, Sizes(), torch.float32, rng.randrange(100))
    together = run_all(TorchBackend(chunk=8), run, given)
    for index, length in enumerate(lengths):
        rows = slice(starts[index], starts[index] + length)
        alone_run = Run((0, length), (run.positions[index],), (run.slots[index],), (run.fresh[index],), (blocks[index],), 4)
        alone = run_all(TorchBackend(chunk=8), alone_run, replace(given, **{name: getattr(given, name)[rows] for name in ROWS}))
        slot = run.slots[index]
        for name in ("y", "convolved", "mixed"):
            assert torch.equal(together[name][rows], alone[name]), f"{name} of sequence {index}"
        for name in ("states", "windows"):
            assert torch.equal(together[name][slot], alone[name][slot]), f"{name} of sequence {index}"
