"""One request while the engine works on it: its tokens, what it holds, how far its state has come.

The law kept here: `computed` is what the step that wrote the state said (law 4); nobody counts it up.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from milepost.request import Request, Usage
from milepost.state.arena import BlockHandle, StateHandle
from milepost.state.fingerprint import Chain, Tokens
from milepost.state.placement import Spot


@dataclass(slots=True, eq=False)
class Sequence:
    """Integers and handles only; the sampler's and the client's things are kept by the loop."""

    request: Request
    chain: Chain
    order: int
    """Arrival number: the smaller, the older."""
    limit: int
    """Most tokens, prompt and answer."""
    rank: int = 0
    """Goes before age: the request's priority where the policy heeds it, else 0."""
    buffer: Tokens = field(init=False)
    length: int = field(init=False)
    computed: int = 0
    """Tokens that the live state has seen."""
    fed: int = 0
    """Tokens ever fed, also by a life before a preemption."""
    slot: StateHandle | None = None
    blocks: list[BlockHandle | None] = field(default_factory=list)
    """In order; None where a block lies behind every window."""
    gone: int = 0
    """How many of the first blocks are None."""
    spots: tuple[Spot, ...] = ()
    """Positions still to be captured, ascending."""
    covered: int = 0
    """Deepest position on this path where a checkpoint stands or was asked for."""
    cached_tokens: int = 0
    recomputed: Counter[str] = field(default_factory=Counter)
    admitted: bool = False
    """True once it was admitted for the first time."""
    refused: bool = False
    """True if its last admission found no room."""

    def __post_init__(self) -> None:
        prompt = self.request.prompt
        self.buffer = np.empty(self.limit + 1, dtype=np.uint32)
        self.buffer[: len(prompt)] = prompt
        self.length = len(prompt)

    @property
    def tokens(self) -> Tokens:
        """All tokens so far, [length] uint32; a view."""
        return self.buffer[: self.length]

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt)

    @property
    def generated(self) -> int:
        """Tokens of the answer so far."""
        return self.length - self.prompt_tokens

    @property
    def held(self) -> int:
        """Blocks that it holds."""
        return len(self.blocks) - self.gone

    @property
    def next_length(self) -> int:
        """Its length when it has got to its next token."""
        return min(self.length + 1, self.limit)

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be picked; 1: it decodes."""
        return self.length - self.computed

    @property
    def key(self) -> tuple[int, int]:
        """Order of service: rank, then age."""
        return self.rank, self.order

    @property
    def usage(self) -> Usage:
        """Counts for the client."""
        return Usage(self.prompt_tokens, self.generated, self.cached_tokens, dict(self.recomputed))

    def pass_blocks(self, first: int) -> list[BlockHandle | None]:
        """Part with the blocks before index `first`, which no token reads any more; they are the caller's to give back."""
        first = max(self.gone, min(first, len(self.blocks)))
        passed = self.blocks[self.gone : first]
        self.blocks[self.gone : first] = [None] * len(passed)
        self.gone = first
        return passed

    def append(self, token: int) -> None:
        """Take a picked token."""
        self.buffer[self.length] = token
        self.length += 1
