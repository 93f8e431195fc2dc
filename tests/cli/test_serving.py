"""What `serve` does around the application: before the model is there, and in the log."""

from __future__ import annotations

import asyncio
import dataclasses
import logging

import httpx
import pytest

from milepost.cli.serving import Gate, _reporting, throughput
from milepost.config import ServerConfig
from milepost.server import create_app
from tests.server.fake import FakeEngine, listening, make_text


def test_every_route_is_503_until_the_model_is_there() -> None:
    engine = FakeEngine(make_text())
    gate = Gate()
    with listening(gate) as address, httpx.Client(base_url=address) as http:
        for answer in (http.get("/health"), http.post("/v1/completions", json={"prompt": "a"})):
            assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
            assert answer.json()["error"]["message"] == "the model is loading"
        gate.app = create_app(engine, engine.text, ServerConfig())
        assert http.get("/health").status_code == 200


def test_one_line_says_how_it_goes() -> None:
    before = FakeEngine(make_text()).stats()
    now = dataclasses.replace(
        before, computed_prompt_tokens=130, generation_tokens=20, prefix_queries=80, prefix_hits=40, running=3
    )
    line = throughput(before, now, 10.0)
    assert line == (
        "prefill 10.0 tokens/s, decode 2.0 tokens/s, 3 running, 2 waiting, prefix hits 75%, arena 60% full, 2 checkpoints"
    )


@pytest.mark.parametrize(("interval", "lines"), [(0.02, True), (0.0, False)])
def test_the_line_comes_every_interval(interval: float, lines: bool, caplog: pytest.LogCaptureFixture) -> None:
    async def watch() -> None:
        async with _reporting(FakeEngine(make_text()), interval):
            await asyncio.sleep(0.15)

    with caplog.at_level(logging.INFO, logger="milepost"):
        asyncio.run(watch())
    assert bool(caplog.records) == lines
