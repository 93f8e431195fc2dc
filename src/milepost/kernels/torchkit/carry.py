"""A state's way in and out of its pool: taken before a run, put back after it, copied where it is captured.

The law kept here: a fresh sequence starts from zeros whatever its slot holds, NaN too, and no slot but those of the run
and its captures is touched.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from milepost.kernels.torchkit.step import Singles, Stretch

_GATHER_BELOW = 16 * 1024
"""State elements of one slot below which single-token runs are gathered as one batch rather than updated in place."""


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def state_before(pool: Tensor, stretch: Stretch, wide: torch.dtype) -> Tensor:
    """A contiguous copy of the sequence's state in dtype `wide`; zeros if it is fresh."""
    live = pool[stretch.slot]
    if stretch.fresh:
        return torch.zeros(live.shape, dtype=wide, device=live.device)
    return live.to(wide, copy=True, memory_format=torch.contiguous_format)


def update_singles(
    pool: Tensor, singles: Singles, wide: torch.dtype, update: Callable[..., Tensor], parts: tuple[Tensor, ...]
) -> Tensor:
    """Apply `update(state, *parts)` to all sequences with one token, states in place, and stack what it returns.

    Each part is [count, ...]. `update` is given a batch of states and the parts as they are, or one state and one entry of
    each part: it must do with and without that first dimension.
    """
    if singles.fresh_index is not None:
        # Zeroing a fresh slot keeps whatever it held, NaN too, out of the products.
        pool.index_fill_(0, singles.fresh_index, 0)
    if pool.dtype == wide and pool[0].numel() >= _GATHER_BELOW:
        # One slot at a time, where it stands: it stays in cache between the passes.
        made = [update(pool[slot], *(part[index] for part in parts)) for index, slot in enumerate(singles.slots)]
        out = torch.stack(made)
    else:
        state = pool.index_select(0, singles.slot_index).to(wide)
        out = update(state, *parts)
        pool.index_copy_(0, singles.slot_index, state.to(pool.dtype))
    capture_singles(pool, singles)
    return out


def capture_singles(pool: Tensor, singles: Singles) -> None:
    """Copy updated live slots to the captures that ask for them."""
    if singles.capture_targets is not None and singles.capture_sources is not None:
        pool.index_copy_(0, singles.capture_targets, pool.index_select(0, singles.capture_sources))
