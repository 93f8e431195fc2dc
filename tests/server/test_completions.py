"""`/v1/completions` through the `openai` client and as plain JSON."""

from __future__ import annotations

import json

import pytest

from tests.server.conftest import Served


def test_one_answer(served: Served) -> None:
    answer = served.client.completions.create(model="fake", prompt="abcdef", max_tokens=5)
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert answer.choices[0].text == "hello"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (6, 5, 11)
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    assert answer.usage.model_extra == {"recomputed": {"last_token": 1}}


def test_default_length_and_end(served: Served) -> None:
    assert served.client.completions.create(model="fake", prompt="a").choices[0].finish_reason == "stop"
    assert served.engine.requests[-1].params.max_tokens == 16
    served.client.completions.create(model="fake", prompt="a", max_tokens=None)
    assert served.engine.requests[-1].params.max_tokens == 199
    served.client.completions.create(model="fake", prompt="a" * 190)
    assert served.engine.requests[-1].params.max_tokens == 10


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("ab", ["ab"]), (["ab", "c"], ["ab", "c"]), ([67, 68], [[67, 68]]), ([[67], [68, 69]], [[67], [68, 69]])],
)
def test_all_kinds_of_prompt(served: Served, prompt: object, prompts: list[object]) -> None:
    answer = served.post("/v1/completions", prompt=prompt, n=2, max_tokens=2).json()
    assert [choice["index"] for choice in answer["choices"]] == list(range(2 * len(prompts)))
    tokens = [list(served.engine.text.tokenizer.encode(p).ids) if isinstance(p, str) else p for p in prompts]
    assert [list(request.prompt) for request in served.engine.requests] == [t for t in tokens for _ in range(2)]
    assert len({request.id for request in served.engine.requests}) == 2 * len(prompts)
    assert answer["usage"]["prompt_tokens"] == sum(map(len, tokens))
    assert answer["usage"]["completion_tokens"] == 4 * len(prompts)
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == sum(len(t) - 1 for t in tokens)


def test_stream_is_the_whole_in_pieces(served: Served) -> None:
    stream = served.client.completions.create(
        model="fake", prompt="a", max_tokens=20, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == "hello wörld"
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-2:] == [None, "stop"]
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 13
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert len({chunk.id for chunk in chunks}) == 1


def test_events_are_as_clients_read_them(served: Served) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    answer = served.post("/v1/completions", prompt=["a", "b"], max_tokens=2, stream=True, stream_options=options, stop=None)
    assert answer.headers["content-type"].startswith("text/event-stream")
    events = answer.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    chunks = [json.loads(event.removeprefix("data: ")) for event in events[:-2]]
    counts = [chunk["usage"]["completion_tokens"] for chunk in chunks if chunk["choices"]]
    assert sorted(counts) == [1, 1, 2, 2]
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert all("cached_tokens" in chunk["usage"]["prompt_tokens_details"] for chunk in chunks)


def test_logprobs(served: Served) -> None:
    answer = served.client.completions.create(model="fake", prompt="a", max_tokens=20, logprobs=2)
    found = answer.choices[0].logprobs
    assert found is not None and found.tokens is not None and found.text_offset is not None
    assert found.tokens[:5] == list("hello")
    assert found.tokens[7:9] == ["bytes:\\xc3", "bytes:\\xb6"]
    assert found.text_offset[:11] == [0, 1, 2, 3, 4, 5, 6, 7, 7, 8, 9]
    assert found.token_logprobs is not None and found.token_logprobs[0] == -1.0
    assert found.top_logprobs is not None
    name = served.engine.text.tokenizer.token_text(70)
    assert found.top_logprobs[0] == {name: -0.5, "h": -1.0}
    only = served.post("/v1/completions", prompt="a", max_tokens=1, logprobs=0).json()["choices"][0]["logprobs"]
    assert only["top_logprobs"] == [{"h": -1.0}]
    three = served.post("/v1/completions", prompt="a", max_tokens=1, logprobs=3).json()["choices"][0]["logprobs"]
    assert min(three["top_logprobs"][0].values()) == -9999.0  # JSON has no infinity


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_as_lm_eval_asks(served: Served, stream: bool) -> None:
    body = {"prompt": "abc", "echo": True, "logprobs": 1, "max_tokens": 1, "temperature": 0, "stream": stream}
    answer = served.post("/v1/completions", **body)
    data = answer.text.split("\n\n")[0].removeprefix("data: ") if stream else answer.text
    choice = json.loads(data)["choices"][0]
    assert choice["text"] == "abch"
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", "h"]
    assert choice["logprobs"]["token_logprobs"] == [None, -1.0, -1.0, -1.0]
    assert choice["logprobs"]["top_logprobs"][0] is None
    assert choice["logprobs"]["text_offset"] == [0, 1, 2, 3]
    assert served.engine.requests[-1].params.prompt_logprobs == 1


