"""In: a directory with `tokenizer.json`, and text. Out: token ids with the characters they cover, and text again.

The law kept here: a tokenizer that can't belong to the model is refused at start, with the file and both sizes.
It does not stream (`stream`) and knows nothing of messages (`template`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers

from milepost.errors import ConfigError, RequestError

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True)
class Encoded:
    """Token ids, and for each the first character it covers and the one after its last."""

    ids: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]


class Tokenizer:
    """One model's tokenizer. Safe to use from several threads: nothing changes after `load`."""

    def __init__(self, rust: tokenizers.Tokenizer, special: dict[str, str], templates: dict[str, str]) -> None:
        self._rust = rust
        self.special_tokens = special
        """Texts by role: `bos_token`, `eos_token`, … (for chat templates)."""
        self.templates = templates
        """Chat templates by name; the usual one is `default`."""
        added = rust.get_added_tokens_decoder()
        self.special_ids = frozenset(token for token, entry in added.items() if entry.special)
        self.size = 1 + max(rust.get_vocab(with_added_tokens=True).values(), default=-1)
        """One more than the largest token id."""
        decoder = json.loads(rust.to_str())["decoder"]
        kinds = {step["type"] for step in _steps(decoder)}
        self.byte_level = kinds == {"ByteLevel"}
        """True if text is exactly the concatenation of the tokens' bytes."""
        self._byte_fallback = "ByteFallback" in kinds

    @classmethod
    def load(cls, directory: Path, *, vocab_size: int | None = None) -> Tokenizer:
        """Read the files of one tokenizer. Raises ConfigError if missing, corrupt or larger than the model."""
        path = directory / "tokenizer.json"
        try:
            rust = tokenizers.Tokenizer.from_str(_without_trimming(path.read_text(encoding="utf-8")))
        except OSError as error:
            raise ConfigError(f"no tokenizer: {path} can't be read ({error.strerror})", field="tokenizer") from error
        except Exception as error:  # the library raises plain Exception for what it can't parse
            raise ConfigError(f"{path} is not a tokenizer: {error}", field="tokenizer") from error
        rust.no_padding()
        rust.no_truncation()
        config = _read_json(directory / "tokenizer_config.json")
        special = _special_tokens(_read_json(directory / "special_tokens_map.json")) | _special_tokens(config)
        tokenizer = cls(rust, special, _templates(directory, config))
        if vocab_size is not None:
            tokenizer.check_size(vocab_size, path)
        return tokenizer

    def check_size(self, vocab_size: int, place: Path) -> None:
        """Refuse a model with fewer tokens than this tokenizer. Raises ConfigError."""
        if self.size > vocab_size:
            raise ConfigError(
                f"{place}: the tokenizer has token ids up to {self.size - 1}, but the model's vocab_size is "
                f"{vocab_size}: it belongs to another model; use --tokenizer with the right directory",
                field="tokenizer",
            )

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Encoded:
        """Turn text into tokens. Raises RequestError if it isn't Unicode text."""
        try:
            encoding = self._rust.encode(text, add_special_tokens=add_special_tokens)
        except TypeError as error:
            raise RequestError("the text holds half of a surrogate pair, which is no character") from error
        return Encoded(tuple(encoding.ids), tuple(encoding.offsets))

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Turn tokens into text."""
        text: str = self._rust.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_bytes(self, token: int) -> bytes:
        """The bytes that this token stands for; an unknown id gives none."""
        piece = self._rust.id_to_token(token)
        if piece is None:
            return b""
        if self.byte_level:
            codes = [_BYTE_OF.get(character) for character in piece]
            known = [code for code in codes if code is not None]
            return bytes(known) if len(known) == len(codes) else piece.encode()
        if token in self.special_ids:
            return bytes(piece.encode())
        if self._byte_fallback and len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return bytes(piece.replace("▁", " ").encode())

    def token_text(self, token: int) -> str:
        """The token as text for people; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", errors="replace")


def _byte_table() -> dict[str, int]:
    """How byte-level BPE spells bytes: printable ones as themselves, the rest as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [code for code in range(256) if code not in printable]
    return {chr(code): code for code in printable} | {chr(0x100 + n): code for n, code in enumerate(others)}


_BYTE_OF = _byte_table()


def _steps(part: Any) -> list[dict[str, Any]]:
    """The parts of a decoder or post-processor, sequences flattened."""
    if not isinstance(part, dict):
        return []
    inner = part.get("decoders") or part.get("processors")
    return [step for child in inner for step in _steps(child)] if inner else [part]


def _without_trimming(text: str) -> str:
    """Have offsets include the whitespace that a token holds: a boundary inside a token must be seen as such."""
    content = json.loads(text)
    trimming = [step for step in _steps(content.get("post_processor")) if step.get("trim_offsets")]
    for step in trimming:
        step["trim_offsets"] = False
    return json.dumps(content, ensure_ascii=False) if trimming else text


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file that may be absent."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", field="tokenizer") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} holds a {type(content).__name__}, not an object", field="tokenizer")
    return content


def _special_tokens(content: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in _SPECIAL_NAMES:
        entry = content.get(name)
        text = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(text, str):
            found[name] = text
    return found


def _templates(directory: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name: the file wins over the one in the configuration."""
    declared = config.get("chat_template")
    found: dict[str, str] = {}
    if isinstance(declared, str):
        found["default"] = declared
    elif isinstance(declared, list):
        found = {entry["name"]: entry["template"] for entry in declared if {"name", "template"} <= entry.keys()}
    file = directory / "chat_template.jinja"
    if file.is_file():
        found["default"] = file.read_text(encoding="utf-8")
    return found
