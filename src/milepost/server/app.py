"""In: an engine, its text, settings. Out: the ASGI application with all routes.

The law kept here: whatever a handler raises becomes a JSON error, and a key, when set, is asked for everywhere but where
machines look whether the server lives.
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from milepost.config import EngineConfig, ServerConfig
from milepost.server import routes
from milepost.server.chat import chat
from milepost.server.completions import completions
from milepost.server.errors import WrongKey, error_response
from milepost.server.metrics import Metrics
from milepost.server.port import Engine
from milepost.server.service import Service
from milepost.server.streaming import ClientGone
from milepost.text import Text

Handler = Callable[[Service, Request], Awaitable[Response]]

_OPEN_PATHS = frozenset({"/health", "/ping", "/metrics", "/version"})
_CLIENT_GONE = 499


def create_app(engine: Engine, text: Text, config: ServerConfig) -> ASGIApp:
    """Wire everything together. The engine must have been started; stopping it is its owner's task."""
    model = served_name(engine.config)
    metrics = Metrics(model, engine.config, engine.stats)
    service = Service(engine, text, model, metrics, int(time.time()))
    handlers: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", chat),
        ("POST", "/v1/completions", completions),
        ("GET", "/v1/models", routes.models),
        ("GET", "/v1/models/{id:path}", routes.model),
        ("GET", "/health", routes.health),
        ("GET", "/ping", routes.health),
        ("POST", "/ping", routes.health),
        ("GET", "/metrics", routes.metrics),
        ("GET", "/version", routes.version),
        ("GET", "/load", routes.load),
        ("GET", "/server_info", routes.server_info),
        ("POST", "/tokenize", routes.tokenize),
        ("POST", "/detokenize", routes.detokenize),
        ("POST", "/reset_prefix_cache", routes.reset_prefix_cache),
    ]
    app = Starlette(
        routes=[Route(path, _endpoint(service, handler), methods=[method]) for method, path, handler in handlers],
        exception_handlers={404: _on_error, 405: _on_error, Exception: _on_error},
    )
    key = config.api_key or os.environ.get("MILEPOST_API_KEY")
    return _KeyCheck(app, key) if key else app


def served_name(config: EngineConfig) -> str:
    """The name that clients use."""
    return config.served_model_name or Path(config.model).resolve().name


def _endpoint(service: Service, handler: Handler) -> Callable[[Request], Awaitable[Response]]:
    async def endpoint(request: Request) -> Response:
        try:
            return await handler(service, request)
        except ClientGone:
            return Response(status_code=_CLIENT_GONE)  # nobody reads it
        except Exception as error:
            return error_response(error)

    return endpoint


async def _on_error(request: Request, error: Exception) -> Response:
    return error_response(error)


class _KeyCheck:
    """Lets nobody in without the key."""

    def __init__(self, app: ASGIApp, key: str) -> None:
        self._app = app
        self._key = key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] not in _OPEN_PATHS and not self._knows(scope):
            answer = error_response(WrongKey())
            await answer(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _knows(self, scope: Scope) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(key.strip(), self._key)
