"""Settings for a workload, with the reason for each. In: a plan's parts and a workload, told or read from a trace. Out: advice.

The law kept here: say why (law 10): each setting names the numbers that it follows from, and nothing is advised that can't be
set. No torch.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from milepost.errors import ConfigError
from milepost.models.spec import ModelSpec
from milepost.plan.devices import Device
from milepost.plan.figures import as_json, figure
from milepost.plan.memory import Memory
from milepost.plan.weights import Weights
from milepost.plan.work import decode, prefill
from milepost.state.geometry import Geometry
from milepost.state.layout import Layout

_ROUND = 1024
_SLACK = 1.5
"""Running sequences beyond the mean that a burst may bring."""


@dataclass(frozen=True, slots=True)
class Workload:
    """Means, but for `longest`. `shared`: prompt tokens that an earlier request began with as well."""

    requests: int = figure("asked", "1 where the workload is told and not read from a trace")
    prompt_tokens: float = figure("measured", "mean length of a prompt, or as told")
    answer_tokens: float = figure("measured", "mean length of an answer, or as told")
    longest: int = figure("measured", "longest prompt and answer together")
    shared_tokens: float = figure("measured", "mean prompt tokens that an earlier request began with, or as told")
    rate: float = figure("measured", "requests a second, or as told")


@dataclass(frozen=True, slots=True)
class Setting:
    """A flag of ours, its value, and why."""

    flag: str
    value: str
    why: str


@dataclass(frozen=True, slots=True)
class Share:
    """How much of the work at a length is attention's."""

    context: int = figure("asked", "length of the sequence")
    prefill_flops: float = figure("shapes", "attention's share of a prompt's operations")
    decode_bytes: float = figure("shapes", "KV's share of the bytes of one decode step at the advised batch")


@dataclass(frozen=True, slots=True)
class Advice:
    """For one workload."""

    workload: Workload
    settings: tuple[Setting, ...]
    attention: tuple[Share, ...]

    def to_json(self) -> dict[str, object]:
        """As plain values, each number with its origin."""
        found: dict[str, object] = as_json(self)
        return found


def told(prompt: int, answer: int, shared: int, rate: float) -> Workload:
    """A workload from four numbers. Raises ConfigError naming one that can't be."""
    for name, value in (("prompt_tokens", prompt), ("answer_tokens", answer)):
        if value < 1:
            raise ConfigError(f"{name}={value} must be at least 1", field=name)
    if not 0 <= shared <= prompt:
        message = f"shared_prefix_tokens={shared} must be from 0 to prompt_tokens={prompt}"
        raise ConfigError(message, field="shared_prefix_tokens")
    if not rate > 0:
        raise ConfigError(f"rate={rate} must be above 0", field="rate")
    return Workload(1, prompt, answer, prompt + answer, shared, rate)


def read_trace(path: Path) -> Workload:
    """A workload from a trace: a JSON object a line with `ts`, `in_len`, `out_len` and `segs`.

    `segs` are [segment id, length] of the input; two requests share what agrees from the left. Raises ConfigError naming the
    line that can't be read.
    """
    count = prompt = answer = shared = longest = 0
    first = last = 0.0
    seen: set[int] = set()
    for number, line in enumerate(_lines(path), start=1):
        try:
            entry: dict[str, Any] = json.loads(line)
            begins, given, segments = int(entry["in_len"]), int(entry["out_len"]), entry["segs"]
            last = float(entry["ts"])
            shared += _known(((int(a), int(b)) for a, b in segments), seen)
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"trace={str(path)!r}, line {number}: {error!r}", field="trace") from error
        first = last if number == 1 else first
        count, prompt, answer, longest = count + 1, prompt + begins, answer + given, max(longest, begins + given)
    if not count:
        raise ConfigError(f"trace={str(path)!r} holds no requests", field="trace")
    rate = count / (last - first) if last > first else float(count)
    return Workload(count, prompt / count, answer / count, longest, shared / count, rate)


