"""What goes into the engine and what comes out: plain data shared by `server`, `text` and `engine`.

The law kept here: a bad parameter is refused when the object is made, by name, so nothing behind it checks again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

from milepost.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]
BoundaryReason = Literal["message_end", "client_mark"]


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are picked, with vLLM's names and defaults. Raises RequestError that names the parameter."""

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    """How many alternatives to report for each generated token beside the picked one; None: no logprobs."""
    prompt_logprobs: int | None = None
    """The same for each prompt token. Such a request computes its whole prompt: it reads no checkpoint."""
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        _within("max_tokens", self.max_tokens, low=1)
        _within("min_tokens", self.min_tokens, low=0)
        _within("temperature", self.temperature, low=0.0, high=100.0)
        _within("top_p", self.top_p, low=0.0, high=1.0, low_open=True)
        _within("min_p", self.min_p, low=0.0, high=1.0)
        _within("presence_penalty", self.presence_penalty, low=-2.0, high=2.0)
        _within("frequency_penalty", self.frequency_penalty, low=-2.0, high=2.0)
        _within("repetition_penalty", self.repetition_penalty, low=0.0, high=100.0, low_open=True)
        _within("logprobs", self.logprobs, low=0, high=100)
        _within("prompt_logprobs", self.prompt_logprobs, low=0, high=100)
        if self.top_k != -1 and self.top_k < 0:
            raise RequestError(f"top_k must be -1, 0 (both: off) or positive, got {self.top_k}", param="top_k")
        if any(not text for text in self.stop):
            raise RequestError("stop must not contain an empty string", param="stop")
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids must not be empty", param="allowed_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})", param="min_tokens"
            )

    @property
    def greedy(self) -> bool:
        """True if the most likely token is always taken."""
        return self.temperature < 1e-5


def _within(
    name: str, value: float | None, *, low: float, high: float = math.inf, low_open: bool = False
) -> None:
    if value is None:
        return
    if math.isnan(value) or value < low or value > high or (low_open and value == low):
        bound = f"{'above' if low_open else 'at least'} {low:g}" + ("" if high == math.inf else f" and at most {high:g}")
        raise RequestError(f"{name} must be {bound}, got {value}", param=name)


@dataclass(frozen=True, slots=True)
class Boundary:
    """A position in the prompt that is worth a checkpoint: `position` tokens precede it."""

    position: int
    reason: BoundaryReason


class Watch(Protocol):
    """Turns generated tokens into text as they come, and notices stop strings. One per request."""

    stop: str | None
    """The stop string that was met, or None."""

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain (may be empty)."""
        ...

    def flush(self) -> str:
        """The request ended: return the text that was held back (empty if a stop string was met)."""
        ...


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `prompt` is token ids; `salt` separates tenants in the prefix tree."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    watch: Watch | None = None
    boundaries: tuple[Boundary, ...] = ()
    salt: str = ""
    priority: int = 0
    """Lower runs first when the scheduling policy is `priority`."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """The picked (or given) token's log-probability and rank, and the likeliest alternatives, best first."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request. `cached_tokens`: prompt tokens whose computation was skipped.

    `recomputed`: prompt or answer tokens that were computed although they had been before, by named reason.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    recomputed: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to one request. The last one has `finish` set."""

    request_id: str
    tokens: tuple[int, ...]
    text: str
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    """On the first delta only, and only if asked for; its first entry is None."""
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token id that ended the answer."""
    error: str | None = None
