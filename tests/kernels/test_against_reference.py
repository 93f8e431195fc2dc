"""Every operation of the fast backend against its definition: outputs, live states and captures, on ragged runs.

Lengths are no multiple of anything, slots and blocks are shuffled, and memory that nobody wrote is NaN.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.kernels.protocol import Capture, Run
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend
from tests.kernels.arena import Inputs, Sizes, check_close, random_inputs, random_run, run_all

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])


def compare(run: Run, sizes: Sizes, dtype: torch.dtype, seed: int, *, chunk: int = 64, bias: bool = True) -> None:
    given = random_inputs(run, sizes, dtype, seed)
    found = run_all(TorchBackend(chunk=chunk), run, given, bias=bias)
    check_close(found, run_all(ReferenceBackend(), run, given, bias=bias), TOLERANCE[dtype])


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.one_of(st.just(1), st.integers(1, 3), st.integers(2, 30)), min_size=1, max_size=5),
    chunk=st.sampled_from([3, 8, 64]),
    seed=st.integers(0, 2**30),
    wide=st.booleans(),
)
def test_random_ragged_runs(lengths: list[int], chunk: int, seed: int, wide: bool) -> None:
    run = random_run(random.Random(seed), lengths)
    sizes = Sizes(heads=2, head_dim=4, state_size=4, groups=1, channels=5)
    compare(run, sizes, torch.float64 if wide else torch.float32, seed, chunk=chunk, bias=wide)


@FLOATS
@pytest.mark.parametrize(
    "sizes",
    [
        Sizes(heads=6, head_dim=5, state_size=7, groups=3, width=2, channels=13, query_heads=6, kv_heads=1, kv_dim=5),
        Sizes(heads=8, head_dim=3, state_size=1, groups=8, width=6, channels=1, query_heads=2, kv_heads=2, kv_dim=16),
        Sizes(heads=1, head_dim=16, state_size=16, groups=1, width=3, channels=33, query_heads=5, kv_heads=1, kv_dim=1),
    ],
)
def test_odd_sizes(sizes: Sizes, dtype: torch.dtype) -> None:
    compare(random_run(random.Random(3), [1, 7, 2, 1, 19]), sizes, dtype, 3, chunk=5)


@FLOATS
def test_longer_than_chunks_and_tiles(dtype: torch.dtype) -> None:
    # 150 rows pass several chunks; the resumed one also takes the masked path of attention.
    sizes = Sizes(heads=1, head_dim=3, state_size=3, groups=1, query_heads=1, kv_heads=1, kv_dim=3)
    for resume in (0.0, 1.0):
        compare(random_run(random.Random(5), [150, 1], resume=resume), sizes, dtype, 5)


@pytest.mark.parametrize("offset", range(1, 12))
def test_capture_at_every_position(offset: int) -> None:
    # Width 6 keeps five columns: captures at offsets 1 to 4 merge them with the old window.
    for position in (0, 9):
        captures = (Capture(0, offset, 3), Capture(0, 11, 4), Capture(0, max(1, offset - 1), 5))
        run = Run((0, 11, 12), (position, 3), (1, 0), (position == 0, False), ((0, 1, 2, 3, 4), (5,)), 4, captures)
        compare(run, Sizes(width=6), torch.float64, offset, chunk=4)


def test_every_capture_equals_a_run_that_ends_there() -> None:
    sizes, backend, length = Sizes(), TorchBackend(chunk=4), 12
    captures = tuple(Capture(0, offset, 1 + offset) for offset in range(1, length + 1))
    whole = Run((0, length), (0,), (0,), (True,), ((0, 1, 2),), 4, captures)
    given = random_inputs(whole, sizes, torch.float64, 1)
    found = run_all(backend, whole, given)
    for offset in range(1, length + 1):
        part = Run((0, offset), (0,), (0,), (True,), ((0, 1, 2),), 4)
        alone = run_all(backend, part, _rows(given, offset))
        for pool in ("states", "windows"):
            torch.testing.assert_close(found[pool][1 + offset], alone[pool][0], rtol=1e-10, atol=1e-10)


def _rows(given: Inputs, count: int) -> Inputs:
    names = ("x", "dt", "b", "c", "columns", "q", "k", "v")
    return replace(given, **{name: getattr(given, name)[:count] for name in names})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_accumulate_in_fp32(dtype: torch.dtype) -> None:
    # Same rounded inputs for both; only the order of fp32 sums and the last rounding differ.
    run = random_run(random.Random(8), [1, 20, 3, 1])
    for pool_dtype in (torch.float32, dtype):
        given = random_inputs(run, Sizes(), dtype, 8, pool_dtype)
        found, wanted = run_all(TorchBackend(chunk=8), run, given), run_all(ReferenceBackend(), run, given)
        for name in ("y", "states", "convolved", "windows", "mixed"):
            torch.testing.assert_close(found[name], wanted[name], rtol=2e-2, atol=2e-2, equal_nan=True)
        if pool_dtype == torch.float32:
            torch.testing.assert_close(found["states"], wanted["states"], rtol=1e-4, atol=1e-4, equal_nan=True)


def test_large_states_are_updated_in_place() -> None:
    # 16,384 numbers a slot and more take the path without a gather.
    sizes = Sizes(heads=8, head_dim=32, state_size=64, groups=2)
    compare(random_run(random.Random(2), [1, 1, 1]), sizes, torch.float32, 2)


def test_strong_decay_and_zero_steps() -> None:
    # exp(cum) underflows within a chunk, and dt = 0 leaves the state alone; neither may give NaN or lose a neighbour.
    run = Run((0, 70), (0,), (0,), (True,), ((0,) * 18,), 4, (Capture(0, 70, 1),))
    given = random_inputs(run, Sizes(), torch.float32, 4)
    given.dt[::3] *= 400.0
    given.dt[1::3] = 0.0
    found, wanted = run_all(TorchBackend(), run, given), run_all(ReferenceBackend(), run, given)
    scale = wanted["y"].abs().max().item()
    torch.testing.assert_close(found["y"], wanted["y"], rtol=1e-5, atol=1e-6 * scale)
    torch.testing.assert_close(found["states"][:2], wanted["states"][:2], rtol=1e-5, atol=1e-6 * scale)
