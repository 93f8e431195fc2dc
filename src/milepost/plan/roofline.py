"""How fast a device could be at best, and when moving a state beats computing it again. In: work and a device. Out: seconds.

The law kept here: a bound, not a forecast: time is the larger of operations over the peak and bytes over the bandwidth, as if
both overlapped wholly; what binds is named.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Literal

from milepost.models.spec import ModelSpec
from milepost.plan.devices import Device, Way, links, tiers
from milepost.plan.figures import as_json, figure
from milepost.plan.memory import Memory
from milepost.plan.weights import Weights
from milepost.plan.work import Work, decode, prefill, recurrent_flops, update_intensity
from milepost.state.codecs import CODECS, Codec, encoded_layout
from milepost.state.layout import Layout

BATCHES = (1, 8, 32, 128, 512)
PROMPTS = (512, 4096, 32768)
CHUNK = 2048
_STEPS = 32
"""Chunks after which one more changes little."""
_Again = Callable[[int], float]
"""Seconds for a prefix of so many tokens."""


@dataclass(frozen=True, slots=True)
class Bound:
    """One phase on one device."""

    phase: Literal["decode", "prefill"] = figure("asked", "decode: one token for each sequence; prefill: one prompt")
    batch: int = figure("asked", "sequences")
    tokens: int = figure("asked", "context of each, or length of the prompt")
    seconds: float = figure("rule", "the larger of operations / peak and bytes / bandwidth")
    tokens_per_s: float = figure("rule", "tokens computed over seconds")
    bound_by: str = figure("rule", "operations, or the largest of weights, KV and states")
    intensity: float = figure("shapes", "operations a byte")


@dataclass(frozen=True, slots=True)
class Restore:
    """A checkpoint fetched against its prompt computed again."""

    tier: str = figure("assumed", "bandwidth and latency of plan/devices.toml")
    codec: Codec = figure("asked", "how the checkpoint is stored")
    worth_from_tokens: int | None = figure("rule", "length from which fetching is always sooner; None: not by 2^20 tokens")
    seconds_at_4096: float = figure("assumed", "time to fetch state and KV of 4,096 tokens")


@dataclass(frozen=True, slots=True)
class HandOver:
    """State and KV of one sequence sent to another machine."""

    link: str = figure("assumed", "bandwidth and latency of plan/devices.toml")
    tokens: int = figure("asked", "length of the sequence")
    seconds: float = figure("assumed", "time for state and KV to arrive")
    recompute_seconds: float = figure("rule", "time to compute it there, at best")


@dataclass(frozen=True, slots=True)
class Speed:
    """Limits on one device. `state_equals_weights_batch`: the batch whose states take as long to move as the weights."""

    device: str
    dtype: str
    bounds: tuple[Bound, ...]
    state_equals_weights_batch: float | None
    update_intensity_simple: float | None
    update_intensity: float | None
    restore: tuple[Restore, ...]
    hand_over: tuple[HandOver, ...]

    def to_json(self) -> dict[str, object]:
        """As plain values, each number with its origin."""
        found: dict[str, object] = as_json(self)
        return found


def speed_of(
    spec: ModelSpec, layout: Layout, memory: Memory, weights: Weights, place: Device, dtype: str, context: int
) -> Speed:
    """All limits of a model on a device, decoding at `context` tokens. Raises ConfigError if it has no peak for the dtype."""
    decodes = (("decode", batch, context, decode(spec, weights, memory, batch, context), batch) for batch in BATCHES)
    prompts = (("prefill", 1, tokens, prefill(spec, weights, memory, tokens, CHUNK), tokens) for tokens in PROMPTS)
    recurrent = sum(part.nbytes for part in layout.state if part.name == "recurrent")

    again = cache(recompute_seconds(spec, memory, weights, place, dtype))

    return Speed(
        device=place.title,
        dtype=dtype,
        bounds=tuple(
            _bound("decode" if phase == "decode" else "prefill", batch, tokens, work, place, dtype, count)
            for phase, batch, tokens, work, count in (*decodes, *prompts)
        ),
        state_equals_weights_batch=balanced_batch(weights, memory),
        update_intensity_simple=update_intensity(spec, recurrent, simple=True),
        update_intensity=update_intensity(spec, recurrent, simple=False),
        restore=tuple(_restore(way, codec, layout, memory, again) for way in tiers() for codec in CODECS),
        hand_over=tuple(
            HandOver(link.title, tokens, link.seconds(memory.at(tokens)), again(tokens))
            for link in links()
            for tokens in PROMPTS
        ),
    )


def _seconds(work: Work, place: Device, dtype: str) -> float:
    return max(work.flops / place.peak(dtype), work.bytes / place.bytes_per_s)


def _bound(
    phase: Literal["decode", "prefill"], batch: int, tokens: int, work: Work, place: Device, dtype: str, count: int
) -> Bound:
    seconds = _seconds(work, place, dtype)
    parts = {"weights": work.weight_bytes, "KV": work.kv_bytes, "states": work.state_bytes}
    busy = work.flops / place.peak(dtype) >= work.bytes / place.bytes_per_s
    by = "operations" if busy else max(parts, key=lambda name: parts[name])
    return Bound(phase, batch, tokens, seconds, count / seconds, by, work.flops / work.bytes)


def _restore(way: Way, codec: Codec, layout: Layout, memory: Memory, again: _Again) -> Restore:
    state = encoded_layout(layout, codec).nbytes

    def fetched(tokens: int) -> float:
        return way.seconds(state + memory.kv_at(tokens))

    return Restore(way.title, codec, worth_from(fetched, again), fetched(4096))


def recompute_seconds(spec: ModelSpec, memory: Memory, weights: Weights, place: Device, dtype: str) -> _Again:
    """Time to compute a prefix again, at best, as a function of its length."""
    update = recurrent_flops(spec)
    return lambda tokens: _seconds(prefill(spec, weights, memory, tokens, CHUNK, update), place, dtype)


def balanced_batch(weights: Weights, memory: Memory) -> float | None:
    """The batch whose states take as many bytes to read and write as the weights that it touches; None without states.

    Experts are read by more of a larger batch, so the two sides are brought together by bisection.
    """
    state = 2.0 * memory.state_bytes
    if not state:
        return None
    low, high = 0.0, weights.touched(1 << 30) * weights.bytes_each / state
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if weights.touched(middle) * weights.bytes_each > middle * state else (low, middle)
    return high


def worth_from(fetched: _Again, again: _Again, longest: int = 1 << 20) -> int | None:
    """The length from which fetching never again takes longer than computing; None if it still does at `longest`.

    Computing is level while weights bind and steps up with each chunk, so the two may cross several times. The last crossing is
    looked for on a grid of lengths 2 % apart, with both sides of the first chunks' ends, and then between two of its points.
    """
    ends = range(CHUNK, min(longest, _STEPS * CHUNK) + 1, CHUNK)
    apart = (round(1.02**power) for power in range(int(math.log(longest, 1.02)) + 1))
    lengths = sorted({*ends, *(end + 1 for end in ends), *apart, longest})
    slow = next((index for index in reversed(range(len(lengths))) if fetched(lengths[index]) > again(lengths[index])), -1)
    if slow == len(lengths) - 1:
        return None
    low: int
    high: int
    low, high = (0 if slow < 0 else lengths[slow]), lengths[slow + 1]
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if fetched(middle) <= again(middle) else (middle, high)
    return high
