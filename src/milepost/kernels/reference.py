"""The plain definition of every operation, token by token: the oracle for every other backend, for ever.

The law kept here: each operation reads like its formula, and nothing in this file is ever made faster.
Sources: Mamba-2, arXiv 2405.21060; gated delta net, 2412.06464; Kimi delta attention, 2510.26692; Mamba, 2312.00752;
RG-LRU, 2402.19427; latent attention, 2405.04434; KERNELS of this project for the convolution's window.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.kernels.checks import (
    check_attention,
    check_convolution,
    check_delta,
    check_latent,
    check_mamba1,
    check_rglru,
    check_run,
    check_scan,
    check_write_kv,
    check_write_latent,
    first_seen,
)
from milepost.kernels.protocol import Activation, Capabilities, Run, Step


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

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step, activation: Activation = "silu"
    ) -> Tensor:
        """y_t = silu(bias + sum over j of weight[:, j] x_{t - (width - 1) + j}); see the protocol for shapes."""
        run = step.run
        check_convolution(x, weight, bias, pool, run)
        wide = _wide(x)
        out = torch.empty_like(x)
        for index, slot in enumerate(run.slots):
            window = _state_before(run, index, pool, wide)
            for offset in range(run.length(index)):
                row = run.starts[index] + offset
                columns = torch.cat([window, x[row].to(wide).unsqueeze(1)], dim=1)
                total = (columns * weight.to(wide)).sum(dim=1)
                if bias is not None:
                    total = total + bias.to(wide)
                out[row] = (total * torch.sigmoid(total) if activation == "silu" else total).to(x.dtype)
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
            state = _state_before(run, index, pool, wide)
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

    def scan_gated_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q; see the protocol for shapes."""
        check_delta(q, k, v, g, beta, pool, step.run, by_channel=False)
        return _delta(q, k, v, g.unsqueeze(2).expand(*g.shape, k.shape[2]), beta, pool, step.run)

    def scan_kda(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """S <- diag(e^g) S, then as the gated delta net; see the protocol for shapes."""
        check_delta(q, k, v, g, beta, pool, step.run, by_channel=True)
        return _delta(q, k, v, g, beta, pool, step.run)

    def scan_mamba1(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """S <- exp(dt a) S + (dt x) b^T; y = S c + d x; see the protocol for shapes."""
        run = step.run
        check_mamba1(x, dt, a, b, c, d, pool, run)
        wide = _wide(x)
        out = torch.empty_like(x)
        for index, slot in enumerate(run.slots):
            state = _state_before(run, index, pool, wide)
            for offset in range(run.length(index)):
                row = run.starts[index] + offset
                x_t, dt_t, b_t, c_t = (each[row].to(wide) for each in (x, dt, b, c))
                state = torch.exp(dt_t.unsqueeze(1) * a.to(wide)) * state + torch.outer(dt_t * x_t, b_t)
                out[row] = (state @ c_t + d.to(wide) * x_t).to(x.dtype)
                _capture(run, index, offset + 1, state, pool)
            pool[slot] = state.to(pool.dtype)
        return out

    def scan_rglru(self, x: Tensor, log_a: Tensor, pool: Tensor, step: Step) -> Tensor:
        """h <- a h + sqrt(1 - a^2) x, the factor of x being 1 at absolute position 0; see the protocol for shapes."""
        run = step.run
        check_rglru(x, log_a, pool, run)
        wide = _wide(x)
        out = torch.empty_like(x)
        for index, slot in enumerate(run.slots):
            state = _state_before(run, index, pool, wide)
            for offset in range(run.length(index)):
                row = run.starts[index] + offset
                log_a_t = log_a[row].to(wide)
                factor = torch.sqrt(-torch.expm1(2 * log_a_t))  # 1 - a^2 loses its digits where a is close to 1
                if run.positions[index] + offset == 0:
                    factor = torch.ones_like(factor)
                state = torch.exp(log_a_t) * state + factor * x[row].to(wide)
                out[row] = state.to(x.dtype)
                _capture(run, index, offset + 1, state, pool)
            pool[slot] = state.to(pool.dtype)
        return out

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """Token at position p goes to block p // block_size, row p % block_size."""
        run = step.run
        check_write_kv(k, v, pool, run)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                block = blocks[position // run.block_size]
                pool[block, 0, position % run.block_size] = k[row].to(pool.dtype)
                pool[block, 1, position % run.block_size] = v[row].to(pool.dtype)

    def attention(
        self, q: Tensor, pool: Tensor, scale: float, step: Step, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """softmax(scale q K^T) V over the positions seen of its own sequence, one query row and head at a time."""
        run = step.run
        check_attention(q, pool, run, window, softcap)
        wide, share = _wide(q), q.shape[1] // pool.shape[3]
        out = torch.empty_like(q)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                seen = range(first_seen(position, window), position + 1)
                places = [(blocks[p // run.block_size], p % run.block_size) for p in seen]
                for head in range(q.shape[1]):
                    keys = torch.stack([pool[block, 0, place, head // share].to(wide) for block, place in places])
                    values = torch.stack([pool[block, 1, place, head // share].to(wide) for block, place in places])
                    scores = scale * (keys @ q[row, head].to(wide))
                    if softcap is not None:
                        scores = softcap * torch.tanh(scores / softcap)
                    out[row, head] = (torch.softmax(scores, dim=0) @ values).to(q.dtype)
        return out

    def write_latent(self, latent: Tensor, pool: Tensor, step: Step) -> None:
        """Token at position p goes to block p // block_size, row p % block_size."""
        run = step.run
        check_write_latent(latent, pool, run)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                pool[blocks[position // run.block_size], position % run.block_size] = latent[row].to(pool.dtype)

    def attention_latent(self, q: Tensor, pool: Tensor, scale: float, step: Step, value_dim: int) -> Tensor:
        """softmax(scale q . latent) latent[:value_dim] over positions 0..p, one query row and head at a time."""
        run = step.run
        check_latent(q, pool, run, value_dim)
        wide = _wide(q)
        out = torch.empty(*q.shape[:2], value_dim, dtype=q.dtype, device=q.device)
        for index, blocks in enumerate(run.blocks):
            for offset in range(run.length(index)):
                row, position = run.starts[index] + offset, run.positions[index] + offset
                places = [(blocks[p // run.block_size], p % run.block_size) for p in range(position + 1)]
                latents = torch.stack([pool[block, place].to(wide) for block, place in places])
                for head in range(q.shape[1]):
                    weights = torch.softmax(scale * (latents @ q[row, head].to(wide)), dim=0)
                    out[row, head] = (weights @ latents[:, :value_dim]).to(q.dtype)
        return out


def _delta(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, run: Run) -> Tensor:
    """The delta rule with a decay of each key channel, g [tokens, heads, key_dim]."""
    wide, share = _wide(v), v.shape[1] // k.shape[1]
    out = torch.empty_like(v)
    for index, slot in enumerate(run.slots):
        state = _state_before(run, index, pool, wide)
        for offset in range(run.length(index)):
            row = run.starts[index] + offset
            for head in range(v.shape[1]):
                q_t, k_t = q[row, head // share].to(wide), k[row, head // share].to(wide)
                decayed = torch.exp(g[row, head].to(wide)).unsqueeze(1) * state[head]
                u = beta[row, head].to(wide) * (v[row, head].to(wide) - decayed.t() @ k_t)
                state[head] = decayed + torch.outer(k_t, u)
                out[row, head] = (state[head].t() @ q_t).to(v.dtype)
            _capture(run, index, offset + 1, state, pool)
        pool[slot] = state.to(pool.dtype)
    return out


def _state_before(run: Run, sequence: int, pool: Tensor, wide: torch.dtype) -> Tensor:
    """What the sequence's slot holds, or zeros for a fresh sequence, as a copy."""
    live = pool[run.slots[sequence]]
    return torch.zeros_like(live, dtype=wide) if run.fresh[sequence] else live.to(wide, copy=True)


def _wide(x: Tensor) -> torch.dtype:
    """Accumulate in fp32, in fp64 for fp64 input."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _capture(run: Run, sequence: int, offset: int, state: Tensor, pool: Tensor) -> None:
    """Copy the state after `offset` tokens to each target that asks for it."""
    for capture in run.captures:
        if capture.sequence == sequence and capture.offset == offset:
            pool[capture.target] = state.to(pool.dtype)
