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


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension, product in fp32.

    x [T, channels] in any float dtype; weight [channels]. Returns [T, channels] in weight's dtype.
    """
    wide = x.to(accumulation_dtype(weight.dtype))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * scale).mul_(weight).to(weight.dtype)


def gated_group_norm(y: Tensor, gate: Tensor, weight: Tensor, groups: int, eps: float) -> Tensor:
    """Gate first, then norm: y * silu(gate), RMS over each of `groups` blocks of channels (arXiv 2405.21060).

    y, gate [T, channels]; weight [channels]. Returns [T, channels] in weight's dtype.
    """
    wide = accumulation_dtype(weight.dtype)
    gated = functional.silu(gate.to(wide)).mul_(y)
    blocks = gated.view(gated.shape[0], groups, -1)
    blocks.mul_(torch.rsqrt(blocks.square().mean(-1, keepdim=True).add_(eps)))
    return gated.to(weight.dtype).mul_(weight)
