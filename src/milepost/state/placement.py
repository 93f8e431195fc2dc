"""Where in a prompt a checkpoint is worth its bytes. Pure functions over integers.

The law kept here: a checkpoint stands where sharing really ends, not on a grid.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

Reason = Literal["client_mark", "branch", "message_end", "before_last", "spacing", "answer_end", "preempted"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A position to capture at, and why."""

    position: int
    reason: Reason


def spots(
    *,
    prompt_tokens: int,
    resumed_at: int,
    boundaries: Sequence[tuple[int, Reason]],
    shared_tokens: int,
    present: Collection[int],
    interval: int | None,
) -> tuple[Spot, ...]:
    """Positions to capture in a prompt that is resumed at `resumed_at`, ascending, one reason each.

    boundaries: message ends and client marks. shared_tokens: how far the prompt agrees with what the tree has seen; if
    it goes its own way there, that is a branch. present: positions on this path that have a checkpoint already.
    A position at or past the last prompt token can't be reused by the same prompt, since its last token is always
    computed; so `prompt_tokens - 1` is the last useful one.
    """
    last = prompt_tokens - 1
    wanted: dict[int, Reason] = {}
    if interval is not None:
        wanted.update(dict.fromkeys(range(interval, last, interval), "spacing"))
    wanted[last] = "before_last"
    for position, reason in boundaries:
        wanted[position] = reason
    if resumed_at < shared_tokens < last:
        wanted[shared_tokens] = "branch"
    return tuple(
        Spot(position, wanted[position])
        for position in sorted(wanted)
        if resumed_at < position <= last and position not in present
    )
