"""In: checked bodies and prompts. Out: engine requests, and their deltas in one queue per HTTP request.

The law kept here: what was submitted is either finished or aborted by the time its HTTP request is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from pydantic import BaseModel
from starlette.requests import Request as HttpRequest

from milepost.errors import RequestError, UnknownModel
from milepost.request import Delta, Request, SamplingParams
from milepost.server.errors import GenerationFailed
from milepost.server.metrics import Metrics
from milepost.server.port import Engine
from milepost.server.protocol import Body
from milepost.text import Prompt, Text

log = logging.getLogger("milepost.server")
B = TypeVar("B", bound=BaseModel)

_HEALTH_CHECK_SECONDS = 5.0


@dataclass(frozen=True)
class Service:
    """What every route works with."""

    engine: Engine
    text: Text
    model: str
    metrics: Metrics
    created: int

    def check_model(self, name: str | None) -> None:
        """Refuse a name that isn't served; no name means the only model there is."""
        if name is not None and name != self.model:
            raise UnknownModel(
                f"The model `{name}` does not exist (served: {self.model})", param="model", code="model_not_found"
            )

    def truncate(self, prompt: Prompt, body: Body) -> Prompt:
        """Keep the last `truncate_prompt_tokens` tokens; -1: what fits beside the answer."""
        count = body.truncate_prompt_tokens
        if count is None:
            return prompt
        if count == 0:
            raise RequestError("truncate_prompt_tokens must be -1 or positive, got 0", param="truncate_prompt_tokens")
        if count == -1:
            count = max(1, self.engine.max_model_len - (body.max_tokens or 1))
        return prompt.keep_last(count)

    def room(self, prompt: Prompt, wanted: int | None, *, explicit: bool, param: str) -> int:
        """Tokens that the answer may have. Raises RequestError if the prompt, or what was asked for, doesn't fit."""
        length, limit = len(prompt.tokens), self.engine.max_model_len
        if not length:
            raise RequestError(f"{param} is empty: it has no tokens", param=param)
        room = limit - length
        if room < 1:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but the prompt has {length}; "
                "at least one token must be left for the answer",
                param=param,
                code="context_length_exceeded",
            )
        if wanted is not None and wanted > room and explicit:
            raise RequestError(
                f"This model's maximum context length is {limit} tokens, but {length} in the prompt and "
                f"max_tokens={wanted} make {length + wanted}; ask for at most {room}",
                param="max_tokens",
                code="context_length_exceeded",
            )
        return room if wanted is None else min(wanted, room)

    def requests(self, name: str, prompts: Sequence[tuple[Prompt, SamplingParams]], body: Body) -> list[Request]:
        """n requests for each prompt, in the order of their choices. Each has its own seed."""
        unique = uuid.uuid4().hex[:8]  # a client may use one request_id twice
        made: list[Request] = []
        for prompt, params in prompts:
            for sample in range(body.count):
                own = params if params.seed is None else replace(params, seed=params.seed + sample)
                made.append(
                    Request(
                        id=f"{name}-{len(made)}-{unique}",
                        prompt=prompt.tokens,
                        params=own,
                        watch=self.text.watch(own),
                        boundaries=prompt.boundaries,
                        salt=body.cache_salt or "",
                        priority=body.priority or 0,
                    )
                )
        return made


class Feed:
    """The sequences of one HTTP request, from `submit` to `close`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._queue: asyncio.Queue[tuple[int, Delta]] = asyncio.Queue()
        self._open: dict[int, str] = {}

    def submit(self, requests: Sequence[Request]) -> None:
        """Hand all to the engine, or none: if one is refused, those before it are aborted."""
        try:
            for index, request in enumerate(requests):
                self._service.engine.submit(request, self._sink(index), on_finish=self._service.metrics.observe_finished)
                self._open[index] = request.id
        except BaseException:
            self.close()
            raise

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """Deltas of all sequences as they come, with the sequence's index. Raises GenerationFailed."""
        while self._open:
            try:
                async with asyncio.timeout(_HEALTH_CHECK_SECONDS):
                    index, delta = await self._queue.get()
            except TimeoutError:
                if not self._service.engine.healthy:
                    raise GenerationFailed("the engine has stopped") from None
                continue
            if delta.finish is not None:
                self._open.pop(index, None)
            if delta.finish == "error":
                raise GenerationFailed(delta.error or "the engine failed at this request")
            yield index, delta

    def close(self) -> None:
        """Abort what still runs."""
        while self._open:
            _, name = self._open.popitem()
            self._service.engine.abort(name)

    def _sink(self, index: int) -> Callable[[Delta], None]:
        last: float | None = None

        def sink(delta: Delta) -> None:  # on the engine's thread
            nonlocal last
            if delta.tokens:
                now = time.monotonic()
                if last is not None:
                    self._service.metrics.observe_interval((now - last) / len(delta.tokens))
                last = now
            with contextlib.suppress(RuntimeError):  # the server's loop is closed: nobody listens
                self._loop.call_soon_threadsafe(self._queue.put_nowait, (index, delta))

        return sink


async def read_body(request: HttpRequest, kind: type[B]) -> B:
    """Parse a JSON body. Raises RequestError or pydantic's ValidationError."""
    raw = await request.body()
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}", code="invalid_json") from error
    if not isinstance(content, dict):
        raise RequestError(f"the body must be a JSON object, got {type(content).__name__}", code="invalid_json")
    if b"\\u" in raw:
        try:
            json.dumps(content, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"the body holds half of a surrogate pair: {error}", code="invalid_json") from error
    return kind.model_validate(content)


def warning_headers(unknown: Sequence[str]) -> dict[str, str]:
    """Headers that tell the client what was ignored."""
    if not unknown:
        return {}
    names = ", ".join(unknown).encode("ascii", "backslashreplace").decode()
    log.warning("ignored unknown parameters: %s", names)
    safe = "".join(character for character in names if character.isprintable() and character not in '"\\')
    return {"Warning": f'299 milepost "ignored unknown parameters: {safe[:1000]}"'}
