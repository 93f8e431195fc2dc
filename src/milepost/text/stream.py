"""In: one token at a time. Out: the text that is now certain, and word of a stop string.

The law kept here: the pieces put together are the text of all tokens, cut at the first stop string; no piece
ever has to be taken back. Bytes of an unfinished character and the beginning of a possible stop string wait.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from milepost.request import SamplingParams
from milepost.text.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
_WINDOW_LIMIT = 64


class TextWatch:
    """The `Watch` of one request."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams) -> None:
        self.stop: str | None = None
        self._params = params
        self._hidden = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._decoder = _Bytes(tokenizer) if tokenizer.byte_level else _Window(tokenizer)
        self._held = ""
        self._seen = 0

    def push(self, token: int) -> str:
        """Take one token; return the text that is now certain."""
        self._seen += 1
        if self.stop is not None:
            return ""
        text = "" if token in self._hidden else self._decoder.push(token)
        return self._release(text)

    def flush(self) -> str:
        """The request ended: return the text that was held back."""
        if self.stop is not None:
            return ""
        text = self._release(self._decoder.flush())
        rest, self._held = self._held, ""
        return text + rest

    def _release(self, text: str) -> str:
        if not self._params.stop:
            return text
        if self._seen < self._params.min_tokens:  # too early to stop: this text can't be part of a match
            return text
        self._held += text
        hits = [(self._held.find(stop), stop) for stop in self._params.stop if stop in self._held]
        if hits:
            # The one that is complete first wins, of two the longer: however the text is cut into tokens.
            start, self.stop = min(hits, key=lambda hit: (hit[0] + len(hit[1]), hit[0]))
            end = start + len(self.stop) if self._params.include_stop_str_in_output else start
            certain, self._held = self._held[:end], ""
            return certain
        keep = _overlap(self._held, self._params.stop)
        certain, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return certain


def _overlap(text: str, stops: Sequence[str]) -> int:
    """Length of the longest end of `text` that begins one of `stops`."""
    longest = min(len(text), max(len(stop) for stop in stops) - 1)
    for length in range(longest, 0, -1):
        if any(stop.startswith(text[-length:]) for stop in stops):
            return length
    return 0


class _Bytes:
    """For byte-level tokenizers: the text is the tokens' bytes, one after another."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> str:
        return self._utf8.decode(self._tokenizer.token_bytes(token))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _Window:
    """For all others: decode the last few tokens twice, without and with the new ones; the difference is new.

    tokens:  … | anchor … | fresh …
                 decoded    decoded, and not certain yet
    The anchor gives decoders that merge or strip spaces at the beginning something to do that to.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._anchor: list[int] = []
        self._fresh: list[int] = []

    def push(self, token: int) -> str:
        self._fresh.append(token)
        known = self._tokenizer.decode(self._anchor)
        text = self._tokenizer.decode(self._anchor + self._fresh)
        if text.endswith(_UNFINISHED) and len(self._fresh) < _WINDOW_LIMIT:
            return ""
        if not text.startswith(known) or len(text) <= len(known):
            # An empty token (or a decoder that rewrote the past): wait for more, but not without limit.
            return "" if len(self._fresh) < _WINDOW_LIMIT else self._advance(text[len(known) :])
        return self._advance(text[len(known) :])

    def flush(self) -> str:
        known = self._tokenizer.decode(self._anchor)
        return self._advance(self._tokenizer.decode(self._anchor + self._fresh)[len(known) :])

    def _advance(self, text: str) -> str:
        self._anchor, self._fresh = self._fresh, []
        return text
