"""The parity matrix against transformers: `milepost bench parity`. Cases are data; theirs, ours and the comparison stand apart.

The law kept here: the oracle is transformers' uncut forward, since its cached pieces are wrong for some families; and
transformers is imported inside functions only, so that importing this costs and needs nothing.
"""

from milepost.bench.parity.report import main

__all__ = ["main"]
