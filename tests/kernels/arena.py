"""Random runs and poisoned pools for kernel tests: what nobody wrote is NaN, so whoever reads it is found.

Pools are strided as in the arena: `pool[i]` is contiguous, the stride of the first dimension is larger than that.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.protocol import Capture, KernelBackend, Run

CPU = torch.device("cpu")
NAN = float("nan")


@dataclass(frozen=True)
class Sizes:
    """Dimensions of the operations under test."""

    heads: int = 4
    head_dim: int = 8
    state_size: int = 16
    groups: int = 2
    width: int = 4
    channels: int = 10
    query_heads: int = 4
    kv_heads: int = 2
    kv_dim: int = 8


def strided_pool(count: int, shape: tuple[int, ...], dtype: torch.dtype, gap: int = 24) -> Tensor:
    """A pool of NaN whose entries lie `gap` elements apart."""
    size = 1
    for each in shape:
        size *= each
    entry = torch.empty(shape, device="meta").stride()
    store = torch.full((count * (size + gap),), NAN, dtype=dtype)
    return store.as_strided((count, *shape), (size + gap, *entry))


def random_run(rng: random.Random, lengths: list[int], *, captures: int = 2, block_size: int = 4, resume: float = 0.6) -> Run:
    """Sequences of these lengths at random positions, in shuffled slots and blocks, with random captures."""
    starts, positions, blocks, wanted = [0], [], [], []
    for length in lengths:
        starts.append(starts[-1] + length)
        positions.append(rng.randrange(1, 20) if rng.random() < resume else 0)
        blocks.append(-(-(positions[-1] + length) // block_size) + rng.randrange(2))
    free = list(range(sum(blocks)))
    rng.shuffle(free)
    indices = list(range(2 * len(lengths) + captures * len(lengths)))
    rng.shuffle(indices)
    slots = [indices.pop() for _ in lengths]
    for sequence, length in enumerate(lengths):
        for _ in range(rng.randrange(captures + 1)):
            wanted.append(Capture(sequence, rng.randrange(1, length + 1), indices.pop()))
    return Run(
        starts=tuple(starts),
        positions=tuple(positions),
        slots=tuple(slots),
        fresh=tuple(position == 0 for position in positions),
        blocks=tuple(tuple(free.pop() for _ in range(count)) for count in blocks),
        block_size=block_size,
        captures=tuple(wanted),
    )


def pool_count(run: Run) -> int:
    """Entries that a pool needs for a run."""
    return max((*run.slots, *(capture.target for capture in run.captures))) + 2


@dataclass(frozen=True)
class Inputs:
    """Arguments of every operation for one run."""

    x: Tensor
    dt: Tensor
    a: Tensor
    b: Tensor
    c: Tensor
    d: Tensor
    states: Tensor
    columns: Tensor
    weight: Tensor
    bias: Tensor
    windows: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    kv: Tensor


def random_inputs(run: Run, sizes: Sizes, dtype: torch.dtype, seed: int, pool_dtype: torch.dtype | None = None) -> Inputs:
    """Random arguments; live slots of resumed sequences and KV before their positions are written, the rest is NaN."""
    generator = torch.Generator().manual_seed(seed)
    pool_dtype, precise = pool_dtype or dtype, torch.promote_types(dtype, torch.float32)

    def normal(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(of)

    tokens, count = run.tokens, pool_count(run)
    matrix = (sizes.heads, sizes.head_dim, sizes.state_size)
    states, windows = (
        strided_pool(count, matrix, pool_dtype),
        strided_pool(count, (sizes.channels, sizes.width - 1), dtype),
    )
    kv = strided_pool(max(max(blocks) for blocks in run.blocks) + 1, (2, run.block_size, sizes.kv_heads, sizes.kv_dim), dtype)
    for index, slot in enumerate(run.slots):
        if not run.fresh[index]:
            states[slot] = normal(*matrix, of=pool_dtype)
            windows[slot] = normal(sizes.channels, sizes.width - 1)
        for position in range(run.positions[index]):
            block = run.blocks[index][position // run.block_size]
            kv[block, :, position % run.block_size] = normal(2, sizes.kv_heads, sizes.kv_dim)
    # x, b and c are slices of one array, as behind a convolution.
    group = sizes.groups * sizes.state_size
    joined = normal(tokens, sizes.heads * sizes.head_dim + 2 * group)
    x, b, c = torch.split(joined, [sizes.heads * sizes.head_dim, group, group], 1)
    return Inputs(
        x=x.view(tokens, sizes.heads, sizes.head_dim),
        dt=torch.nn.functional.softplus(normal(tokens, sizes.heads, of=precise) - 1.0),
        a=-torch.exp(normal(sizes.heads, of=precise)),
        b=b.view(tokens, sizes.groups, sizes.state_size),
        c=c.view(tokens, sizes.groups, sizes.state_size),
        d=normal(sizes.heads, of=precise),
        states=states,
        columns=normal(tokens, sizes.channels + 3)[:, 1:-2],
        weight=normal(sizes.channels, sizes.width),
        bias=normal(sizes.channels),
        windows=windows,
        q=normal(tokens, sizes.query_heads, sizes.kv_dim),
        k=normal(tokens, sizes.kv_heads, sizes.kv_dim),
        v=normal(tokens, sizes.kv_heads, sizes.kv_dim),
        kv=kv,
    )


def copy_pool(pool: Tensor) -> Tensor:
    """The same entries in a new store, strided alike."""
    copied = strided_pool(pool.shape[0], tuple(pool.shape[1:]), pool.dtype)
    copied.copy_(pool)
    return copied


def run_all(backend: KernelBackend, run: Run, given: Inputs, *, bias: bool = True) -> dict[str, Tensor]:
    """Every operation on copies of the pools: outputs and pools, by name."""
    step = backend.prepare(run, CPU)
    states, windows, kv = copy_pool(given.states), copy_pool(given.windows), copy_pool(given.kv)
    with torch.inference_mode():
        y = backend.scan_mamba2(given.x, given.dt, given.a, given.b, given.c, given.d, states, step)
        convolved = backend.convolution(given.columns, given.weight, given.bias if bias else None, windows, step)
        backend.write_kv(given.k, given.v, kv, step)
        mixed = backend.attention(given.q, kv, 0.35, step)
    return {"y": y, "states": states, "convolved": convolved, "windows": windows, "kv": kv, "mixed": mixed}


def check_close(found: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float) -> None:
    """Outputs have no NaN and agree; pools agree with NaN in the same places."""
    for name, value in wanted.items():
        if name in ("y", "convolved", "mixed"):
            assert not torch.isnan(found[name]).any(), f"{name} read memory that nobody wrote"
        torch.testing.assert_close(
            found[name], value, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text, name=name: f"{name}: {text}"
        )
