"""Rotary position embedding (arXiv 2104.09864): rows and their positions in, rotated rows out.

The law kept here: angles are fp32 (fp64 in an fp64 run) functions of the absolute position, wherever a run was cut.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.models.layers.norm import accumulation_dtype
from milepost.models.spec import RotarySpec


def rotate(x: Tensor, positions: Tensor, spec: RotarySpec) -> Tensor:
    """Rotate the first spec.dim channels of each head; channel i is paired with i + dim / 2.

    x [T, heads, head_dim]; positions [T] int64. Returns [T, heads, head_dim] in x's dtype.
    """
    half, wide = spec.dim // 2, accumulation_dtype(x.dtype)
    frequencies = spec.theta ** (-torch.arange(0, spec.dim, 2, device=x.device).to(wide) / spec.dim)
    angles = positions.to(wide)[:, None] * frequencies
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    first, second = x[..., :half].to(wide), x[..., half : spec.dim].to(wide)
    turned = torch.cat((first * cos - second * sin, second * cos + first * sin), -1).to(x.dtype)
    return turned if spec.dim == x.shape[-1] else torch.cat((turned, x[..., spec.dim :]), -1)
