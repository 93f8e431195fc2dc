"""Root-mean-square norms (arXiv 1910.07467).

The law kept here: the mean of squares is taken in fp32 (fp64 for fp64 input), whatever the activations' dtype.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype to accumulate in: fp64 for fp64, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float = 0.0) -> Tensor:
    """(weight + offset) * x / sqrt(mean(x^2) + eps) over the last dimension, sum and product in fp32.

    x [..., channels] in any float dtype; weight [channels]. Returns [..., channels] in weight's dtype.
    """
    wide = x.to(accumulation_dtype(weight.dtype))
    factor = weight if offset == 0.0 else weight.to(wide.dtype) + offset
    return (wide * _scale(wide, eps)).mul_(factor).to(weight.dtype)


def unit(x: Tensor, eps: float = 1e-6) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension, in fp32 (fp64 for fp64 input): x [..., channels]."""
    wide = x.to(accumulation_dtype(x.dtype))
    norm: Tensor = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return wide * norm.square_().add_(eps).rsqrt_()


def gated_group_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate first, then norm: y * silu(gate), RMS over each of `groups` blocks of channels (arXiv 2405.21060).

    y, gate [T, channels]; weight [channels]. Returns [T, channels] in weight's dtype.
    """
    wide = accumulation_dtype(weight.dtype)
    gated = functional.silu(gate.to(wide)).mul_(y)
    blocks = gated.view(gated.shape[0], groups, -1)
    blocks.mul_(_scale(blocks, eps))
    return gated.to(weight.dtype).mul_(weight)


def norm_then_gate(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Norm first, then gate: RMS over each of `groups` blocks of channels of y, times weight and silu(gate).

    y, gate [T, channels]; weight [channels]. Returns [T, channels] in weight's dtype.
    """
    wide = accumulation_dtype(weight.dtype)
    blocks = y.to(wide).view(y.shape[0], groups, -1)
    normed = (blocks * _scale(blocks, eps)).flatten(1).mul_(weight)
    return normed.mul_(functional.silu(gate.to(wide))).to(weight.dtype)


def _scale(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) over the last dimension, [..., 1]; one pass over x, no array of squares."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()
