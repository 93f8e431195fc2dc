"""Whatever a client does wrong, it gets a JSON error that names it; whatever the engine does, too."""

from __future__ import annotations

import json
from typing import Any

import httpx
import openai
import pytest

from milepost.config import ServerConfig
from milepost.errors import Overloaded, StateError
from milepost.server import create_app
from tests.server.conftest import Served
from tests.server.fake import FakeEngine, listening, make_text, wait_until

TALK = [{"role": "user", "content": "hi"}]


def error_of(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    return dict(body["error"])


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": 10**30}, "max_tokens"),
        ({"n": 0}, "n"),
        ({"n": 2, "best_of": 3}, "best_of"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"seed": 2**70}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"logit_bias": {"999": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stream_options": 3}, "stream_options"),
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens"),
        ({"bad_words": ["x"]}, "bad_words"),
        ({"structured_outputs": {"json": {}}}, "structured_outputs"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"use_beam_search": True}, "use_beam_search"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_bad_parameters_are_named(served: Served, path: str, body: dict[str, Any], param: str) -> None:
    prompt = {"messages": TALK} if "chat" in path else {"prompt": "hi"}
    error = error_of(served.post(path, **prompt, **body))
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert param in error["message"]
    assert served.engine.requests == []


@pytest.mark.parametrize(
    "body", [{}, {"prompt": None}, {"prompt": []}, {"prompt": ""}, {"prompt": [[]]}, {"prompt": [1, "a"]}, {"prompt": 5},
             {"prompt": [999]}, {"prompt": [-1]}, {"prompt": "x", "suffix": "y"}]
)  # fmt: skip
def test_bad_prompts(served: Served, body: dict[str, Any]) -> None:
    assert error_of(served.post("/v1/completions", **body))["param"] in ("prompt", "suffix")


@pytest.mark.parametrize(
    "body", [{}, {"messages": []}, {"messages": "hi"}, {"messages": [1]}, {"messages": [{"content": "x"}]},
             {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
             {"messages": TALK, "tool_choice": "required", "tools": []}, {"messages": TALK, "top_logprobs": 3},
             {"messages": TALK, "chat_template": "x"}, {"messages": TALK, "chat_template_kwargs": 5}]
)  # fmt: skip
def test_bad_messages(served: Served, body: dict[str, Any]) -> None:
    error = error_of(served.post("/v1/chat/completions", **body))
    assert error["param"] in ("tool_choice", "top_logprobs", "chat_template", "chat_template_kwargs") or (
        error["param"].startswith("messages")
    )


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b'"x"', b"\xff", b"null", b"[" * 100_000, b'{"prompt": "\\ud800"}', b'{"a": NaN}']
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"])
def test_bad_json(served: Served, path: str, raw: bytes) -> None:
    error_of(served.http.post(path, content=raw))


@pytest.mark.parametrize("field", ["temperature", "top_p"])
def test_nan_is_no_number(served: Served, field: str) -> None:
    answer = served.http.post("/v1/completions", content=f'{{"prompt": "a", "{field}": NaN}}')
    assert error_of(answer)["param"] == field


def test_context_length(served: Served) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        served.client.chat.completions.create(model="fake", messages=[{"role": "user", "content": "x" * 300}])
    assert caught.value.code == "context_length_exceeded"
    error = error_of(served.post("/v1/completions", prompt="abc", max_tokens=198))
    assert (error["code"], error["param"]) == ("context_length_exceeded", "max_tokens")
    assert "at most 197" in error["message"]


def test_unknown_model(served: Served) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        served.client.completions.create(model="other", prompt="a")
    assert caught.value.code == "model_not_found"
    assert error_of(served.http.get("/v1/models/other"), 404)["code"] == "model_not_found"


def test_unknown_keys_are_accepted_with_a_warning(served: Served) -> None:
    answer = served.post("/v1/completions", prompt="a", max_tokens=1, shiny='"x"\n', user="me", **{'o"dd\nkéy': 1})
    assert answer.status_code == 200
    assert "shiny" in answer.headers["warning"] and "user" not in answer.headers["warning"]
    quiet = served.post("/v1/completions", prompt="a", max_tokens=1, user="me", suffix=None, stop=None, bad_words=[])
    assert "warning" not in quiet.headers


def test_unknown_routes_and_methods(served: Served) -> None:
    error_of(served.http.get("/nowhere"), 404)
    error_of(served.http.get("/v1/completions"), 405)


def test_overload_says_when_to_come_back(served: Served) -> None:
    served.engine.fault = Overloaded("too many", retry_after=7)
    answer = served.post("/v1/completions", prompt="a")
    assert error_of(answer, 503)["code"] == "overloaded"
    assert answer.headers["retry-after"] == "7"
    assert served.post("/v1/chat/completions", messages=TALK, stream=True).status_code == 503


@pytest.mark.parametrize("fault", [StateError("odd"), ZeroDivisionError("secret")])
def test_a_fault_of_ours_is_a_500_in_json(served: Served, fault: Exception) -> None:
    served.engine.fault = fault
    error = error_of(served.post("/v1/completions", prompt="a"), 500)
    assert error["type"] == "internal_error"
    assert "secret" not in error["message"]


def test_an_engine_error_reaches_whole_and_streamed_answers(served: Served) -> None:
    served.engine.broken = True
    assert "out of luck" in error_of(served.post("/v1/completions", prompt="a"), 500)["message"]
    events = served.post("/v1/chat/completions", messages=TALK, stream=True).text.split("\n\n")
    assert "out of luck" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
    assert events[-2] == "data: [DONE]"
    with pytest.raises(openai.APIError, match="out of luck"):
        list(served.client.completions.create(model="fake", prompt="a", stream=True))


def test_a_batch_is_all_or_nothing(served: Served) -> None:
    error_of(served.post("/v1/completions", prompt=[[67], [999]], max_tokens=5))
    assert served.engine.aborted == [served.engine.requests[0].id]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_aborts_its_requests(served: Served, path: str, stream: bool) -> None:
    served.engine.pause = 0.1
    body = {"prompt": "a", "messages": TALK, "n": 2, "stream": stream, "max_tokens": 12}
    if stream:
        with served.http.stream("POST", path, json=body) as answer:
            next(answer.iter_lines())
    else:
        with pytest.raises(httpx.TimeoutException):
            served.http.post(path, json=body, timeout=0.25)
    wait_until(lambda: len(served.engine.aborted) == 2)
    assert sorted(served.engine.aborted) == sorted(request.id for request in served.engine.requests)
    wait_until(lambda: served.engine.finished["abort"] == 2)


def test_a_finished_request_is_not_aborted(served: Served) -> None:
    served.post("/v1/completions", prompt="a", max_tokens=2)
    served.post("/v1/completions", prompt="a", max_tokens=2, stream=True)
    assert served.engine.aborted == []


def test_the_key_is_asked_for() -> None:
    engine = FakeEngine(make_text())
    app = create_app(engine, engine.text, ServerConfig(api_key="kéy"))
    with listening(app) as address, httpx.Client(base_url=address) as http:
        assert http.get("/health").status_code == 200
        for headers in ({}, {"Authorization": "Bearer no"}, {"Authorization": "key"}):
            assert error_of(http.get("/v1/models", headers=headers), 401)["code"] == "invalid_api_key"
        right = {"Authorization": b"Bearer " + "kéy".encode()}
        assert http.get("/v1/models", headers=right).status_code == 200
        error_of(http.post("/reset_prefix_cache"), 401)
        assert engine.resets == 0
