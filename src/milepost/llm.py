"""In: prompts or messages, from Python. Out: finished completions, or a stream of deltas.

    with LLM("clerk") as llm:
        print(llm.generate("Once upon a time", SamplingParams(max_tokens=32))[0].text)

The law kept here: an unknown setting is refused by name, and leaving the `with` block leaves nothing running.
"""

from __future__ import annotations

import difflib
import queue
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from milepost.config import EngineConfig
from milepost.embedded import resolve_model
from milepost.errors import ConfigError, MilepostError, Overloaded, RequestError
from milepost.models.registry import load_spec
from milepost.request import Delta, FinishReason, Request, SamplingParams, TokenLogprobs, Usage
from milepost.text import Prompt, Text

if TYPE_CHECKING:
    from milepost.engine.loop import Engine

PromptInput = str | Sequence[str] | Sequence[int] | Sequence[Sequence[int]]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One finished answer."""

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    stop_reason: str | int | None = None


class _Engine(Protocol):
    """As much of the engine as is used here."""

    def stop(self) -> None: ...
    def submit(self, request: Request, sink: Callable[[Delta], None]) -> None: ...
    def abort(self, request_id: str) -> None: ...


class LLM:
    """A model, loaded and running in this process."""

    def __init__(self, model: str = "clerk", *, progress: bool = True, **settings: Any) -> None:
        """Load the model. `settings` are the fields of `EngineConfig`. Raises ConfigError, UnsupportedModel."""
        _refuse_unknown(settings)
        self.config = EngineConfig(model=model, **settings)
        self._progress = progress and sys.stderr.isatty()
        self._text: Text
        self._engine: _Engine
        self._engine, self._text = start(self.config, show=self._progress)

    @classmethod
    def over(cls, engine: _Engine, text: Text) -> Self:
        """The same interface over an engine that runs already."""
        made = cls.__new__(cls)
        made.config, made._progress = EngineConfig(), False
        made._engine, made._text = engine, text
        return made

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Stop the engine. Closing twice is fine."""
        self._engine.stop()

    def generate(
        self,
        prompts: PromptInput,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Continue each prompt; the answers come in the prompts' order. Token ids are accepted in place of text."""
        entries = [self._prompt(entry) for entry in _batch(prompts)]
        return self._complete(entries, _spread(sampling_params, len(entries)))

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **template_settings: Any,
    ) -> list[Completion]:
        """Answer a conversation, or several; `template_settings` as `ChatTemplate.prompt` takes them."""
        several = bool(messages) and not isinstance(messages[0], Mapping)
        conversations: Sequence[Any] = messages if several else [messages]
        entries = [self._text.chat(conversation, **template_settings) for conversation in conversations]
        default = SamplingParams(max_tokens=None) if sampling_params is None else sampling_params
        return self._complete(entries, _spread(default, len(entries)))

    def stream(
        self, prompt: str | Messages, sampling_params: SamplingParams | None = None, **template_settings: Any
    ) -> Iterator[Delta]:
        """Deltas of one answer as they come, to a prompt or a conversation. Leaving the loop aborts the request."""
        read = self._prompt(prompt) if isinstance(prompt, str) else self._text.chat(prompt, **template_settings)
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        request = self._request(read, sampling_params or SamplingParams(max_tokens=None))
        self._engine.submit(request, arrived.put)
        finished = False
        try:
            while not finished:
                delta = arrived.get()
                finished = delta.finish is not None
                _refuse_failed(delta)
                yield delta
        finally:
            if not finished:
                self._engine.abort(request.id)

    def _prompt(self, entry: str | Sequence[int]) -> Prompt:
        return self._text.prompt(entry) if isinstance(entry, str) else Prompt(tuple(entry), (), "")

    def _request(self, prompt: Prompt, params: SamplingParams) -> Request:
        return Request(
            f"llm-{uuid.uuid4().hex}", prompt.tokens, params, watch=self._text.watch(params), boundaries=prompt.boundaries
        )

    def _complete(self, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Completion]:
        requests = [self._request(prompt, own) for prompt, own in zip(prompts, params, strict=True)]
        arrived: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        gathered = {request.id: _Gathered() for request in requests}
        running: set[str] = set()
        waiting = list(reversed(requests))
        try:
            with _Bar(len(requests), show=self._progress) as bar:
                while waiting or running:
                    while waiting and self._submit(waiting[-1], arrived.put, alone=not running):
                        running.add(waiting.pop().id)
                    delta = arrived.get()
                    gathered[delta.request_id].add(delta)
                    if delta.finish is not None:
                        running.discard(delta.request_id)
                    _refuse_failed(delta)
                    bar.add(delta)
        finally:
            for request_id in running:
                self._engine.abort(request_id)
        return [gathered[request.id].completion() for request in requests]

    def _submit(self, request: Request, sink: Callable[[Delta], None], *, alone: bool) -> bool:
        """False: the queue is full, so wait for one of ours to end."""
        try:
            self._engine.submit(request, sink)
        except Overloaded:
            if alone:
                raise
            return False
        return True


