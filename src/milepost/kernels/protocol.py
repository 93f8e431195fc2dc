"""The contract of a kernel backend: what it declares, what it is given, what it does.

The law kept here: kernels take arrays and integers and hold no policy. No padding token reaches a recurrence, a
sequence marked fresh starts from zeros whatever its slot holds, and a state is captured while passing a position.
This package imports nothing else of Milepost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Protocol, get_args

import torch
from torch import Tensor

Operation = Literal["convolution", "mamba2", "gated_delta", "kda", "mamba1", "rglru", "attention", "latent_attention"]
"""What a backend may be chosen for. Storing KV belongs to the attention that reads it."""

OPERATIONS: frozenset[str] = frozenset(get_args(Operation))

Activation = Literal["silu"] | None
"""What follows a convolution."""


@dataclass(frozen=True, slots=True)
class Capture:
    """Write the state of sequence `sequence` after its first `offset` tokens of this run (1..length) to `target`."""

    sequence: int
    offset: int
    target: int


@dataclass(frozen=True, slots=True)
class Run:
    """One step's tokens laid end to end, without padding: sequence i is rows starts[i]..starts[i + 1].

    positions[i] is the absolute position of its first token, so positions[i] tokens were applied before.
    slots[i] is the index of its live slot; fresh[i] says that the slot is to be taken as zeros.
    blocks[i] lists its KV blocks in order; block j holds tokens j * block_size and on, and -1 stands for a block that
    is gone, which only attention with a window may pass over.
    """

    starts: tuple[int, ...]
    positions: tuple[int, ...]
    slots: tuple[int, ...]
    fresh: tuple[bool, ...]
    blocks: tuple[tuple[int, ...], ...]
    block_size: int
    captures: tuple[Capture, ...] = ()

    @property
    def sequences(self) -> int:
        """How many sequences take part."""
        return len(self.slots)

    @property
    def tokens(self) -> int:
        """How many tokens the step computes."""
        return self.starts[-1]

    def length(self, sequence: int) -> int:
        """Tokens of one sequence in this step."""
        return self.starts[sequence + 1] - self.starts[sequence]


class Step(Protocol):
    """A run with whatever a backend derives from it once (index arrays); shared by all layers of the step."""

    @property
    def run(self) -> Run:
        """The run that was prepared."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can do. `None` for sizes means any."""

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    state_dtypes: tuple[torch.dtype, ...]
    state_sizes: tuple[int, ...] | None = None
    head_dims: tuple[int, ...] | None = None
    ragged: bool = True
    initial_state: bool = True
    captures: bool = True
    draft_tokens: int = 0
    operations: frozenset[str] = OPERATIONS
    notes: tuple[str, ...] = field(default=())


class KernelBackend(Protocol):
    """Operations on state. Pools are views into the arena, indexed by slot, checkpoint or block index."""

    @property
    def capabilities(self) -> Capabilities:
        """What this backend can do."""
        ...

    def prepare(self, run: Run, device: torch.device) -> Step:
        """Derive index arrays from a run, once per step."""
        ...

    def convolution(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step, activation: Activation = "silu"
    ) -> Tensor:
        """Depthwise causal convolution, then the activation; LFM2's short convolution has none.

        x [tokens, channels]; weight [channels, width]; bias [channels] or None;
        pool [slots, channels, width - 1]: the last columns *before* the convolution, oldest first.
        Returns [tokens, channels]. Updates the pool in place at each live slot and at each capture.
        """
        ...

    def scan_mamba2(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """S <- exp(dt a) S + dt x b^T; y = S c + d x (arXiv 2405.21060).

        x [tokens, heads, head_dim]; dt [tokens, heads] (after softplus and clamp); a [heads], negative;
        b, c [tokens, groups, state_size]; d [heads]; pool [slots, heads, head_dim, state_size].
        Returns [tokens, heads, head_dim]. Updates the pool in place at each live slot and at each capture.
        Accumulates in fp32 (fp64 if x is fp64).
        """
        ...

    def scan_gated_delta(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """S <- e^g S; u = beta (v - S^T k); S <- S + k u^T; o = S^T q (gated delta net, arXiv 2412.06464).

        q, k [tokens, key_heads, key_dim], normalised and scaled by the caller; v [tokens, heads, value_dim], whose head h
        reads key head h // (heads / key_heads); g [tokens, heads], log decay <= 0; beta [tokens, heads];
        pool [slots, heads, key_dim, value_dim].
        Returns [tokens, heads, value_dim]. Updates the pool in place at each live slot and at each capture.
        Accumulates in fp32 (fp64 if v is fp64).
        """
        ...

    def scan_kda(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, pool: Tensor, step: Step) -> Tensor:
        """S <- diag(e^g) S, then as `scan_gated_delta` (Kimi delta attention, arXiv 2510.26692).

        q, k [tokens, heads, key_dim]; g [tokens, heads, key_dim], log decay <= 0 of each key channel; the rest as in
        `scan_gated_delta`.
        """
        ...

    def scan_mamba1(
        self, x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, pool: Tensor, step: Step
    ) -> Tensor:
        """S[i, n] <- exp(dt_i a_in) S[i, n] + dt_i b_n x_i; y_i = sum over n of c_n S[i, n] + d_i x_i (arXiv 2312.00752).

        x, dt [tokens, channels] (dt after softplus); a [channels, state_size], negative; b, c [tokens, state_size];
        d [channels]; pool [slots, channels, state_size].
        Returns [tokens, channels]. Updates the pool in place at each live slot and at each capture.
        Accumulates in fp32 (fp64 if x is fp64).
        """
        ...

    def scan_rglru(self, x: Tensor, log_a: Tensor, pool: Tensor, step: Step) -> Tensor:
        """h <- a h + sqrt(1 - a^2) x with a = exp(log_a) (RG-LRU of Griffin, arXiv 2402.19427).

        At absolute position 0, and nowhere else, the factor of x is 1.
        x, log_a [tokens, channels], log_a <= 0; pool [slots, channels].
        Returns h [tokens, channels]. Updates the pool in place at each live slot and at each capture.
        Accumulates in fp32 (fp64 if x is fp64).
        """
        ...

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """Store k, v [tokens, kv_heads, head_dim] in pool [blocks, 2, block_size, kv_heads, head_dim]."""
        ...

    def attention(
        self, q: Tensor, pool: Tensor, scale: float, step: Step, window: int | None = None, softcap: float | None = None
    ) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over all tokens in its sequence's blocks, itself included.

        Query head h reads KV head h // (heads / kv_heads). With a window, a query at position p sees positions
        p - window + 1 to p, and blocks that lie behind every query's window are never read. With a softcap, a score s
        becomes softcap * tanh(s / softcap). Returns [tokens, heads, head_dim].
        """
        ...

    def write_latent(self, latent: Tensor, pool: Tensor, step: Step) -> None:
        """Store latent [tokens, width] in pool [blocks, block_size, width]."""
        ...

    def attention_latent(self, q: Tensor, pool: Tensor, scale: float, step: Step, value_dim: int) -> Tensor:
        """Causal attention in which all heads share one latent row a token as key and value (MLA, arXiv 2405.04434).

        q [tokens, heads, width], with the key's up-projection absorbed; pool [blocks, block_size, width], whose first
        `value_dim` columns are the value and whose rest is the key's rotary part.
        Returns softmax(scale q . latent) latent[:value_dim], [tokens, heads, value_dim].
        """
        ...
