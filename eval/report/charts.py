"""Small SVG charts as text: no script, no network, readable on light and dark pages."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 460, 240
LEFT, RIGHT, TOP, BOTTOM = 52, 12, 34, 40
COLOURS = ("var(--a)", "var(--b)", "var(--c)")
Series = Mapping[str, Sequence[tuple[float, float]]]


def line_chart(title: str, series: Series, x_label: str, *, dots: bool = True, zero: bool = True) -> str:
    """Draw named lines of (x, y) points; with `zero` the y axis starts at 0."""
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    xs, ys = [p[0] for p in points], [p[1] for p in points]
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(0.0 if zero else min(ys), max(ys))
    whole = all(x == int(x) for x in xs)
    if whole and max(xs) - min(xs) <= 16:
        x_ticks = sorted(set(xs))
    frame = _Frame(x_ticks, y_ticks)
    body = [frame.grid(title, x_label, list(series))]
    for colour, line in zip(COLOURS, series.values(), strict=False):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        if dots:
            body += [_dot(frame, x, y, colour) for x, y in line]
    return _svg(title, body)


def bar_chart(title: str, labels: Sequence[str], series: Mapping[str, Sequence[float | None]], x_label: str) -> str:
    """Draw groups of bars, one group a label, the value written on each bar; None leaves a gap."""
    values = [v for bars in series.values() for v in bars if v is not None]
    if not values:
        return ""
    frame = _Frame([0.0, float(len(labels))], ticks(0.0, max(values)), [i + 0.5 for i in range(len(labels))], labels)
    body = [frame.grid(title, x_label, list(series))]
    width = 0.76 / len(series)
    for n, (colour, bars) in enumerate(zip(COLOURS, series.values(), strict=False)):
        for i, value in enumerate(bars):
            if value is None:
                continue
            left, right = frame.x(i + 0.12 + n * width), frame.x(i + 0.12 + (n + 1) * width)
            top = frame.y(value)
            body.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
                f'height="{max(HEIGHT - BOTTOM - top, 0):.1f}" fill="{colour}"/>'
                f'<text x="{(left + right) / 2:.1f}" y="{top - 3:.1f}" text-anchor="middle">{figure(value)}</text>'
            )
    return _svg(title, body)


class _Frame:
    """Maps data to pixels and draws axes, grid and legend."""

    def __init__(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        marks: Sequence[float] | None = None,
        names: Sequence[str] | None = None,
    ) -> None:
        self.left, self.right = x_ticks[0], x_ticks[-1] if x_ticks[-1] > x_ticks[0] else x_ticks[0] + 1
        self.low, self.high = y_ticks[0], y_ticks[-1] if y_ticks[-1] > y_ticks[0] else y_ticks[0] + 1
        self.y_ticks, self.marks = y_ticks, marks if marks is not None else x_ticks
        self.names = names if names is not None else [figure(x) for x in x_ticks]

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)

    def grid(self, title: str, x_label: str, legend: Sequence[str]) -> str:
        parts = [f'<text x="{LEFT}" y="14" class="title">{escape(title)}</text>']
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{figure(value)}</text>')
        for value, name in zip(self.marks, self.names, strict=True):
            parts.append(
                f'<text x="{self.x(value):.1f}" y="{HEIGHT - BOTTOM + 14}" text-anchor="middle">{escape(name)}</text>'
            )
        parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 8}" text-anchor="middle">{escape(x_label)}</text>')
        x = float(WIDTH - RIGHT)
        for colour, name in reversed(list(zip(COLOURS, legend, strict=False)) if len(legend) > 1 else []):
            x -= 6.2 * len(name) + 18
            parts.append(f'<rect x="{x}" y="19" width="9" height="9" fill="{colour}"/>')
            parts.append(f'<text x="{x + 13}" y="27">{escape(name)}</text>')
        return "".join(parts)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round numbers that enclose low..high, about `about` of them."""
    span = (high - low) or abs(high) or 1.0
    raw = span / about
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= raw * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, max(last, first + 1) + 1)]


def short(text: str, most: int = 16) -> str:
    """A label of at most `most` characters."""
    return text if len(text) <= most else text[: most - 1] + "…"


def figure(value: float) -> str:
    """Three significant digits, thousands separated, no exponent for ordinary sizes."""
    if value == 0:
        return "0"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _dot(frame: _Frame, x: float, y: float, colour: str) -> str:
    where = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
    return f'<circle {where} r="3" fill="{colour}"><title>{figure(x)}: {figure(y)}</title></circle>'


def _svg(title: str, body: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" role="img" '
        f'aria-label="{escape(title, quote=True)}" xmlns="http://www.w3.org/2000/svg">{"".join(body)}</svg>'
    )
