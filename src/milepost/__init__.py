"""Milepost: a serving engine for hybrid language models. `LLM` is the way in from Python.

Importing the package is cheap: torch is loaded when an engine is made, not before.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from milepost.errors import MilepostError
from milepost.request import SamplingParams

if TYPE_CHECKING:
    from milepost.llm import LLM, Completion

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "MilepostError", "SamplingParams", "__version__"]


def __getattr__(name: str) -> Any:
    if name in ("LLM", "Completion"):
        from milepost import llm

        return getattr(llm, name)
    raise AttributeError(f"module 'milepost' has no attribute {name!r}")
