"""The backend in plain torch operations: any size, no compiler.

The law kept here: it agrees with `reference`, states and captures included, on lengths that are no multiple of
anything. What comes in is checked; what goes out is computed by `torchkit`, one file for each operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.checks import check_attention, check_convolution, check_scan
from milepost.kernels.protocol import Capabilities, Run, Step
from milepost.kernels.torchkit.attention import attention, write_kv
from milepost.kernels.torchkit.convolution import convolution
from milepost.kernels.torchkit.scan import scan
from milepost.kernels.torchkit.step import TorchStep, prepare

CHUNK = 32
"""Tokens of a chunk of the scan: the fastest of 32, 48, 64, 96 and 128 where it was measured (AVX2, fp32)."""


class TorchBackend:
    """Implements `KernelBackend`. `chunk` is the longest chunk of the scan."""

    def __init__(self, *, chunk: int = CHUNK) -> None:
        if chunk < 1:
            raise ValueError(f"chunk must be at least 1, got {chunk}")
        above = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
        self._mask = torch.zeros(chunk, chunk).masked_fill_(above, float("-inf"))

    @property
    def capabilities(self) -> Capabilities:
        """Any size; pools and activations in any float dtype. Declared for the CPU, where it is tested."""
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return Capabilities("torch", ("cpu",), floats, floats, notes=("plain torch operations",))

    def prepare(self, run: Run, device: torch.device) -> TorchStep:
        """Lay out a run once per step. Raises ValueError if it contradicts itself."""
        return prepare(run, self._mask.to(device))

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step) -> Tensor:
        """See `KernelBackend.convolution`. Raises ValueError for shapes that don't fit."""
        check_convolution(x, weight, bias, pool, step.run)
        return convolution(x, weight, bias, pool, _own(step))

    def scan_mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """See `KernelBackend.scan_mamba2`. Raises ValueError for shapes that don't fit."""
        check_scan(x, dt, a, b, c, d, pool, step.run)
        return scan(x, dt, a, b, c, d, pool, _own(step))

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """See `KernelBackend.write_kv`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_attention(k, pool, step.run)
        write_kv(k, v, pool, _own(step))

    def attention(self, q: Tensor, pool: Tensor, scale: float, step: Step) -> Tensor:
        """See `KernelBackend.attention`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_attention(q, pool, step.run)
        return attention(q, pool, scale, _own(step))


def _own(step: Step) -> TorchStep:
    if not isinstance(step, TorchStep):
        raise TypeError(f"a step prepared by another backend was given to 'torch': {type(step).__name__}")
    return step
