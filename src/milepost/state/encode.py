"""Put a state into its stored form and back. In: the parts of one state as tensors. Out: one buffer of bytes, and parts again.

The law kept here: quantised once, restored once, and only what stands in the encoded layout: raw is exact to the last bit,
int8 is off by at most half a scale in each column, and a column of zeros comes back as zeros.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from milepost.state.codecs import EncodedLayout, Piece
from milepost.state.pools import TORCH_DTYPES

_STEPS = 127
_DTYPES: Mapping[str, torch.dtype] = {str(name): dtype for name, dtype in TORCH_DTYPES.items()} | {"int8": torch.int8}


def encode(layout: EncodedLayout, parts: Sequence[Tensor]) -> Tensor:
    """One tensor for each part of the layout's state, in its order, to a buffer [layout.nbytes] of uint8.

    Raises ValueError if a tensor's shape isn't its part's, or if a value to be quantised isn't finite.
    """
    buffer = torch.empty(layout.nbytes, dtype=torch.uint8)
    for each, tensor in zip(layout.parts, parts, strict=True):
        if tuple(tensor.shape) != each.part.shape:
            raise ValueError(f"layer {each.part.layer} {each.part.name}: shape {tuple(tensor.shape)} isn't {each.part.shape}")
        values = _view(buffer, each.values)
        if each.scales is None:
            values.copy_(tensor)
            continue
        grouped = tensor.reshape(each.values.shape).double()
        if not bool(grouped.isfinite().all()):
            raise ValueError(f"layer {each.part.layer} {each.part.name}: holds values that aren't finite")
        scales = _view(buffer, each.scales)
        scales.copy_(grouped.abs().amax(1) / _STEPS)
        steps = torch.where(scales > 0, scales, 1.0).double().unsqueeze(1)
        values.copy_((grouped / steps).round().clamp(-_STEPS, _STEPS))
    return buffer


def decode(layout: EncodedLayout, buffer: Tensor) -> tuple[Tensor, ...]:
    """A buffer [layout.nbytes] of uint8 to the parts of a state, each in its own dtype. Raises ValueError for any other."""
    if buffer.dtype != torch.uint8 or tuple(buffer.shape) != (layout.nbytes,):
        raise ValueError(f"a buffer {buffer.dtype} {tuple(buffer.shape)} isn't uint8 ({layout.nbytes},)")
    found = []
    for each in layout.parts:
        values, dtype = _view(buffer, each.values), _DTYPES[each.part.dtype]
        if each.scales is not None:
            values = values.double() * _view(buffer, each.scales).double().unsqueeze(1)
        found.append(values.to(dtype, copy=True).reshape(each.part.shape))
    return tuple(found)


def _view(buffer: Tensor, piece: Piece) -> Tensor:
    return buffer[piece.offset : piece.offset + piece.nbytes].view(_DTYPES[piece.dtype]).view(piece.shape)
