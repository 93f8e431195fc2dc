"""What lies beside a `config.json`: would it load? In: a directory and a spec. Out: notes, and what start-up would refuse.

The law kept here: say everything that is wrong at once. Headers are read, no weight is, and torch isn't loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from milepost.config import EngineConfig
from milepost.errors import ConfigError
from milepost.models.registry import family_of
from milepost.models.spec import ModelSpec
from milepost.models.weights import match_weights, read_headers

T = TypeVar("T")


def look(path: Path, spec: ModelSpec, config: EngineConfig, refusals: list[str]) -> tuple[str, ...]:
    """Compare weights and tokenizer, where they are, with what the model asks for; adds to `refusals`."""
    notes: list[str] = []
    family = family_of(spec)
    if any(path.glob("*.safetensors*")):
        tried(lambda: match_weights(read_headers(path), family.weights(spec), family.canonical_name), refusals)
    else:
        notes.append("no weights here: sizes only")
    place = Path(config.tokenizer) if config.tokenizer else path
    if (place / "tokenizer.json").exists():
        from milepost.text.tokenizer import Tokenizer

        tried(lambda: Tokenizer.load(place, vocab_size=spec.vocab_size), refusals)
    else:
        notes.append("no tokenizer.json here")
    return tuple(notes)


def tried(action: Callable[[], T], refusals: list[str]) -> T | None:
    """What `action` gives; None, with its message among the refusals, if it is refused."""
    try:
        return action()
    except ConfigError as error:
        refusals.append(str(error))
        return None
