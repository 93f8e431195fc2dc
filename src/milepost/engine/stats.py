"""Counts that the engine keeps, as one frozen snapshot: what `/metrics`, `/server_info` and the demo read.

The law kept here: every zero hit, recomputed token and limit has a named reason (law 10).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pools:
    """Bytes and counts of the arena at one moment. used + cached + free = budget."""

    budget_bytes: int
    free_bytes: int
    slots_used: int
    slots_total: int
    slot_bytes: int
    checkpoints: int
    checkpoint_bytes: int
    blocks_used: int
    """Blocks that running sequences hold (shared ones count once)."""
    blocks_cached: int
    """Blocks that only the prefix tree holds."""
    block_bytes: int
    block_size: int


@dataclass(frozen=True, slots=True)
class Timing:
    """Moments of one finished request, in seconds of the engine's clock (arrival 0)."""

    queued: float
    first_token: float | None
    finished: float


@dataclass(frozen=True, slots=True)
class Stats:
    """Totals since the start, and what holds now."""

    running: int
    waiting: int
    pools: Pools
    steps: int
    prompt_tokens: int
    """Prompt tokens of admitted requests."""
    computed_prompt_tokens: int
    generation_tokens: int
    prefix_queries: int
    """Tokens looked up in the prefix tree (vLLM counts both of these in tokens)."""
    prefix_hits: int
    """Tokens whose computation was skipped."""
    lost_hits: int
    """Tokens whose KV was known but that no checkpoint covered."""
    preemptions: int
    captures: Mapping[str, int]
    """Checkpoints published, by reason."""
    skipped_captures: Mapping[str, int]
    """Checkpoints wanted and not taken, by reason."""
    evictions: int
    recomputed: Mapping[str, int]
    """Tokens computed again, by reason."""
    verification_failures: Mapping[str, int]
    """Checkpoints that were not what their reader asked for, by place and reason."""
    bound_by: Mapping[str, int]
    """Steps in which a request waited, by the limit that held it."""
    finished: Mapping[str, int]
    """Requests ended, by finish reason."""
