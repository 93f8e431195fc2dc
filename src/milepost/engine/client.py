"""The client's side of a sequence: its sampler, its text, what it has been told.

In: logits of its rows. Out: deltas to its sink. Lives in the engine's thread.
The law kept here: one delta per picked token, and exactly one last delta with a finish reason.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from milepost.engine.sampler import Picker, logprobs_of
from milepost.engine.sequence import Sequence
from milepost.engine.stats import Timing
from milepost.request import Delta, FinishReason, Request, TokenLogprobs, Usage

log = logging.getLogger("milepost.engine")


class Client:
    """One request's sampler and stream."""

    sequence: Sequence

    def __init__(
        self, request: Request, sink: Callable[[Delta], None], on_finish: Callable[[Timing], None] | None, *, arrival: float
    ) -> None:
        self.request = request
        self.sink = sink
        self.on_finish = on_finish
        self.arrival = arrival
        self.admitted: float | None = None
        self.first_token: float | None = None
        self.stop_reason: str | int | None = None
        self._pending: list[int] = []
        self._text = ""
        self._logprobs: list[TokenLogprobs] = []
        self._prompt: list[TokenLogprobs | None] | None = None if request.params.prompt_logprobs is None else [None]

    def begin(self, sequence: Sequence, *, seed: int, eos: tuple[int, ...], vocab_size: int) -> None:
        """The request was taken in."""
        params = self.request.params
        self.sequence = sequence
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos))
        self._named = frozenset(params.stop_token_ids)
        prompt = torch.tensor(self.request.prompt)
        own_seed = seed if params.seed is None else params.seed
        self.picker = Picker(params, seed=own_seed, prompt=prompt, eos=eos, vocab_size=vocab_size)

    def read_prompt(self, logits: Tensor, start: int) -> None:
        """Logits after prompt tokens start, start + 1, …: what the model thought of the tokens that follow them."""
        if self._prompt is None:
            return
        for offset, row in enumerate(logits):
            position = start + offset + 1
            if position >= len(self._prompt):  # a life before a preemption may have read it already
                count = self.request.params.prompt_logprobs or 0
                self._prompt.append(logprobs_of(row, self.request.prompt[position], count))

    def take(self, logits: Tensor, now: float) -> FinishReason | None:
        """Pick a token from logits [vocab_size]; says whether the answer ends with it."""
        self.first_token = now if self.first_token is None else self.first_token
        token, scores = self.picker.pick(logits)
        self.sequence.append(token)
        self._pending.append(token)
        if scores is not None:
            self._logprobs.append(scores)
        watch, enough = self.request.watch, self.sequence.generated >= self.request.params.min_tokens
        if token in self._ends and enough:
            self.stop_reason = token if token in self._named else None
            return "stop"
        if watch is not None:
            self._text += watch.push(token)
            if watch.stop is not None and enough:
                self.stop_reason = watch.stop
                return "stop"
        return "length" if self.sequence.length >= self.sequence.limit else None

    def tell(self, finish: FinishReason | None, now: float, *, error: str | None = None) -> None:
        """Send what has gathered since the last delta."""
        if finish is not None and self.request.watch is not None:
            self._text += self.request.watch.flush()
        first = self._prompt is not None and (self._pending or finish)
        prompt = tuple(self._prompt) if first and self._prompt is not None else None
        self._prompt = None if first else self._prompt
        self._send(
            Delta(
                self.request.id,
                tuple(self._pending),
                self._text,
                self.sequence.usage,
                tuple(self._logprobs),
                prompt,
                finish,
                self.stop_reason,
                error,
            )
        )
        self._pending, self._text, self._logprobs = [], "", []
        if finish is not None and self.on_finish is not None:
            first_token = None if self.first_token is None else self.first_token - self.arrival
            self.on_finish(Timing((self.admitted or now) - self.arrival, first_token, now - self.arrival))

    def fail(self, message: str) -> None:
        """Refuse a request that was never taken in."""
        usage = Usage(len(self.request.prompt), 0, 0, {})
        self._send(Delta(self.request.id, (), "", usage, finish="error", error=message))

    def _send(self, delta: Delta) -> None:
        try:
            self.sink(delta)
        except Exception:  # a client's fault must not end the step of the others
            log.exception("the sink of request %s failed", self.request.id)
