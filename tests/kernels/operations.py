"""The operations that models beyond Mamba-2 need, each as data: its inputs by row, its constants, its pool, its call.

One suite runs over all of them. Inputs are built so that what an operation is promised holds: keys of unit length, log
decays below 0. Pools are strided, and NaN where nobody wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import KernelBackend, Run, Step
from tests.kernels.arena import CPU, copy_pool, pool_count, strided_pool

Normal = Callable[..., Tensor]
Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Given:
    """Arguments of one operation for one run. `rows` have one entry for each token."""

    rows: Tensors
    constants: Tensors
    pool: Tensor

    def part(self, rows: slice) -> Given:
        """The same with some of the rows, over the same pool."""
        return replace(self, rows={name: value[rows] for name, value in self.rows.items()})


@dataclass(frozen=True)
class Case:
    """One operation: how to make its arguments, and how to call it on a backend."""

    name: str
    entry: Callable[[int], tuple[int, ...]]
    """Shape of one entry of the pool, given the block size."""
    make: Callable[[Normal, int], tuple[Tensors, Tensors]]
    """Rows and constants for so many tokens."""
    call: Callable[[KernelBackend, Given, Tensor, Step], Tensor]
    paged: bool = False
    """The pool holds blocks rather than states."""
    window: int | None = None
    """Positions that a query sees, for attention."""

    def given(self, run: Run, dtype: torch.dtype, seed: int, pool_dtype: torch.dtype | None = None) -> Given:
        """Random arguments; live slots of resumed sequences and blocks before their positions are written."""
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        entry = self.entry(run.block_size)
        count = max(max(blocks) for blocks in run.blocks) + 1 if self.paged else pool_count(run)
        pool = strided_pool(count, entry, pool_dtype or dtype)
        for index, slot in enumerate(run.slots):
            if not self.paged and not run.fresh[index]:
                pool[slot] = normal(*entry).to(pool.dtype)
            for position in range(run.positions[index] if self.paged else 0):
                block, place = run.blocks[index][position // run.block_size], position % run.block_size
                if block >= 0:
                    at = pool[block, :, place] if len(entry) == 4 else pool[block, place]
                    at.copy_(normal(*at.shape))
        rows, constants = self.make(normal, run.tokens)
        return Given(*({name: value.to(dtype) for name, value in each.items()} for each in (rows, constants)), pool)

    def run(self, backend: KernelBackend, run: Run, given: Given) -> tuple[Tensor, Tensor]:
        """Output and pool, the operation having worked on a copy of the pool."""
        pool = copy_pool(given.pool)
        with torch.inference_mode():
            return self.call(backend, given, pool, backend.prepare(run, CPU)), pool


# --- recurrences ------------------------------------------------------------------------------------------------------


def short_convolution(channels: int = 5, width: int = 3) -> Case:
    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        return {"x": normal(tokens, channels)}, {"weight": normal(channels, width)}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        return backend.convolution(given.rows["x"], given.constants["weight"], None, pool, step, activation=None)

    return Case("convolution", lambda _: (channels, width - 1), make, call)


def delta(
    name: str, key_heads: int = 2, share: int = 1, key_dim: int = 4, value_dim: int = 3,
    strength: float = 1.0, reach: float = 1.0,
) -> Case:  # fmt: skip
    """Gated delta net, or KDA. `strength` scales the log decays; beta is below `reach` (2 where a model lets states flip)."""
    heads, by_channel = key_heads * share, name == "kda"

    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        decays = normal(tokens, heads, key_dim) if by_channel else normal(tokens, heads)
        rows = {
            "q": functional.normalize(normal(tokens, key_heads, key_dim), dim=-1) * key_dim**-0.5,
            "k": functional.normalize(normal(tokens, key_heads, key_dim), dim=-1),
            "v": normal(tokens, heads, value_dim),
            "g": -functional.softplus(decays) * strength,
            "beta": torch.sigmoid(normal(tokens, heads)) * reach,
        }
        return rows, {}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        scan = backend.scan_kda if by_channel else backend.scan_gated_delta
        return scan(**given.rows, pool=pool, step=step)

    return Case(name, lambda _: (heads, key_dim, value_dim), make, call)


def mamba1(channels: int = 5, state_size: int = 3, strength: float = 1.0) -> Case:
    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        rows = {
            "x": normal(tokens, channels),
            "dt": functional.softplus(normal(tokens, channels) - 1.0) * strength,
            "b": normal(tokens, state_size),
            "c": normal(tokens, state_size),
        }
        return rows, {"a": -torch.exp(normal(channels, state_size)), "d": normal(channels)}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        return backend.scan_mamba1(**given.rows, **given.constants, pool=pool, step=step)

    return Case("mamba1", lambda _: (channels, state_size), make, call)


def rglru(channels: int = 5, strength: float = 1.0) -> Case:
    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        return {"x": normal(tokens, channels), "log_a": -functional.softplus(normal(tokens, channels)) * strength}, {}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        return backend.scan_rglru(**given.rows, pool=pool, step=step)

    return Case("rglru", lambda _: (channels,), make, call)


# --- attention --------------------------------------------------------------------------------------------------------


def attention(
    name: str, heads: int = 4, kv_heads: int = 2, dim: int = 3, window: int | None = None, softcap: float | None = None
) -> Case:
    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        return {name: normal(tokens, count, dim) for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))}, {}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        backend.write_kv(given.rows["k"], given.rows["v"], pool, step)
        return backend.attention(given.rows["q"], pool, 0.7, step, window, softcap)

    return Case(name, lambda size: (2, size, kv_heads, dim), make, call, paged=True, window=window)


def latent(heads: int = 3, width: int = 7, value_dim: int = 5) -> Case:
    def make(normal: Normal, tokens: int) -> tuple[Tensors, Tensors]:
        return {"q": normal(tokens, heads, width), "latent": normal(tokens, width)}, {}

    def call(backend: KernelBackend, given: Given, pool: Tensor, step: Step) -> Tensor:
        backend.write_latent(given.rows["latent"], pool, step)
        return backend.attention_latent(given.rows["q"], pool, 0.4, step, value_dim)

    return Case("latent", lambda size: (size, width), make, call, paged=True)


CASES = {
    case.name: case
    for case in (
        short_convolution(),
        delta("gated_delta", share=2),
        delta("kda"),
        mamba1(),
        rglru(),
        attention("window", window=5),
        attention("softcap", softcap=2.0),
        attention("window_softcap", window=3, softcap=2.0),
        latent(),
    )
}
RECURRENT = {name: case for name, case in CASES.items() if not case.paged}