def test_echo_alone_makes_no_token(served: Served) -> None:
    answer = served.post("/v1/completions", prompt=[67, 68], echo=True, logprobs=0, max_tokens=0).json()
    assert answer["choices"][0]["text"] == served.engine.text.tokenizer.decode([67, 68])
    assert len(answer["choices"][0]["logprobs"]["tokens"]) == 2
    assert answer["usage"]["completion_tokens"] == 0
    assert answer["choices"][0]["finish_reason"] == "length"


def test_vllm_extras(served: Served) -> None:
    extras = {
        "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.1, "min_tokens": 1, "ignore_eos": True, "stop_token_ids": [7],
        "logit_bias": {"5": 1.5}, "allowed_token_ids": [1, 2], "cache_salt": "s", "priority": 3, "request_id": "mine",
        "seed": 9, "stop": "x", "include_stop_str_in_output": True, "skip_special_tokens": False,
    }  # fmt: skip
    answer = served.post("/v1/completions", prompt="abc", max_tokens=3, n=2, **extras).json()
    assert answer["id"] == "cmpl-mine"
    first, second = served.engine.requests
    assert (first.salt, first.priority, first.params.seed, second.params.seed) == ("s", 3, 9, 10)
    params = first.params
    assert (params.top_k, params.min_p, params.min_tokens, params.ignore_eos) == (5, 0.1, 1, True)
    assert (params.stop, params.stop_token_ids, params.logit_bias) == (("x",), (7,), {5: 1.5})
    assert params.allowed_token_ids == (1, 2)
    assert params.include_stop_str_in_output and not params.skip_special_tokens


def test_stop_string(served: Served) -> None:
    answer = served.post("/v1/completions", prompt="a", max_tokens=20, stop=["wö", "zz"]).json()
    assert answer["choices"][0]["text"] == "hello "
    assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", "wö")


def test_token_ids_and_prompt_logprobs(served: Served) -> None:
    answer = served.post("/v1/completions", prompt="ab", max_tokens=2, return_token_ids=True, prompt_logprobs=1).json()
    ids = served.engine.text.tokenizer.encode
    assert answer["choices"][0]["prompt_token_ids"] == list(ids("ab").ids)
    assert answer["choices"][0]["token_ids"] == list(ids("he").ids)
    first, second = answer["choices"][0]["prompt_logprobs"]
    assert first is None
    assert second[str(ids("b").ids[0])] == {"logprob": -1.0, "rank": 2, "decoded_token": "b"}


@pytest.mark.parametrize(("keep", "left"), [(2, "bc"), (99, "abc"), (-1, "abc")])
def test_truncation_keeps_the_end(served: Served, keep: int, left: str) -> None:
    answer = served.post("/v1/completions", prompt="abc", max_tokens=1, truncate_prompt_tokens=keep, echo=True).json()
    assert served.engine.requests[-1].prompt == served.engine.text.tokenizer.encode(left).ids
    assert answer["choices"][0]["text"] == left + "h"


def test_truncation_makes_a_long_prompt_fit(served: Served) -> None:
    assert served.post("/v1/completions", prompt="a" * 500, max_tokens=10, truncate_prompt_tokens=-1).status_code == 200
    assert len(served.engine.requests[-1].prompt) == 190
