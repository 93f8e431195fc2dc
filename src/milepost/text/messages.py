"""In: chat messages as a client wrote them. Out: messages as templates want them, and the client's marks.

The law kept here: what can't be honoured (a picture, an unknown kind of content) is refused by name. Content given in
parts is joined with newlines, as templates for text models take strings.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from milepost.errors import RequestError


@dataclass(frozen=True, slots=True)
class Message:
    """One message. `fields` is what the template sees."""

    fields: dict[str, Any]
    content: str
    marks: tuple[int, ...]
    """Characters of `content` at which a marked part ends."""
    marked: bool
    """True if the client marked the message itself."""


def read_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """Check and rewrite all messages. Raises RequestError that names the place."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence):
        raise RequestError("messages must be a list", param="messages")
    if not messages:
        raise RequestError("messages must not be empty", param="messages")
    return [_read(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read(message: Mapping[str, Any], place: str) -> Message:
    if not isinstance(message, Mapping):
        raise RequestError(f"{place} must be an object, got {type(message).__name__}", param=place)
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{place}.role must be a string", param=f"{place}.role")
    marked = _is_marked(message, place)
    content, marks = _read_content(message.get("content"), f"{place}.content")
    fields = {key: value for key, value in message.items() if key != "cache_control"}
    fields["content"] = content
    calls = message.get("tool_calls")
    if calls:
        fields["tool_calls"] = _read_calls(calls, f"{place}.tool_calls")
    else:
        fields.pop("tool_calls", None)
    return Message(fields, content, marks, marked)


def _read_content(content: Any, place: str) -> tuple[str, tuple[int, ...]]:
    """The text, and where marked parts end in it."""
    if content is None:
        return "", ()
    if isinstance(content, str):
        return content, ()
    if not isinstance(content, Sequence):
        raise RequestError(f"{place} must be a string or a list of parts, got {type(content).__name__}", param=place)
    text = ""
    marks = []
    for index, part in enumerate(content):
        here = f"{place}[{index}]"
        piece = part
        if isinstance(part, Mapping):
            if part.get("type") != "text":
                raise RequestError(f"{here}.type={part.get('type')!r} is not supported (supported: text)", param=here)
            piece = part.get("text")
        if not isinstance(piece, str):
            raise RequestError(f"{here} must be a string or have a string `text`", param=here)
        text += ("\n" if index else "") + piece
        if isinstance(part, Mapping) and _is_marked(part, here):
            marks.append(len(text))
    return text, tuple(marks)


def _read_calls(calls: Any, place: str) -> list[dict[str, Any]]:
    """Tool calls with their arguments as objects: clients send JSON in a string, templates want the object."""
    if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
        raise RequestError(f"{place} must be a list of objects", param=place)
    read = []
    for call in calls:
        function = call.get("function")
        if isinstance(function, Mapping) and isinstance(function.get("arguments"), str):
            try:
                arguments = json.loads(function["arguments"] or "{}")
            except ValueError as error:
                raise RequestError(f"{place}: function.arguments is not JSON: {error}", param=place) from error
            call = {**call, "function": {**function, "arguments": arguments}}
        read.append(dict(call))
    return read


def _is_marked(holder: Mapping[str, Any], place: str) -> bool:
    control = holder.get("cache_control")
    if control is None:
        return False
    if not isinstance(control, Mapping) or control.get("type") != "ephemeral":
        raise RequestError(
            f'{place}.cache_control must be {{"type": "ephemeral"}}, got {json.dumps(control, default=str)}',
            param=f"{place}.cache_control",
        )
    return True
