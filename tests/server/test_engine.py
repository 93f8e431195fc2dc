"""Server and engine together: the embedded model behind a real socket."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from milepost.config import EngineConfig, ServerConfig
from milepost.llm import start
from milepost.server import create_app
from tests.server.fake import listening, wait_until

SYSTEM = {"role": "system", "content": "You look things up. " * 8}


@pytest.fixture(scope="module")
def http() -> Iterator[httpx.Client]:
    engine, text = start(EngineConfig(model="clerk", kv_cache_memory_bytes=32 << 20, max_num_seqs=4), show=False)
    try:
        with (
            listening(create_app(engine, text, ServerConfig())) as address,
            httpx.Client(base_url=address, timeout=60) as client,
        ):
            yield client
    finally:
        engine.stop()


def ask(http: httpx.Client, *talk: dict[str, str], **more: object) -> dict[str, object]:
    body = {"messages": [SYSTEM, *talk], "temperature": 0, "max_tokens": 6, "ignore_eos": True, **more}
    answer = http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


def cached(answer: dict[str, object]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])  # type: ignore[index]


def settled(http: httpx.Client) -> dict[str, object]:
    """The pools once nothing runs."""
    wait_until(lambda: http.get("/load").json()["server_load"] == 0, 20)
    info = dict(http.get("/server_info").json())
    assert info["audit"] == []
    assert info["pools"]["slots_used"] == 0
    assert info["pools"]["blocks_used"] == 0
    return info


def test_conversations_share_their_system_prompt(http: httpx.Client) -> None:
    http.post("/reset_prefix_cache")
    first = ask(http, {"role": "user", "content": "one"})
    other = ask(http, {"role": "user", "content": "two"})
    system_end = http.post("/tokenize", json={"messages": [SYSTEM, {"role": "user", "content": "two"}]}).json()
    assert cached(first) == 0
    assert cached(other) >= system_end["boundaries"][0]["position"]
    again = ask(http, {"role": "user", "content": "two"}, cache_salt="another tenant")
    assert cached(again) == 0
    assert again["choices"][0]["message"] == other["choices"][0]["message"]  # type: ignore[index]
    settled(http)


def test_the_next_turn_resumes_where_the_answer_ended(http: httpx.Client) -> None:
    turn = [{"role": "user", "content": "my name is Ada."}]
    first = ask(http, *turn, return_token_ids=True)
    prompt = len(first["prompt_token_ids"])  # type: ignore[arg-type]
    said = first["choices"][0]["message"]["content"]  # type: ignore[index]
    second = ask(http, *turn, {"role": "assistant", "content": said}, {"role": "user", "content": "and?"})
    assert cached(second) >= prompt - 1
    settled(http)


def test_streamed_and_whole_answers_agree(http: httpx.Client) -> None:
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none")
    body = {"model": "clerk", "prompt": "<|user|>3 cats", "max_tokens": 8, "temperature": 0}
    extra = {"ignore_eos": True}
    whole = client.completions.create(**body, logprobs=2, extra_body=extra)  # type: ignore[call-overload]
    options = {"include_usage": True}
    chunks = list(client.completions.create(**body, stream=True, stream_options=options, extra_body=extra))  # type: ignore[call-overload]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == whole.choices[0].text
    assert chunks[-1].usage.completion_tokens == 8
    assert len(whole.choices[0].logprobs.tokens) == 8
    client.close()


def test_echoed_logprobs_are_those_of_generation(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "logprobs": 1, "return_token_ids": True, "ignore_eos": True}
    made = http.post("/v1/completions", json=body).json()["choices"][0]
    whole = made["prompt_token_ids"] + made["token_ids"]
    echo = {"prompt": whole, "echo": True, "logprobs": 1, "max_tokens": 0}
    read = http.post("/v1/completions", json=echo).json()["choices"][0]["logprobs"]
    assert read["token_logprobs"][-4:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=1e-3)
    assert read["token_logprobs"][0] is None


def test_a_lost_client_frees_what_it_held(http: httpx.Client) -> None:
    body = {"prompt": "abc", "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with http.stream("POST", "/v1/completions", json=body) as answer:
        lines = (line for line in answer.iter_lines() if line)
        assert json.loads(next(lines).removeprefix("data: "))["choices"]
    info = settled(http)
    assert info["stats"]["finished"]["abort"] == 1  # type: ignore[index]


def test_many_at_once(http: httpx.Client) -> None:
    body = {"prompt": [f"{n} birds" for n in range(6)], "n": 2, "max_tokens": 3, "seed": 1, "ignore_eos": True}
    answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 36
    assert all(choice["finish_reason"] == "length" for choice in answer["choices"])
    settled(http)


def test_streams_of_eight_openai_clients_at_once_say_what_each_says_alone(http: httpx.Client) -> None:
    """29 (public kind): as many requests as slots and more. Here 8 and then 9 streams on 4 slots, through the real client."""
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=60)

    def stream(number: int) -> tuple[str, int]:
        chunks = client.chat.completions.create(
            model="clerk",
            messages=[SYSTEM, {"role": "user", "content": f"number {number}"}],  # type: ignore[list-item]
            temperature=0,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        text, tokens = "", 0
        for chunk in chunks:
            text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        return text, tokens

    alone = {number: stream(number) for number in range(9)}
    for count in (8, 4 + 5):
        http.post("/reset_prefix_cache")
        with ThreadPoolExecutor(count) as pool:
            assert dict(enumerate(pool.map(stream, range(count)))) == {number: alone[number] for number in range(count)}
        settled(http)
    assert all(tokens == 8 for _, tokens in alone.values())


def test_clients_that_leave_in_the_middle_of_their_streams_leave_no_slot_behind(http: httpx.Client) -> None:
    """30 (public kind): slots leak on disconnect."""
    client = openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0, timeout=60)
    before = http.get("/server_info").json()["stats"]["finished"].get("abort", 0)
    streams = [
        client.completions.create(
            model="clerk", prompt=f"{number} and on", max_tokens=3000, stream=True, extra_body={"ignore_eos": True}
        )
        for number in range(6)  # four run, two wait
    ]
    next(iter(streams[0]))
    for stream in streams:
        stream.close()
    wait_until(lambda: http.get("/server_info").json()["stats"]["finished"].get("abort", 0) == before + 6, 30)
    settled(http)
