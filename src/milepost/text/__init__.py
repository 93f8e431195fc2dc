"""Text <-> tokens: tokenizer, chat template, and where messages begin and end."""

from __future__ import annotations

from milepost.text.front import Text
from milepost.text.stream import TextWatch
from milepost.text.template import ChatTemplate, Prompt
from milepost.text.tokenizer import Tokenizer

__all__ = ["ChatTemplate", "Prompt", "Text", "TextWatch", "Tokenizer"]
