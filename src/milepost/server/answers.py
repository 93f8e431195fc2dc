"""In: deltas. Out: OpenAI's usage, log-probabilities and finished answers, as plain data for JSON.

The law kept here: usage always says how many prompt tokens were cached, and why tokens were computed again.
"""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from milepost.request import Delta, TokenLogprobs, Usage
from milepost.text import Tokenizer

_FLOOR = -9999.0  # JSON has no infinity


@dataclass
class Answer:
    """What one sequence has produced so far."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    usage: Usage | None = None
    finish: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: Delta) -> None:
        """Take what one step added."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = self.prompt_logprobs or delta.prompt_logprobs
        self.usage = delta.usage
        self.finish = delta.finish
        self.stop_reason = delta.stop_reason


def usage_body(usages: Mapping[int, Usage], samples: int, prompt_lengths: Sequence[int]) -> dict[str, Any]:
    """Usage of one HTTP request: each prompt counts once, however many answers it has."""
    firsts: dict[int, Usage] = {}
    for index in sorted(usages):
        firsts.setdefault(index // samples, usages[index])
    prompt = sum(prompt_lengths)
    completion = sum(usage.completion_tokens for usage in usages.values())
    recomputed: Counter[str] = Counter()
    for usage in usages.values():
        recomputed.update(usage.recomputed)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(usage.cached_tokens for usage in firsts.values())},
        "recomputed": {reason: count for reason, count in recomputed.items() if count},
    }


def token_name(tokenizer: Tokenizer, token: int) -> str:
    """The token as OpenAI writes it: its text, or `bytes:\\x..` where that is no text."""
    raw = tokenizer.token_bytes(token)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


class CompletionLogprobs:
    """Builds `logprobs` of a completion, piece by piece: offsets go on where the last piece ended."""

    def __init__(self, tokenizer: Tokenizer, count: int) -> None:
        self._tokenizer = tokenizer
        self._count = count
        self._offset = 0
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def piece(self, entries: Iterable[TokenLogprobs | None], prompt: Sequence[int] = ()) -> dict[str, list[Any]]:
        """The next tokens; an entry None (only in a prompt) is a token without a probability: the first."""
        body: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for index, entry in enumerate(entries):
            token = prompt[index] if entry is None else entry.token
            body["tokens"].append(token_name(self._tokenizer, token))
            body["token_logprobs"].append(None if entry is None else _number(entry.logprob))
            body["top_logprobs"].append(None if entry is None else self._top(entry))
            body["text_offset"].append(self._offset)
            self._offset += len(self._utf8.decode(self._tokenizer.token_bytes(token)))
        return body

    def _top(self, entry: TokenLogprobs) -> dict[str, float]:
        top: dict[str, float] = {}
        for token, logprob in (*entry.top[: self._count], (entry.token, entry.logprob)):
            top.setdefault(token_name(self._tokenizer, token), _number(logprob))
        return top


def chat_logprobs(tokenizer: Tokenizer, entries: Iterable[TokenLogprobs], count: int) -> dict[str, Any]:
    """`logprobs` of a chat choice."""

    def one(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": token_name(tokenizer, token), "logprob": _number(logprob), "bytes": list(raw)}

    content = [
        {**one(entry.token, entry.logprob), "top_logprobs": [one(*pair) for pair in entry.top[:count]]} for entry in entries
    ]
    return {"content": content, "refusal": None}


def prompt_logprobs(
    tokenizer: Tokenizer, entries: Iterable[TokenLogprobs | None], count: int
) -> list[dict[str, dict[str, Any]] | None]:
    """`prompt_logprobs` as vLLM has them: for each token, by id, the token's own and the likeliest."""
    body: list[dict[str, dict[str, Any]] | None] = []
    for entry in entries:
        if entry is None:
            body.append(None)
            continue
        ranked = {token: (logprob, rank) for rank, (token, logprob) in enumerate(entry.top[:count], start=1)}
        ranked[entry.token] = (entry.logprob, entry.rank)
        body.append(
            {
                str(token): {
                    "logprob": _number(logprob),
                    "rank": rank,
                    "decoded_token": token_name(tokenizer, token),
                }
                for token, (logprob, rank) in ranked.items()
            }
        )
    return body


def _number(logprob: float) -> float:
    return max(logprob, _FLOOR)
