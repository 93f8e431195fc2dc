"""Synthetic directories and conversations for the directory clerk.

Pure Python, no torch: the demo and the tests import it too. Everything is a function of the
``random.Random`` that is passed in, so one seed gives one conversation.

The training and the test half never share a word of a name nor a number: a word (or a number) belongs to
the test half when the CRC-32 of its lower-cased text is divisible by eight (`in_split`).

A conversation is rendered with one token per UTF-8 byte; the special tokens follow the 256 bytes.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Split = Literal["train", "test"]
Entry = tuple[str, str]

PAD, END, SYSTEM, USER, ASSISTANT = range(256, 261)
SPECIAL_TOKENS = ("<|pad|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
VOCAB_SIZE = 261

HEADER = "Directory:"
OTHER_HEADERS = ("Phone directory:", "Phone book:", "Here is the directory:", "Numbers:")
MISSING = "Sorry, I have no number for that name."

#: Phrasings of a question and how often each is drawn.
PHRASINGS: tuple[tuple[str, float], ...] = (
    ("{name}?", 8.0),
    ("{name}", 1.0),
    ("What is the number of {name}?", 3.0),
    ("What is the number for {name}?", 1.0),
    ("What is {name}'s number?", 2.0),
    ("What's {name}'s number?", 1.0),
    ("Number for {name} please", 1.0),
    ("Number for {name}, please.", 1.0),
    ("The number of {name}?", 1.0),
    ("{name}'s number?", 1.0),
    ("{name}, please.", 1.0),
    ("And {name}?", 2.0),
    ("Can you give me {name}'s number?", 1.0),
    ("Please give me the number of {name}.", 1.0),
    ("How do I reach {name}?", 1.0),
    ("I need the number for {name}.", 1.0),
)


def _words(text: str) -> list[str]:
    """Split a list that is written as one text."""
    return text.split()


_FIRST = _words(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Quentin Rosa Sam Tina "
    "Ursula Victor Wendy Xavier Yvonne Zoe Ann Anna Ben Chris Daniel Elena Felix George Hannah Ian James Kate Laura "
    "Mark Nora Olga Peter Ruth Sarah Tom Uma Vera William John Mary Robert Linda Michael Susan Omar Fatima Wei Mei "
    "Hiro Yuki Ravi Priya Ivan Lars Ingrid Pierre Claire Luca Giulia Carlos Lucia Ahmed Layla Max Eve Joe Amy Tim Sue"
)
_LAST = _words(
    "Smith Jones Brown Taylor Wilson Davies Evans Thomas Johnson Roberts Walker Wright Robinson Thompson White Hughes "
    "Edwards Green Hall Wood Harris Lewis Martin Jackson Clarke Clark Turner Hill Moore Cooper Ward Morris King Baker "
    "Garcia Lopez Muller Schmidt Weber Rossi Ferrari Silva Santos Kim Lee Park Chen Wang Li Tanaka Sato Suzuki Singh "
    "Patel Khan Ali Hassan Novak Kowalski Ivanov Petrov Hansen Larsen Nilsson Berg Dubois Moreau Murphy Kelly Byrne"
)
_ONSETS = _words(
    "b c d f g h j k l m n p r s t v w y z br ch cl cr dr fl fr gl gr kh kl kr ph pl pr qu sh sk sl sm sn sp st sw th "
    "tr tw wh x"
)
_NUCLEI = _words("a e i o u a e i o u ai ay ea ee ei ia ie io oa oo ou ue y")
_CODAS = _words("n r l s t m d k th rd nd st ck ng ll ss tt x z p lt rt nt sh ch f g b v w")
_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def in_split(text: str, split: Split) -> bool:
    """Whether a word of a name, or a number, belongs to the given half."""
    return (zlib.crc32(text.lower().encode()) % 8 == 0) == (split == "test")


def _syllables(rng: random.Random) -> str:
    word = "" if rng.random() < 0.2 else rng.choice(_ONSETS)
    for index in range(rng.choice((1, 2, 2, 2, 3, 3))):
        if index:
            word += rng.choice(_ONSETS)
        word += rng.choice(_NUCLEI)
        if rng.random() < 0.3:
            word += rng.choice(_CODAS)
    if rng.random() < 0.4:
        word += rng.choice(_CODAS)
    return word


def make_word(rng: random.Random, split: Split) -> str:
    """One capitalised word of three to nine letters that belongs to the split."""
    while True:
        word = _syllables(rng) if rng.random() < 0.85 else "".join(rng.choices(_LETTERS, k=rng.randint(3, 7)))
        if 3 <= len(word) <= 9 and in_split(word, split):
            return word.capitalize()


def make_number(rng: random.Random, split: Split) -> str:
    """A number of three to six digits that belongs to the split; now and then with a leading zero."""
    while True:
        digits = rng.choice((3, 4, 4, 4, 5, 6))
        number = "".join(rng.choices("0123456789", k=digits))
        if (number[0] != "0" or rng.random() < 0.2) and in_split(number, split):
            return number


class NameMaker:
    """Draws names in one directory's style: how many have two words, how much is shared between names.

    Everyday names are drawn in training only: too few of them fall to the test half to make a directory.
    """

    def __init__(self, rng: random.Random, split: Split, size: int, two_words: float | None = None) -> None:
        self.rng, self.split = rng, split
        self.two_words = rng.choice((0.0, 0.3, 0.5, 1.0, 1.0)) if two_words is None else two_words
        # Everyday names share first names and surnames; in training those are frequent, since they are the hardest.
        self.ordinary = rng.choice((0.0, 0.5, 1.0, 1.0)) if split == "train" else 0.0
        self.shared = rng.choice((0.0, 0.2, 0.5)) if split == "train" else rng.choice((0.0, 0.0, 0.3))
        self.first = [word for word in _FIRST if in_split(word, split)]
        self.last = [word for word in _LAST if in_split(word, split)]
        self.pool = [make_word(rng, split) for _ in range(max(2, size // 3))]

    def _word(self, ordinary: Sequence[str]) -> str:
        draw = self.rng.random()
        if draw < self.shared:
            return self.rng.choice(self.pool)
        return self.rng.choice(ordinary) if self.rng.random() < self.ordinary else make_word(self.rng, self.split)

    def draw(self) -> str:
        """One name."""
        name = self._word(self.first)
        return f"{name} {self._word(self.last)}" if self.rng.random() < self.two_words else name


def make_directory(
    rng: random.Random, entries: int, split: Split, two_words: float | None = None
) -> tuple[list[Entry], NameMaker]:
    """A directory of distinct names and distinct numbers, and the maker that drew its names."""
    maker = NameMaker(rng, split, entries, two_words)
    names: dict[str, str] = {}
    numbers: set[str] = set()
    tries = 0
    while len(names) < entries:
        tries += 1
        name = maker.draw() if tries < 4 * entries else make_word(rng, split)
        number = make_number(rng, split)
        if name not in names and number not in numbers:
            names[name] = number
            numbers.add(number)
    return list(names.items()), maker


def system_message(directory: Sequence[Entry], header: str | None = HEADER) -> str:
    """The canonical system message: a header line, then one ``Name: number`` a line."""
    lines = [f"{name}: {number}" for name, number in directory]
    return "\n".join(lines if header is None else [header, *lines])


def make_question(rng: random.Random, name: str, plain_share: float = 0.0) -> str:
    """A question for one name in one of the phrasings; `plain_share` of them just the name and a question mark."""
    if plain_share and rng.random() < plain_share:
        return f"{name}?"
    template = rng.choices([text for text, _ in PHRASINGS], weights=[weight for _, weight in PHRASINGS])[0]
    return template.format(name=name)


def _one_letter_off(rng: random.Random, name: str) -> str:
    index = rng.randrange(1, len(name))
    if name[index] == " " or name[index - 1] == " ":
        return name
    return name[:index] + rng.choice(_LETTERS) + name[index + 1 :]


def missing_name(rng: random.Random, directory: Sequence[Entry], maker: NameMaker) -> str:
    """A name that isn't in the directory: mostly unrelated, at times a mixture or a misspelling of its names."""
    present = {name for name, _ in directory}
    for _ in range(50):
        draw = rng.random()
        if draw < 0.15:
            first, last = (rng.choice(directory)[0].split()[index] for index in (0, -1))
            name = f"{first} {last}"
        elif draw < 0.25:
            name = _one_letter_off(rng, rng.choice(directory)[0])
        else:
            name = maker.draw()
        if name not in present and all(in_split(word, maker.split) for word in name.split()):
            return name
    while (name := make_word(rng, maker.split)) in present:
        pass
    return name


