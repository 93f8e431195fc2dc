"""The figures of `milepost bench prefix` for people, beside what other engines are known to reuse of the same prompts.

The law kept here: figures of others are labelled as theirs; nothing here was measured in this run but our own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from milepost.bench.prefix_figures import Figures, Row


@dataclass(frozen=True, slots=True)
class Peer:
    """What another engine had cached of its `request`-th prompt: pairs of shared tokens and cached tokens."""

    engine: str
    note: str
    request: int
    cached: tuple[tuple[int, int], ...]


PEERS = (
    Peer("vLLM", "0.32, block of 1056", 2, ((900, 0), (1300, 1056), (4000, 3168))),
    Peer("SGLang", "prefix tree", 2, ((900, 0), (1300, 0), (4000, 0))),
    Peer("SGLang", "prefix tree", 3, ((900, 896), (1300, 1280), (4000, 3968))),
    Peer("llama-server", "", 2, ((900, 448), (1300, 848), (4000, 3548))),
)
"""Published measurements of others."""

_LEGEND = (
    "peers: published measurements of vLLM 0.32 (block of 1056 tokens), SGLang's prefix tree and llama-server on the same "
    "prompts; not measured in this run"
)


def render(figures: Figures, about: Mapping[str, Any], console: Console) -> None:
    """Print everything that a reader wants to see at a glance."""
    table = Table(title=f"shared prompts, {about['model']}, {about['dtype']}, {about['threads']} threads", title_justify="left")
    table.add_column("mode")
    for name in ("shared", "request", "prompt", "cached", "first token", "of the first"):
        table.add_column(name, justify="right")
    table.add_column("peers' cached tokens")
    last: tuple[str, int] | None = None
    for row in figures.rows:
        if last is not None and last != (row.mode, row.shared):
            table.add_section()
        last = (row.mode, row.shared)
        table.add_row(
            row.mode,
            f"{row.shared:,}",
            f"{row.request}",
            f"{row.prompt_tokens:,}",
            f"{row.cached_tokens:,}",
            f"{row.ttft_s * 1000:,.1f} ms",
            f"{row.ttft_ratio_to_first:.1%}",
            _peers(row),
        )
    console.print(table)
    console.print(_LEGEND, style="dim")
    _summary(figures, console)


def _summary(figures: Figures, console: Console) -> None:
    right = sum(again.cached_tokens == again.length - 1 for again in figures.identical)
    same = sum(again.same_answer for again in figures.identical)
    lengths = ", ".join(f"{again.length:,}" for again in figures.identical)
    console.print(
        f"identical prompts ({lengths} tokens): all but the last token cached at {right} of {len(figures.identical)}; "
        f"{same} answered as the first time"
    )
    turns = figures.chat_turns
    again = sum(turn.recomputed_earlier_tokens for turn in turns)
    prompt, cached = sum(turn.prompt_tokens for turn in turns), sum(turn.cached_tokens for turn in turns)
    console.print(
        f"chat of {len(turns)} turns: {again:,} tokens that were fed before were fed again; "
        f"{cached:,} of {prompt:,} prompt tokens cached"
    )


def peers_json() -> list[dict[str, Any]]:
    """The peers' figures as JSON wants them."""
    source = {"source": "published, not measured in this run"}
    return [{**asdict(peer), **source, "cached": {str(shared): count for shared, count in peer.cached}} for peer in PEERS]


def _peers(row: Row) -> str:
    asked = [peer for peer in PEERS if row.mode == "chat" and peer.request == row.request]
    return ", ".join(f"{peer.engine} {count:,}" for peer in asked for shared, count in peer.cached if shared == row.shared)
