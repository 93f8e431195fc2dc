"""Streaming: the pieces put together are the text, and nothing is ever taken back."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from milepost.request import SamplingParams
from milepost.text import TextWatch, Tokenizer
from tests.text.conftest import byte_level, sentencepiece_like

BYTES = Tokenizer(byte_level(), {}, {})
MERGED = Tokenizer(byte_level(["hello world 世界 😀\n\n"] * 30, size=330), {}, {})
SPACED = Tokenizer(sentencepiece_like(), {}, {})


def stream(tokenizer: Tokenizer, tokens: list[int], **params: object) -> tuple[list[str], str | None]:
    """All pieces, the last from `flush`, and the stop string that was met."""
    watch = TextWatch(tokenizer, SamplingParams(**params))  # type: ignore[arg-type]
    pieces = []
    for token in tokens:
        pieces.append(watch.push(token))
        if watch.stop is not None:
            break
    return [*pieces, watch.flush()], watch.stop


def test_a_character_waits_for_its_bytes() -> None:
    pieces, _ = stream(BYTES, list(BYTES.encode("a世b").ids))
    assert pieces == ["a", "", "", "世", "b", ""]


def test_unfinished_bytes_come_out_at_the_end() -> None:
    pieces, _ = stream(BYTES, list(BYTES.encode("世").ids[:2]))
    assert "".join(pieces) == "\ufffd"


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, MERGED.size - 1), max_size=30), st.booleans())
def test_pieces_are_the_text_for_any_tokens(tokens: list[int], skip: bool) -> None:
    pieces, _ = stream(MERGED, tokens, skip_special_tokens=skip)
    assert "".join(pieces) == MERGED.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=20))
def test_pieces_are_the_text_with_byte_fallback(text: str) -> None:
    words = [258, 259, 260, 261, 262]
    tokens = [1, *words, *(2 + byte for byte in text.encode()), *words, 1]
    pieces, _ = stream(SPACED, tokens)
    assert "".join(pieces) == SPACED.decode(tokens, skip_special_tokens=True)


def test_the_first_space_is_stripped_once() -> None:
    pieces, _ = stream(SPACED, [258, 259, 1, 259])
    assert pieces == ["hello", " world", "", " world", ""]
    shown, _ = stream(SPACED, [258, 1], skip_special_tokens=False)
    assert "".join(shown) == "hello</s>"


def test_a_stop_string_across_tokens_is_cut() -> None:
    tokens = list(BYTES.encode("one STOP two").ids)
    pieces, stop = stream(BYTES, tokens, stop=("STOP",))
    assert ("".join(pieces), stop) == ("one ", "STOP")
    pieces, stop = stream(BYTES, tokens, stop=("STOP",), include_stop_str_in_output=True)
    assert ("".join(pieces), stop) == ("one STOP", "STOP")


def test_a_false_beginning_of_a_stop_string_is_given_back() -> None:
    pieces, stop = stream(BYTES, list(BYTES.encode("STO STx ST").ids), stop=("STOP",))
    assert stop is None
    assert "".join(pieces) == "STO STx ST"
    assert pieces[:3] == ["", "", ""]


def test_text_before_min_tokens_cannot_stop() -> None:
    tokens = list(BYTES.encode("ab ab").ids)
    pieces, stop = stream(BYTES, tokens, stop=("ab",), min_tokens=3)
    assert ("".join(pieces), stop) == ("ab ", "ab")


@pytest.mark.parametrize(("stops", "text", "left"), [(("b", "abc"), "xabc", "xa"), (("bc", "c"), "xabc", "xa")])
def test_the_stop_string_that_is_met_first_wins(stops: tuple[str, ...], text: str, left: str) -> None:
    pieces, _ = stream(BYTES, list(BYTES.encode(text).ids), stop=stops)
    assert "".join(pieces) == left


@settings(max_examples=200, deadline=None)
@given(st.text("lo 世", max_size=24), st.lists(st.text("lo 世", min_size=1, max_size=4), min_size=1, max_size=3))
def test_stopping_is_as_if_the_whole_text_had_been_searched(text: str, stops: list[str]) -> None:
    for tokenizer in (BYTES, MERGED):
        _check_stop(tokenizer, text, stops)


def _check_stop(tokenizer: Tokenizer, text: str, stops: list[str]) -> None:
    pieces, stop = stream(tokenizer, list(tokenizer.encode(text).ids), stop=tuple(stops))
    ends = [text.find(candidate) + len(candidate) for candidate in stops if candidate in text]
    if not ends:
        assert (stop, "".join(pieces)) == (None, text)
        return
    seen = text[: min(ends)]  # the tokens that came before the first match was complete
    matched = [candidate for candidate in stops if seen.endswith(candidate)]
    assert stop in matched
    assert "".join(pieces) == seen[: -len(max(matched, key=len))]
