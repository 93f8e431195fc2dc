"""Time, real or simulated. The law kept here: no policy reads the machine's clock on its own."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Seconds from an arbitrary start."""

    def now(self) -> float:
        """The moment, in seconds; never runs backwards."""
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        """Seconds of `time.perf_counter`."""
        return time.perf_counter()