def advise(
    spec: ModelSpec,
    layout: Layout,
    geometry: Geometry,
    memory: Memory,
    weights: Weights | None,
    place: Device | None,
    workload: Workload,
    *,
    dtype: str,
    longest: int,
    step: int,
    contexts: Iterable[int],
) -> Advice:
    """Settings for a workload in a budget. `longest`: the model's limit; `step`: the token budget that was asked for."""
    length = math.ceil(workload.prompt_tokens + workload.answer_tokens)
    room = max(1, geometry.sequences(layout, length, step))
    wanted, why = _running(spec, memory, weights, place, workload, dtype, room)
    fits = min(longest, -(-workload.longest // _ROUND) * _ROUND)
    limit = f"the longest request has {workload.longest:,} tokens"
    if workload.longest > longest:
        limit += f", more than the model's {longest:,}: those are refused"
    settings = [
        Setting("--max-model-len", f"{fits}", limit),
        Setting("--max-num-seqs", f"{min(wanted, room)}", f"{why}; the budget holds {room:,} of {length:,} tokens"),
        Setting("--kv-cache-memory-bytes", f"{geometry.pages * geometry.page_bytes}", "states and KV share it"),
        Setting("--block-size", f"{layout.block_size}", "small blocks cost nothing: hits end at checkpoints, not at blocks"),
        *_spacing(layout, memory, workload),
    ]
    batch = min(wanted, room)
    shares = tuple(_share(spec, memory, weights, tokens, batch) for tokens in contexts) if weights else ()
    return Advice(workload, tuple(settings), shares)


def _running(
    spec: ModelSpec,
    memory: Memory,
    weights: Weights | None,
    place: Device | None,
    workload: Workload,
    dtype: str,
    room: int,
) -> tuple[int, str]:
    """How many sequences run at once, by Little's law where the device is known: rate x time that each one takes at best."""
    if weights is None or place is None:
        return room, "as many as fit, since no device was named or the weights aren't known"
    context = math.ceil(workload.prompt_tokens + workload.answer_tokens / 2)
    new = max(1, math.ceil(workload.prompt_tokens - workload.shared_tokens))
    first = prefill(spec, weights, memory, new, 2048)
    waits = max(first.flops / place.peak(dtype), first.bytes / place.bytes_per_s)
    running = 1
    for _ in range(20):  # a larger batch makes each token slower, which makes more run at once
        token = decode(spec, weights, memory, running, context)
        seconds = waits + workload.answer_tokens * max(token.flops / place.peak(dtype), token.bytes / place.bytes_per_s)
        running = min(room, max(1, math.ceil(workload.rate * seconds)))
    wanted = min(room, math.ceil(running * _SLACK))
    each = f"{workload.rate:.3g} requests a second of {seconds:.2f} s each at best"
    return wanted, f"{each} keep {running} running, half more for bursts"


def _spacing(layout: Layout, memory: Memory, workload: Workload) -> list[Setting]:
    """Checkpoints between message ends: one for as many tokens as weigh as much in KV, so that they at most double memory."""
    if workload.shared_tokens < layout.block_size:
        return [Setting("--no-enable-prefix-caching", "", "hardly a token is shared: checkpoints would only take room")]
    grown = memory.kv_at(1 << 40) if memory.growth else 0
    if not memory.state_bytes or not memory.bytes_per_token or grown < memory.state_bytes:
        return []
    tokens = -(-memory.state_bytes // memory.bytes_per_token)
    rounded = max(layout.block_size, -(-tokens // layout.block_size) * layout.block_size)
    if rounded > workload.prompt_tokens:
        return []
    why = f"a state weighs as much as the KV of {tokens:,} tokens: spaced so, checkpoints at most double a prompt's memory"
    return [Setting("--prefix-cache-retention-interval", f"{rounded}", why)]


def _share(spec: ModelSpec, memory: Memory, weights: Weights, tokens: int, batch: int) -> Share:
    prompt, token = prefill(spec, weights, memory, tokens, 2048), decode(spec, weights, memory, batch, tokens)
    return Share(tokens, prompt.attention_flops / prompt.flops, token.kv_bytes / token.bytes)


def _known(segments: Iterable[tuple[int, int]], seen: set[int]) -> int:
    """Tokens of the leading segments that an earlier request began with; the whole path is remembered."""
    path, shared, following = 0, 0, True
    for segment in segments:
        path = hash((path, segment))
        following = following and path in seen
        shared += segment[1] if following else 0
        seen.add(path)
    return shared


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as stream:
            yield from (line for line in stream if line.strip())
    except (OSError, EOFError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace={str(path)!r} can't be read: {error}", field="trace") from error
