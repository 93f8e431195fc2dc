"""A server over a fake engine, on a real socket, and clients of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import openai
import pytest

from milepost.config import ServerConfig
from milepost.server import create_app
from tests.server.fake import FakeEngine, listening, make_text


@dataclass
class Served:
    """One server and two clients of it."""

    engine: FakeEngine
    http: httpx.Client
    client: openai.OpenAI

    def post(self, path: str, **body: object) -> httpx.Response:
        return self.http.post(path, json=body)


@pytest.fixture(scope="session")
def running() -> Iterator[Served]:
    engine = FakeEngine(make_text())
    with listening(create_app(engine, engine.text, ServerConfig())) as address:
        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0)
        with httpx.Client(base_url=address, timeout=10) as http, client:
            yield Served(engine, http, client)


@pytest.fixture
def served(running: Served) -> Served:
    """The same server for all tests, its engine as new."""
    fresh = FakeEngine(running.engine.text)
    running.engine.__dict__.update(fresh.__dict__)
    return running
