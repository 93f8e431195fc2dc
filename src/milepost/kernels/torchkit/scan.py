"""The Mamba-2 scan in torch operations: chunks for runs of several tokens, one batch for runs of one token.

The law kept here: no padding exists. A sequence is cut into chunks of unequal length where captures ask for it, and
every row that enters the recurrence is a token of that sequence. The formulas are those of arXiv 2405.21060, section
6: inside a chunk, with a_t = dt_t A and cum its inclusive prefix sum,

    y_t = sum over s <= t of (C_t . B_s) exp(cum_t - cum_s) dt_s x_s  +  exp(cum_t) C_t S  +  D x_t
    S   <- exp(cum_last) S + sum over t of exp(cum_last - cum_t) dt_t x_t B_t^T

Every exponent is a sum of a_t <= 0, with log dt_s added where dt_s is a factor, and -inf above the diagonal before exp.
Sums of a_t are taken in fp64: differences of fp32 prefix sums would lose what lies near the diagonal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.torchkit.carry import accumulation_dtype, state_before, update_singles
from milepost.kernels.torchkit.step import Singles, Stretch, TorchStep


def scan(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: TorchStep) -> Tensor:
    """S <- exp(dt a) S + dt x b^T; y = S c + d x. Shapes as in `KernelBackend.scan_mamba2`."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if step.singles is not None:
        _scan_singles(x, dt, a, b, c, d, pool, step.singles, out)
    for stretch in step.stretches:
        _scan_stretch(x, dt, a, b, c, d, pool, step, stretch, out)
    return out


# --- runs of several tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Factors:
    """Scalars of a sequence, by head and row, the prefix sums started anew at each chunk."""

    query: Tensor
    """[heads, L] fp64: cum."""
    key: Tensor
    """[heads, L] fp64: cum - log dt."""
    past: Tensor
    """[heads, L]: exp(cum), the factor of the state that entered the chunk."""
    into: Tensor
    """[L, heads]: dt exp(cum_last - cum), the factor with which a row enters the state."""
    whole: Tensor
    """[chunks, heads]: exp(cum_last)."""


def _factors(dt: Tensor, a: Tensor, stretch: Stretch, wide: torch.dtype) -> _Factors:
    """Prefix sums of one sequence. dt [L, heads], a [heads]; all but the exponents' parts are of dtype `wide`."""
    dt = dt.to(torch.float64)
    steps = dt * a.to(torch.float64)
    total = steps.cumsum(0)
    cum = total - (total - steps).index_select(0, stretch.first_rows)
    last = cum.index_select(0, stretch.chunk_ends)
    to_end = last.index_select(0, stretch.chunk_of_row) - cum
    by_head = cum.t().contiguous()
    return _Factors(
        query=by_head,
        key=by_head - dt.t().log(),
        past=by_head.exp().to(wide),
        into=to_end.exp_().mul_(dt).to(wide),
        whole=last.exp_().to(wide),
    )


def _scan_stretch(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor,
    pool: Tensor, step: TorchStep, stretch: Stretch, out: Tensor,
) -> None:  # fmt: skip
    """One sequence, chunk by chunk: the carry stays in one place, and a capture is a copy of it."""
    wide = accumulation_dtype(x.dtype)
    factors = _factors(dt[stretch.start : stretch.stop], a, stretch, wide)
    state, d = state_before(pool, stretch, wide), d.to(wide)
    for index, chunk in enumerate(stretch.chunks):
        here, part = slice(stretch.start + chunk.begin, stretch.start + chunk.end), slice(chunk.begin, chunk.end)
        values, keys, queries = x[here].to(wide), b[here].to(wide), c[here].to(wide)
        weights = _inside(keys, queries, factors.query[:, part], factors.key[:, part], d, step.mask)
        y = _past(queries, state, factors.past[:, part])
        y.baddbmm_(weights, values.transpose(0, 1))
        out[here] = y.transpose(0, 1)
        _advance(state, values, keys, factors.into[part], factors.whole[index])
        for target in chunk.targets:
            pool[target] = state
    pool[stretch.slot] = state


