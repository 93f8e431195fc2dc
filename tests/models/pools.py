"""One sequence in memory of its own, as the parity bench runs it."""

from milepost.bench.parity.ours import BLOCK, Sequence, load, make_memory

__all__ = ["BLOCK", "Sequence", "load", "make_memory"]
