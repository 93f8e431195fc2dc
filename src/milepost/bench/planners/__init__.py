"""Other planners beside ours: `milepost bench planners`. What each says of ten published hybrids, and the right value.

The law kept here: planners are asked in environments of their own, by their own code, and the right value is read off the
layout that the pools are built from.
"""

from milepost.bench.planners.report import main

__all__ = ["main"]