def _inside(keys: Tensor, queries: Tensor, cum: Tensor, key: Tensor, d: Tensor, mask: Tensor) -> Tensor:
    """Weights [heads, q, q] of the chunk's own values: (C_t . B_s) exp(cum_t - cum_s) dt_s, and D on the diagonal."""
    heads, rows = cum.shape
    groups = keys.shape[1]
    weights = (cum.unsqueeze(2) - key.unsqueeze(1)).to(keys.dtype)
    weights.add_(mask[:rows, :rows]).exp_()
    scores = torch.bmm(queries.transpose(0, 1), keys.permute(1, 2, 0))
    weights.view(groups, heads // groups, rows, rows).mul_(scores.unsqueeze(1))
    weights.diagonal(dim1=1, dim2=2).add_(d.unsqueeze(1))
    return weights


def _past(queries: Tensor, state: Tensor, past: Tensor) -> Tensor:
    """exp(cum_t) C_t S: queries [q, groups, n], state [heads, head_dim, n], past [heads, q] to [heads, q, head_dim]."""
    heads, head_dim, size = state.shape
    rows, groups, _ = queries.shape
    product = torch.bmm(queries.transpose(0, 1), state.view(groups, -1, size).transpose(1, 2))
    y = torch.empty(heads, rows, head_dim, dtype=state.dtype, device=state.device)
    by_head = product.view(groups, rows, -1, head_dim).transpose(1, 2)
    torch.mul(by_head, past.view(groups, -1, rows, 1), out=y.view(by_head.shape))
    return y


def _advance(state: Tensor, values: Tensor, keys: Tensor, into: Tensor, whole: Tensor) -> None:
    """S <- exp(cum_last) S + sum over t of into_t x_t B_t^T, in place. values [q, heads, head_dim]."""
    heads, _, size = state.shape
    groups = keys.shape[1]
    weighted = (values * into.unsqueeze(2)).view(values.shape[0], groups, -1)
    state.mul_(whole.view(heads, 1, 1))
    state.view(groups, -1, size).baddbmm_(weighted.permute(1, 2, 0), keys.transpose(0, 1))


# --- runs of one token ------------------------------------------------------------------------------------------------


def _scan_singles(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, singles: Singles, out: Tensor
) -> None:
    """All sequences with one token: one update of the state each, then y."""
    wide = accumulation_dtype(x.dtype)
    rows = singles.rows
    values, steps = x.index_select(0, rows).to(wide), dt.index_select(0, rows).to(wide)
    count, heads, head_dim = values.shape
    grouped = (count, b.shape[1], -1, 1)
    parts = (
        (steps * a.to(wide)).exp_().repeat_interleave(head_dim, 1).view(grouped),
        (values * steps.unsqueeze(2)).view(grouped),
        b.index_select(0, rows).to(wide).unsqueeze(2),
        c.index_select(0, rows).to(wide).unsqueeze(2),
    )
    products = update_singles(pool, singles, wide, _update, parts)
    y = products.view(count, heads, head_dim).addcmul_(values, d.to(wide).unsqueeze(1))
    out.index_copy_(0, rows, y.to(out.dtype))


def _update(state: Tensor, decay: Tensor, pushed: Tensor, keys: Tensor, queries: Tensor) -> Tensor:
    """S <- decay S + pushed keys, in place, then S queries: [..., groups, channels of a group].

    state [..., heads, head_dim, n]; decay, pushed [..., groups, channels, 1]; keys, queries [..., groups, 1, n].
    """
    grouped = state.view(*decay.shape[:-1], state.shape[-1])
    grouped.mul_(decay).addcmul_(pushed, keys)
    return (grouped * queries).sum(-1)
