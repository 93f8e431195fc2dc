"""Lay a plan out as one ragged run of tokens. In: a plan. Out: a `Run` of kernel indices, token ids, rows to read.

The law kept here: no padding. Every token in the run is a real token of one sequence, at its own position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from milepost.engine.scheduler import Plan, Share
from milepost.kernels.protocol import Capture, Run
from milepost.state.arena import Arena, BlockHandle


@dataclass(frozen=True, slots=True)
class Rows:
    """Which logits of the step belong to one share: `prompt` rows first (prompt logprobs), then the one to pick from."""

    share: Share
    first: int
    prompt: int
    picks: bool


@dataclass(frozen=True, slots=True)
class Batch:
    """A step, ready for the model."""

    run: Run
    tokens: np.ndarray
    """Token ids [tokens] int64."""
    rows: np.ndarray
    """Rows of the run whose logits are wanted [rows] int64."""
    owners: tuple[Rows, ...]


def batch_of(plan: Plan, arena: Arena, block_size: int) -> Batch:
    """Translate handles to kernel indices and lay tokens end to end. Raises StaleHandle."""
    starts: list[int] = [0]
    tokens: list[np.ndarray] = []
    rows: list[int] = []
    owners: list[Rows] = []
    captures: list[Capture] = []
    for number, share in enumerate(plan.shares):
        sequence = share.sequence
        end = share.start + share.length
        tokens.append(sequence.tokens[share.start : end])
        picks = end == sequence.length
        prompt = _prompt_rows(share)
        owners.append(Rows(share, len(rows), prompt, picks))
        rows.extend(range(starts[-1], starts[-1] + prompt))
        if picks:
            rows.append(starts[-1] + share.length - 1)
        captures += [Capture(number, c.offset, arena.state_page(c.target)) for c in share.captures]
        starts.append(starts[-1] + share.length)
    run = Run(
        starts=tuple(starts),
        positions=tuple(share.start for share in plan.shares),
        slots=tuple(arena.state_page(share.sequence.slot) for share in plan.shares if share.sequence.slot is not None),
        fresh=tuple(share.start == 0 for share in plan.shares),
        blocks=tuple(tuple(_page(block, arena) for block in share.sequence.blocks) for share in plan.shares),
        block_size=block_size,
        captures=tuple(captures),
    )
    return Batch(run, np.concatenate(tokens).astype(np.int64), np.array(rows, dtype=np.int64), tuple(owners))


def _page(block: BlockHandle | None, arena: Arena) -> int:
    return -1 if block is None else arena.block_page(block)


def _prompt_rows(share: Share) -> int:
    """Rows of a share that say something about a later prompt token (prompt logprobs)."""
    sequence = share.sequence
    if sequence.request.params.prompt_logprobs is None:
        return 0
    return max(0, min(share.start + share.length, sequence.prompt_tokens - 1) - share.start)
