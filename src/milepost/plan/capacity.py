"""How many sequences run at once, and how many conversations stay cached, in one budget. In: settings. Out: a frontier.

The law kept here: planned = allocated (law 9): pages are counted as the scheduler counts them when it admits a request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from milepost.plan.figures import as_json, figure
from milepost.state.codecs import CODECS, Codec, encoded_layout
from milepost.state.geometry import Geometry
from milepost.state.layout import Layout

Bound = Literal["max_num_seqs", "state bytes", "KV bytes"]


@dataclass(frozen=True, slots=True)
class Point:
    """Concurrency at one length."""

    context: int = figure("asked", "length of each sequence, prompt and answer")
    room: int = figure("shapes", "pages of the budget over the pages of a sequence, as the scheduler admits them")
    sequences: int = figure("rule", "room, or max_num_seqs if that is less")
    bound_by: Bound = figure("rule", "what stops the next one; of bytes, the larger of its two kinds")
    state_share: float = figure("shapes", "of a sequence's pages")


@dataclass(frozen=True, slots=True)
class Cached:
    """How many idle conversations of one length stay resumable."""

    context: int = figure("asked", "tokens of each conversation")
    codec: Codec = figure("asked", "how its checkpoint is stored")
    checkpoint_bytes: int = figure("shapes", "one state under the codec")
    kv_bytes: int = figure("shapes", "KV that its next token reaches, in whole blocks")
    conversations: int = figure("shapes", "budget over both, with nothing running")


@dataclass(frozen=True, slots=True)
class Capacity:
    """One budget for states and KV."""

    budget_bytes: int = figure("asked", "kv_cache_memory_bytes, or memory less weights")
    page_bytes: int = figure("rule", "the smaller unit, or an even part of it, so that rounding costs at most 1 %")
    state_waste: float = figure("shapes", "share of a state's pages that rounding loses")
    block_waste: float = figure("shapes", "share of a block's pages that rounding loses")
    frontier: tuple[Point, ...] = ()
    cached: tuple[Cached, ...] = ()

    def to_json(self) -> dict[str, object]:
        """As plain values, each number with its origin."""
        found: dict[str, object] = as_json(self)
        return found


def capacity_of(
    layout: Layout, geometry: Geometry, budget_bytes: int, *, contexts: Iterable[int], max_num_seqs: int, step: int
) -> Capacity:
    """The frontier of a budget at some lengths; `step`: most tokens that one step computes."""
    contexts = tuple(contexts)
    return Capacity(
        budget_bytes=budget_bytes,
        page_bytes=geometry.page_bytes,
        state_waste=_waste(layout.state_bytes, geometry.state_pages * geometry.page_bytes),
        block_waste=_waste(layout.block_bytes, geometry.block_pages * geometry.page_bytes),
        frontier=tuple(_point(layout, geometry, context, max_num_seqs, step) for context in contexts),
        cached=tuple(_cached(layout, budget_bytes, context, codec) for context in contexts for codec in CODECS),
    )


def _point(layout: Layout, geometry: Geometry, context: int, max_num_seqs: int, step: int) -> Point:
    room = geometry.sequences(layout, context, step)
    kv = layout.blocks_kept(context) * geometry.block_pages
    share = geometry.state_pages / max(1, geometry.state_pages + kv)
    bytes_bound: Bound = "state bytes" if geometry.state_pages >= kv else "KV bytes"
    return Point(context, room, min(room, max_num_seqs), "max_num_seqs" if room > max_num_seqs else bytes_bound, share)


def _cached(layout: Layout, budget: int, context: int, codec: Codec) -> Cached:
    checkpoint = encoded_layout(layout, codec).nbytes
    kv = (layout.blocks_for(context) - min(layout.first_block(context), layout.blocks_for(context))) * layout.block_bytes
    return Cached(context, codec, checkpoint, kv, budget // max(1, checkpoint + kv))


def _waste(needed: int, taken: int) -> float:
    return (taken - needed) / taken if taken else 0.0
