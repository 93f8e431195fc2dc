"""The backend in plain torch operations: any size, no compiler.

The law kept here: it agrees with `reference`, states and captures included, on lengths that are no multiple of
anything. What comes in is checked; what goes out is computed by `torchkit`, one file for each operation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from milepost.kernels.checks import (
    check_attention,
    check_convolution,
    check_delta,
    check_latent,
    check_mamba1,
    check_rglru,
    check_scan,
    check_write_kv,
    check_write_latent,
)
from milepost.kernels.protocol import Activation, Capabilities, Run, Step
from milepost.kernels.torchkit.attention import attention, attention_latent, write_kv, write_latent
from milepost.kernels.torchkit.convolution import convolution
from milepost.kernels.torchkit.delta import delta
from milepost.kernels.torchkit.mamba1 import scan_mamba1
from milepost.kernels.torchkit.rglru import scan_rglru
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

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step, activation: Activation = "silu"
    ) -> Tensor:
        """See `KernelBackend.convolution`. Raises ValueError for shapes that don't fit."""
        check_convolution(x, weight, bias, pool, step.run)
        return convolution(x, weight, bias, pool, _own(step), activation)

    def scan_mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """See `KernelBackend.scan_mamba2`. Raises ValueError for shapes that don't fit."""
        check_scan(x, dt, a, b, c, d, pool, step.run)
        return scan(x, dt, a, b, c, d, pool, _own(step))

    def scan_gated_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """See `KernelBackend.scan_gated_delta`. Raises ValueError for shapes that don't fit."""
        check_delta(q, k, v, g, beta, pool, step.run, by_channel=False)
        return delta(q, k, v, g, beta, pool, _own(step))

    def scan_kda(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """See `KernelBackend.scan_kda`. Raises ValueError for shapes that don't fit."""
        check_delta(q, k, v, g, beta, pool, step.run, by_channel=True)
        return delta(q, k, v, g, beta, pool, _own(step))

    def scan_mamba1(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """See `KernelBackend.scan_mamba1`. Raises ValueError for shapes that don't fit."""
        check_mamba1(x, dt, a, b, c, d, pool, step.run)
        return scan_mamba1(x, dt, a, b, c, d, pool, _own(step))

    def scan_rglru(self, x: Tensor, log_a: Tensor, pool: Tensor, step: Step) -> Tensor:
        """See `KernelBackend.scan_rglru`. Raises ValueError for shapes that don't fit."""
        check_rglru(x, log_a, pool, step.run)
        return scan_rglru(x, log_a, pool, _own(step))

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """See `KernelBackend.write_kv`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_write_kv(k, v, pool, step.run)
        write_kv(k, v, pool, _own(step))

    def attention(
        self, q: Tensor, pool: Tensor, scale: float, step: Step, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """See `KernelBackend.attention`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_attention(q, pool, step.run, window, softcap)
        return attention(q, pool, scale, _own(step), window, softcap)

    def write_latent(self, latent: Tensor, pool: Tensor, step: Step) -> None:
        """See `KernelBackend.write_latent`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_write_latent(latent, pool, step.run)
        write_latent(latent, pool, _own(step))

    def attention_latent(self, q: Tensor, pool: Tensor, scale: float, step: Step, value_dim: int) -> Tensor:
        """See `KernelBackend.attention_latent`. Raises ValueError for shapes that don't fit or blocks that don't suffice."""
        check_latent(q, pool, step.run, value_dim)
        return attention_latent(q, pool, scale, _own(step), value_dim)


def _own(step: Step) -> TorchStep:
    if not isinstance(step, TorchStep):
        raise TypeError(f"a step prepared by another backend was given to 'torch': {type(step).__name__}")
    return step
