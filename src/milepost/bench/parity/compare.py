"""Ours against theirs for one model: in one piece, in pieces, at captures, token by token.

In: theirs. Out: how far ours is off, by the way of running and by "logits" or "layer.component".
The law kept here: an error that isn't a number, or a component that one side lacks, is infinitely wrong.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from milepost.bench.parity.ours import Sequence, load
from milepost.bench.parity.theirs import Theirs

PROMPT, ANSWER = 75, 64
PIECES = [31, 1, 2, 41]
CAPTURES = ((2, 1), (30, 2))
"""(offset, slot) in the first piece."""

Values = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one model showed. Errors are relative: the largest difference over the largest value that was wanted."""

    errors: dict[str, dict[str, float]]
    """Ours against theirs: by "whole", "pieces" or "capture at N", then by "logits" or "layer.component"."""
    reference: dict[str, dict[str, float]]
    """Their fp32 against our fp64, likewise, without "pieces": the noise of the reference."""
    picked: tuple[int, ...]
    """What greedy decoding picked, with ours."""
    greedy_equal: bool


def errors(found: Values, wanted: Values) -> dict[str, float]:
    """Relative errors by name."""
    off: dict[str, float] = {}
    for name in {**wanted, **found}:
        error = math.nan
        if name in found and name in wanted:
            error = ((found[name] - wanted[name]).abs().max() / wanted[name].abs().max()).item()
        off[name] = math.inf if math.isnan(error) else error
    return off


def compare(theirs: Theirs, path: Path) -> Outcome:
    """Save theirs to `path`, load it as ours, run both. Raises UnsupportedModel if ours refuses it."""
    theirs.save(path)
    model = load(path)
    tokens = torch.randint(model.spec.vocab_size, (PROMPT,), generator=torch.Generator().manual_seed(7))
    wanted = _named(*theirs.uncut(tokens))
    declared = {f"{index}.{part.name}" for index, layer in enumerate(model.spec.layers) for part in layer.components}
    whole, pieces, exact = Sequence(model), Sequence(model), Sequence(load(path, dtype=torch.float64), torch.float64)
    found = _named(whole.feed(tokens), whole.states())
    in_pieces, truth = _in_pieces(pieces, tokens), _in_pieces(exact, tokens)
    ways = {"whole": errors(found, wanted), "pieces": errors(in_pieces, wanted)}
    ways["whole"] |= dict.fromkeys((declared | {"logits"}) - wanted.keys(), math.inf)
    reference = {"whole": errors(wanted, truth)}
    for offset, slot in CAPTURES:
        captured = theirs.uncut(tokens[:offset])[1]
        ways[f"capture at {offset}"] = errors(pieces.states(slot), captured)
        reference[f"capture at {offset}"] = errors(captured, exact.states(slot))
    picked, equal = _greedy(Sequence(model), theirs, tokens[:5])
    return Outcome(ways, reference, picked, equal)


def _in_pieces(sequence: Sequence, tokens: Tensor) -> Values:
    first, *rest = torch.split(tokens, PIECES)
    rows = [sequence.feed(first, CAPTURES), *(sequence.feed(piece) for piece in rest)]
    return _named(torch.cat(rows), sequence.states())


def _named(logits: Tensor, states: Values) -> Values:
    return {"logits": logits, **states}


def _greedy(sequence: Sequence, theirs: Theirs, prompt: Tensor) -> tuple[tuple[int, ...], bool]:
    answer, rows = prompt, sequence.feed(prompt)
    for _ in range(ANSWER):
        picked = rows[-1].argmax().view(1)
        answer = torch.cat([answer, picked])
        rows = sequence.feed(picked)
    # One uncut forward over all of it says what theirs would have picked after each prefix.
    theirs_picked = theirs.uncut(answer)[0].argmax(1)[len(prompt) - 1 : -1].tolist()
    ours_picked = answer[len(prompt) :].tolist()
    return tuple(ours_picked), ours_picked == theirs_picked
