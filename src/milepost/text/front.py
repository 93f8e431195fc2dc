"""In: an engine's settings, then prompts or messages. Out: `Prompt`s and one `Watch` per request.

The law kept here: one object holds all that turns text into tokens and back, made once and never changed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from milepost.config import EngineConfig
from milepost.errors import ConfigError, RequestError
from milepost.request import SamplingParams
from milepost.text.stream import TextWatch
from milepost.text.template import ChatTemplate, Prompt
from milepost.text.tokenizer import Tokenizer


class Text:
    """The tokenizer and the chat template of one model."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None) -> None:
        self.tokenizer = tokenizer
        self.template = template

    @classmethod
    def load(cls, directory: Path, config: EngineConfig, *, vocab_size: int | None = None) -> Text:
        """Read what lies in the model's directory, or where `config` points instead."""
        tokenizer = Tokenizer.load(Path(config.tokenizer or directory), vocab_size=vocab_size)
        templates = tokenizer.templates
        if config.chat_template is not None:
            try:
                templates = {"default": Path(config.chat_template).read_text(encoding="utf-8")}
            except OSError as error:
                raise ConfigError(
                    f"chat_template={config.chat_template!r} can't be read ({error.strerror})", field="chat_template"
                ) from error
        return cls(tokenizer, ChatTemplate(tokenizer, templates) if templates else None)

    def prompt(self, text: str, *, add_special_tokens: bool = True) -> Prompt:
        """A plain prompt."""
        return Prompt(self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, (), text)

    def chat(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> Prompt:
        """A conversation, through the chat template; `settings` as `ChatTemplate.prompt` takes them."""
        if self.template is None:
            raise RequestError(
                "this model has no chat template; use /v1/completions, or serve it with --chat-template FILE",
                param="messages",
            )
        return self.template.prompt(messages, **settings)

    def watch(self, params: SamplingParams) -> TextWatch:
        """What turns one request's tokens into text."""
        return TextWatch(self.tokenizer, params)
