"""Which curves a plan has. In: a `Plan`. Out: figures, each a chart, a sentence that says what to see, and its numbers.

The law kept here: nothing is computed here that the plan's own functions don't compute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from milepost.plan.crossovers import attention_everywhere
from milepost.plan.memory import Memory, memory_of
from milepost.plan.plan import Plan
from milepost.plan.report.svg import Axis, Chart, Line, Mark
from milepost.plan.roofline import CHUNK, recompute_seconds
from milepost.state.codecs import encoded_layout
from milepost.state.geometry import geometry_of
from milepost.state.layout import layout_of

SHARED = range(0, 5001, 10)
"""Shared tokens at which hits are drawn."""
_SAMPLES = 97
_QUESTION = 64
_STEP = 8192
"""Tokens of a step in the other engines, as they come."""
_FIRST = 64
"""Tokens at which curves begin."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A plot with what it shows in words, and its numbers in a table: a header and rows."""

    name: str
    see: str
    chart: Chart
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


def figures(plan: Plan) -> tuple[Figure, ...]:
    """All that this plan has data for."""
    found = [_memory(plan), _concurrency(plan), _hits(plan)]
    if plan.speed is not None and plan.question.device is not None and plan.weights is not None:
        found += [_restore(plan), _roofline(plan)]
    return tuple(found)


def _memory(plan: Plan) -> Figure:
    twin = attention_everywhere(plan.spec)
    others: list[tuple[str, Memory]] = [] if plan.baseline is None else [plan.baseline]
    if twin is not None:
        others.append(("attention in every layer", memory_of(twin, layout_of(twin, plan.settings.dtypes, 1))))
    longest = max(131072, *plan.question.contexts)
    cross = plan.crossovers
    marks = []
    if cross.baseline is not None and cross.baseline.smaller_from_tokens:
        marks.append(Mark(cross.baseline.smaller_from_tokens, f"smaller from {cross.baseline.smaller_from_tokens:,.0f}"))
    if cross.own_kv_tokens:
        marks.append(Mark(cross.own_kv_tokens, f"KV = state at {cross.own_kv_tokens:,.0f}"))
    lengths = _spread(max(1, min([_FIRST, *(int(mark.x / 2) for mark in marks)])), longest)
    lines = [Line(plan.model, [(t, plan.memory.at(t)) for t in lengths])]
    lines.append(Line(f"state of {plan.model} alone", [(t, plan.memory.state_bytes) for t in lengths]))
    lines += [Line(name, [(t, memory.at(t)) for t in lengths]) for name, memory in others]
    rows = [
        [f"{t:,}", size(plan.memory.at(t)), *(size(memory.at(t)) for _, memory in others)] for t in plan.question.contexts
    ]
    return Figure(
        "Memory of one sequence",
        f"The state is there from the first token and never grows. {_what_grows(plan)}",
        Chart("Memory against context", "Bytes of one sequence by its length", TOKENS_LOG, BYTES, lines, marks),
        ["tokens", plan.model, *(name for name, _ in others)],
        rows,
    )