@dataclass(frozen=True)
class Turn:
    """One question and its answer."""

    question: str
    answer: str
    missing: bool


@dataclass(frozen=True)
class Conversation:
    """A directory, the system message that holds it, and questions with their answers."""

    directory: list[Entry]
    system: str
    turns: list[Turn]


def make_conversation(
    rng: random.Random,
    entries: int,
    turns: int,
    split: Split,
    missing_rate: float = 0.12,
    two_words: float | None = None,
    plain_share: float = 0.0,
) -> Conversation:
    """A whole conversation over a directory; the header line varies."""
    directory, maker = make_directory(rng, entries, split, two_words)
    header: str | None = HEADER
    if rng.random() < 0.3:
        header = None if rng.random() < 0.7 else rng.choice(OTHER_HEADERS)
    made: list[Turn] = []
    order: list[Entry] = []
    for _ in range(turns):
        if rng.random() < missing_rate:
            made.append(Turn(make_question(rng, missing_name(rng, directory, maker), plain_share), MISSING, True))
            continue
        if not order:
            order = rng.sample(directory, len(directory))
        name, number = order.pop()
        made.append(Turn(make_question(rng, name, plain_share), number, False))
    return Conversation(directory, system_message(directory, header), made)


def ordinary_conversation(rng: random.Random, entries: int, turns: int, missing_rate: float) -> Conversation:
    """Everyday names ("Alice Smith") with the canonical header and numbers of the unseen half.

    The words are the lists above, most of which occur in training; the first names and surnames repeat within
    the directory, and a missing name is another pair of the same words.
    """
    pairs = rng.sample([f"{first} {last}" for first in _FIRST for last in _LAST], entries + turns)
    numbers: dict[str, None] = {}
    while len(numbers) < entries:
        numbers[make_number(rng, "test")] = None
    directory = list(zip(pairs, numbers, strict=False))
    made: list[Turn] = []
    for index in range(turns):
        if rng.random() < missing_rate:
            made.append(Turn(make_question(rng, pairs[entries + index]), MISSING, True))
        else:
            name, number = rng.choice(directory)
            made.append(Turn(make_question(rng, name), number, False))
    return Conversation(directory, system_message(directory), made)


def encode_message(role: int, content: str) -> list[int]:
    """One message as the chat template renders it."""
    return [role, *content.encode(), END]


def number_positions(conversation: Conversation) -> dict[str, int]:
    """Where in the encoded conversation each number of the directory begins."""
    positions: dict[str, int] = {}
    header = conversation.system[: len(conversation.system) - len(system_message(conversation.directory, None))]
    offset = 1 + len(header.encode())
    for name, number in conversation.directory:
        offset += len(f"{name}: ".encode())
        positions[number] = offset
        offset += len(number) + 1
    return positions


def encode_conversation(conversation: Conversation) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids, and for every turn the [start, stop) of its answer with the end token."""
    ids = encode_message(SYSTEM, conversation.system)
    spans: list[tuple[int, int]] = []
    for turn in conversation.turns:
        ids += encode_message(USER, turn.question)
        start = len(ids) + 1
        ids += encode_message(ASSISTANT, turn.answer)
        spans.append((start, len(ids)))
    return ids, spans
