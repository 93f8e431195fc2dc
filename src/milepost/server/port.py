"""What the server asks of an engine, as one narrow protocol: a fake of it is 40 lines.

The law kept here: the server sees no more of the engine than this, so it never imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from milepost.config import EngineConfig
from milepost.engine.stats import Stats, Timing
from milepost.request import Delta, Request


class Engine(Protocol):
    """The engine as the server sees it. All methods may be called from any thread."""

    @property
    def config(self) -> EngineConfig: ...
    @property
    def max_model_len(self) -> int: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def healthy(self) -> bool: ...

    def submit(
        self,
        request: Request,
        sink: Callable[[Delta], None],
        on_finish: Callable[[Timing], None] | None = None,
    ) -> None:
        """Queue a request. `sink` is called from the engine's thread; its last Delta has `finish` set."""
        ...

    def abort(self, request_id: str) -> None:
        """End a request early; unknown ids are ignored."""
        ...

    def stats(self) -> Stats:
        """Totals and what holds now."""
        ...

    def audit(self) -> Sequence[Any]:
        """What doesn't add up: findings with `.place` and `.message`; empty when all is well."""
        ...

    def reset_prefix_cache(self) -> None:
        """Forget all checkpoints and cached blocks that nothing uses."""
        ...
