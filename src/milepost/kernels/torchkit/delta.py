"""The delta rule in torch operations, with one decay a head (gated delta net) or one a key channel (KDA).

The law kept here: every decay is a product of factors e^g <= 1 or the exponential of a sum of g <= 0, masked with -inf
before exp. Nothing is divided by a decay, and no exponent is positive, so no g overflows, however strong.

Both are S <- D S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q, with D = e^g (arXiv 2412.06464) or diag(e^g)
(arXiv 2510.26692). Inside a chunk that the state S enters, with D(t, s) the product of the decays after row s up to row t
and D(t) that of all up to t,

    u_t = beta_t (v_t - (D(t) k_t)^T S - sum over s < t of (k_t . D(t, s) k_s) u_s)
    o_t = (D(t) q_t)^T S + sum over s <= t of (q_t . D(t, s) k_s) u_s
    S   <- D(last) S + sum over s of (D(last, s) k_s) u_s^T

The first line is a unit lower triangular system (I + diag(beta) A) U = diag(beta) (V - ...). Its matrix is inverted by
substitution, head by head, and applied as a product: with a triangular solve of wide right sides torch is twice as slow.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.torchkit.carry import accumulation_dtype, state_before, update_singles
from milepost.kernels.torchkit.step import Singles, Stretch, TorchStep


def delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: TorchStep) -> Tensor:
    """Both forms. Shapes as in `KernelBackend.scan_gated_delta`, or `scan_kda` if g has a dimension for key channels."""
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if step.singles is not None:
        _singles(q, k, v, g, beta, pool, step.singles, out)
    for stretch in step.stretches:
        _stretch(q, k, v, g, beta, pool, step, stretch, out)
    return out


# --- runs of several tokens -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Chunk:
    """What q, k and g of a chunk of r rows come to, before the state is looked at."""

    inside: Tensor
    """[heads, r, r]: k_t . D(t, s) k_s below the diagonal; what stands elsewhere isn't read."""
    weights: Tensor
    """[heads, r, r]: q_t . D(t, s) k_s up to the diagonal, else 0."""
    past: Tensor
    """[heads, r x 2, key_dim]: D(t) k_t and D(t) q_t by turns."""
    into: Tensor
    """[heads, r, key_dim]: D(last, s) k_s."""
    whole: Tensor
    """[heads, 1 or key_dim, 1]: D(last)."""


def _stretch(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: TorchStep, stretch: Stretch, out: Tensor
) -> None:
    """One sequence, chunk by chunk: the carry stays in one place, and a capture is a copy of it."""
    wide = accumulation_dtype(v.dtype)
    state = state_before(pool, stretch, wide)
    eye = torch.eye(step.mask.shape[0], dtype=wide, device=v.device)
    for chunk in stretch.chunks:
        here = slice(stretch.start + chunk.begin, stretch.start + chunk.end)
        rows = chunk.end - chunk.begin
        queries, keys, values = (_by_head(each[here].to(wide)) for each in (q, k, v))
        if g.ndim == 2:
            parts = _decayed_by_head(queries, keys, g[here], step.mask[:rows, :rows])
        else:
            parts = _decayed_by_channel(queries, keys, _by_head(g[here].to(wide)))
        betas = beta[here].to(wide).t().unsqueeze(2)
        of_keys, of_queries = torch.bmm(parts.past, state).view(state.shape[0], rows, 2, -1).unbind(2)
        inverse = torch.linalg.solve_triangular(
            parts.inside.mul_(betas), eye[:rows, :rows].expand_as(parts.inside), upper=False, unitriangular=True
        )
        updates = torch.bmm(inverse, values.sub(of_keys).mul_(betas))
        out[here] = torch.baddbmm(of_queries, parts.weights, updates).transpose(0, 1)
        state.mul_(parts.whole).baddbmm_(parts.into.transpose(1, 2), updates)
        for target in chunk.targets:
            pool[target] = state
    pool[stretch.slot] = state


def _by_head(rows: Tensor) -> Tensor:
    """[r, heads, dim] to [heads, r, dim]."""
    return rows.transpose(0, 1).contiguous()


def _decayed_by_head(queries: Tensor, keys: Tensor, g: Tensor, mask: Tensor) -> _Chunk:
    """One decay a head. queries, keys [key_heads, r, key_dim]; g [r, heads]; mask is -inf above the diagonal, else 0.

    Sums of g are taken in fp64: differences of fp32 prefix sums would lose what lies near the diagonal.
    """
    wide, (key_heads, rows, key_dim) = keys.dtype, keys.shape
    cum = g.t().to(torch.float64).cumsum(1)
    heads = cum.shape[0]
    apart = (cum.unsqueeze(2) - cum.unsqueeze(1)).to(wide).add_(mask).exp_()
    both = torch.stack([keys, queries], dim=2)
    # Value heads of a key head share its products.
    products = torch.bmm(both.flatten(1, 2), keys.transpose(1, 2)).view(key_heads, 1, rows, 2, rows)
    scores = (products * apart.view(key_heads, -1, rows, 1, rows)).view(heads, rows, 2, rows)
    start, end = cum.exp().to(wide), (cum[:, -1:] - cum).exp_().to(wide)
    past = both.unsqueeze(1) * start.view(key_heads, -1, rows, 1, 1)
    into = keys.unsqueeze(1) * end.view(key_heads, -1, rows, 1)
    return _Chunk(
        inside=scores[:, :, 0],
        weights=scores[:, :, 1],
        past=past.view(heads, rows * 2, key_dim),
        into=into.view(heads, rows, key_dim),
        whole=start[:, -1].view(heads, 1, 1),
    )


