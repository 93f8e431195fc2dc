"""The depthwise causal convolution with its window, in torch operations.

The law kept here: the window holds the last width - 1 columns *before* the convolution, oldest first. A run or a capture
shorter than that keeps the newest columns of the old window in front of its own; a fresh sequence's old window is
zeros whatever its slot holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.torchkit.scan import accumulation_dtype
from milepost.kernels.torchkit.step import Singles, Stretch, TorchStep

_TILE = 256 * 1024
"""Numbers that are convolved at a time, so that they stay in cache between the passes."""


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: TorchStep) -> Tensor:
    """Convolution, then SiLU. Shapes as in `KernelBackend.convolution`."""
    wide = accumulation_dtype(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.t().to(wide).contiguous()
    bias = torch.zeros_like(taps[0]) if bias is None else bias.to(wide)
    if step.singles is not None:
        _convolve_singles(x, taps, bias, pool, step.singles, out)
    for stretch in step.stretches:
        _convolve_stretch(x, taps, bias, pool, stretch, out)
    return out


def _convolve_stretch(x: Tensor, taps: Tensor, bias: Tensor, pool: Tensor, stretch: Stretch, out: Tensor) -> None:
    """One sequence: a head that reads the old window, then tiles that read rows only, then the new windows."""
    kept = taps.shape[0] - 1
    rows = x[stretch.start : stretch.stop]
    live = pool[stretch.slot]
    old = torch.zeros_like(live).t() if stretch.fresh else live.t()
    near = torch.cat([old.to(rows.dtype), rows[:kept]]) if kept else rows[:0]
    here = out[stretch.start : stretch.stop]
    _convolve(near, taps, bias, here[:kept])
    size = max(8, _TILE // taps.shape[1])
    for begin in range(kept, rows.shape[0], size):
        tile = here[begin : begin + size]
        _convolve(rows[begin - kept : begin + tile.shape[0]], taps, bias, tile)
    windows = [(target, _window(near, rows, kept, offset)) for offset, target in stretch.captures]
    windows.append((stretch.slot, _window(near, rows, kept, rows.shape[0])))
    for target, window in windows:
        pool[target] = window.t()


def _convolve(columns: Tensor, taps: Tensor, bias: Tensor, out: Tensor) -> None:
    """silu(bias + sum over j of taps[j] columns[t + j]). columns [rows + width - 1, channels], out [rows, channels]."""
    count = out.shape[0]
    wide = columns.to(taps.dtype)
    total = out if out.dtype == taps.dtype else torch.empty(out.shape, dtype=taps.dtype, device=out.device)
    torch.addcmul(bias, wide[:count], taps[0], out=total)
    for index in range(1, taps.shape[0]):
        total.addcmul_(wide[index : index + count], taps[index])
    functional.silu(total, inplace=True)
    if total is not out:
        out.copy_(total)


def _window(near: Tensor, rows: Tensor, kept: int, offset: int) -> Tensor:
    """The last `kept` columns after `offset` rows, [kept, channels]; `near` is the old window and the first rows."""
    return rows[offset - kept : offset] if offset >= kept else near[offset : offset + kept]


def _convolve_singles(x: Tensor, taps: Tensor, bias: Tensor, pool: Tensor, singles: Singles, out: Tensor) -> None:
    """All sequences with one token, as one batch."""
    if singles.fresh_index is not None:
        pool.index_fill_(0, singles.fresh_index, 0)
    rows = x.index_select(0, singles.rows)
    columns = torch.cat([pool.index_select(0, singles.slot_index).to(x.dtype), rows.unsqueeze(2)], dim=2)
    total = (columns.to(taps.dtype) * taps.t()).sum(2).add_(bias)
    out.index_copy_(0, singles.rows, functional.silu(total, inplace=True).to(out.dtype))
    pool.index_copy_(0, singles.slot_index, columns[:, :, 1:].to(pool.dtype))
    if singles.capture_targets is not None and singles.capture_sources is not None:
        pool.index_copy_(0, singles.capture_targets, pool.index_select(0, singles.capture_sources))
