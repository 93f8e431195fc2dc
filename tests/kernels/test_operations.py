"""Every operation of `operations.CASES` against its definition: outputs, live states and captures, on ragged runs.

Also law 1 for each of them: every split of a run gives the same outputs and states, and neighbours change no bit.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given as given_by
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor

from milepost.kernels.protocol import Capture, KernelBackend, Run
from milepost.kernels.reference import ReferenceBackend
from milepost.kernels.torch_backend import TorchBackend
from tests.kernels import operations
from tests.kernels.arena import CPU, copy_pool, random_run
from tests.kernels.operations import CASES, RECURRENT, Case, Given

TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-11}
FLOATS = pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "fp64"])
EACH = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
EACH_RECURRENT = pytest.mark.parametrize("case", RECURRENT.values(), ids=RECURRENT)
REFERENCE = ReferenceBackend()


def compare(case: Case, run: Run, given: Given, tolerance: float, *, chunk: int = 32) -> None:
    """Outputs have no NaN and agree; pools agree with NaN in the same places."""
    (found, pool), (wanted, wanted_pool) = (case.run(each, run, given) for each in (TorchBackend(chunk=chunk), REFERENCE))
    assert not torch.isnan(found).any(), "it read memory that nobody wrote"
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(pool, wanted_pool, rtol=tolerance, atol=tolerance, equal_nan=True)


def without_blocks_behind(run: Run, window: int | None) -> Run:
    """The same run, -1 standing for each block that no query of it sees."""
    if window is None:
        return run
    blocks = []
    for position, owned in zip(run.positions, run.blocks, strict=True):
        gone = max(0, position - window + 1) // run.block_size
        blocks.append((-1,) * gone + owned[gone:])
    return replace(run, blocks=tuple(blocks))


@EACH
@settings(max_examples=12, deadline=None)
@given_by(
    lengths=st.lists(st.one_of(st.just(1), st.integers(1, 3), st.integers(2, 30)), min_size=1, max_size=4),
    chunk=st.sampled_from([3, 11, 32]),
    seed=st.integers(0, 2**30),
    dtype=st.sampled_from(list(TOLERANCE)),
)
def test_random_ragged_runs(case: Case, lengths: list[int], chunk: int, seed: int, dtype: torch.dtype) -> None:
    run = without_blocks_behind(random_run(random.Random(seed), lengths), case.window)
    compare(case, run, case.given(run, dtype, seed), TOLERANCE[dtype], chunk=chunk)


@FLOATS
@pytest.mark.parametrize(
    "case",
    [
        operations.short_convolution(channels=1, width=2),
        operations.short_convolution(channels=33, width=7),
        operations.delta("gated_delta", key_heads=3, share=1, key_dim=1, value_dim=7),
        operations.delta("gated_delta", key_heads=1, share=5, key_dim=9, value_dim=1),
        operations.delta("kda", key_heads=1, key_dim=1, value_dim=5),
        operations.delta("kda", key_heads=3, key_dim=17, value_dim=2),
        operations.delta("kda", key_heads=5, key_dim=10, value_dim=10),
        operations.mamba1(channels=1, state_size=1),
        operations.mamba1(channels=33, state_size=16),
        operations.rglru(channels=1),
        operations.attention("window", heads=6, kv_heads=1, dim=5, window=1),
        operations.attention("window", heads=2, kv_heads=2, dim=1, window=40),
        operations.attention("softcap", heads=5, kv_heads=5, dim=2, softcap=30.0),
        operations.latent(heads=1, width=4, value_dim=4),
        operations.latent(heads=5, width=9, value_dim=1),
        operations.latent(heads=3, width=37, value_dim=32),
    ],
    ids=lambda case: case.name,
)
def test_odd_sizes(case: Case, dtype: torch.dtype) -> None:
    run = random_run(random.Random(3), [1, 7, 2, 1, 19])
    compare(case, run, case.given(run, dtype, 3), TOLERANCE[dtype], chunk=13)


@pytest.mark.parametrize("backend", [REFERENCE, TorchBackend(chunk=5)], ids=["reference", "torch"])
@pytest.mark.parametrize(
    "case",
    [
        operations.attention("window", heads=6, kv_heads=1, dim=5, window=1),
        operations.attention("window", heads=5, kv_heads=5, dim=1, window=7),
        operations.attention("window", heads=3, kv_heads=1, dim=9, window=11),
        operations.attention("window_softcap", heads=4, kv_heads=2, dim=3, window=4, softcap=1.0),
    ],
    ids=lambda case: f"{case.name}{case.window}",
)
def test_blocks_that_are_gone_change_no_bit(case: Case, backend: KernelBackend) -> None:
    """What lay in them is NaN, and -1, read as an index, would be a block of another sequence."""
    run = random_run(random.Random(6), [1, 7, 2, 1, 19], captures=3, block_size=3, resume=1.0)
    gone = without_blocks_behind(run, case.window)
    freed = sorted({block for owned in run.blocks for block in owned} - {block for owned in gone.blocks for block in owned})
    assert len(freed) >= 3 and run.captures
    given = case.given(run, torch.float32, 6)
    poisoned = copy_pool(given.pool)
    poisoned[freed] = float("nan")
    wanted, kept = case.run(backend, run, given)
    found, pool = case.run(backend, gone, replace(given, pool=poisoned))
    assert torch.equal(found, wanted) and not found.isnan().any()
    kept[freed] = float("nan")
    torch.testing.assert_close(pool, kept, rtol=0.0, atol=0.0, equal_nan=True)


@EACH
def test_longer_than_chunks_and_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    # Small tiles cut windowed and written-out attention at rows that are no multiple of anything.
    monkeypatch.setattr("milepost.kernels.torchkit.attention._TILE", 7)
    monkeypatch.setattr("milepost.kernels.torchkit.attention._SCORES", 1000)
    run = random_run(random.Random(5), [75, 1, 34], resume=0.5)
    compare(case, run, case.given(run, torch.float32, 5), TOLERANCE[torch.float32])


@EACH
def test_every_split(case: Case) -> None:
    """All ways to cut 1 to 12 tokens: a walk over every next piece from every state that a split can reach."""
    length, blocks, backend = 12, ((2, 0, 3, 1),), TorchBackend(chunk=5)
    captures = () if case.paged else tuple(Capture(0, offset, offset) for offset in range(1, length))
    whole = Run((0, length), (0,), (0,), (True,), blocks, 4, captures)
    given = case.given(whole, torch.float64, 7)
    wanted, states = case.run(REFERENCE, whole, given)
    steps = {
        (first, stop): backend.prepare(Run((0, stop - first), (first,), (0,), (first == 0,), blocks, 4), CPU)
        for first in range(length)
        for stop in range(first + 1, length + 1)
    }
    parts = {ends: given.part(slice(*ends)) for ends in steps}

    def walk(pool: Tensor, first: int) -> None:
        for stop in range(first + 1, length + 1):
            after = copy_pool(pool)
            found = case.call(backend, parts[first, stop], after, steps[first, stop])
            assert torch.allclose(found, wanted[first:stop], rtol=1e-10, atol=1e-10), f"rows {first} to {stop}"
            if not case.paged:
                assert torch.allclose(after[0], states[stop % length], rtol=1e-10, atol=1e-10), f"state after {stop}"
            walk(after, stop)

    with torch.inference_mode():
        walk(given.pool, 0)


@EACH_RECURRENT
@pytest.mark.parametrize("position", [0, 9])
def test_capture_at_every_position(case: Case, position: int) -> None:
    length = 19
    for offset in range(1, length + 1):
        captures = (Capture(0, offset, 3), Capture(0, length, 4), Capture(0, max(1, offset - 1), 5), Capture(1, 1, 6))
        run = Run((0, length, length + 1), (position, 3), (1, 0), (position == 0, False), ((), ()), 4, captures)
        run = replace(run, blocks=((0,) * 8, (1,)))
        compare(case, run, case.given(run, torch.float64, offset), 1e-11, chunk=7)


@EACH_RECURRENT
def test_all_captures_at_once_equal_runs_that_end_there(case: Case) -> None:
    length, backend = 12, TorchBackend(chunk=5)
    captures = tuple(Capture(0, offset, offset) for offset in range(1, length + 1))
    whole = Run((0, length), (0,), (0,), (True,), ((0,) * 3,), 4, captures)
    given = case.given(whole, torch.float64, 1)
    _, states = case.run(backend, whole, given)
    for offset in range(1, length + 1):
        alone = Run((0, offset), (0,), (0,), (True,), ((0,) * 3,), 4)
        _, pool = case.run(backend, alone, given.part(slice(0, offset)))
        torch.testing.assert_close(states[offset], pool[0], rtol=1e-10, atol=1e-10)


@EACH
def test_neighbours_change_no_bit(case: Case) -> None:
    lengths = [17, 1, 40, 1, 2]
    starts = [sum(lengths[:index]) for index in range(6)]
    blocks = tuple(tuple(range(12 * index, 12 * index + 12)) for index in range(5))
    run = Run(tuple(starts), (0, 5, 3, 8, 1), (4, 1, 0, 3, 2), (True, False, False, False, False), blocks, 4)
    given, backend = case.given(run, torch.float32, 11), TorchBackend(chunk=8)
    together, pool = case.run(backend, run, given)
    for index, length in enumerate(lengths):
        rows = slice(starts[index], starts[index] + length)
        alone_run = Run((0, length), (run.positions[index],), (run.slots[index],), (run.fresh[index],), (blocks[index],), 4)
        alone, alone_pool = case.run(backend, alone_run, given.part(rows))
        assert torch.equal(together[rows], alone), f"output of sequence {index}"
        if not case.paged:
            assert torch.equal(pool[run.slots[index]], alone_pool[run.slots[index]]), f"state of sequence {index}"


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_accumulate_in_fp32(case: Case, dtype: torch.dtype) -> None:
    # Same rounded inputs for both; only the order of fp32 sums and the last rounding differ.
    run = random_run(random.Random(8), [1, 20, 3, 1])
    compare(case, run, case.given(run, dtype, 8), 2e-2, chunk=8)
    if not case.paged and case.name != "convolution":
        given = case.given(run, dtype, 8, torch.float32)
        (_, pool), (_, wanted) = (case.run(each, run, given) for each in (TorchBackend(chunk=8), REFERENCE))
        torch.testing.assert_close(pool, wanted, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("case", [
    operations.delta("gated_delta", key_heads=1, share=2, key_dim=48, value_dim=176),
    operations.delta("kda", key_heads=2, key_dim=48, value_dim=176),
    operations.mamba1(channels=1100, state_size=16),
    operations.rglru(channels=17000),
], ids=lambda case: case.name)  # fmt: skip
def test_large_states_are_updated_in_place(case: Case) -> None:
    # 16,384 numbers a slot and more take the path without a gather.
    run = random_run(random.Random(2), [1, 1, 1])
    compare(case, run, case.given(run, torch.float32, 2), 2e-5)


@FLOATS
@pytest.mark.parametrize("strength", [40.0, 2000.0])
@pytest.mark.parametrize("make", [
    lambda strength: operations.delta("gated_delta", strength=strength),
    lambda strength: operations.delta("kda", strength=strength),
    lambda strength: operations.mamba1(strength=strength),
    lambda strength: operations.rglru(strength=strength),
], ids=["gated_delta", "kda", "mamba1", "rglru"])  # fmt: skip
def test_strong_decays_among_none(make, strength: float, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    # Decays underflow within a chunk, and beside them stand rows that forget nothing or next to nothing: neither
    # overflow, nor NaN, nor a neighbour's digits lost in a large sum.
    case = make(strength)
    run = Run((0, 70), (0,), (0,), (True,), ((0,) * 18,), 4, (Capture(0, 70, 1), Capture(0, 41, 2)))
    given = case.given(run, dtype, 4)
    decays = next(given.rows[name] for name in ("g", "dt", "log_a") if name in given.rows)
    decays[1::3] *= 1e-3 / strength
    decays[2::3] = 0.0
    tolerance = TOLERANCE[dtype]
    if case.name == "mamba1":
        tolerance *= max(1.0, case.run(REFERENCE, run, given)[1][0].abs().max().item())
    compare(case, run, given, tolerance)


@FLOATS
@pytest.mark.parametrize("name", ["gated_delta", "kda"])
def test_keys_alike_and_beta_near_two(name: str, dtype: torch.dtype) -> None:
    # The triangular matrix is full of twos here, and every token nearly reflects the state: the hardest inverse there is.
    case = operations.delta(name, strength=1e-3, reach=2.0)
    run = Run((0, 70), (0,), (0,), (True,), ((0,) * 18,), 4)
    given = case.given(run, dtype, 6)
    given.rows["k"].copy_(given.rows["k"][:1].clone())
    given.rows["beta"][::2] = 1.999
    compare(case, run, given, 10 * TOLERANCE[dtype])


def test_the_first_factor_of_rglru_is_one_at_position_0_only() -> None:
    # Two sequences of one token and two of two: fresh ones start with h = x, resumed ones scale x.
    case = operations.rglru(channels=3)
    run = Run((0, 1, 2, 4, 6), (0, 1, 0, 1), (0, 1, 2, 3), (True, False, True, False), ((0,),) * 4, 4)
    given = case.given(run, torch.float64, 0)
    given.pool[1], given.pool[3] = 0.0, 0.0
    x, a = given.rows["x"], given.rows["log_a"].exp()
    for backend in (TorchBackend(), REFERENCE):
        out, _ = case.run(backend, run, given)
        torch.testing.assert_close(out[[0, 2]], x[[0, 2]])
        torch.testing.assert_close(out[[1, 4]], ((1 - a**2).sqrt() * x)[[1, 4]])


def test_rglru_keeps_its_digits_where_a_is_close_to_one() -> None:
    case, run = operations.rglru(strength=1e-6), Run((0, 40), (3,), (0,), (False,), ((0,) * 11,), 4)
    given = case.given(run, torch.float32, 0)
    given.pool.zero_()
    exact = replace(given, rows={name: value.double() for name, value in given.rows.items()}, pool=given.pool.double())
    (found, _), (wanted, _) = case.run(TorchBackend(), run, given), case.run(REFERENCE, run, exact)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5 * wanted.abs().max().item())


def test_a_window_as_long_as_the_sequence_is_none() -> None:
    wide, none = operations.attention("wide", window=64), operations.attention("none")
    run = random_run(random.Random(4), [9, 1, 5])
    given = wide.given(run, torch.float64, 4)
    (found, _), (wanted, _) = (case.run(TorchBackend(), run, given) for case in (wide, none))
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


def test_latent_attention_is_attention_over_one_shared_head() -> None:
    case, heads, width, value_dim = operations.latent(), 3, 7, 5
    run = Run((0, 6), (0,), (0,), (True,), ((1, 0),), 4)
    given = case.given(run, torch.float64, 2)
    latents = given.rows["latent"].expand(heads, 6, width)
    wanted = torch.nn.functional.scaled_dot_product_attention(
        given.rows["q"].transpose(0, 1), latents, latents[..., :value_dim], is_causal=True, scale=0.4
    )
    found, _ = case.run(TorchBackend(), run, given)
    torch.testing.assert_close(found, wanted.transpose(0, 1), rtol=1e-12, atol=1e-12)