def _decayed_by_channel(queries: Tensor, keys: Tensor, g: Tensor) -> _Chunk:
    """One decay a key channel. All [heads, r, key_dim].

    Factoring D(t, s) into exp(cum_t) exp(-cum_s) would overflow where a channel forgets fast. So the chunk is halved again and
    again, and a pair of rows meets at the border b of the halves that part it: D(t, s) = D(t, b) D(b, s). Both are products
    of decays, hence <= 1, and if one underflows, so does what it stands for. From the smallest halves up, with D(t, b) in
    `past` and D(b, s) in `into`, joining two halves takes one factor for each row, and the last join leaves D(t) and
    D(last, s) in them. Nothing is subtracted, so no digits are lost either.

    Halves need a power of two: rows of zeros that decay nothing fill it up, and are cut away before the state is looked at.
    """
    heads, rows, key_dim = keys.shape
    size = 1 << (rows - 1).bit_length()
    past, into = keys.new_zeros(heads, size, 2, key_dim), keys.new_zeros(heads, size, key_dim)
    decay = g.exp()
    into[:, :rows] = keys
    torch.mul(keys, decay, out=past[:, :rows, 0])
    torch.mul(queries, decay, out=past[:, :rows, 1])
    over = keys.new_ones(heads, size, key_dim)  # the decay of each half as a whole
    over[:, :rows] = decay
    scores = keys.new_zeros(heads, size, 2, size)
    half = 1
    while half < size:
        pairs = size // (2 * half)
        later = past.view(heads, pairs, 2, half, 2, key_dim)[:, :, 1]
        earlier = into.view(heads, pairs, 2, half, key_dim)[:, :, 0]
        met = torch.bmm(later.reshape(-1, half * 2, key_dim), earlier.reshape(-1, half, key_dim).transpose(1, 2))
        corners = scores.view(heads, pairs, 2, half, 2, pairs, 2, half)[:, :, 1, :, :, :, 0].diagonal(dim1=1, dim2=4)
        corners.movedim(-1, 1).copy_(met.view(heads, pairs, half, 2, half))
        first, second = over.view(heads, pairs, 2, 1, key_dim).unbind(2)
        later.mul_(first.unsqueeze(2))
        earlier.mul_(second)
        over, half = first * second, 2 * half
    weights = scores[:, :rows, 1, :rows]
    weights.diagonal(dim1=1, dim2=2).copy_((queries * keys).sum(-1))
    return _Chunk(
        inside=scores[:, :rows, 0, :rows],
        weights=weights,
        past=past[:, :rows].reshape(heads, rows * 2, key_dim),
        into=into[:, :rows],
        whole=over.view(heads, key_dim, 1),
    )


# --- runs of one token ------------------------------------------------------------------------------------------------


def _singles(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, singles: Singles, out: Tensor
) -> None:
    """All sequences with one token: one update of the state each."""
    wide, rows = accumulation_dtype(v.dtype), singles.rows
    share = v.shape[1] // k.shape[1]
    queries, keys, values, logs, betas = (each.index_select(0, rows).to(wide) for each in (q, k, v, g, beta))
    queries, keys = (each.repeat_interleave(share, 1) if share > 1 else each for each in (queries, keys))
    decay = logs.exp_().unsqueeze(-1) if g.ndim == 3 else logs.exp_()[..., None, None]
    parts = (decay, torch.stack([keys, queries], dim=2), values.unsqueeze(2), betas[..., None, None])
    out.index_copy_(0, rows, update_singles(pool, singles, wide, _update, parts).to(out.dtype))


def _update(state: Tensor, decay: Tensor, both: Tensor, values: Tensor, betas: Tensor) -> Tensor:
    """S <- D S; u = beta (v - S^T k); S <- S + k u^T, in place, then o = S^T q: [..., heads, value_dim].

    state [..., heads, key_dim, value_dim]; decay [..., heads, 1 or key_dim, 1]; both [..., heads, 2, key_dim], k then q;
    values [..., heads, 1, value_dim]; betas [..., heads, 1, 1].
    """
    state.mul_(decay)
    seen = torch.matmul(both, state)
    update = (values - seen[..., :1, :]).mul_(betas)
    keys, queries = both[..., :1, :], both[..., 1:, :]
    state.addcmul_(keys.transpose(-1, -2), update)
    # The state was read once, before k u^T was added: (S + k u^T)^T q = S^T q + (k . q) u.
    inner = (keys * queries).sum(-1, keepdim=True)
    return (seen[..., 1:, :] + inner * update).squeeze(-2)
