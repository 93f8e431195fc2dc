"""In: `POST /v1/completions`. Out: OpenAI's text completions, whole or as a stream.

The law kept here: whole and streamed answers are built from the same deltas by the same pieces.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from milepost.errors import RequestError
from milepost.request import Delta, SamplingParams, TokenLogprobs, Usage
from milepost.server.answers import Answer, CompletionLogprobs, prompt_logprobs, usage_body
from milepost.server.protocol import CompletionBody
from milepost.server.service import Feed, Service, read_body, warning_headers
from milepost.server.streaming import EventStream, unless_gone
from milepost.text import Prompt


async def completions(service: Service, request: Request) -> Response:
    """The route."""
    body = await read_body(request, CompletionBody)
    service.check_model(body.model)
    headers = warning_headers(body.unknown())
    body.check_tokens(service.engine.vocab_size)
    prompts = await asyncio.to_thread(_prompts, service, body)  # tokenizing a long prompt takes a while
    job = _Job(service, body, f"cmpl-{body.request_id or uuid.uuid4().hex}", int(time.time()), prompts)
    feed = Feed(service)
    feed.submit(service.requests(job.id, prompts, body))
    if body.stream:
        return EventStream(feed, job.chunks(feed), headers)
    try:
        return JSONResponse(await unless_gone(job.whole(feed), request), headers=headers)
    finally:
        feed.close()


def _prompts(service: Service, body: CompletionBody) -> list[tuple[Prompt, SamplingParams]]:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs can't be streamed; use echo with logprobs", param="prompt_logprobs")
    given: dict[str, Any] = {}
    if body.logprobs is not None:
        given["logprobs"] = body.logprobs
        if body.echo:
            given["prompt_logprobs"] = max(body.logprobs, body.prompt_logprobs or 0)
    wanted = body.max_tokens
    if wanted == 0 and body.echo:
        wanted = 1  # the engine always makes one; `_Job` drops it
    base = body.sampling(max_tokens=wanted, **given)
    explicit = "max_tokens" in body.model_fields_set
    made = []
    for entry in body.prompts:
        if isinstance(entry, str):
            add = True if body.add_special_tokens is None else body.add_special_tokens
            prompt = service.text.prompt(entry, add_special_tokens=add)
        else:
            prompt = Prompt(tuple(entry), (), "")
        prompt = service.truncate(prompt, body)
        room = service.room(prompt, wanted, explicit=explicit, param="prompt")
        made.append((prompt, replace(base, max_tokens=room)))
    return made


@dataclass(frozen=True)
class _Job:
    """One HTTP request while it is answered."""

    service: Service
    body: CompletionBody
    id: str
    created: int
    prompts: list[tuple[Prompt, SamplingParams]]

    async def whole(self, feed: Feed) -> dict[str, Any]:
        """The answer in one piece."""
        answers = [Answer() for _ in range(len(self.prompts) * self.body.count)]
        async for index, delta in feed.deltas():
            answers[index].add(self._without_extra(delta))
        choices = []
        for index, answer in enumerate(answers):
            choice = self._choice(index, answer, self._logprobs(), first=True)
            if self.body.prompt_logprobs is not None and answer.prompt_logprobs is not None:
                choice["prompt_logprobs"] = prompt_logprobs(
                    self.service.text.tokenizer, answer.prompt_logprobs, self.body.prompt_logprobs
                )
            choices.append(choice)
        usages = {index: answer.usage for index, answer in enumerate(answers) if answer.usage is not None}
        return {**self._head(choices), "usage": self._usage(usages)}

    async def chunks(self, feed: Feed) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes."""
        options = self.body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        at_end = bool(options and options.include_usage)
        usages: dict[int, Usage] = {}
        builders = [self._logprobs() for _ in range(len(self.prompts) * self.body.count)]
        async for index, delta in feed.deltas():
            delta = self._without_extra(delta)
            answer = Answer()
            answer.add(delta)
            first = index not in usages
            usages[index] = delta.usage
            chunk = self._head([self._choice(index, answer, builders[index], first=first)])
            if continuous:
                chunk["usage"] = self._usage({index: delta.usage})
            elif at_end:
                chunk["usage"] = None
            yield chunk
        if at_end:
            yield {**self._head([]), "usage": self._usage(usages)}

    def _choice(self, index: int, answer: Answer, builder: CompletionLogprobs | None, *, first: bool) -> dict[str, Any]:
        prompt = self.prompts[index // self.body.count][0]
        echo = first and bool(self.body.echo)
        logprobs = None
        if builder is not None:
            before: tuple[TokenLogprobs | None, ...] = (answer.prompt_logprobs or ()) if echo else ()
            logprobs = builder.piece((*before, *answer.logprobs), prompt.tokens)
        choice: dict[str, Any] = {
            "index": index,
            "text": (self._echo(prompt, index) if echo else "") + answer.text,
            "logprobs": logprobs,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.tokens
            if first:
                choice["prompt_token_ids"] = list(prompt.tokens)
        return choice

    def _echo(self, prompt: Prompt, index: int) -> str:
        given = self.body.prompts[index // self.body.count]
        if isinstance(given, str) and self.body.truncate_prompt_tokens is None:
            return given
        hide = self.body.skip_special_tokens is not False
        return self.service.text.tokenizer.decode(prompt.tokens, skip_special_tokens=hide)

    def _without_extra(self, delta: Delta) -> Delta:
        """max_tokens=0 asks for the prompt only: drop the token that the engine made."""
        if self.body.max_tokens != 0:
            return delta
        usage = replace(delta.usage, completion_tokens=0)
        finish = delta.finish and ("length" if delta.finish == "stop" else delta.finish)
        return replace(delta, tokens=(), text="", logprobs=(), usage=usage, finish=finish, stop_reason=None)

    def _logprobs(self) -> CompletionLogprobs | None:
        if self.body.logprobs is None:
            return None
        return CompletionLogprobs(self.service.text.tokenizer, self.body.logprobs)

    def _usage(self, usages: dict[int, Usage]) -> dict[str, Any]:
        count = self.body.count
        lengths = [len(self.prompts[prompt][0].tokens) for prompt in sorted({index // count for index in usages})]
        return usage_body(usages, count, lengths)

    def _head(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.service.model,
            "choices": choices,
        }
