"""What is compared: the cases of every family, at least three each, sizes that are no powers of two among them.

The law kept here: a case is data. A tolerance other than the usual comes with its reason.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.errors import ConfigError

TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class Case:
    """A model to compare: our family, a name for its config, transformers' classes and what their config is given."""

    family: str
    config: str
    architecture: str
    settings: Mapping[str, Any]
    config_class: str = "Config"
    tolerance: float = TOLERANCE
    reason: str = ""
    seed: int = 11
    """Of the weights: one under which greedy decoding doesn't fall into repeating a token."""

    @property
    def name(self) -> str:
        """As tests and progress bars call it."""
        return f"{self.family}/{self.config}"


def cases(families: Iterable[str] | None = None) -> tuple[Case, ...]:
    """All cases, or those of these families. Raises ConfigError for a family without any."""
    from milepost.bench.parity import cases_linear, cases_mamba

    known = (*cases_mamba.CASES, *cases_linear.CASES)
    if families is None:
        return known
    names = dict.fromkeys(case.family for case in known)
    for family in families:
        if family not in names:
            raise ConfigError(f"family={family!r} has no parity cases (there are {', '.join(names)})", field="family")
    return tuple(case for case in known if case.family in set(families))


def case(family: str, config: str) -> Case:
    """One case. Raises KeyError."""
    return {(found.family, found.config): found for found in cases()}[family, config]
