"""In: `POST /v1/chat/completions`. Out: OpenAI's chat completions, whole or as a stream.

The law kept here: the template decides the prompt, and the end of every message is told to the engine as a boundary.
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
from milepost.request import SamplingParams, Usage
from milepost.server.answers import Answer, chat_logprobs, prompt_logprobs, usage_body
from milepost.server.protocol import ChatBody
from milepost.server.service import Feed, Service, read_body, warning_headers
from milepost.server.streaming import EventStream, unless_gone
from milepost.text import Prompt


async def chat(service: Service, request: Request) -> Response:
    """The route."""
    body = await read_body(request, ChatBody)
    service.check_model(body.model)
    headers = warning_headers(body.unknown())
    body.check_tokens(service.engine.vocab_size)
    prompt, params = await asyncio.to_thread(_prompt, service, body)  # rendering and tokenizing may take a while
    job = _Job(service, body, f"chatcmpl-{body.request_id or uuid.uuid4().hex}", int(time.time()), prompt)
    feed = Feed(service)
    feed.submit(service.requests(job.id, [(prompt, params)], body))
    if body.stream:
        return EventStream(feed, job.chunks(feed), headers)
    try:
        return JSONResponse(await unless_gone(job.whole(feed), request), headers=headers)
    finally:
        feed.close()


def _prompt(service: Service, body: ChatBody) -> tuple[Prompt, SamplingParams]:
    if body.stream and body.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs can't be streamed", param="prompt_logprobs")
    given = {"logprobs": body.top_logprobs or 0} if body.logprobs else {}
    base = body.sampling(max_tokens=body.max_tokens, **given)
    prompt = service.truncate(service.text.chat(body.messages, **body.template_settings()), body)
    room = service.room(prompt, body.max_tokens, explicit=True, param="messages")
    return prompt, replace(base, max_tokens=room)


@dataclass(frozen=True)
class _Job:
    """One HTTP request while it is answered."""

    service: Service
    body: ChatBody
    id: str
    created: int
    prompt: Prompt

    async def whole(self, feed: Feed) -> dict[str, Any]:
        """The answer in one piece."""
        answers = [Answer() for _ in range(self.body.count)]
        async for index, delta in feed.deltas():
            answers[index].add(delta)
        choices = []
        for index, answer in enumerate(answers):
            message = {"role": "assistant", "content": answer.text}
            choices.append(self._choice(index, answer, {"message": message}))
        usages = {index: answer.usage for index, answer in enumerate(answers) if answer.usage is not None}
        whole = {**self._head("chat.completion", choices), "usage": self._usage(usages)}
        if self.body.prompt_logprobs is not None and answers[0].prompt_logprobs is not None:
            whole["prompt_logprobs"] = prompt_logprobs(
                self.service.text.tokenizer, answers[0].prompt_logprobs, self.body.prompt_logprobs
            )
        if self.body.return_token_ids:
            whole["prompt_token_ids"] = list(self.prompt.tokens)
        return whole

    async def chunks(self, feed: Feed) -> AsyncIterator[dict[str, Any]]:
        """The answer as it comes; each choice begins with its role."""
        options = self.body.stream_options
        continuous = bool(options and options.continuous_usage_stats)
        at_end = bool(options and options.include_usage)
        usages: dict[int, Usage] = {}
        async for index, delta in feed.deltas():
            answer = Answer()
            answer.add(delta)
            parts: list[dict[str, Any]] = []
            if index not in usages:
                parts.append(self._opening(index))
            usages[index] = delta.usage
            parts.append(self._choice(index, answer, {"delta": {"content": answer.text}}))
            for choice in parts:
                chunk = self._head("chat.completion.chunk", [choice])
                if self.body.return_token_ids and "role" in choice["delta"]:
                    chunk["prompt_token_ids"] = list(self.prompt.tokens)
                if continuous:
                    chunk["usage"] = self._usage({index: delta.usage})
                elif at_end:
                    chunk["usage"] = None
                yield chunk
        if at_end:
            yield {**self._head("chat.completion.chunk", []), "usage": self._usage(usages)}

    @staticmethod
    def _opening(index: int) -> dict[str, Any]:
        delta = {"role": "assistant", "content": ""}
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}

    def _choice(self, index: int, answer: Answer, content: dict[str, Any]) -> dict[str, Any]:
        logprobs = None
        if self.body.logprobs:
            logprobs = chat_logprobs(self.service.text.tokenizer, answer.logprobs, self.body.top_logprobs or 0)
        choice = {
            "index": index,
            **content,
            "logprobs": logprobs,
            "finish_reason": answer.finish,
            "stop_reason": answer.stop_reason,
        }
        if self.body.return_token_ids:
            choice["token_ids"] = answer.tokens
        return choice

    def _usage(self, usages: dict[int, Usage]) -> dict[str, Any]:
        return usage_body(usages, self.body.count, [len(self.prompt.tokens)])

    def _head(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.service.model,
            "choices": choices,
        }
