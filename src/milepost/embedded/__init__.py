"""In: a model's name as the user gave it. Out: the directory that holds it.

The law kept here: `clerk` is the model inside this package; every other name is a directory, never a download.
"""

from __future__ import annotations

from pathlib import Path

from milepost.errors import ConfigError

EMBEDDED = ("clerk",)


def resolve_model(name: str) -> Path:
    """Find a model's directory. Raises ConfigError if there is none."""
    path = Path(__file__).parent / name if name in EMBEDDED else Path(name).expanduser()
    if not (path / "config.json").is_file():
        raise ConfigError(
            f"model={name!r}: no config.json in {path}; give a directory in Hugging Face layout, "
            f"or one of the embedded models ({', '.join(EMBEDDED)})",
            field="model",
        )
    return path