def _concurrency(plan: Plan) -> Figure:
    budget, layout = plan.capacity.budget_bytes, plan.settings.layout
    geometry, step = geometry_of(layout, budget), CHUNK
    lengths = _spread(_FIRST, plan.settings.max_model_len)
    lines = [Line("fit in the budget", [(t, geometry.sequences(layout, t, step)) for t in lengths])]
    for codec, name in (("raw", "stay cached"), ("int8", "would stay cached as int8")):
        each = plan.checkpoint_bytes[codec]
        lines.append(Line(name, [(t, budget // max(1, each + plan.memory.kv_at(t))) for t in lengths]))
    rows = [
        [f"{p.context:,}", f"{p.room:,}", f"{p.sequences:,}", p.bound_by, f"{p.state_share:.0%}"]
        for p in plan.capacity.frontier
    ]
    return Figure(
        f"How many sequences {size(budget)} hold",
        f"States and KV share one budget. {_what_bounds(plan)}",
        Chart("Concurrency against context", "Sequences at once by their length", TOKENS_LOG, COUNT, lines),
        ["tokens", "fit at once", "run at once", "bound by", "state's share"],
        rows,
    )


def _hits(plan: Plan) -> Figure:
    lines = [Line("Milepost", [(t, t) for t in (0, SHARED[-1])])]
    others = [(f"vLLM {mode.mode}", mode.hit) for mode in plan.vllm.modes] + [("SGLang", plan.sglang.hit)]
    lines += [Line(name, [(t, hit(t, None)) for t in SHARED], steps=True) for name, hit in others]
    shown = (100, 500, 1000, 2000, 5000)
    firsts = [plan.vllm.align.hit_after, plan.sglang.hit_after]
    rows = [
        [
            f"{t:,}",
            f"{t:,}",
            *(f"{hit(t, None):,}" for _, hit in others),
            *(f"{first(t + _QUESTION, t, t + _QUESTION, _STEP):,}" for first in firsts),
        ]
        for t in shown
    ]
    return Figure(
        "What a shared prompt saves",
        "Two requests begin with the same tokens. Milepost resumes exactly where they part; the others only at multiples of "
        "their blocks, and below the first step not at all. Drawn at best: where each engine keeps every state that it could. "
        f"The table's last columns are what the second of two requests with questions of {_QUESTION} tokens really gets.",
        Chart("Reused against shared tokens", "The staircase of each engine", SHARED_TOKENS, REUSED, lines),
        ["shared", "Milepost", *(name for name, _ in others), "second request: vLLM align", "SGLang"],
        rows,
    )


def _restore(plan: Plan) -> Figure:
    from milepost.plan.devices import tiers

    place, weights = plan.question.device, plan.computed
    if place is None or weights is None or plan.speed is None:
        raise ValueError("a plan without a device has no speeds")
    lengths, state = _spread(_FIRST, max(plan.question.contexts)), encoded_layout(plan.settings.layout, "int8").nbytes

    again = recompute_seconds(plan.spec, plan.memory, weights, place, plan.speed.dtype)
    lines = [Line(f"computed again on {place.title}", [(t, again(t)) for t in lengths])]
    lines += [Line(f"from {way.title}", [(t, way.seconds(state + plan.memory.kv_at(t))) for t in lengths]) for way in tiers()]
    rows = [
        [each.tier, each.codec, "never" if each.worth_from_tokens is None else f"{each.worth_from_tokens:,}"]
        for each in plan.speed.restore
    ]
    return Figure(
        "Fetch a checkpoint, or compute it again",
        "Where a tier's line runs below the thick one, fetching state (int8) and KV is faster than computing the prompt again. "
        "The tiers' speeds are assumed; the device's is its data sheet's.",
        Chart("Restore against recompute", "Seconds by the length of the prefix", TOKENS_LOG, SECONDS, lines),
        ["from", "codec", "always faster from (tokens)"],
        rows,
    )


def _roofline(plan: Plan) -> Figure:
    place, speed = plan.question.device, plan.speed
    if place is None or speed is None:
        raise ValueError("a plan without a device has no roofline")
    peak = place.peak(speed.dtype)
    ridge = peak / place.bytes_per_s
    roof = [(x, min(peak, x * place.bytes_per_s)) for x in (0.3, ridge, ridge * 30)]
    lines = [Line(f"{place.title}, {speed.dtype}", roof)]
    rows = []
    for phase in ("decode", "prefill"):
        bounds = [bound for bound in speed.bounds if bound.phase == phase]
        lines.append(Line(phase, [(b.intensity, min(peak, b.intensity * place.bytes_per_s)) for b in bounds], dots=True))
        rows += [[b.phase, f"{b.batch:,}", f"{b.tokens:,}", f"{b.tokens_per_s:,.0f}", b.bound_by] for b in bounds]
    return Figure(
        "What limits the speed",
        "Left of the bend a step waits for memory, right of it for arithmetic. Decoding moves right as the batch grows, until "
        "what each sequence brings of its own, its state and its KV, weighs more than the weights that all share.",
        Chart("Roofline", "Operations a second by operations a byte", INTENSITY, FLOPS, lines),
        ["phase", "batch", "tokens", "tokens/s at best", "bound by"],
        rows,
    )


def _what_grows(plan: Plan) -> str:
    if not plan.memory.growth:
        return "This model has no KV: a conversation costs the same however long it is."
    window = plan.sizes.attention_window
    grows = f"KV grows up to {window:,} tokens" if window else "KV grows with every token"
    start = plan.crossovers.baseline.smaller_from_tokens if plan.crossovers.baseline else None
    smaller = "" if start is None else f" From {start:,.0f} tokens on the whole is smaller than the dense model's KV."
    return f"{grows}.{smaller}"


def _what_bounds(plan: Plan) -> str:
    if not plan.memory.growth:
        return "Without KV, the state alone says how many run at once, at any length."
    if plan.sizes.attention_window:
        return "KV says how many run at once until its window is full; from there on length costs nothing."
    if not plan.memory.state_bytes:
        return "Without a state, KV alone says how many run at once."
    return "Where the line is level the state says how many run at once; where it falls KV does."


def _spread(first: int, last: int) -> list[int]:
    """Lengths from first to last, even on a log scale, and the last."""
    ratio = (max(last, first + 1) / first) ** (1 / (_SAMPLES - 1))
    return sorted({round(first * ratio**index) for index in range(_SAMPLES)} | {last})


def size(count: float) -> str:
    """Bytes for people, in binary units."""
    return _scaled(count, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def short(count: float) -> str:
    """A count for people, in thousands."""
    return _scaled(count, 1000, ("", "k", "M", "G", "T", "P")).replace(" ", "")


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    def steps() -> Iterator[tuple[float, str]]:
        value = count
        for unit in units:
            yield value, unit
            value /= base

    value, unit = next(((v, u) for v, u in steps() if abs(v) < base), (count / base ** (len(units) - 1), units[-1]))
    digits = f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
    return f"{digits} {unit}".strip()


def _seconds(value: float) -> str:
    return f"{value * 1e6:g} µs" if value < 1e-3 else f"{value * 1e3:g} ms" if value < 1 else f"{value:g} s"


TOKENS_LOG = Axis("length of the sequence, tokens", short, log=True)
SHARED_TOKENS = Axis("tokens that two prompts share", short)
REUSED = Axis("tokens not computed again", short)
BYTES = Axis("bytes (10^9: 1 GB)", lambda value: short(value) + "B", log=True)
COUNT = Axis("sequences", short, log=True)
SECONDS = Axis("time", _seconds, log=True)
INTENSITY = Axis("operations a byte", lambda value: f"{value:g}", log=True)
FLOPS = Axis("operations a second", short, log=True)
