"""In: messages and tools. Out: a `Prompt`: text, tokens, and at which token each message ends.

The law kept here: a boundary never lies inside a token. A token that straddles the end of a message belongs to what
follows, since another continuation would be cut into other tokens there.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from itertools import accumulate
from typing import Any

import jinja2
from jinja2.ext import Extension
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from milepost.errors import ConfigError, RequestError
from milepost.request import Boundary, BoundaryReason
from milepost.text.messages import Message, read_messages
from milepost.text.tokenizer import Tokenizer

_OTHER = "\ue000"
"""A content like no other: a character for private use."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request asks the model to continue."""

    tokens: tuple[int, ...]
    boundaries: tuple[Boundary, ...]
    text: str

    def keep_last(self, count: int) -> Prompt:
        """The last `count` tokens, boundaries moved with them."""
        cut = len(self.tokens) - count
        if cut <= 0:
            return self
        kept = (Boundary(b.position - cut, b.reason) for b in self.boundaries if b.position > cut)
        return Prompt(self.tokens[cut:], tuple(kept), self.text)


class ChatTemplate:
    """A model's chat template, compiled. Safe to use from several threads."""

    def __init__(self, tokenizer: Tokenizer, sources: Mapping[str, str]) -> None:
        self._tokenizer = tokenizer
        environment = _environment()
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(f"chat template {name!r} can't be parsed: {error}", field="chat_template") from error

    def prompt(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_special_tokens: bool = False,
    ) -> Prompt:
        """Render, tokenise once, and find the end of every message."""
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt can't both be true", param="continue_final_message"
            )
        read = read_messages(messages)
        render = _Render(self._pick(tools), self._tokenizer.special_tokens, tools, chat_template_kwargs or {})
        rendered = text = render(read, add_generation_prompt)
        if continue_final_message:
            text = _cut_after(text, read[-1])
        encoded = self._tokenizer.encode(text, add_special_tokens=add_special_tokens)
        # First p tokens end at ends[p - 1]; a running maximum, since special tokens around the text have offset (0, 0).
        ends = list(accumulate((end for _, end in encoded.offsets), max))
        positions: dict[int, BoundaryReason] = {}
        written = partial(_written, render, read, rendered, add_generation_prompt)
        for character, reason in _ends(render, read, text, continue_final_message, written):
            position = bisect_right(ends, character)
            if position and positions.get(position) != "client_mark":
                positions[position] = reason
        boundaries = tuple(Boundary(position, positions[position]) for position in sorted(positions))
        return Prompt(encoded.ids, boundaries, text)

    def _pick(self, tools: Sequence[Mapping[str, Any]] | None) -> jinja2.Template:
        if tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        return next(iter(self._templates.values()))


