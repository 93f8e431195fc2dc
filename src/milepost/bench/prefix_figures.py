"""What `milepost bench prefix` measures, and what must hold of it. In: counts. Out: named violations.

The law kept here: each load has its expectation, an exact number or a range; nothing is rounded in our favour.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class Row:
    """One request under a shared prompt. `common_tokens`: what it has in common with the ones before it."""

    shared: int
    mode: Literal["chat", "tokens"]
    request: int
    prompt_tokens: int
    cached_tokens: int
    common_tokens: int
    computed_tokens: int
    ttft_s: float
    ttft_ratio_to_first: float


@dataclass(frozen=True, slots=True)
class Repeat:
    """The second time of one prompt. `same_answer`: it was answered as before, token for token (greedy)."""

    length: int
    cached_tokens: int
    same_answer: bool


@dataclass(frozen=True, slots=True)
class Turn:
    """One turn of the long chat. `recomputed_earlier_tokens`: fed by an earlier turn and fed again."""

    turn: int
    prompt_tokens: int
    cached_tokens: int
    recomputed_earlier_tokens: int


@dataclass(frozen=True, slots=True)
class Figures:
    """All that was measured."""

    rows: list[Row]
    identical: list[Repeat]
    chat_turns: list[Turn]

    def violations(self) -> list[str]:
        """Every expectation that did not hold, by name."""
        found = [text for row in self.rows for text in _row_faults(row)]
        found += [
            f"identical prompt of {again.length} tokens: cached_tokens={again.cached_tokens}, expected {again.length - 1}"
            for again in self.identical
            if again.cached_tokens != again.length - 1
        ]
        found += [
            f"chat turn {turn.turn}: {turn.recomputed_earlier_tokens} tokens that were fed before were fed again, expected 0"
            for turn in self.chat_turns
            if turn.recomputed_earlier_tokens
        ]
        return found


def _row_faults(row: Row) -> Iterator[str]:
    name = f"{row.mode}, {row.shared} shared tokens, request {row.request}"
    if row.request == 1:
        low = high = 0
    elif row.mode == "chat":
        low, high = row.shared, row.common_tokens
    else:
        low, high = 0 if row.request == 2 else row.common_tokens, row.common_tokens
    if not low <= row.cached_tokens <= high:
        wanted = f"{low}" if low == high else f"{low} to {high}"
        yield f"{name}: cached_tokens={row.cached_tokens}, expected {wanted}"
    if row.computed_tokens + row.cached_tokens != row.prompt_tokens:
        yield f"{name}: {row.computed_tokens} computed and {row.cached_tokens} cached are not {row.prompt_tokens} prompt tokens"
