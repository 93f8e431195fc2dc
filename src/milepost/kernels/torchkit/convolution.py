"""The depthwise causal convolution with its window, in torch operations.

The law kept here: the window holds the last width - 1 columns *before* the convolution, oldest first. A run or a capture
shorter than that keeps the newest columns of the old window in front of its own; a fresh sequence's old window is
zeros whatever its slot holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.protocol import Activation
from milepost.kernels.torchkit.carry import accumulation_dtype, capture_singles
from milepost.kernels.torchkit.step import Singles, Stretch, TorchStep

_TILE = 256 * 1024
"""Numbers that are convolved at a time, so that they stay in cache between the passes."""


def convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: TorchStep, activation: Activation
) -> Tensor:
    """Convolution, then the activation. Shapes as in `KernelBackend.convolution`."""
    wide = accumulation_dtype(x.dtype)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    taps = weight.t().to(wide).contiguous()
    bias = torch.zeros_like(taps[0]) if bias is None else bias.to(wide)
    if step.singles is not None:
        _convolve_singles(x, taps, bias, pool, step.singles, activation, out)
    for stretch in step.stretches:
        _convolve_stretch(x, taps, bias, pool, stretch, activation, out)
    return out


def _convolve_stretch(
    x: Tensor, taps: Tensor, bias: Tensor, pool: Tensor, stretch: Stretch, activation: Activation, out: Tensor
) -> None:
    """One sequence: a head that reads the old window, then tiles that read rows only, then the new windows."""
    kept = taps.shape[0] - 1
    rows = x[stretch.start : stretch.stop]
    live = pool[stretch.slot]
    old = torch.zeros_like(live).t() if stretch.fresh else live.t()
    near = torch.cat([old.to(rows.dtype), rows[:kept]]) if kept else rows[:0]
    here = out[stretch.start : stretch.stop]
    _convolve(near, taps, bias, activation, here[:kept])
    size = max(8, _TILE // taps.shape[1])
    for begin in range(kept, rows.shape[0], size):
        tile = here[begin : begin + size]
        _convolve(rows[begin - kept : begin + tile.shape[0]], taps, bias, activation, tile)
    windows = [(target, _window(near, rows, kept, offset)) for offset, target in stretch.captures]
    windows.append((stretch.slot, _window(near, rows, kept, rows.shape[0])))
    for target, window in windows:
        pool[target] = window.t()


def _convolve(columns: Tensor, taps: Tensor, bias: Tensor, activation: Activation, out: Tensor) -> None:
    """silu(bias + sum over j of taps[j] columns[t + j]). columns [rows + width - 1, channels], out [rows, channels]."""
    count = out.shape[0]
    wide = columns.to(taps.dtype)
    total = out if out.dtype == taps.dtype else torch.empty(out.shape, dtype=taps.dtype, device=out.device)
    torch.addcmul(bias, wide[:count], taps[0], out=total)
    for index in range(1, taps.shape[0]):
        total.addcmul_(wide[index : index + count], taps[index])
    if activation == "silu":
        functional.silu(total, inplace=True)
    if total is not out:
        out.copy_(total)


def _window(near: Tensor, rows: Tensor, kept: int, offset: int) -> Tensor:
    """The last `kept` columns after `offset` rows, [kept, channels]; `near` is the old window and the first rows."""
    return rows[offset - kept : offset] if offset >= kept else near[offset : offset + kept]


def _convolve_singles(
    x: Tensor, taps: Tensor, bias: Tensor, pool: Tensor, singles: Singles, activation: Activation, out: Tensor
) -> None:
    """All sequences with one token, as one batch."""
    if singles.fresh_index is not None:
        pool.index_fill_(0, singles.fresh_index, 0)
    kept = taps.shape[0] - 1
    rows = x.index_select(0, singles.rows)
    windows = pool.index_select(0, singles.slot_index).to(x.dtype).transpose(1, 2).contiguous()
    columns = torch.cat([windows, rows.unsqueeze(1)], dim=1)
    wide = columns.to(taps.dtype)
    total = torch.addcmul(bias, wide[:, 0], taps[0])
    for index in range(1, kept + 1):
        total.addcmul_(wide[:, index], taps[index])
    if activation == "silu":
        # Not torch's silu: it rounds the last few numbers of an array differently, and neighbours move the array's end.
        total.div_(total.neg().exp_().add_(1.0))
    out.index_copy_(0, singles.rows, total.to(out.dtype))
    pool.index_copy_(0, singles.slot_index, columns[:, 1:].transpose(1, 2).contiguous().to(pool.dtype))
    capture_singles(pool, singles)
