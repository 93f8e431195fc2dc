"""The contract of a kernel backend: what it declares, what it is given, what it does.

The law kept here: kernels take arrays and integers and hold no policy. No padding token reaches a recurrence, a
sequence marked fresh starts from zeros whatever its slot holds, and a state is captured while passing a position.
This package imports nothing else of Milepost.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor


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
    blocks[i] lists its KV blocks in order; block j holds tokens j * block_size and on.
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

    def convolution(self, x: Tensor, weight: Tensor, bias: Tensor | None, pool: Tensor, step: Step) -> Tensor:
        """Depthwise causal convolution, then SiLU.

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

    def write_kv(self, k: Tensor, v: Tensor, pool: Tensor, step: Step) -> None:
        """Store k, v [tokens, kv_heads, head_dim] in pool [blocks, 2, block_size, kv_heads, head_dim]."""
        ...

    def attention(self, q: Tensor, pool: Tensor, scale: float, step: Step) -> Tensor:
        """Causal attention of q [tokens, heads, head_dim] over all tokens in its sequence's blocks, itself included.

        Query head h reads KV head h // (heads / kv_heads). Returns [tokens, heads, head_dim].
        """
        ...
