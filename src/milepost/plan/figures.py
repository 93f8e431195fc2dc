"""Numbers that carry their reason. In: a dataclass whose fields are declared by `figure`. Out: plain values and origins.

The law kept here: say why (law 10): a number says whether it is a product of shapes, a rule, measured or assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, fields, is_dataclass
from typing import Any, Literal

Origin = Literal["shapes", "rule", "asked", "measured", "assumed"]
"""Where a number comes from: a product of shapes, a rule of some code, the caller, a measurement, or a guess at a set-up."""


def figure(origin: Origin, source: str) -> Any:
    """A dataclass field that says where its number comes from: `as_json` prints both beside it."""
    return field(metadata={"origin": origin, "source": source})


def as_json(record: object) -> Any:
    """Plain values; a field declared by `figure` becomes {"value", "origin", "source"}."""
    if is_dataclass(record) and not isinstance(record, type):
        return {
            item.name: {"value": as_json(getattr(record, item.name)), **item.metadata}
            if item.metadata
            else as_json(getattr(record, item.name))
            for item in fields(record)
        }
    if isinstance(record, Mapping):
        return {str(key): as_json(value) for key, value in record.items()}
    if isinstance(record, (tuple, list)):
        return [as_json(value) for value in record]
    return record
