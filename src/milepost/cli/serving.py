"""In: settings of engine and server. Out: a server that runs until it is told to stop.

The law kept here: the address is taken before weights load, so a taken port costs nothing; until the model is there
every route answers 503; the address is printed once requests are served; when the server ends, so does the engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from milepost.config import EngineConfig, ServerConfig
from milepost.engine.stats import Stats
from milepost.errors import ConfigError, Overloaded
from milepost.llm import start
from milepost.server import create_app
from milepost.server.errors import error_response
from milepost.server.port import Engine

if TYPE_CHECKING:
    from milepost.engine.loop import Engine as EngineThread

log = logging.getLogger("milepost")

_GRACE_SECONDS = 5
_POLL_SECONDS = 0.05


class Gate:
    """Answers 503 until the model is there; then hands everything to the application."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loading = error_response(Overloaded("the model is loading", retry_after=1))
        await (self.app or loading)(scope, receive, send)


class _Http(uvicorn.Server):
    """uvicorn without its signal handlers: it would raise the signal again, and the engine would not be stopped."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):  # not in the main thread
                loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def run_server(config: EngineConfig, server: ServerConfig) -> int:
    """Load the model and serve it until SIGINT or SIGTERM."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    with contextlib.closing(_listen(server)) as listener:
        asyncio.run(_serve(config, server, listener))
    return 0


def _listen(server: ServerConfig) -> socket.socket:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((server.host, server.port))
        listener.listen(2048)
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"can't listen on {server.host}:{server.port}: {error}", field="port") from error
    return listener


async def _serve(config: EngineConfig, server: ServerConfig, listener: socket.socket) -> None:
    gate = Gate()
    http = _Http(
        uvicorn.Config(gate, log_level="warning", access_log=False, timeout_graceful_shutdown=_GRACE_SECONDS, lifespan="off")
    )
    serving = asyncio.ensure_future(http.serve(sockets=[listener]))
    engine: EngineThread | None = None
    try:
        loaded, text = await asyncio.to_thread(start, config, show=sys.stderr.isatty())
        engine = loaded
        gate.app = create_app(loaded, text, server)
        if not http.should_exit:
            host, port = listener.getsockname()[:2]
            print(f"milepost: serving at http://{f'[{host}]' if ':' in host else host}:{port}", flush=True)
        async with _reporting(loaded, server.log_interval):
            while not http.should_exit and not serving.done():
                await asyncio.sleep(_POLL_SECONDS)
    finally:
        http.should_exit = True
        if engine is not None:
            await asyncio.to_thread(engine.stop)  # ends every stream, so that the server need not wait for them
        await serving


@contextlib.asynccontextmanager
async def _reporting(engine: Engine, interval: float) -> AsyncIterator[None]:
    """While inside, log one line of throughput every `interval` seconds in which something happened."""
    task = asyncio.ensure_future(_report(engine, interval)) if interval > 0 else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task


async def _report(engine: Engine, interval: float) -> None:
    before = await asyncio.to_thread(engine.stats)
    while True:
        await asyncio.sleep(interval)
        now = await asyncio.to_thread(engine.stats)
        if now.steps != before.steps or now.running or now.waiting:
            log.info("%s", throughput(before, now, interval))
        before = now


def throughput(before: Stats, now: Stats, seconds: float) -> str:
    """One line: what went through, what runs, what is held, what was reused."""
    prompt = (now.computed_prompt_tokens - before.computed_prompt_tokens) / seconds
    generated = (now.generation_tokens - before.generation_tokens) / seconds
    asked, hit = now.prefix_queries - before.prefix_queries, now.prefix_hits - before.prefix_hits
    pools = now.pools
    held = 1 - pools.free_bytes / pools.budget_bytes if pools.budget_bytes else 0.0
    return (
        f"prefill {prompt:,.1f} tokens/s, decode {generated:,.1f} tokens/s, {now.running} running, {now.waiting} waiting, "
        f"prefix hits {hit / asked if asked else 0.0:.0%}, arena {held:.0%} full, {pools.checkpoints} checkpoints"
    )
