"""What a planner said, in our quantities, and how far off it is. In: its raw answer and the right values. Out: rows.

The law kept here: every planner is read the same way. KV of a token and the state of a sequence are the slope and the rest of
the cache that it plans at two short contexts; so no planner is judged by the names that it gives to its parts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

CONTEXTS = (1024, 2048, 8192, 131072)
"""Where planners are asked: two contexts within every sliding window, for the slope, and two that people run."""
SHOWN = (8192, 131072)
QUANTITIES = ("kv_bytes_per_token", "state_bytes_per_sequence", *(f"cache_bytes_at_{context}" for context in SHOWN))

_GIB = 1024**3
_NOT_CACHE = ("Model weights / rank", "CUDA / runtime", "Prefill scratch", "Safety reserve")


@dataclass(frozen=True, slots=True)
class Row:
    """One quantity of one model by one planner. `factor` is said / right; `why`: there is no figure, or what it rests on."""

    model: str
    planner: str
    version: str | None
    quantity: str
    said: int | None
    right: int | None
    factor: float | None
    why: str | None = None

    def to_json(self) -> dict[str, object]:
        """As plain values."""
        return asdict(self)


def rows_of(model: str, planner: str, answer: Mapping[str, Any], right: Mapping[str, int] | str) -> list[Row]:
    """A row for each quantity. `right` is a text where we have no values: why not."""
    said: Mapping[str, int] = {}
    why = answer.get("why") or answer.get("note")
    if not answer.get("why"):
        try:
            said = quantities(planner, answer["at"])
        except (KeyError, TypeError, ValueError) as error:
            why = f"its answer can't be read: {type(error).__name__}: {error}"
    if isinstance(right, str):
        why, right = why or f"no right value: {right}", {}
    return [
        Row(
            model,
            planner,
            answer.get("version"),
            quantity,
            said.get(quantity),
            right.get(quantity),
            factor(said.get(quantity), right.get(quantity)),
            why,
        )
        for quantity in QUANTITIES
    ]


def quantities(planner: str, at: Mapping[str, Any]) -> dict[str, int]:
    """The four quantities from what the planner said at each of CONTEXTS. Raises KeyError or TypeError: not as expected."""
    cache = {context: _CACHE[planner](at[str(context)], context) for context in CONTEXTS}
    first, second = CONTEXTS[:2]
    kv = (cache[second] - cache[first]) / (second - first)
    said = {"kv_bytes_per_token": kv, "state_bytes_per_sequence": cache[first] - first * kv}
    said |= {f"cache_bytes_at_{context}": cache[context] for context in SHOWN}
    return {name: round(value) for name, value in said.items()}


def factor(said: int | None, right: int | None) -> float | None:
    """said / right, to 4 digits after the point; None where one is missing or the right value is 0."""
    return None if said is None or not right else round(said / right, 4)


def in_words(factor: float | None) -> str:
    """A factor for people: exact, so many times too much, so many times too little, or nothing at all."""
    if factor is None:
        return "–"
    if factor == 0:
        return "not seen"
    if abs(factor - 1) < 0.00005:
        return "exact"
    if abs(factor - 1) < 0.05:
        return f"{factor - 1:+.1%}"
    return f"{factor:.3g}x" if factor > 1 else f"1/{1 / factor:.3g}"


def _kvfit(said: Mapping[str, Any], _: int) -> float:
    return float(said["bytes_per_sequence"])


def _ridgepoint(said: Mapping[str, Any], _: int) -> float:
    return float(said["capacity"]["bytes_per_seq"])


def _vramscout(said: Mapping[str, Any], _: int) -> float:
    parts = {name: float(size) for name, size in said["parts_gib"].items()}
    missing = [name for name in _NOT_CACHE if name not in parts]
    if missing:  # renamed: they would be taken for cache
        raise KeyError(missing[0])
    return sum(size for name, size in parts.items() if name not in _NOT_CACHE) * _GIB


def _vllm_sr_sim(said: Mapping[str, Any], context: int) -> float:
    return float(said["kv_bytes_per_token"]) * context


_CACHE: Mapping[str, Callable[[Mapping[str, Any], int], float]] = {
    "kvfit": _kvfit,
    "ridgepoint": _ridgepoint,
    "vramscout": _vramscout,
    "vllm-sr-sim": _vllm_sr_sim,
}
"""Bytes of cache of one sequence at a context, as each planner says it."""

PLANNERS = tuple(_CACHE)
