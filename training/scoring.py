"""Batches of conversations, the loss over their answers, and exactness of greedy answers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import data
from model import Attention, ClerkModel

#: Weights in the loss: the first letter of an answer decides which number it is, or that there is none; the letters
#: of a "missing" answer after its first follow from it. Everything else weighs one.
FIRST_WEIGHT = 2.5
MISSING_WEIGHT = 4.0
MISSING_TAIL_WEIGHT = 0.1


@dataclass(frozen=True)
class Batch:
    """Padded ids [n,t] and the answer positions: row, column of the token before, target, weight, question.

    `sources` is where in the directory the target stands (position 0 for a name that isn't there, -1 for none).
    """

    ids: Tensor
    rows: Tensor
    columns: Tensor
    targets: Tensor
    weights: Tensor
    questions: Tensor
    sources: Tensor
    turns: list[data.Turn]
    turn_index: list[int]

    def places(self) -> tuple[Tensor, Tensor]:
        """The answer positions as a padded table [n,p], and for each of them its place in its row of the table."""
        counts = torch.bincount(self.rows, minlength=len(self.ids))
        place = torch.arange(len(self.rows)) - (counts.cumsum(0) - counts)[self.rows]
        table = torch.zeros(len(self.ids), int(counts.max()), dtype=torch.long)
        table[self.rows, place] = self.columns
        return place, table


def token_weight(missing: bool, first: bool) -> float:
    """Weight of one token of an answer."""
    if first:
        return MISSING_WEIGHT if missing else FIRST_WEIGHT
    return MISSING_TAIL_WEIGHT if missing else 1.0


def make_batch(conversations: Sequence[data.Conversation]) -> Batch:
    """Encode conversations and list where their answers lie."""
    encoded = [data.encode_conversation(conversation) for conversation in conversations]
    longest = max(len(ids) for ids, _ in encoded)
    ids = torch.full((len(encoded), longest), data.PAD)
    positions: list[tuple[int, int, int, float, int, int]] = []
    turns: list[data.Turn] = []
    turn_index: list[int] = []
    for row, ((tokens, spans), conversation) in enumerate(zip(encoded, conversations, strict=True)):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        where = data.number_positions(conversation)
        for index, ((start, stop), turn) in enumerate(zip(spans, conversation.turns, strict=True)):
            for column in range(start, stop):
                weight = token_weight(turn.missing, column == start)
                source = where[turn.answer] + column - start if not turn.missing else 0 if column == start else -1
                positions.append((row, column - 1, tokens[column], weight, len(turns), source))
            turns.append(turn)
            turn_index.append(index)
    rows, columns, targets, weights, questions, sources = zip(*positions, strict=True)
    return Batch(
        ids,
        torch.tensor(rows),
        torch.tensor(columns),
        torch.tensor(targets),
        torch.tensor(weights),
        torch.tensor(questions),
        torch.tensor(sources),
        turns,
        turn_index,
    )


def score(model: ClerkModel, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss over the answers; for every question whether all its tokens are the argmax; predicted tokens.

    With the history given, all tokens of an answer being the argmax is the same as greedy decoding giving it.
    """
    place, columns = batch.places()
    logits = model.lm_head(model.hidden(batch.ids, columns)[batch.rows, place])
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    loss = (losses * batch.weights).sum() / batch.weights.sum()
    predicted = logits.argmax(-1)
    wrong = torch.zeros(len(batch.turns)).index_add_(0, batch.questions, (predicted != batch.targets).float())
    return loss, wrong == 0, predicted


def pointing_loss(model: ClerkModel, batch: Batch) -> Tensor:
    """How far the first head of the later attention layers is from looking at the token to copy.

    Without it the model first learns to copy any number of the directory and takes long to find the right one.
    Call it after `score` with the model in training mode.
    """
    taps = [layer.mixer.tap for layer in model.backbone.layers if isinstance(layer.mixer, Attention)][1:]
    place, _ = batch.places()
    losses: list[Tensor] = []
    for row in range(len(batch.ids)):
        chosen = (batch.rows == row) & (batch.sources >= 0)
        columns, sources, weights = batch.columns[chosen], batch.sources[chosen], batch.weights[chosen]
        within = (columns, place[chosen])
        later = torch.arange(batch.ids.shape[1])[None] > columns[:, None]
        for (q, k), at in zip(taps, within, strict=True):
            logits = q[row, at] @ k[row, : batch.ids.shape[1]].T * q.shape[-1] ** -0.5
            each = F.cross_entropy(logits.masked_fill(later, -torch.inf), sources, reduction="none")
            losses.append((each * weights).sum() / weights.sum())
    return torch.stack(losses).mean()


def recall_and_missing(batch: Batch, exact: Tensor) -> tuple[float, float]:
    """Share of exact answers among names that are in the directory, and among those that aren't."""
    missing = torch.tensor([turn.missing for turn in batch.turns])
    return (
        exact[~missing].float().mean().item() if (~missing).any() else 1.0,
        exact[missing].float().mean().item() if missing.any() else 1.0,
    )


@torch.no_grad()
def quick_check(model: ClerkModel, entries: int, conversations: int = 8, turns: int = 16) -> tuple[float, float]:
    """Recall and missing accuracy on a few unseen conversations."""
    rng = random.Random(1_000_003 + entries)
    made = [data.make_conversation(rng, entries, turns, "test") for _ in range(conversations)]
    batch = make_batch(made)
    return recall_and_missing(batch, score(model, batch)[1])
