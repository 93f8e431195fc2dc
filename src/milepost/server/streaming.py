"""In: an async generator of chunks. Out: server-sent events, ended by `[DONE]`, an error event or a lost client.

The law kept here: when the client goes, its sequences are aborted at once, whether it streamed or waited.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Mapping
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from milepost.server.errors import describe
from milepost.server.service import Feed

T = TypeVar("T")


class ClientGone(Exception):
    """The client closed the connection before its answer was ready."""


class EventStream(Response):
    """Sends chunks as they come and watches the connection meanwhile. Closes the feed, however it ends."""

    def __init__(self, feed: Feed, chunks: AsyncIterator[dict[str, Any]], headers: Mapping[str, str]) -> None:
        super().__init__(
            headers={**headers, "Cache-Control": "no-cache", "X-Accel-Buffering": "no"},
            media_type="text/event-stream",
        )
        del self.headers["content-length"]
        self._feed = feed
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await _until_gone(self._pump(send), receive)
        except (ClientGone, OSError):
            pass  # nobody is left to be told
        finally:
            self._feed.close()

    async def _pump(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})

        async def event(content: str, more: bool = True) -> None:
            body = f"data: {content}\n\n".encode()
            await send({"type": "http.response.body", "body": body, "more_body": more})

        try:
            async for chunk in self._chunks:
                await event(json.dumps(chunk, ensure_ascii=False, separators=(",", ":")))
        except OSError:
            raise
        except Exception as error:  # the status is already sent: the stream itself must say it
            await event(json.dumps(describe(error)[1]))
        await event("[DONE]", more=False)


async def unless_gone(work: Awaitable[T], request: Request) -> T:
    """Wait for `work`, but no longer than the client does. Raises ClientGone."""
    return await _until_gone(work, request.receive)


async def _until_gone(work: Awaitable[T], receive: Receive) -> T:
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for task in (working, watching):
            if not task.done():
                task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
