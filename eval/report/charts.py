"""Small SVG charts as text: no script, no network, readable on light and dark pages.

Every chart says in `<title>` and `<desc>` what it shows; lines differ by dashes, too, and every mark names its figures
where a pointer rests on it. A chart without a value is the empty string.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

from .markup import said

WIDTH, PLOT = 460, 166
"""Pixels: of a chart, and the height of the area that its axes enclose; what follows are pixels, too."""
LEFT, RIGHT, TOP, BOTTOM = 52, 20, 20, 40
LEGEND_LINE, CHARACTER, DIGIT, TITLE = 14, 6.2, 5.0, 7.6
COLOURS = tuple(f"var(--{name})" for name in "abcdef")
DASHES = ("", "6 3", "2 3", "8 3 2 3")
MOST_TOLD = 12
"""Points of a line that its description lists; of longer ones it says where they start, turn and end."""

Series = Mapping[str, Sequence[tuple[float, float]]]
Bars = Mapping[str, Sequence[float | None]]
Interval = Sequence[float] | None
Intervals = Mapping[str, Sequence[Interval]]


def line_chart(
    title: str, series: Series, x_label: str, *, dots: bool = True, zero: bool = True, mark: float | None = None
) -> str:
    """Draw named lines of (x, y) points.

    Args:
        zero: the y axis starts at 0.
        mark: y of a dashed line across, e.g. 1 for a speed-up.
    """
    points = [p for line in series.values() for p in line]
    if not points:
        return ""
    xs, ys = [p[0] for p in points], [p[1] for p in points] + ([] if mark is None else [mark])
    x_ticks, y_ticks = ticks(min(xs), max(xs)), ticks(0.0 if zero else min(ys), max(ys))
    if all(x == int(x) for x in xs) and max(xs) - min(xs) <= 16:
        x_ticks = sorted(set(xs))
    frame = _Frame(x_ticks, y_ticks, x_ticks, [figure(x) for x in x_ticks], list(series), dashed=True)
    body = [frame.grid(x_label), *frame.across(mark)]
    for n, (name, line) in enumerate(series.items()):
        path = " ".join(f"{frame.x(x):.1f},{frame.y(y):.1f}" for x, y in line)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour(n)}" stroke-width="2"{_dash(n)}/>')
        if dots:
            body += [_dot(frame, name, x, y, colour(n)) for x, y in line]
    told = [f"{name}: {_told(line)}" for name, line in series.items() if line]
    return svg(title, body, WIDTH, frame.height, f"by {x_label}. {'; '.join(told)}")


def bar_chart(
    title: str,
    labels: Sequence[str],
    series: Bars,
    x_label: str,
    *,
    intervals: Intervals | None = None,
    mark: float | None = None,
) -> str:
    """Draw groups of bars, one group a label, its value on each bar that is wide enough; None leaves a gap.

    Args:
        intervals: (low, high) of each bar, drawn as an error bar; None where it has none.
        mark: y of a dashed line across.
    """
    values = [v for bars in series.values() for v in bars if v is not None]
    if not values:
        return ""
    most = max([*values, *highs(intervals), *([] if mark is None else [mark])])
    middles = [i + 0.5 for i in range(len(labels))]
    frame = _Frame([0.0, float(len(labels))], ticks(0.0, most), middles, labels, list(series))
    body, labelled = [frame.grid(x_label)], []
    width = 0.76 / len(series)
    for n, (name, bars) in enumerate(series.items()):
        for i, value in enumerate(bars):
            if value is None:
                continue
            left, right = frame.x(i + 0.12 + n * width), frame.x(i + 0.12 + (n + 1) * width)
            spread = (intervals or {}).get(name, [None] * len(bars))[i]
            top, middle = frame.y(value), (left + right - 1) / 2
            body.append(
                f'<rect x="{left:.1f}" y="{top:.1f}" width="{right - left - 1:.1f}" '
                f'height="{max(frame.bottom - top, 0):.1f}" fill="{colour(n)}">{tip(name, labels[i], value, spread)}'
                f"</rect>"
            )
            if spread is not None:
                low, top = frame.y(spread[0]), min(top, frame.y(spread[1]))
                body.append(whisker([(middle, low), (middle, top)], across=False))
            if right - left > DIGIT * len(figure(value)):
                labelled.append(f'<text x="{middle:.1f}" y="{top - 3:.1f}" text-anchor="middle">{figure(value)}</text>')
    body += [*frame.across(mark), *labelled]  # over the bars
    return svg(title, body, WIDTH, frame.height, f"by {x_label}. {described(labels, series, intervals)}")


class _Frame:
    """Maps data to pixels and draws axes, grid and legend.

    Attributes:
        bottom: y of the lower axis; height: of the whole chart, in pixels.
    """

    def __init__(
        self,
        x_ticks: Sequence[float],
        y_ticks: Sequence[float],
        marks: Sequence[float],
        names: Sequence[str],
        legend: Sequence[str],
        dashed: bool = False,
    ) -> None:
        self.left, self.right = x_ticks[0], x_ticks[-1] if x_ticks[-1] > x_ticks[0] else x_ticks[0] + 1
        self.low, self.high = y_ticks[0], y_ticks[-1] if y_ticks[-1] > y_ticks[0] else y_ticks[0] + 1
        self.y_ticks, self.marks, self.names = y_ticks, marks, names
        self.legend, above = legend_keys(legend, dashed)
        self.top = TOP + above + 14
        self.bottom = self.top + PLOT
        self.height = self.bottom + BOTTOM

    def x(self, value: float) -> float:
        return LEFT + (value - self.left) / (self.right - self.left) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return self.bottom - (value - self.low) / (self.high - self.low) * PLOT

    def grid(self, x_label: str) -> str:
        parts = [self.legend]
        for value in self.y_ticks:
            y = self.y(value)
            parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
            parts.append(f'<text x="{LEFT - 6}" y="{y + 3:.1f}" text-anchor="end">{figure(value)}</text>')
        for value, name in zip(self.marks, self.names, strict=True):
            x = self.x(value)
            parts.append(f'<text x="{x:.1f}" y="{self.bottom + 14}" text-anchor="middle">{said(name)}</text>')
        middle = (LEFT + WIDTH) / 2
        parts.append(f'<text x="{middle}" y="{self.height - 8}" text-anchor="middle">{said(x_label)}</text>')
        return "".join(parts)

    def across(self, mark: float | None) -> list[str]:
        """A dashed line at a value of the y axis."""
        if mark is None:
            return []
        y = self.y(mark)
        return [f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="mark"/>']


def legend_keys(names: Sequence[str], dashed: bool = False) -> tuple[str, int]:
    """Keys of more than one series below a title, in as many lines as they need; and the height that they take."""
    if len(names) < 2:
        return "", 0
    parts, x, y = [], 4.0, TOP
    for n, name in enumerate(names):
        wide = CHARACTER * len(name) + 30
        if x > 4 and x + wide > WIDTH:
            x, y = 4.0, y + LEGEND_LINE
        line = f'<line x1="{x:.0f}" x2="{x + 14:.0f}" y1="{y + 5}" y2="{y + 5}"'
        parts.append(f'{line} stroke="{colour(n)}" stroke-width="{3 if dashed else 8}"{_dash(n) if dashed else ""}/>')
        parts.append(f'<text x="{x + 18:.0f}" y="{y + 9}">{said(name)}</text>')
        x += wide
    return "".join(parts), y - TOP + LEGEND_LINE


def svg(title: str, body: Iterable[str], width: float, height: float, told: str) -> str:
    """A drawing with its title on top, and in words what it shows."""
    name = said(title)
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" aria-label="{name}" '
        f'xmlns="http://www.w3.org/2000/svg"><title>{name}</title><desc>{said(told)}</desc>'
        f'<text x="4" y="14" class="title">{said(short(title, int(width / TITLE)))}</text>{"".join(body)}</svg>'
    )


def described(labels: Sequence[str], series: Bars, intervals: Intervals | None = None) -> str:
    """Every value of a bar chart in words."""
    parts = []
    for name, bars in series.items():
        spreads = (intervals or {}).get(name, [None] * len(bars))
        values = [
            f"{label} {figure(value)}{between(spread)}"
            for label, value, spread in zip(labels, bars, spreads, strict=True)
            if value is not None
        ]
        parts.append(f"{name}: {', '.join(values)}")
    return "; ".join(parts)


def tip(name: str, label: str, value: float, spread: Interval = None) -> str:
    """What a mark says where a pointer rests on it."""
    return f"<title>{said(name)}, {said(label)}: {figure(value)}{between(spread)}</title>"


def between(spread: Interval) -> str:
    """An interval in words; nothing where there is none."""
    return "" if spread is None else f" ({figure(spread[0])} to {figure(spread[1])})"


def colour(n: int) -> str:
    """Of series number `n`."""
    return COLOURS[n % len(COLOURS)]


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


def highs(intervals: Intervals | None) -> list[float]:
    """Upper ends of all intervals that there are."""
    return [spread[1] for spreads in (intervals or {}).values() for spread in spreads if spread is not None]


def whisker(ends: Sequence[tuple[float, float]], across: bool) -> str:
    """An error bar between two points, with a cap at either end; with `across` it lies, else it stands."""
    (x1, y1), (x2, y2) = ends
    dx, dy = (0, 3) if across else (3, 0)
    caps = "".join(f"M{x - dx:.1f} {y - dy:.1f}L{x + dx:.1f} {y + dy:.1f}" for x, y in ends)
    return f'<path d="M{x1:.1f} {y1:.1f}L{x2:.1f} {y2:.1f}{caps}" class="whisker"/>'


def _told(line: Sequence[tuple[float, float]]) -> str:
    if len(line) <= MOST_TOLD:
        return ", ".join(f"{figure(x)}: {figure(y)}" for x, y in line)
    low, high = min(line, key=lambda p: p[1]), max(line, key=lambda p: p[1])
    marks = {"first": line[0], "lowest": low, "highest": high, "last": line[-1]}
    return ", ".join(f"{name} {figure(y)} at {figure(x)}" for name, (x, y) in marks.items())


def _dash(n: int) -> str:
    dash = DASHES[n % len(DASHES)]
    return f' stroke-dasharray="{dash}"' if dash else ""


def _dot(frame: _Frame, name: str, x: float, y: float, fill: str) -> str:
    where = f'cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}"'
    return f'<circle {where} r="3" fill="{fill}">{tip(name, figure(x), y)}</circle>'
