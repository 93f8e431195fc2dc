"""Which checkpoint to let go first. Pure functions over numbers.

The law kept here: a checkpoint is worth the compute that it saves over the nearest one above it, per byte that only it
holds, less the longer nobody has asked for it.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """Work of a forward pass in multiply-adds: per token, and per token and token of context."""

    per_token: float
    per_token_and_context: float

    def between(self, start: int, end: int) -> float:
        """Work of computing tokens start..end when the first `start` are known."""
        tokens = end - start
        return tokens * (self.per_token + self.per_token_and_context * (start + end) / 2)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A checkpoint that may be evicted."""

    key: int
    position: int
    above: int
    """Position of the nearest checkpoint on the path above (0: none)."""
    own_bytes: int
    """Bytes that would be freed."""
    idle: int
    """Lookups since it was last used or made."""


def value(candidate: Candidate, costs: Costs) -> float:
    """Compute saved per byte, aged: higher stays longer."""
    return costs.between(candidate.above, candidate.position) / candidate.own_bytes / (1 + candidate.idle)


def first_to_go(candidates: list[Candidate], costs: Costs) -> Candidate | None:
    """The candidate of least value; of equals the deepest one, so that a path shrinks from its tip."""
    return min(candidates, key=lambda c: (value(c, costs), -c.position), default=None)
