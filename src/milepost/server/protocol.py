"""In: JSON bodies. Out: checked bodies with `SamplingParams`, and a list of what was ignored.

The law kept here: a known parameter that would change the answer and can't be honoured is refused by name; an unknown
key is accepted and reported in a `Warning` header; `null` always means the default.
"""

from __future__ import annotations

from typing import Any, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from milepost.errors import RequestError
from milepost.request import SamplingParams

_REFUSED = {
    "bad_words": "forbidden words aren't supported; use logit_bias",
    "suffix": "insertion isn't supported",
    "structured_outputs": "constrained decoding isn't supported",
    "guided_json": "constrained decoding isn't supported",
    "guided_regex": "constrained decoding isn't supported",
    "guided_choice": "constrained decoding isn't supported",
    "guided_grammar": "constrained decoding isn't supported",
    "use_beam_search": "beam search isn't supported",
    "logits_processors": "logits processors aren't supported",
    "prompt_embeds": "embeddings as a prompt aren't supported",
    "chat_template": "a template in the request isn't supported; serve with --chat-template FILE",
    "functions": "use tools",
    "function_call": "use tools and tool_choice",
    "audio": "audio isn't supported",
    "length_penalty": "beam search isn't supported",
    "truncate_side": "truncation is always on the left",
}
"""Names whose value would change the answer, and why they can't be honoured. Values that ask for nothing pass."""

_HARMLESS = frozenset(
    {
        "user", "metadata", "store", "service_tier", "parallel_tool_calls", "safety_identifier", "prompt_cache_key",
        "prompt_cache_retention", "spaces_between_special_tokens", "add_special_tokens", "modalities", "verbosity",
    }
)  # fmt: skip
"""Names that ask nothing of an engine: accepted without a word."""


class StreamOptions(BaseModel):
    """What else a stream carries."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class Body(BaseModel):
    """What completions and chat have in common."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    prompt_logprobs: int | None = None
    n: int | None = Field(None, ge=1, le=128)
    best_of: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    truncate_prompt_tokens: int | None = Field(None, ge=-1)
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    priority: int | None = Field(None, ge=-(2**31), lt=2**31)
    cache_salt: str | None = None
    request_id: str | None = Field(None, max_length=256)
    response_format: dict[str, Any] | None = None

    @property
    def count(self) -> int:
        """Answers per prompt."""
        return self.n or 1

    def unknown(self) -> list[str]:
        """Refuse what can't be honoured; return the names that mean nothing here."""
        extra = {name: value for name, value in (self.model_extra or {}).items() if value is not None}
        for name, value in extra.items():
            if name in _REFUSED and value not in ("", [], {}, False, "none"):
                raise RequestError(f"{name} can't be honoured: {_REFUSED[name]}", param=name, code="unsupported")
        if self.best_of is not None and self.best_of != self.count:
            raise RequestError(f"best_of={self.best_of} can't be honoured: it must equal n ({self.count})", param="best_of")
        kind = (self.response_format or {}).get("type", "text")
        if kind != "text":
            raise RequestError(
                f"response_format.type={kind!r} can't be honoured: constrained decoding isn't supported (supported: text)",
                param="response_format",
                code="unsupported",
            )
        return sorted(name for name in extra if name not in _REFUSED and name not in _HARMLESS)

    def sampling(self, **given: Any) -> SamplingParams:
        """The engine's parameters; `given` are those that differ between the two kinds of body."""
        values = {name: getattr(self, name) for name in _SAMPLING_NAMES if getattr(self, name) is not None} | given
        if isinstance(values.get("stop"), str):
            values["stop"] = (values["stop"],)
        for name in ("stop", "stop_token_ids", "allowed_token_ids"):
            if name in values:
                values[name] = tuple(values[name])
        return SamplingParams(**values)

    def check_tokens(self, vocab_size: int) -> None:
        """Refuse token ids that the model doesn't have."""
        named: dict[str, list[int]] = {
            "logit_bias": list(self.logit_bias or {}),
            "allowed_token_ids": self.allowed_token_ids or [],
            "stop_token_ids": self.stop_token_ids or [],
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    raise RequestError(f"{name}: token id {token} is not in 0..{vocab_size - 1}", param=name)


_SAMPLING_NAMES = (
    "min_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "logit_bias", "allowed_token_ids", "stop", "stop_token_ids", "include_stop_str_in_output",
    "ignore_eos", "skip_special_tokens", "prompt_logprobs",
)  # fmt: skip


class CompletionBody(Body):
    """`POST /v1/completions`."""

    prompt: str | list[int] | list[str] | list[list[int]]
    max_tokens: int | None = 16
    logprobs: int | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The batch, one entry per prompt."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if not self.prompt:
            raise RequestError("prompt must not be empty", param="prompt")
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [entry for entry in self.prompt if not isinstance(entry, int)]


class Template(BaseModel):
    """What decides how messages become a prompt."""

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    def template_settings(self) -> dict[str, Any]:
        """Keyword arguments for `Text.chat`."""
        going_on = bool(self.continue_final_message)
        generate = not going_on if self.add_generation_prompt is None else self.add_generation_prompt
        return {
            "tools": self.tools,
            "add_generation_prompt": generate,
            "continue_final_message": going_on,
            "chat_template_kwargs": self.chat_template_kwargs,
        }


class ChatBody(Body, Template):
    """`POST /v1/chat/completions`."""

    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tool_choice: str | dict[str, Any] | None = None
    reasoning_effort: str | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        return self

    def unknown(self) -> list[str]:
        """As for all bodies, and what only chat has."""
        if self.tool_choice not in (None, "none", "auto"):
            raise RequestError(
                f"tool_choice={self.tool_choice!r} can't be honoured: a call can't be forced (supported: none, auto)",
                param="tool_choice",
                code="unsupported",
            )
        if self.top_logprobs and not self.logprobs:
            raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
        if self.echo:
            raise RequestError("echo can't be honoured in chat; use continue_final_message", param="echo")
        return super().unknown()

    def template_settings(self) -> dict[str, Any]:
        """As for all templates; `reasoning_effort` is a variable that some of them know."""
        settings = super().template_settings()
        if self.reasoning_effort is not None:
            settings["chat_template_kwargs"] = {
                "reasoning_effort": self.reasoning_effort, **(self.chat_template_kwargs or {})
            }  # fmt: skip
        if self.tool_choice == "none":
            settings["tools"] = None
        settings["add_special_tokens"] = bool(self.add_special_tokens)
        return settings


class AnyBody(BaseModel):
    """Any object: to see which kind of body it is."""

    model_config = ConfigDict(extra="allow")


class TokenizeBody(BaseModel):
    """`POST /tokenize` with a prompt."""

    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = None


class TokenizeChatBody(Template):
    """`POST /tokenize` with messages."""

    model: str | None = None
    add_special_tokens: bool = False
    return_token_strs: bool | None = None

    def template_settings(self) -> dict[str, Any]:
        """As for all templates."""
        return {**super().template_settings(), "add_special_tokens": self.add_special_tokens}


class DetokenizeBody(BaseModel):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]
