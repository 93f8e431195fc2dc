"""What a state is a state *of*: model, layout, tenant, token chain, position, in 16 bytes.

In: identities and token ids. Out: digests (BLAKE2b, 128 bits).
The law kept here: identity before use (law 5). Two states have the same fingerprint only if the same weights applied the
same tokens from the start, for the same tenant, in the same layout.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

import numpy as np

DIGEST_BYTES = 16
_STRIDE = 16
"""Tokens per link of the chain; a matter of speed only, it has nothing to do with blocks of KV."""

Tokens = np.ndarray
"""Token ids, uint32 [n]."""


def root_of(model_identity: str, layout_digest: bytes, salt: str) -> bytes:
    """The chain's start: everything that a state depends on besides its tokens."""
    parts = (b"milepost-1", model_identity.encode(), layout_digest, salt.encode())
    return _hash(b"".join(len(part).to_bytes(8, "little") + part for part in parts))


@dataclass(slots=True)
class Chain:
    """Fingerprints of one sequence's prefixes. Links are computed once and kept, so a position costs one short hash."""

    root: bytes
    _links: list[bytes] = field(default_factory=list)

    def at(self, tokens: Tokens, position: int) -> bytes:
        """Fingerprint of the state after `position` tokens. `tokens` may only ever grow between calls."""
        whole = position // _STRIDE
        while len(self._links) < whole:
            start = len(self._links) * _STRIDE
            before = self._links[-1] if self._links else self.root
            self._links.append(_hash(before + tokens[start : start + _STRIDE].tobytes()))
        before = self._links[whole - 1] if whole else self.root
        return _hash(before + tokens[whole * _STRIDE : position].tobytes() + position.to_bytes(8, "little"))


def _hash(data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()