def start(config: EngineConfig, *, show: bool) -> tuple[Engine, Text]:
    """Load and start an engine with its text; a bar shows how far loading is."""
    path = resolve_model(config.model)
    text = Text.load(path, config, vocab_size=load_spec(path).vocab_size)  # cheap, so refused before weights load
    from milepost.engine.loop import Engine as Loop  # imports torch

    with Progress(
        TextColumn("loading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=Console(stderr=True),
        transient=True, disable=not show,
    ) as bar:  # fmt: skip
        task = bar.add_task("loading", total=None)
        engine = Loop(config, progress=lambda done, total: bar.update(task, completed=done, total=total))
    engine.start()
    return engine, text


@dataclass
class _Gathered:
    """Deltas of one answer, put together."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    last: Delta | None = None

    def add(self, delta: Delta) -> None:
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.last = delta

    def completion(self) -> Completion:
        if self.last is None or self.last.finish is None:
            raise MilepostError("the engine ended before the answer did")
        return Completion(
            self.text,
            tuple(self.tokens),
            self.last.finish,
            self.last.usage,
            tuple(self.logprobs),
            self.prompt_logprobs,
            self.last.stop_reason,
        )


class _Bar:
    """How many answers are ready, with prefill and decode tokens/s."""

    def __init__(self, total: int, *, show: bool) -> None:
        self._bar = Progress(
            TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
            TextColumn("{task.fields[speed]}"), console=Console(stderr=True), disable=not show,
        )  # fmt: skip
        self._task = self._bar.add_task("generating", total=total, speed="")
        self._began = time.monotonic()
        self._prefilled: dict[str, int] = {}
        self._decoded = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def add(self, delta: Delta) -> None:
        self._prefilled[delta.request_id] = delta.usage.prompt_tokens - delta.usage.cached_tokens
        self._decoded += len(delta.tokens)
        seconds = max(time.monotonic() - self._began, 1e-9)
        prefill, decode = sum(self._prefilled.values()) / seconds, self._decoded / seconds
        speed = f"prefill {prefill:,.0f} tokens/s, decode {decode:,.0f} tokens/s"
        self._bar.update(self._task, advance=1 if delta.finish else 0, speed=speed)


def _refuse_failed(delta: Delta) -> None:
    if delta.finish == "error":
        raise MilepostError(delta.error or f"the engine failed at request {delta.request_id}")


def _refuse_unknown(settings: Mapping[str, Any]) -> None:
    known = [entry.name for entry in fields(EngineConfig)]
    for name in settings:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else f" (known: {', '.join(known)})"
            raise ConfigError(f"unknown setting {name!r}{hint}", field=name)


def _batch(prompts: PromptInput) -> list[str | Sequence[int]]:
    if isinstance(prompts, str):
        return [prompts]
    if prompts and all(isinstance(entry, int) for entry in prompts):
        return [[entry for entry in prompts if isinstance(entry, int)]]
    batch = [entry for entry in prompts if not isinstance(entry, int)]
    if len(batch) != len(prompts):
        raise RequestError("prompts mixes token ids with whole prompts", param="prompts")
    return batch


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise RequestError(f"{len(params)} sampling_params for {count} prompts", param="sampling_params")
    return list(params)
