"""One request at a time through a running engine, and a record of every token that was fed.

In: prompts. Out: what each request cost, measured from outside: the clock, and a comparison of token ids.
The law kept here: what an earlier request had fed is known from this record alone; the engine isn't asked.
"""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from milepost.engine.stats import Stats
from milepost.errors import MilepostError
from milepost.request import Boundary, Delta, Request, SamplingParams
from milepost.text import Text


class Engine(Protocol):
    """As much of the engine as a bench uses."""

    @property
    def max_model_len(self) -> int: ...
    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None: ...
    def stats(self) -> Stats: ...
    def reset_prefix_cache(self) -> None: ...
    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Served:
    """One finished request. `known_tokens`: how many of its leading tokens an earlier request had fed already."""

    prompt_tokens: int
    cached_tokens: int
    known_tokens: int
    computed_tokens: int
    """Prompt tokens that the engine's step counter says it computed for this request."""
    ttft_s: float
    answer: tuple[int, ...]
    text: str


class Drive:
    """Asks, waits, measures."""

    def __init__(self, engine: Engine, text: Text, advance: Callable[[], None] = lambda: None) -> None:
        """`advance` is called after each request."""
        self.engine = engine
        self.text = text
        self._advance = advance
        self._fed: list[tuple[int, ...]] = []
        self._count = 0

    def forget(self) -> None:
        """Start cold: neither the engine nor this record knows any token from here on."""
        self.engine.reset_prefix_cache()
        self._fed.clear()

    def ask(self, tokens: Sequence[int], params: SamplingParams, boundaries: tuple[Boundary, ...] = ()) -> Served:
        """Run one request to its end. Raises MilepostError if the engine fails at it."""
        self._count += 1
        prompt = tuple(tokens)
        request = Request(f"bench-{self._count}", prompt, params, watch=self.text.watch(params), boundaries=boundaries)
        arrived: queue.SimpleQueue[tuple[float, Delta]] = queue.SimpleQueue()
        before = self.engine.stats().computed_prompt_tokens
        began = time.perf_counter()
        self.engine.submit(request, lambda delta: arrived.put((time.perf_counter(), delta)))
        first: float | None = None
        answer: list[int] = []
        text = ""
        while True:
            moment, delta = arrived.get()
            if first is None and delta.tokens:
                first = moment
            answer += delta.tokens
            text += delta.text
            if delta.finish is not None:
                break
        if delta.finish in ("error", "abort") or first is None:
            raise MilepostError(f"request {request.id} of {len(prompt)} tokens failed: {delta.error or delta.finish}")
        known = max((common(prompt, fed) for fed in self._fed), default=0)
        self._fed.append(prompt + tuple(answer[:-1]))  # the last token was picked, and never fed
        self._advance()
        return Served(
            prompt_tokens=len(prompt),
            cached_tokens=delta.usage.cached_tokens,
            known_tokens=known,
            computed_tokens=self.engine.stats().computed_prompt_tokens - before,
            ttft_s=first - began,
            answer=tuple(answer),
            text=text,
        )


def common(left: Sequence[int], right: Sequence[int]) -> int:
    """How many leading tokens agree."""
    for index, (one, other) in enumerate(zip(left, right, strict=False)):
        if one != other:
            return index
    return min(len(left), len(right))
