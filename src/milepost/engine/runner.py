"""Run a plan: copies, restores, one forward pass. In: a plan. Out: logits.

The law kept here: position honesty (law 4). What this file has just run is what it writes on each state: owner and position.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from milepost.engine.batch import Batch, batch_of
from milepost.engine.scheduler import Plan
from milepost.errors import SealMismatch
from milepost.models.protocol import Model
from milepost.state.arena import Arena, Tag
from milepost.state.pools import Pools


@dataclass(frozen=True, slots=True)
class Ran:
    """What a step gave."""

    batch: Batch
    logits: Tensor
    """[rows of the batch, vocab_size]."""


class Runner:
    """Holds the model and the pools; knows no policy."""

    def __init__(self, model: Model, pools: Pools, arena: Arena) -> None:
        self.model = model
        self.pools = pools
        self.arena = arena

    @torch.inference_mode()
    def run(self, plan: Plan) -> Ran:
        """Execute a plan that has at least one share. Raises StaleHandle, SealMismatch."""
        self._copy(plan)
        batch = batch_of(plan, self.arena, self.pools.layout.block_size)
        step = self.model.prepare(batch.run)
        tokens, rows = torch.from_numpy(batch.tokens), torch.from_numpy(batch.rows)
        logits = self.model.forward(tokens, step, self.pools.memory, rows)
        self._tag(plan)
        return Ran(batch, logits)

    def _copy(self, plan: Plan) -> None:
        for source, target in plan.copies:
            self.pools.copy_block(self.arena.block_page(source), self.arena.block_page(target))
        for sequence, match in plan.restores:
            if match.handle is None or sequence.slot is None:
                continue
            tag = self.arena.tag(match.handle)
            if tag is None or tag.position != match.position:
                raise SealMismatch(f"a checkpoint asked for at position {match.position} was written at {tag}")
            if self.pools.layout.state:
                self.pools.copy_state(self.arena.state_page(match.handle), self.arena.state_page(sequence.slot))

    def _tag(self, plan: Plan) -> None:
        for share in plan.shares:
            owner = share.sequence.request.id
            if share.sequence.slot is not None:
                self.arena.write_tag(share.sequence.slot, Tag(owner, share.start + share.length))
            for capture in share.captures:
                self.arena.write_tag(capture.target, Tag(owner, share.start + capture.offset))
