"""Tokenizers made here, so that every test knows what its tokens are."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from milepost.text import Tokenizer as Ours

LINES = [f"{letter}.\n\n" for letter in "abcdefghijklmnopqrstuvwxyz"] + ["hello", "world", "user: ", "世界"] * 5
SPECIAL = ["<|start|>", "<|end|>"]


def byte_level(merges_from: list[str] | None = None, *, size: int = 320) -> Tokenizer:
    """A byte-level BPE. Without text to learn from it has one token per byte. Line breaks merge across words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    trainer = trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=SPECIAL, show_progress=False
    )
    made.train_from_iterator(merges_from or [], trainer)
    return made


def sentencepiece_like() -> Tokenizer:
    """Words that begin with U+2581, byte fallback, and a decoder that strips the first space."""
    vocab = {"<unk>": 0, "</s>": 1} | {f"<0x{code:02X}>": 2 + code for code in range(256)}
    for word in ["▁hello", "▁world", "▁", "lo", "hel", "wor", "ld", "!", "▁a", "b"]:
        vocab[word] = len(vocab)
    made = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    made.add_special_tokens([AddedToken("</s>", special=True)])
    return made


@pytest.fixture(scope="session")
def bytes_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """One token per byte."""
    return load(byte_level(), tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="session")
def merging_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """Has tokens that join the end of a message with what follows: `.\\n\\n`"""
    return load(byte_level(LINES, size=300), tmp_path_factory.mktemp("merging"))


@pytest.fixture(scope="session")
def spaced_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Ours:
    """Like SentencePiece."""
    return load(sentencepiece_like(), tmp_path_factory.mktemp("spaced"))


def load(tokenizer: Tokenizer, directory: Path) -> Ours:
    """Through the file, as the server does."""
    tokenizer.save(str(directory / "tokenizer.json"))
    return Ours.load(directory)
