"""The plain definition of every operation, token by token: the oracle for every other backend, for ever.

The law kept here: each operation reads like its formula, and nothing in this file is ever made faster.
Sources: Mamba-2, arXiv 2405.21060; KERNELS of this project for the convolution's window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.checks import check_attention, check_convolution, check_run, check_scan
from milepost.kernels.protocol import Capabilities, Run, Step


@dataclass(frozen=True, slots=True)
class ReferenceStep:
    """A run as it is: this backend derives nothing."""

    run: Run


class ReferenceBackend:
    """Implements `KernelBackend` with loops over sequences, tokens and heads."""

    @property
    def capabilities(self) -> Capabilities:
        """Any size, any float dtype; slow."""
        floats = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
        return Capabilities("reference", ("cpu",), floats, floats, notes=("token by token: for tests only",))

    def prepare(self, run: Run, device: torch.device) -> ReferenceStep:
        """Check the run. Raises ValueError if it contradicts itself."""
        check_run(run)
        return ReferenceStep(run)

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step) -> Tensor:
        """y_t = silu(bias + sum over j of weight[:, j] x_{t - (width - 1) + j}); see the protocol for shapes."""
        run = step.run
        check_convolution(x, weight, bias, pool, run)
        wide = _wide(x)
        out = torch.empty_like(x)
        for index, slot in enumerate(run.slots):
            window = torch.zeros(pool.shape[1:], dtype=wide) if run.fresh[index] else pool[slot].to(wide, copy=True)
            window = window.to(x.device)
            for offset in range(run.length(index)):
                row = run.starts[index] + offset
                columns = torch.cat([window, x[row].to(wide).unsqueeze(1)], dim=1)
                total = (columns * weight.to(wide)).sum(dim=1)
                if bias is not None:
                    total = total + bias.to(wide)
                out[row] = (total * torch.sigmoid(total)).to(x.dtype)
                window = columns[:, 1:]
                _capture(run, index, offset + 1, window, pool)
            pool[slot] = window.to(pool.dtype)
        return out

    def scan_mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """S <- exp(dt a) S + dt x b^T; y = S c + d x; see the protocol for shapes."""
        run = step.run
        check_scan(x, dt, a, b, c, d, pool, run)
        wide, share = _wide(x), x.shape[1] // b.shape[1]
        out = torch.empty_like(x)
        for index, slot in enumerate(run.slots):
            state = torch.zeros(pool.shape[1:], dtype=wide) if run.fresh[index] else pool[slot].to(wide, copy=True)
            state = state.to(x.device)
            for offset in range(run.length(index)):
                row = run.starts[index] + offset
                for head in range(x.shape[1]):
                    x_t, dt_t = x[row, head].to(wide), dt[row, head].to(wide)
                    b_t, c_t = b[row, head // share].to(wide), c[row, head // share].to(wide)
                    decay = torch.exp(dt_t * a[head].to(wide))
                    state[head] = decay * state[head] + dt_t * torch.outer(x_t, b_t)
                    out[row, head] = (state[head] @ c_t + d[head].to(wide) * x_t).to(x.dtype)
                _capture(run, index, offset + 1, state, pool)
            pool[slot] = state.to(pool.dtype)
        return out

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """Token at position p goes to block p // block_size, row p % block_size."""
        run = step.run
        check_attention(k, pool, run)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                block = blocks[position // run.block_size]
                pool[block, 0, position % run.block_size] = k[row].to(pool.dtype)
                pool[block, 1, position % run.block_size] = v[row].to(pool.dtype)

    def attention(self, q: Tensor, pool: Tensor, scale: float, step: Step) -> Tensor:
        """softmax(scale q K^T) V over positions 0..p of its own sequence, one query row and head at a time."""
        run = step.run
        check_attention(q, pool, run)
        wide, share = _wide(q), q.shape[1] // pool.shape[3]
        out = torch.empty_like(q)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                places = [(blocks[p // run.block_size], p % run.block_size) for p in range(position + 1)]
                for head in range(q.shape[1]):
                    keys = torch.stack([pool[block, 0, place, head // share].to(wide) for block, place in places])
                    values = torch.stack([pool[block, 1, place, head // share].to(wide) for block, place in places])
                    weights = torch.softmax(scale * (keys @ q[row, head].to(wide)), dim=0)
                    out[row, head] = (weights @ values).to(q.dtype)
        return out


def _wide(x: Tensor) -> torch.dtype:
    """Accumulate in fp32, in fp64 for fp64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _capture(run: Run, sequence: int, offset: int, state: Tensor, pool: Tensor) -> None:
    """Copy the state after `offset` tokens to each target that asks for it."""
    for capture in run.captures:
        if capture.sequence == sequence and capture.offset == offset:
            pool[capture.target] = state.to(pool.dtype)
