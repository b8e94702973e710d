"""Lying bars, for long labels: values with error bars, and shares of a whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .charts import (
    CHARACTER,
    TOP,
    WIDTH,
    Bars,
    Interval,
    Intervals,
    colour,
    described,
    figure,
    highs,
    legend_keys,
    short,
    svg,
    ticks,
    tip,
    whisker,
)
from .markup import said

MOST_LABEL = 26
"""Characters of a label that are shown; its tip and the table beside the chart have all of them."""
BAR, GAP, VALUE, AXIS = 13, 7, 40, 34
"""Pixels: thickness of a bar, between two groups, for the value behind the longest bar, for the axis below."""


def lying_bars(
    title: str,
    labels: Sequence[str],
    series: Bars,
    x_label: str,
    *,
    intervals: Intervals | None = None,
    mark: float | None = None,
) -> str:
    """Draw groups of lying bars, one group a label; see `charts.bar_chart`, whose arguments these are."""
    found = [v for bars in series.values() for v in bars if v is not None]
    if not found:
        return ""
    names = [short(label, MOST_LABEL) for label in labels]
    left = CHARACTER * max(map(len, names)) + 12
    keys, above = legend_keys(list(series))
    steps = ticks(0.0, max([*found, *highs(intervals), *([] if mark is None else [mark])]))
    scale = (WIDTH - left - VALUE) / steps[-1]
    top, group = TOP + above + 4, BAR * len(series) + GAP
    bottom = top + group * len(labels)
    body = [keys]
    for value in steps:
        x = left + scale * value
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="grid"/>')
        body.append(f'<text x="{x:.1f}" y="{bottom + 13}" text-anchor="middle">{figure(value)}</text>')
    for i, name in enumerate(names):
        y = top + i * group + group / 2 + 4
        body.append(f'<text x="{left - 6:.1f}" y="{y:.1f}" text-anchor="end">{said(name)}</text>')
    for n, (name, bars) in enumerate(series.items()):
        spreads = (intervals or {}).get(name, [None] * len(bars))
        for i, (length, spread) in enumerate(zip(bars, spreads, strict=True)):
            if length is not None:
                told = tip(name, labels[i], length, spread)
                body.append(_bar(left, top + i * group + GAP / 2 + n * BAR, scale, length, spread, colour(n), told))
    if mark is not None:
        x = left + scale * mark
        body.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" class="mark"/>')
    body.append(f'<text x="{(left + WIDTH) / 2:.1f}" y="{bottom + 28}" text-anchor="middle">{said(x_label)}</text>')
    return svg(title, body, WIDTH, bottom + AXIS, f"{x_label}. {described(labels, series, intervals)}")


def _bar(left: float, y: float, scale: float, value: float, spread: Interval, fill: str, told: str) -> str:
    """One bar with its error bar, and its value behind both."""
    end = left + scale * value
    parts = [
        f'<rect x="{left:.1f}" y="{y:.1f}" width="{end - left:.1f}" height="{BAR - 1}" fill="{fill}">{told}</rect>'
    ]
    if spread is not None:
        middle, low, high = y + (BAR - 1) / 2, left + scale * spread[0], left + scale * spread[1]
        parts.append(whisker([(low, middle), (high, middle)], across=True))
        end = max(end, high)
    return "".join([*parts, f'<text x="{end + 5:.1f}" y="{y + 10:.1f}">{figure(value)}</text>'])


def shares_bar(title: str, shares: Mapping[str, float]) -> str:
    """One bar of parts that make up a whole, each with its share."""
    whole = sum(shares.values())
    if whole <= 0:
        return ""
    keys, above = legend_keys(list(shares))
    y, x = TOP + above + 6, 4.0
    body = [keys]
    for n, (name, share) in enumerate(shares.items()):
        wide, text = (WIDTH - 8) * share / whole, f"{100 * share / whole:.0f} %"
        body.append(
            f'<rect x="{x:.1f}" y="{y}" width="{wide:.1f}" height="26" fill="{colour(n)}">'
            f"<title>{said(name)}: {text}</title></rect>"
        )
        if wide > CHARACTER * len(text):
            body.append(f'<text x="{x + wide / 2:.1f}" y="{y + 17}" text-anchor="middle" class="in">{text}</text>')
        x += wide
    told = ", ".join(f"{name} {100 * share / whole:.1f} %" for name, share in shares.items())
    return svg(title, body, WIDTH, y + 34, told)
