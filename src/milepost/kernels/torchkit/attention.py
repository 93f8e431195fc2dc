"""Paged causal attention in torch operations: KV or latents written to blocks, read back sequence by sequence.

The law kept here: rows of a block past a sequence's last token, or before the first position that a window shows, are
sliced away before any product, because they may hold anything, NaN too, and 0 x NaN is NaN. Blocks wholly behind the
window are never read.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.checks import first_seen
from milepost.kernels.torchkit.carry import accumulation_dtype
from milepost.kernels.torchkit.step import TorchStep

_TILE = 256
"""Query rows at a time when a sequence resumes past position 0 or has a window: bounds the mask to tile x length."""

_SCORES = 1024 * 1024
"""Scores at a time where they are written out."""


def write_kv(k: Tensor, v: Tensor, pool: Tensor, step: TorchStep) -> None:
    """Scatter K and V to their blocks. Shapes as in `KernelBackend.write_kv`."""
    places = (step.kv_blocks, step.kv_places)
    pool[:, 0].index_put_(places, k.to(pool.dtype))
    pool[:, 1].index_put_(places, v.to(pool.dtype))


def write_latent(latent: Tensor, pool: Tensor, step: TorchStep) -> None:
    """Scatter latents to their blocks. Shapes as in `KernelBackend.write_latent`."""
    pool.index_put_((step.kv_blocks, step.kv_places), latent.to(pool.dtype))


def attention(
    q: Tensor, pool: Tensor, scale: float, step: TorchStep, window: int | None = None, softcap: float | None = None
) -> Tensor:
    """Causal attention. Shapes as in `KernelBackend.attention`."""
    run = step.run
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for index, blocks in enumerate(step.block_index):
        start, stop, position = run.starts[index], run.starts[index + 1], run.positions[index]
        first = first_seen(position, window)
        seen = (first, position + stop - start)
        keys, values = (_gather(pool[:, part], blocks, run.block_size, *seen).to(q.dtype).transpose(0, 1) for part in (0, 1))
        if softcap is not None:
            _written_out(q[start:stop], keys, values, scale, position - first, out[start:stop], window, softcap)
        elif stop - start == 1:
            out[start] = _one(q[start], keys, values, scale)
        else:
            _several(q[start:stop], keys, values, scale, position - first, window, out[start:stop])
    return out


def attention_latent(q: Tensor, pool: Tensor, scale: float, step: TorchStep, value_dim: int) -> Tensor:
    """Latent attention. Shapes as in `KernelBackend.attention_latent`.

    All heads read one latent, so their rows are stacked: a product of [rows x heads, width] with it reads it once.
    """
    run = step.run
    out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
    for index, blocks in enumerate(step.block_index):
        start, stop, position = run.starts[index], run.starts[index + 1], run.positions[index]
        latents = _gather(pool, blocks, run.block_size, 0, position + stop - start).unsqueeze(0)
        _written_out(q[start:stop], latents, latents[:, :, :value_dim], scale, position, out[start:stop])
    return out


def _gather(pool: Tensor, blocks: Tensor, block_size: int, first: int, stop: int) -> Tensor:
    """Positions [first, stop) of one sequence, [stop - first, ...], from pool [blocks, block_size, ...]."""
    behind = first // block_size
    rows = pool.index_select(0, blocks[behind:]).flatten(0, 1)
    return rows[first - behind * block_size : stop - behind * block_size]


def _one(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query row, [heads, head_dim]: query heads of a KV head stand in for rows, so K and V are read once."""
    kv_heads = keys.shape[0]
    grouped = q.view(1, kv_heads, -1, q.shape[1])
    mixed = functional.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0), scale=scale)
    return mixed.reshape(q.shape)


def _several(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, before: int, window: int | None, out: Tensor
) -> None:
    """Rows [L, heads, head_dim] whose first has `before` keys before its own."""
    attend = functional.scaled_dot_product_attention
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    if before == 0 and (window is None or window >= q.shape[0]):
        mixed = attend(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(mixed.squeeze(0).transpose(0, 1))
        return
    for begin in range(0, q.shape[0], _TILE):
        end = min(begin + _TILE, q.shape[0])
        shown = slice(first_seen(before + begin, window), before + end)
        mask = _visible(begin, end, before, window, q.device)
        mixed = attend(
            queries[:, :, begin:end], keys[:, :, shown], values[:, :, shown], attn_mask=mask, scale=scale, enable_gqa=True
        )
        out[begin:end] = mixed.squeeze(0).transpose(0, 1)


def _visible(begin: int, end: int, before: int, window: int | None, device: torch.device) -> Tensor:
    """Which keys rows [begin, end) see, among those from the first one's first: row i sees up to key before + i."""
    first = first_seen(before + begin, window)
    mask = torch.ones(end - begin, before + end - first, dtype=torch.bool, device=device).tril(before + begin - first)
    return mask if window is None else mask.triu(before + begin - first - window + 1)


def _written_out(
    q: Tensor, keys: Tensor, values: Tensor, scale: float, before: int, out: Tensor,
    window: int | None = None, softcap: float | None = None,
) -> None:  # fmt: skip
    """Attention with its scores in memory, for what torch's own has no form of: a softcap, or values narrower than keys.

    q [L, heads, head_dim]; keys [kv_heads, n, head_dim]; values [kv_heads, n, value_dim]; out [L, heads, value_dim].
    """
    (length, heads, width), (kv_heads, count, _) = q.shape, keys.shape
    wide = accumulation_dtype(q.dtype)
    keys, values = keys.to(wide), values.to(wide)
    size = max(1, _SCORES // (heads * count))
    for begin in range(0, length, size):
        end = min(begin + size, length)
        shown = slice(first_seen(before + begin, window), before + end)
        # Rows of the query heads that read one KV head lie one after the other.
        grouped = q[begin:end].to(wide).transpose(0, 1).reshape(kv_heads, -1, width)
        scores = torch.bmm(grouped, keys[:, shown].transpose(1, 2)).mul_(scale)
        if softcap is not None:
            scores.div_(softcap).tanh_().mul_(softcap)
        hidden = ~_visible(begin, end, before, window, q.device)
        scores.view(heads, end - begin, -1).masked_fill_(hidden, float("-inf"))
        mixed = torch.bmm(torch.softmax(scores, dim=-1), values[:, shown])
        out[begin:end] = mixed.view(heads, end - begin, -1).transpose(0, 1)
