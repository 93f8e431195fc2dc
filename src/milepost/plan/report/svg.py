"""Line plots as SVG. In: lines of points and labels. Out: markup that reads on a phone, on paper and in the dark.

The law kept here: the drawing is 420 units wide whatever the screen is, so that its text shrinks by a quarter at most on a
phone; a plotting library draws for a desk and shrinks by more. Colours are the page's CSS variables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 420, 300
_LEFT, _RIGHT, _TOP, _BOTTOM = 74, 12, 14, 52
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "1 4")
_SPAN = 1e-9
_FEW = 3
_BELOW = 0.1
"""Decades that a log scale begins below its least value, which would else lie on the axis."""
_LETTER = 7.4
"""Units that a letter takes, about."""


@dataclass(frozen=True, slots=True)
class Line:
    """A named curve. `steps`: it jumps at each point and is level between them. `dots`: points alone."""

    name: str
    points: Sequence[tuple[float, float]]
    steps: bool = False
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Axis:
    """`show` writes a value for people."""

    label: str
    show: Callable[[float], str]
    log: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A dotted vertical line at `x` with a word on it."""

    x: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """One plot: `title` and `description` are for those who can't see it, too."""

    title: str
    description: str
    x: Axis
    y: Axis
    lines: Sequence[Line]
    marks: Sequence[Mark] = ()

    def svg(self) -> str:
        """The drawing, without its legend."""
        points = [point for line in self.lines for point in line.points]
        across = _Scale(self.x, [x for x, _ in points] + [mark.x for mark in self.marks], _LEFT, WIDTH - _RIGHT)
        up = _Scale(self.y, [y for _, y in points], HEIGHT - _BOTTOM, _TOP)
        body = [*_grid(across, up, self.x, self.y), *self._marks(across), *self._drawn(across, up)]
        named = f"<title>{escape(self.title)}</title><desc>{escape(self.description)}</desc>"
        return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" xmlns="http://www.w3.org/2000/svg">{named}{"".join(body)}</svg>'

    def legend(self) -> str:
        """Names of the lines beside samples of them, as HTML that wraps."""
        items = []
        for index, line in enumerate(self.lines):
            sample = f'<circle cx="12" cy="5" r="4" class="f{index}"/>' if line.dots else _sample(index)
            drawn = f'<svg viewBox="0 0 24 10" width="24" height="10" aria-hidden="true">{sample}</svg>'
            items.append(f"<li>{drawn} {escape(line.name)}</li>")
        return f'<ul class="legend">{"".join(items)}</ul>'

    def _drawn(self, across: _Scale, up: _Scale) -> list[str]:
        drawn = []
        for index, line in enumerate(self.lines):
            placed = [(across.at(x), up.at(y)) for x, y in line.points]
            if line.dots:
                drawn += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" class="f{index}"/>' for x, y in placed]
            elif placed:
                path = f"M{placed[0][0]:.1f} {placed[0][1]:.1f}"
                for x, y in placed[1:]:
                    path += f"H{x:.1f}V{y:.1f}" if line.steps else f"L{x:.1f} {y:.1f}"
                drawn.append(f'<path d="{path}" class="l{index}" stroke-dasharray="{_DASHES[index % len(_DASHES)]}"/>')
        return drawn

    def _marks(self, across: _Scale) -> list[str]:
        drawn = []
        for index, mark in enumerate(self.marks):
            x, y = across.at(mark.x), HEIGHT - _BOTTOM - 8 - 15 * index
            fits = x + 4 + _LETTER * len(mark.label) <= WIDTH - _RIGHT
            anchor, shift = ("start", 4) if fits else ("end", -4)
            drawn.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" class="mark"/>')
            drawn.append(f'<text x="{x + shift:.1f}" y="{y}" text-anchor="{anchor}" class="word">{escape(mark.label)}</text>')
        return drawn


class _Scale:
    """From values to places; on a log scale from the first power below to the last above, else from zero."""

    def __init__(self, axis: Axis, values: Sequence[float], low: float, high: float) -> None:
        self.log = axis.log
        known = [value for value in values if value > 0] or [1.0]
        if axis.log:
            self.first, self.last = math.log10(min(known)) - _BELOW, math.log10(max(known))
            self.ticks = _powers(self.first, self.last, (1,))
            if len(self.ticks) < _FEW:
                self.ticks = _powers(self.first, self.last, (1, 2, 5))
        else:
            self.first, self.last = 0.0, max(known)
            self.ticks = _round_steps(self.last)
        if self.last - self.first < _SPAN:
            self.last = self.first + 1
        self.low, self.high = low, high

    def at(self, value: float) -> float:
        """Where a value stands; below a log scale's beginning: at its beginning."""
        placed = math.log10(value) if self.log and value > 0 else self.first if self.log else value
        share = (min(max(placed, self.first), self.last) - self.first) / (self.last - self.first)
        return self.low + share * (self.high - self.low)


def _powers(first: float, last: float, steps: tuple[int, ...]) -> list[float]:
    """Multiples of powers of ten between two logarithms."""
    powers = range(math.floor(first), math.ceil(last) + 1)
    values = [step * 10.0**power for power in powers for step in steps]
    return [value for value in values if first - _SPAN <= math.log10(value) <= last + _SPAN]


def _round_steps(last: float) -> list[float]:
    step = 10 ** math.floor(math.log10(last))
    step = next(part for part in (step / 5, step / 2, step, 2 * step) if last / part <= 6)
    return [step * index for index in range(int(last / step + _SPAN) + 1)]


def _grid(across: _Scale, up: _Scale, x: Axis, y: Axis) -> list[str]:
    bottom, drawn = HEIGHT - _BOTTOM, []
    for value in up.ticks:
        place = up.at(value)
        drawn.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{place:.1f}" y2="{place:.1f}" class="grid"/>')
        drawn.append(f'<text x="{_LEFT - 5}" y="{place + 4:.1f}" text-anchor="end">{escape(y.show(value))}</text>')
    for value in across.ticks:
        place = across.at(value)
        anchor = "end" if place > WIDTH - _RIGHT - 14 else "middle"
        drawn.append(f'<line x1="{place:.1f}" x2="{place:.1f}" y1="{bottom}" y2="{bottom + 4}" class="tick"/>')
        drawn.append(f'<text x="{place:.1f}" y="{bottom + 19}" text-anchor="{anchor}">{escape(x.show(value))}</text>')
    drawn.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="tick"/>')
    middle = (_LEFT + WIDTH - _RIGHT) / 2
    drawn.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle" class="axis">{escape(x.label)}</text>')
    turned = f"translate(11 {HEIGHT / 2 - 10}) rotate(-90)"
    drawn.append(f'<text transform="{turned}" text-anchor="middle" class="axis">{escape(y.label)}</text>')
    return drawn


def _sample(index: int) -> str:
    return f'<path d="M0 5H24" class="l{index}" stroke-dasharray="{_DASHES[index % len(_DASHES)]}"/>'
