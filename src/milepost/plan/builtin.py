"""Configs of published models that come with the package: a name in, the path of its `config.json` out.

The law kept here: each file is in the dialect that its publisher writes, so that what is said of it holds for the published
checkpoint too. A key whose published value isn't known to us is left out.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from milepost.errors import ConfigError

CONFIGS = Path(__file__).parent / "configs"
_SHOWN = 3


def names() -> tuple[str, ...]:
    """The names that `path_of` knows, sorted."""
    return tuple(sorted(path.stem for path in CONFIGS.glob("*.json")))


def path_of(name: str) -> Path:
    """The file with the config of a published model, by its name in any case. Raises ConfigError with the close matches."""
    known = names()
    wanted = name.lower()
    if wanted in known:
        return CONFIGS / f"{wanted}.json"
    close = difflib.get_close_matches(wanted, known, n=_SHOWN, cutoff=0.4)
    hint = f"close to it: {', '.join(close)}" if close else f"there are: {', '.join(known)}"
    raise ConfigError(f"model={name!r} is none of the built-in configs; {hint}", field="model")
