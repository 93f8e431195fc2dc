"""The real-gated linear recurrent unit in torch operations: position by position, all channels at once.

The law kept here: h <- a h + sqrt(1 - a^2) x (arXiv 2402.19427), the factor of x being 1 at absolute position 0 and nowhere
else; a sequence that resumes has a position above 0. The root comes from -expm1(2 log a): 1 - a^2 would lose its digits
where a is close to 1, which is where a channel remembers longest.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.torchkit.carry import accumulation_dtype, state_before, update_singles
from milepost.kernels.torchkit.step import Stretch, TorchStep


def scan_rglru(x: Tensor, log_a: Tensor, pool: Tensor, step: TorchStep) -> Tensor:
    """Shapes as in `KernelBackend.scan_rglru`."""
    wide, run = accumulation_dtype(x.dtype), step.run
    logs = log_a.to(wide)
    factor = torch.expm1(2.0 * logs).neg_().sqrt_()
    firsts = [run.starts[index] for index, position in enumerate(run.positions) if position == 0]
    if firsts:
        factor[firsts] = 1.0
    decay, pushed = logs.exp(), factor.mul_(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if step.singles is not None:
        rows = step.singles.rows
        parts = (decay.index_select(0, rows), pushed.index_select(0, rows))
        out.index_copy_(0, rows, update_singles(pool, step.singles, wide, _update, parts).to(out.dtype))
    for stretch in step.stretches:
        _stretch(decay, pushed, pool, stretch, out)
    return out


def _stretch(decay: Tensor, pushed: Tensor, pool: Tensor, stretch: Stretch, out: Tensor) -> None:
    """One sequence: each row of h is made from the one before it, and a capture is a row."""
    here = slice(stretch.start, stretch.stop)
    state = state_before(pool, stretch, decay.dtype)
    hidden = torch.empty_like(decay[here])
    for decay_t, pushed_t, hidden_t in zip(decay[here], pushed[here], hidden, strict=True):
        state = torch.addcmul(pushed_t, decay_t, state, out=hidden_t)
    out[here] = hidden
    for offset, target in stretch.captures:
        pool[target] = hidden[offset - 1]
    pool[stretch.slot] = state


def _update(state: Tensor, decay: Tensor, pushed: Tensor) -> Tensor:
    """h <- a h + pushed, in place. All [..., channels]."""
    return state.mul_(decay).add_(pushed)