class _Render:
    """One conversation's rendering: the same tools, settings and time for the whole and for each prefix."""

    def __init__(
        self,
        template: jinja2.Template,
        special: Mapping[str, str],
        tools: Sequence[Mapping[str, Any]] | None,
        extra: Mapping[str, Any],
    ) -> None:
        now = datetime.now()
        self.tools = list(tools) if tools else None
        self._template = template
        self._context = {
            "documents": None,
            **special,
            **extra,
            "tools": self.tools,
            "strftime_now": now.strftime,
        }

    def __call__(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        try:
            return self._template.render(
                **self._context,
                messages=[message.fields for message in messages],
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:  # a template is a program: it can fail in any way
            raise RequestError(f"the chat template refuses these messages: {error}", param="messages") from error


def _ends(
    render: _Render, messages: Sequence[Message], text: str, whole: bool, written: Callable[[int], _Span | None]
) -> list[tuple[int, BoundaryReason]]:
    """Characters in `text` at which messages end and at which the client put marks.

    1. The conversation up to message k, rendered alone: where that is how the whole begins, its length is the end.
    2. Where the template refuses it or writes it otherwise, the end of the message's content, looked for in order.
    """
    found: list[tuple[int, BoundaryReason]] = []
    if render.tools and messages[0].fields["role"] not in ("system", "developer"):
        found.append((_preamble_end(render, messages[0], text), "message_end"))
    ends = _prefix_ends(render, messages, text)
    if whole:
        ends[-1] = len(text)
    cursor = 0
    for index, message in enumerate(messages):
        end = ends[index]
        limit = end if end is not None else next((later for later in ends[index:] if later is not None), len(text))
        span = written(index) if end is None else None
        if span is None or not cursor <= span.start < span.end <= limit:
            span = _locate(text, message.content, cursor, limit, from_right=end is not None)
        if span is None and message.marks:  # written elsewhere: a system message inside the last user's
            span = _locate(text, message.content, 0, len(text), from_right=True)
            end = end if end is not None or span is None else min(span.end, limit)
        if span is not None:
            found += [(min(max(span.start, span.origin + mark), span.end), "client_mark") for mark in message.marks]
            end = span.end if end is None else end
        if end is not None:
            found.append((end, "client_mark" if message.marked else "message_end"))
            cursor = max(cursor, end)
    return found


def _preamble_end(render: _Render, first: Message, text: str) -> int:
    """Where the tools end that stand before the first message: all that doesn't change with the message's content."""
    other = replace(first, fields={**first.fields, "content": _OTHER})
    try:
        rendered = render([other], add_generation_prompt=False)
    except RequestError:
        return 0
    return _agree(text, rendered)


def _agree(one: str, other: str) -> int:
    """How many characters two texts begin with alike."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(one), len(other)))


def _prefix_ends(render: _Render, messages: Sequence[Message], text: str) -> list[int | None]:
    """Where the talk up to each message ends in the whole; None where the template refuses it or writes it otherwise."""
    ends: list[int | None] = []
    reached = 0
    for count in range(1, len(messages) + 1):
        try:
            prefix = render(messages[:count], add_generation_prompt=False)
        except RequestError:
            prefix = ""
        known = reached < len(prefix) and text.startswith(prefix)
        reached = len(prefix) if known else reached
        ends.append(reached if known else None)
    return ends


@dataclass(frozen=True, slots=True)
class _Span:
    """Where a content stands in the whole. `origin`: where it would begin had the template not trimmed it."""

    start: int
    end: int
    origin: int


def _written(render: _Render, messages: Sequence[Message], text: str, generate: bool, index: int) -> _Span | None:
    """Where the template writes one content: what changes when the content does. A short one may stand elsewhere too."""
    message = messages[index]
    other = replace(message, fields={**message.fields, "content": _OTHER})
    try:
        rendered = render([*messages[:index], other, *messages[index + 1 :]], add_generation_prompt=generate)
    except RequestError:
        return None
    start = _agree(text, rendered)
    room = min(len(text), len(rendered)) - start
    end = len(text) - min(_agree(text[::-1], rendered[::-1]), room)
    piece = text[start:end]
    if not piece or piece not in message.content:  # empty, or the template writes more of it otherwise
        return None
    return _Span(start, end, start - message.content.find(piece))


def _locate(text: str, content: str, low: int, high: int, *, from_right: bool) -> _Span | None:
    """Look for a message's content, as it is and then trimmed, between two characters."""
    search = text.rfind if from_right else text.find
    if content and (start := search(content, low, high)) >= 0:
        return _Span(start, start + len(content), start)
    trimmed = content.strip()
    if trimmed and (start := search(trimmed, low, high)) >= 0:
        return _Span(start, start + len(trimmed), start - (len(content) - len(content.lstrip())))
    return None


def _cut_after(text: str, message: Message) -> str:
    """The rendering up to the end of its last message's content, for the model to go on from there."""
    span = _locate(text, message.content, 0, len(text), from_right=True)
    if span is None:
        raise RequestError(
            "continue_final_message: the last message's content is empty or not in the rendered prompt",
            param="continue_final_message",
        )
    return text[: span.end]


def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as chat templates expect it: sandboxed, blocks leave no blank lines, a few extra names."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationTag]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    return environment


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here its content passes unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> Node | list[Node]:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_pass"), [], [], body).set_lineno(line)

    def _pass(self, caller: Any) -> str:
        return str(caller())


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, in the order given: what models were trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
