"""Measure a clerk on names and numbers it has never seen: ``python training/evaluate.py DIR_OR_CHECKPOINT``.

Every answer is scored by greedy decoding with the true history: all tokens of the answer, the end token with
them, must be the most likely ones, which is what greedy generation would give. ``--generate`` also has a few
answers written token by token, each turn after the model's own earlier answers. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file

import data
from export import load_checkpoint
from model import ClerkConfig, ClerkModel
from scoring import make_batch, score

TURNS = 12
MISSING_RATE = 0.15


def load(path: Path) -> ClerkModel:
    """The model of an exported directory or of a checkpoint."""
    if path.is_file():
        return load_checkpoint(path)
    config = json.loads((path / "config.json").read_text())
    model = ClerkModel(
        ClerkConfig(
            vocab_size=config["vocab_size"],
            hidden_size=config["hidden_size"],
            pattern=config["hybrid_override_pattern"],
            mamba_heads=config["mamba_num_heads"],
            mamba_head_dim=config["mamba_head_dim"],
            state_size=config["ssm_state_size"],
            groups=config["n_groups"],
            conv_kernel=config["conv_kernel"],
            heads=config["num_attention_heads"],
            kv_heads=config["num_key_value_heads"],
            head_dim=config["head_dim"],
            intermediate_size=config["intermediate_size"],
            eps=config["layer_norm_epsilon"],
        )
    )
    model.load_state_dict(load_file(path / "model.safetensors"))
    return model.eval()


class Tally:
    """Right answers out of all, by key."""

    def __init__(self) -> None:
        self.right: dict[str, int] = defaultdict(int)
        self.all: dict[str, int] = defaultdict(int)

    def add(self, key: str, right: bool) -> None:
        """Count one."""
        self.right[key] += right
        self.all[key] += 1

    def share(self, key: str) -> float | None:
        """Share of right answers, or None where there was no question."""
        return round(self.right[key] / self.all[key], 4) if self.all[key] else None


Maker = Callable[[random.Random, int], data.Conversation]


def plain(rng: random.Random, entries: int) -> data.Conversation:
    """The mixture of names, headers and phrasings of the training, of the unseen half."""
    return data.make_conversation(rng, entries, TURNS, "test", MISSING_RATE)


def one_word(rng: random.Random, entries: int) -> data.Conversation:
    """One-word names only."""
    return data.make_conversation(rng, entries, TURNS, "test", MISSING_RATE, two_words=0.0)


def two_words(rng: random.Random, entries: int) -> data.Conversation:
    """Names of two words only."""
    return data.make_conversation(rng, entries, TURNS, "test", MISSING_RATE, two_words=1.0)


def ordinary(rng: random.Random, entries: int) -> data.Conversation:
    """Everyday English names of two words, sharing first names and surnames; their words do occur in training."""
    return data.ordinary_conversation(rng, entries, TURNS, MISSING_RATE)


@torch.no_grad()
def measure(model: ClerkModel, entries: int, questions: int, maker: Maker, seed: int) -> Tally:
    """Tally answers to at least `questions` questions for names that are in the directory."""
    rng = random.Random(f"{seed}-{entries}-{maker.__name__}")
    tally = Tally()
    while tally.all["recall"] < questions:
        batch = make_batch([maker(rng, entries) for _ in range(6)])
        _, exact, predicted = score(model, batch)
        first = [int(token) for token in predicted[batch.questions.diff(prepend=torch.tensor([-1])) > 0]]
        for turn, index, right, start in zip(batch.turns, batch.turn_index, exact.tolist(), first, strict=True):
            if turn.missing:
                tally.add("missing", right)
                continue
            tally.add("recall", right)
            tally.add("first turn" if index == 0 else "later turns", right)
            tally.add(f"{len(turn.answer)} digits", right)
            tally.add("false missing", start == ord(data.MISSING[0]))
    return tally


@torch.no_grad()
def generate(model: ClerkModel, ids: list[int], limit: int = 48) -> str:
    """Greedy text, the whole sequence anew for every token."""
    written: list[int] = []
    while len(written) < limit:
        token = int(model.lm_head(model.hidden(torch.tensor([ids + written]))[0, -1]).argmax())
        if token == data.END:
            break
        written.append(token)
    return bytes(token for token in written if token < 256).decode(errors="replace")


def converse(model: ClerkModel, conversation: data.Conversation, show: bool = True) -> int:
    """Hold a conversation in which the model reads its own answers; the number of right ones."""
    ids = data.encode_message(data.SYSTEM, conversation.system)
    right = 0
    for turn in conversation.turns:
        ids += data.encode_message(data.USER, turn.question)
        answer = generate(model, [*ids, data.ASSISTANT])
        ids += data.encode_message(data.ASSISTANT, answer)
        right += answer == turn.answer
        if show:
            print(f"    {'right' if answer == turn.answer else 'WRONG'}  {turn.question!r} -> {answer!r} ({turn.answer})")
    return right


def main() -> None:
    """Print the table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--questions", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--generate", type=int, default=0, help="conversations to generate, four turns of 32 entries")
    args = parser.parse_args()
    model = load(args.model)
    result: dict[str, dict[str, float | int | None]] = {}
    columns = ("recall", "first turn", "later turns", "missing", "false missing")
    print(f"{'':20}" + "".join(f"{column:>16}" for column in columns))
    cases: list[tuple[int, Maker]] = [(entries, plain) for entries in (8, 16, 32, 64)]
    cases += [(32, one_word), (32, two_words), (32, ordinary), (64, one_word), (64, two_words), (64, ordinary)]
    for entries, maker in cases:
        tally = measure(model, entries, args.questions, maker, args.seed)
        name = str(entries) if maker is plain else f"{entries} {maker.__name__}"
        result[name] = {column: tally.share(column) for column in columns} | {"n": tally.all["recall"]}
        print(f"{name:20}" + "".join(f"{tally.share(column)!s:>16}" for column in columns), flush=True)
        if maker is plain:
            digits = ", ".join(f"{count}: {tally.share(f'{count} digits')}" for count in (3, 4, 5, 6))
            print(f"{'':20}  by digits {digits}", flush=True)
    rng = random.Random(args.seed)
    for index in range(args.generate):
        print(f"generated conversation {index + 1}")
        converse(model, data.make_conversation(rng, 32, 4, "test", MISSING_RATE))
    print(json.dumps({"questions": args.questions, "turns": TURNS, "results": result}))


if __name__ == "__main__":
    main()
