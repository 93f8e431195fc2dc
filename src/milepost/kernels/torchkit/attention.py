"""Paged causal attention in torch operations: KV written to blocks, read back sequence by sequence.

The law kept here: rows of a block past a sequence's last token are sliced away before any product, because they may
hold anything, NaN too, and 0 x NaN is NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from milepost.kernels.torchkit.step import TorchStep

_TILE = 256
"""Query rows at a time when a sequence resumes past position 0: bounds the mask to tile x length."""


def write_kv(k: Tensor, v: Tensor, pool: Tensor, step: TorchStep) -> None:
    """Scatter K and V to their blocks. Shapes as in `KernelBackend.write_kv`."""
    places = (step.kv_blocks, step.kv_places)
    pool[:, 0].index_put_(places, k.to(pool.dtype))
    pool[:, 1].index_put_(places, v.to(pool.dtype))


def attention(q: Tensor, pool: Tensor, scale: float, step: TorchStep) -> Tensor:
    """Causal attention. Shapes as in `KernelBackend.attention`."""
    run = step.run
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    for index, blocks in enumerate(step.block_index):
        start, stop, position = run.starts[index], run.starts[index + 1], run.positions[index]
        keys, values = _gather(pool, blocks, position + stop - start, q.dtype)
        if stop - start == 1:
            out[start] = _one(q[start], keys, values, scale)
        else:
            _several(q[start:stop], keys, values, scale, position, out[start:stop])
    return out


def _gather(pool: Tensor, blocks: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, [kv_heads, length, head_dim] each."""
    kv_heads, head_dim = pool.shape[3:]
    keys, values = (
        pool[:, part].index_select(0, blocks).view(-1, kv_heads, head_dim)[:length].to(dtype).transpose(0, 1) for part in (0, 1)
    )
    return keys, values


def _one(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query row, [heads, head_dim]: query heads of a KV head stand in for rows, so K and V are read once."""
    kv_heads = keys.shape[0]
    grouped = q.view(1, kv_heads, -1, q.shape[1])
    mixed = functional.scaled_dot_product_attention(grouped, keys.unsqueeze(0), values.unsqueeze(0), scale=scale)
    return mixed.reshape(q.shape)


def _several(q: Tensor, keys: Tensor, values: Tensor, scale: float, position: int, out: Tensor) -> None:
    """Rows [L, heads, head_dim] whose first has `position` tokens before it."""
    attend = functional.scaled_dot_product_attention
    queries, keys, values = q.transpose(0, 1).unsqueeze(0), keys.unsqueeze(0), values.unsqueeze(0)
    if position == 0:
        mixed = attend(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
        out.copy_(mixed.squeeze(0).transpose(0, 1))
        return
    for begin in range(0, q.shape[0], _TILE):
        end = min(begin + _TILE, q.shape[0])
        seen = position + end
        # Row i of the tile sees the keys up to position + begin + i.
        mask = torch.ones(end - begin, seen, dtype=torch.bool, device=q.device).tril(position + begin)
        part = (queries[:, :, begin:end], keys[:, :, :seen], values[:, :, :seen])
        mixed = attend(*part, attn_mask=mask, scale=scale, enable_gqa=True)
        out[begin:end] = mixed.squeeze(0).transpose(0, 1)
