"""`/v1/chat/completions` through the `openai` client and as plain JSON."""

from __future__ import annotations

import json

from tests.server.conftest import Served

TALK = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "hi"}]


def test_one_answer(served: Served) -> None:
    answer = served.client.chat.completions.create(model="fake", messages=TALK)  # type: ignore[arg-type]
    assert answer.id.startswith("chatcmpl-")
    assert (answer.choices[0].message.role, answer.choices[0].message.content) == ("assistant", "hello wörld")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 4
    [request] = served.engine.requests
    assert request.params.max_tokens == 200 - len(request.prompt)


def test_the_engine_hears_where_messages_end(served: Served) -> None:
    marked = [{**TALK[0], "cache_control": {"type": "ephemeral"}}, TALK[1]]
    served.post("/v1/chat/completions", messages=marked, max_tokens=1)
    [request] = served.engine.requests
    decode = served.engine.text.tokenizer.decode
    ends = [(decode(request.prompt[: b.position]), b.reason) for b in request.boundaries]
    assert ends == [
        ("<|start|>system\nbe kind<|end|>\n", "client_mark"),
        ("<|start|>system\nbe kind<|end|>\n<|start|>user\nhi<|end|>\n", "message_end"),
    ]


def test_stream(served: Served) -> None:
    options = {"include_usage": True}
    stream = served.client.chat.completions.create(  # type: ignore[call-overload]
        model="fake", messages=TALK, stream=True, n=2, max_completion_tokens=5, stream_options=options
    )
    chunks = list(stream)
    for index in (0, 1):
        mine = [chunk.choices[0] for chunk in chunks[:-1] if chunk.choices[0].index == index]
        assert mine[0].delta.role == "assistant"
        assert all(choice.delta.role is None for choice in mine[1:])
        assert "".join(choice.delta.content or "" for choice in mine) == "hello"
        assert mine[-1].finish_reason == "length"
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 10
    assert chunks[-1].usage.prompt_tokens == len(served.engine.requests[0].prompt)


def test_logprobs(served: Served) -> None:
    answer = served.client.chat.completions.create(
        model="fake",
        messages=TALK,  # type: ignore[arg-type]
        logprobs=True,
        top_logprobs=2,
        max_tokens=9,
    )
    content = answer.choices[0].logprobs.content  # type: ignore[union-attr]
    assert content is not None
    assert (content[0].token, content[0].logprob, content[0].bytes) == ("h", -1.0, [104])
    assert [(top.token, top.logprob) for top in content[0].top_logprobs][1] == ("h", -1.0)
    assert content[7].bytes == [0xC3]
    plain = served.post("/v1/chat/completions", messages=TALK, logprobs=True, max_tokens=1).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


def test_tools_reach_the_template(served: Served) -> None:
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    served.post("/v1/chat/completions", messages=TALK, tools=tools, tool_choice="auto", max_tokens=1)
    assert "look_up" in served.engine.text.tokenizer.decode(served.engine.requests[-1].prompt)
    served.post("/v1/chat/completions", messages=TALK, tools=tools, tool_choice="none", max_tokens=1)
    assert "look_up" not in served.engine.text.tokenizer.decode(served.engine.requests[-1].prompt)


def test_continuing_the_final_message(served: Served) -> None:
    talk = [*TALK, {"role": "assistant", "content": "well, "}]
    served.post("/v1/chat/completions", messages=talk, continue_final_message=True, max_tokens=1)
    assert served.engine.text.tokenizer.decode(served.engine.requests[-1].prompt).endswith("assistant\nwell, ")


def test_token_ids(served: Served) -> None:
    body = {"messages": TALK, "max_tokens": 2, "return_token_ids": True}
    whole = served.post("/v1/chat/completions", **body).json()
    assert whole["prompt_token_ids"] == list(served.engine.requests[-1].prompt)
    assert len(whole["choices"][0]["token_ids"]) == 2
    events = served.post("/v1/chat/completions", **body, stream=True).text.split("\n\n")
    first = json.loads(events[0].removeprefix("data: "))
    assert first["prompt_token_ids"] == whole["prompt_token_ids"]


def test_truncation_moves_message_ends(served: Served) -> None:
    served.post("/v1/chat/completions", messages=TALK, max_tokens=1, truncate_prompt_tokens=20)
    [request] = served.engine.requests
    assert len(request.prompt) == 20
    assert [b.position for b in request.boundaries] == [20 - len("sassistant\n")]
