"""Chat templates: what they render, and above all at which token each message ends."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.errors import ConfigError, RequestError
from milepost.request import Boundary
from milepost.text import ChatTemplate, Prompt, Tokenizer
from tests.text.conftest import LINES, byte_level

MARKED = (
    "{%- for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TIGHT = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ '' if loop.last else '\n\n' }}{% endfor %}"
REFUSING = (
    "{% if messages[-1].role != 'user' %}{{ raise_exception('the last message must be a user\\'s') }}{% endif %}"
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }} {% endfor %}"
)
EPHEMERAL = {"type": "ephemeral"}
TALK = [
    {"role": "system", "content": "hello there."},
    {"role": "user", "content": "世界 😀"},
    {"role": "assistant", "content": "hello world."},
    {"role": "user", "content": "hello"},
]


def render(tokenizer: Tokenizer, source: str, messages: list[dict[str, Any]], **settings: Any) -> Prompt:
    return ChatTemplate(tokenizer, {"default": source}).prompt(messages, **settings)


def ends_of(tokenizer: Tokenizer, prompt: Prompt) -> list[str]:
    """The text before each boundary."""
    return [tokenizer.decode(prompt.tokens[: boundary.position]) for boundary in prompt.boundaries]


def test_every_message_ends_where_its_prefix_does(bytes_tokenizer: Tokenizer) -> None:
    prompt = render(bytes_tokenizer, MARKED, TALK)
    prefixes = [render(bytes_tokenizer, MARKED, TALK[: k + 1], add_generation_prompt=False) for k in range(len(TALK))]
    assert [boundary.position for boundary in prompt.boundaries] == [len(prefix.tokens) for prefix in prefixes]
    assert all(boundary.reason == "message_end" for boundary in prompt.boundaries)
    for boundary, prefix in zip(prompt.boundaries, prefixes, strict=True):
        assert prompt.tokens[: boundary.position] == prefix.tokens


def test_a_token_across_the_end_of_a_message_belongs_to_what_follows(merging_tokenizer: Tokenizer) -> None:
    prompt = render(merging_tokenizer, TIGHT, TALK)
    ends = ends_of(merging_tokenizer, prompt)
    wanted = [render(merging_tokenizer, TIGHT, TALK[: k + 1]).text for k in range(len(TALK))]
    assert len(ends) == len(wanted)
    assert ends != wanted, "this test needs a token across an end"
    for end, want, boundary in zip(ends, wanted, prompt.boundaries, strict=True):
        assert want.startswith(end)
        following = merging_tokenizer.decode(prompt.tokens[: boundary.position + 1])
        assert not want.startswith(following) or boundary.position == len(prompt.tokens)


words = st.text(alphabet="helo wrd.\n世😀", max_size=12)
roles = st.sampled_from(["user", "assistant", "system"])
talks = st.lists(st.fixed_dictionaries({"role": roles, "content": words}), min_size=1, max_size=5)
MERGING = Tokenizer(byte_level(LINES, size=300), {}, {})


@settings(max_examples=60, deadline=None)
@given(talks, st.sampled_from([MARKED, PLAIN, TIGHT]))
def test_positions_agree_with_tokenising_the_prefix(messages: list[dict[str, Any]], source: str) -> None:
    template = ChatTemplate(MERGING, {"default": source})
    whole = template.prompt(messages)
    positions = {boundary.position for boundary in whole.boundaries}
    for k in range(len(messages)):
        prefix = template.prompt(messages[: k + 1], add_generation_prompt=False)
        count = len(prefix.tokens)
        assert whole.text.startswith(prefix.text)
        if whole.tokens[:count] == prefix.tokens:  # the end is between two tokens
            assert count in positions
        best = max(p for p in range(len(whole.tokens) + 1) if _chars(whole, p) <= len(prefix.text))
        assert best in positions or best == 0


def _chars(prompt: Prompt, count: int) -> float:
    """Characters, some perhaps begun only, that the first tokens cover."""
    return len(b"".join(map(MERGING.token_bytes, prompt.tokens[:count])).decode("utf-8", errors="replace"))


def test_a_template_that_refuses_prefixes_still_has_ends(bytes_tokenizer: Tokenizer) -> None:
    talk = [
        {"role": "user", "content": " hello\n"},
        {"role": "assistant", "content": "hello"},
        {"role": "user", "content": "hello"},
    ]
    prompt = render(bytes_tokenizer, REFUSING, talk)
    assert ends_of(bytes_tokenizer, prompt) == [
        "[user] hello ",  # its prefix is accepted
        "[user] hello [assistant] hello",  # its prefix is refused
        "[user] hello [assistant] hello [user] hello ",
    ]


def test_a_template_that_drops_a_message_keeps_the_other_ends(bytes_tokenizer: Tokenizer) -> None:
    source = "{% for m in messages %}{% if not loop.first %}{{ loop.length }}{{ m.content }};{% endif %}{% endfor %}"
    prompt = render(bytes_tokenizer, source, TALK)
    assert ends_of(bytes_tokenizer, prompt) == ["4世界 😀", "4世界 😀;4hello world.", prompt.text]


def test_client_marks(bytes_tokenizer: Tokenizer) -> None:
    talk = [
        {
            "role": "system",
            "content": [{"type": "text", "text": "one", "cache_control": EPHEMERAL}, {"type": "text", "text": "two"}],
        },
        {"role": "user", "content": "three", "cache_control": EPHEMERAL},
    ]
    prompt = render(bytes_tokenizer, MARKED, talk)
    assert "cache_control" not in prompt.text
    assert [boundary.reason for boundary in prompt.boundaries] == ["client_mark", "message_end", "client_mark"]
    assert ends_of(bytes_tokenizer, prompt)[0] == "<|start|>system\none"
    assert ends_of(bytes_tokenizer, prompt)[1].endswith("one\ntwo<|end|>\n")


def test_a_mark_in_content_that_the_template_trims(bytes_tokenizer: Tokenizer) -> None:
    parts = [{"type": "text", "text": "  a", "cache_control": EPHEMERAL}, {"type": "text", "text": "b  "}]
    prompt = render(bytes_tokenizer, "{{ messages[0].content | trim }}!", [{"role": "user", "content": parts}])
    assert prompt.text == "a\nb!"
    assert prompt.boundaries == (Boundary(1, "client_mark"), Boundary(4, "message_end"))


def test_tools_without_a_system_message_end_somewhere_too(bytes_tokenizer: Tokenizer) -> None:
    source = "{% if tools %}TOOLS {{ tools | tojson }}\n{% endif %}" + MARKED
    talk = [{"role": "user", "content": "one"}]
    prompt = render(bytes_tokenizer, source, talk, tools=[{"a": 1}])
    assert ends_of(bytes_tokenizer, prompt)[0] == 'TOOLS [{"a": 1}]\n<|start|>user\n'
    assert len(prompt.boundaries) == 2
    assert len(render(bytes_tokenizer, source, talk).boundaries) == 1


def test_truncation_moves_boundaries() -> None:
    prompt = Prompt((1, 2, 3, 4), (Boundary(2, "message_end"), Boundary(3, "client_mark")), "")
    assert prompt.keep_last(2) == Prompt((3, 4), (Boundary(1, "client_mark"),), "")
    assert prompt.keep_last(9) is prompt


def test_continue_final_message(bytes_tokenizer: Tokenizer) -> None:
    settings = {"add_generation_prompt": False, "continue_final_message": True}
    prompt = render(bytes_tokenizer, MARKED, TALK[:3], **settings)
    assert prompt.text.endswith("<|start|>assistant\nhello world.")
    assert prompt.boundaries[-1].position == len(prompt.tokens)
    with pytest.raises(RequestError, match="can't both be true"):
        render(bytes_tokenizer, MARKED, TALK, continue_final_message=True)
    with pytest.raises(RequestError, match="empty"):
        render(bytes_tokenizer, MARKED, [{"role": "user", "content": ""}], **settings)


def test_tool_calls_reach_the_template_as_objects(bytes_tokenizer: Tokenizer) -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": "é"}'}}
    source = "{{ messages[0].tool_calls[0].function.arguments.x }}{{ tools | tojson }}{{ flavour }}"
    talk = [{"role": "assistant", "content": None, "tool_calls": [call]}]
    settings = {"tools": [{"a": "<b>"}], "chat_template_kwargs": {"flavour": "sweet"}}
    assert render(bytes_tokenizer, source, talk, **settings).text == 'é[{"a": "<b>"}]sweet'
    call["function"]["arguments"] = "{"  # type: ignore[index]
    with pytest.raises(RequestError, match="not JSON"):
        render(bytes_tokenizer, source, talk)


def test_what_templates_expect_of_jinja(bytes_tokenizer: Tokenizer) -> None:
    source = (
        "{% generation %}a{% endgeneration %}{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}"
        "{{ strftime_now('%Y') | length }}{{ {'b': 1} | tojson(indent=1) }}"
    )
    assert render(bytes_tokenizer, source, TALK).text == 'a14{\n "b": 1\n}'


@pytest.mark.parametrize(
    "source",
    ["{{ raise_exception('no') }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{{ messages[99].role.x }}", "{{ 1 + 'a' }}"],
)
def test_whatever_fails_in_a_template_is_a_request_error(bytes_tokenizer: Tokenizer, source: str) -> None:
    with pytest.raises(RequestError, match="chat template refuses"):
        render(bytes_tokenizer, source, TALK)


def test_a_template_has_no_way_out(bytes_tokenizer: Tokenizer) -> None:
    for source in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}{{ ''.__class__.mro() }}"):
        with pytest.raises(RequestError):
            render(bytes_tokenizer, source, TALK)
    with pytest.raises(ConfigError, match="can't be parsed"):
        render(bytes_tokenizer, "{% if %}", TALK)


@pytest.mark.parametrize(
    ("messages", "place"),
    [
        ([], "messages"),
        ("hi", "messages"),
        ([1], r"messages\[0\]"),
        ([{"content": "x"}], r"messages\[0\].role"),
        ([{"role": 1}], r"messages\[0\].role"),
        ([{"role": "user", "content": 5}], r"messages\[0\].content"),
        ([{"role": "user", "content": [5]}], r"messages\[0\].content\[0\]"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "image_url"),
        ([{"role": "user", "content": [{"type": "text"}]}], "text"),
        ([{"role": "user", "content": "x", "cache_control": {"type": "eternal"}}], "cache_control"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls"),
    ],
)
def test_wrong_messages_are_named(bytes_tokenizer: Tokenizer, messages: Any, place: str) -> None:
    with pytest.raises(RequestError, match=place):
        render(bytes_tokenizer, MARKED, messages)


@pytest.mark.parametrize("source", [MARKED, PLAIN, TIGHT])
def test_same_text_as_transformers(source: str) -> None:
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level())
    for generate in (True, False):
        options = {"tokenize": False, "chat_template": source, "add_generation_prompt": generate}
        expected = theirs.apply_chat_template(json.loads(json.dumps(TALK)), **options)
        assert render(Tokenizer(byte_level(), {}, {}), source, TALK, add_generation_prompt=generate).text == expected


def test_a_short_content_is_found_where_the_template_writes_it(bytes_tokenizer: Tokenizer) -> None:
    source = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}{{ '' if add_generation_prompt else 'EOS' }}"
    )
    talk = [{"role": role, "content": "a"} for role in ("system", "user", "assistant", "user")]
    prompt = render(bytes_tokenizer, source, talk)
    assert ends_of(bytes_tokenizer, prompt) == [
        prompt.text[: -len("<|end|>")].rsplit("<|end|>", 3 - index)[0] for index in range(4)
    ]
