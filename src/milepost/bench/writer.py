"""Prompts of wanted lengths, from one seed. In: a tokenizer with its template. Out: texts and token ids.

The law kept here: no two prompts that should differ begin alike: each text starts with a word, and each run of ids with an
id, that was never first before.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from milepost.errors import ConfigError
from milepost.text import Text

T = TypeVar("T")


class Writer:
    """Draws words and token ids."""

    def __init__(self, text: Text, words: Sequence[str], seed: int) -> None:
        self._text = text
        self._random = random.Random(seed)
        self._words = list(words)
        special = text.tokenizer.special_ids
        self.ids = tuple(token for token in range(text.tokenizer.size) if token not in special)
        """Every token id that stands for text."""
        self._first_words = self._each_once(self._words)
        self._first_ids = self._each_once(self.ids)

    def tokens(self, count: int) -> tuple[int, ...]:
        """So many ids."""
        return (next(self._first_ids), *self._random.choices(self.ids, k=count - 1))

    def system(self, tokens: int) -> dict[str, str]:
        """A system message that ends at this position of the rendered conversation, or as soon after it as words allow."""

        def end(content: str) -> int:
            boundaries = self._text.chat([_message("system", content), _message("user", " ")]).boundaries
            if not boundaries:
                raise ConfigError("the chat template doesn't show where the system message ends", field="chat_template")
            return boundaries[0].position

        return _message("system", self._until(tokens, end))

    def user(self, tokens: int) -> dict[str, str]:
        """A user's message of so many tokens."""
        encode = self._text.tokenizer.encode
        return _message("user", self._until(tokens, lambda content: len(encode(content, add_special_tokens=False).ids)))

    def _until(self, wanted: int, length: Callable[[str], int]) -> str:
        """The shortest text whose length is at least what is wanted."""
        drawn = [next(self._first_words), *self._random.choices(self._words, k=wanted)]
        low, high = 1, len(drawn)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if length(_join(drawn[:middle])) >= wanted else (middle + 1, high)
        return _join(drawn[:low])

    def _each_once(self, items: Sequence[T]) -> Iterator[T]:
        return iter(self._random.sample(items, len(items)))


def _join(words: Sequence[str]) -> str:
    return "".join(f" {word}" for word in words)


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}
