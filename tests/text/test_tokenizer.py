"""The tokenizer: files that fit, files that don't, bytes of tokens."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.config import EngineConfig
from milepost.errors import ConfigError, RequestError
from milepost.text import Text, Tokenizer
from tests.text.conftest import byte_level


def test_text_survives(bytes_tokenizer: Tokenizer, merging_tokenizer: Tokenizer) -> None:
    text = "hello 世界 😀\n\n.\x00"
    for tokenizer in (bytes_tokenizer, merging_tokenizer):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
        assert b"".join(map(tokenizer.token_bytes, ids)) == text.encode()


def test_offsets_include_the_whitespace_of_a_token(merging_tokenizer: Tokenizer) -> None:
    encoded = merging_tokenizer.encode("there.\n\nuser: hello")
    assert encoded.offsets[-1][1] == 19
    assert all(first[1] == second[0] for first, second in zip(encoded.offsets, encoded.offsets[1:], strict=False))


def test_special_tokens_are_known(bytes_tokenizer: Tokenizer) -> None:
    end = bytes_tokenizer.encode("<|end|>").ids
    assert len(end) == 1
    assert set(end) <= bytes_tokenizer.special_ids
    assert bytes_tokenizer.decode([*end, *bytes_tokenizer.encode("a").ids], skip_special_tokens=True) == "a"
    assert bytes_tokenizer.token_bytes(end[0]) == b"<|end|>"


def test_half_a_surrogate_is_a_request_error(bytes_tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="surrogate"):
        bytes_tokenizer.encode("a\ud800")


def test_tokens_of_byte_fallback(spaced_tokenizer: Tokenizer) -> None:
    assert spaced_tokenizer.token_bytes(2 + 0xE4) == b"\xe4"
    assert spaced_tokenizer.token_bytes(258) == b" hello"
    assert spaced_tokenizer.token_bytes(10**6) == b""


BYTES = Tokenizer(byte_level(), {}, {})
TOKEN_OF = {BYTES.token_bytes(token): token for token in range(BYTES.size)}


@given(st.binary(max_size=40))
def test_any_bytes_decode_as_their_tokens_do(raw: bytes) -> None:
    ids = [TOKEN_OF[bytes([byte])] for byte in raw]
    assert BYTES.decode(ids) == raw.decode("utf-8", errors="replace")


def test_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.json can't be read"):
        Tokenizer.load(tmp_path)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', "\x00"])
def test_corrupt_file_is_named(tmp_path: Path, content: str) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json is not a tokenizer"):
        Tokenizer.load(tmp_path)


def test_corrupt_configuration_is_named(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json is not JSON"):
        Tokenizer.load(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ConfigError, match=r"token ids up to 257.*vocab_size is 200"):
        Tokenizer.load(tmp_path, vocab_size=200)
    assert Tokenizer.load(tmp_path, vocab_size=258).size == 258


def test_templates_and_special_tokens_come_from_all_files(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools }}"}]
    config = {"chat_template": named, "bos_token": {"content": "<|start|>"}, "eos_token": None}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<|end|>"}')
    loaded = Tokenizer.load(tmp_path)
    assert loaded.special_tokens == {"bos_token": "<|start|>", "eos_token": "<|end|>"}
    text = Text.load(tmp_path, EngineConfig())
    messages = [{"role": "user", "content": "hi"}]
    assert text.chat(messages).text == "D"
    assert text.chat(messages, tools=[{"a": 1}]).text.startswith("T")
    (tmp_path / "chat_template.jinja").write_text("F")
    assert Text.load(tmp_path, EngineConfig()).chat(messages).text == "F"
    (tmp_path / "other.jinja").write_text("O")
    config_with = EngineConfig(chat_template=str(tmp_path / "other.jinja"))
    assert Text.load(tmp_path, config_with).chat(messages).text == "O"


def test_chat_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    byte_level().save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(RequestError, match="no chat template"):
        Text.load(tmp_path, EngineConfig()).chat([{"role": "user", "content": "hi"}])
    with pytest.raises(ConfigError, match=r"nowhere\.jinja"):
        Text.load(tmp_path, EngineConfig(chat_template="nowhere.jinja"))
