"""The Mamba-1 scan in torch operations: position by position, all channels and state columns at once.

The law kept here: S[i, n] <- exp(dt_i a_in) S[i, n] + dt_i b_n x_i, y_i = sum over n of c_n S[i, n] + d_i x_i
(arXiv 2312.00752), with every row a token of its sequence.

Its decay has no structure that a product of matrices could use: each channel and column forgets at its own rate, and pairs
of rows in a chunk would cost as many exponentials as the chunk has rows, for each number of the state. One exponential a
number and position is the least, so a run is a plain loop, with the state laid out [state_size, channels]: then inner loops
are long, and y is one product of a row with a matrix. Where it was measured (8192 x 16, AVX2), the exponentials take half
of the time, and cutting channels into tiles that stay in cache loses more to calls than it wins.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.torchkit.carry import accumulation_dtype, state_before, update_singles
from milepost.kernels.torchkit.step import Singles, Stretch, TorchStep


def scan_mamba1(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: TorchStep) -> Tensor:
    """Shapes as in `KernelBackend.scan_mamba1`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if step.singles is not None:
        _singles(x, dt, a, b, c, d, pool, step.singles, out)
    for stretch in step.stretches:
        _stretch(x, dt, a, b, c, d, pool, stretch, out)
    return out


def _stretch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, stretch: Stretch, out: Tensor
) -> None:
    """One sequence: the state stays in one place, transposed, and a capture is a copy of it."""
    wide = accumulation_dtype(x.dtype)
    state = state_before(pool, stretch, wide).t().contiguous()
    rates, decay = a.to(wide).t().contiguous(), torch.empty_like(state)
    for chunk in stretch.chunks:
        here = slice(stretch.start + chunk.begin, stretch.start + chunk.end)
        values, steps, keys, queries = (each[here].to(wide) for each in (x, dt, b, c))
        pushed, y = values * steps, values * d.to(wide)
        rows = zip(steps, pushed, keys.unsqueeze(2), queries.unsqueeze(1), y.unsqueeze(1), strict=True)
        for step_t, pushed_t, key, query, y_t in rows:
            state.mul_(torch.mul(rates, step_t, out=decay).exp_()).addcmul_(key, pushed_t)
            y_t.addmm_(query, state)
        out[here] = y
        for target in chunk.targets:
            pool[target] = state.t()
    pool[stretch.slot] = state.t()


def _singles(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, singles: Singles, out: Tensor
) -> None:
    """All sequences with one token: one update of the state each, as it lies in the pool."""
    wide, rows = accumulation_dtype(x.dtype), singles.rows
    values, steps, keys, queries = (each.index_select(0, rows).to(wide) for each in (x, dt, b, c))
    rates = a.to(wide)

    def update(state: Tensor, step: Tensor, pushed: Tensor, key: Tensor, query: Tensor) -> Tensor:
        """state [..., channels, n]; step, pushed [..., channels, 1]; key, query [..., 1, n] to [..., channels]."""
        state.mul_((rates * step).exp_()).addcmul_(pushed, key)
        return torch.matmul(state, query.transpose(-1, -2)).squeeze(-1)

    parts = (steps.unsqueeze(2), (values * steps).unsqueeze(2), keys.unsqueeze(1), queries.unsqueeze(1))
    y = update_singles(pool, singles, wide, update, parts).addcmul_(values, d.to(wide))
    out.index_copy_(0, rows, y.to(out.dtype))
