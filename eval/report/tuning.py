"""A tuning in the terminal: the best settings, every setting at the smallest batch, engines, advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import short

BEST_COLUMNS = ("temperature", "batch", "best", "speed-up", "tokens/s", "plain", "best chain", "its speed-up")
TABLE_COLUMNS = ("setting", "K", "nodes", "τ", "predicted", "measured", "speed-up", "off by")
WIDTH = 120
"""Characters of the tables where standard output is no terminal that says how wide it is."""


def best_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a temperature and batch, in the order of BEST_COLUMNS."""
    return [
        (
            f"{cell['temperature']:g}",
            str(cell["batch"]),
            *_best(cell["best"]),
            "–" if cell["best"] is None else f"{cell['best']['tokens_per_s']:.1f}",
            f"{cell['plain_tokens_per_s']:.1f}",
            *_best(cell["best_chain"]),
        )
        for cell in result["cells"]
    ]


def _best(best: Mapping[str, Any] | None) -> tuple[str, str]:
    if best is None:
        return "–", "outputs differ"
    low, high = best["speedup_ci"]
    pays = "" if best["pays"] else " (plain is faster)"
    doubtful = " (doubtful)" if best["flag"] else ""
    return short(best["tree"], 24) + pays, f"{best['speedup']:.2f}× [{low:.2f}, {high:.2f}]{doubtful}"


def table_rows(cell: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a setting of a cell, those that promise most first, in the order of TABLE_COLUMNS."""
    rows = sorted(cell["table"], key=lambda row: -row["predicted_tokens_per_s"])
    return [
        (
            short(row["tree"], 24),
            str(row["depth"]),
            str(row["nodes"]),
            f"{row['tau']:.2f}",
            f"{row['predicted_tokens_per_s']:.1f} ({row['predicted_speedup']:.2f}×)",
            "" if row["measured_tokens_per_s"] is None else f"{row['measured_tokens_per_s']:.1f}",
            ""
            if row["measured_speedup"] is None
            else f"{row['measured_speedup']:.2f}×" + " (doubtful)" * bool(row["flag"]),
            "" if row["error"] is None else f"{row['error']:+.1%}",
        )
        for row in rows
    ]


def doubts(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why the speed-ups of some settings can't be believed."""
    return [
        f"{row['tree']}, temperature {cell['temperature']:g}, batch {cell['batch']}: {row['flag']}"
        for cell in cells
        for row in cell["table"]
        if row["flag"]
    ]


def engine_lines(serve: Sequence[Mapping[str, Any]]) -> list[str]:
    """What each engine must be told, with its rules."""
    lines = []
    for entry in serve:
        if "refused" in entry:
            lines.append(f"{entry['title']}: not for this head: {entry['refused']}")
            continue
        gains = ", ".join(
            f"batch {batch} {speedup:.2f}×" for batch, speedup in zip(entry["batches"], entry["speedups"], strict=True)
        )
        checked = f"checked with {entry['checked']}" if entry["checked"] else "config only: not run here"
        lines.append(f"{entry['title']}, {entry['tree']} ({gains} in the decoder here; {checked}):")
        lines += [f"    {command}" for command in entry["commands"]]
        lines += [f"  - {rule}" for rule in [*entry["constraints"], *entry["notes"]]]
    return lines


def print_tuning(result: Mapping[str, Any]) -> None:
    """Print everything on standard output."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    e, head = result["environment"], result["head"]
    prompts = ", ".join(f"{p['count']} of {p['name']} × {p['max_new_tokens']} new tokens" for p in result["prompts"])
    best = Table(
        *BEST_COLUMNS,
        title=f"{head['name']} for {result['model']}: {prompts}",
        caption=f"{e['processor']}, {e['threads']} threads, {e['dtype']}; measured, against plain decoding",
    )
    for row in best_rows(result):
        best.add_row(*row)
    console.print(best)
    first = result["cells"][0]
    table = Table(*TABLE_COLUMNS, title=f"temperature {first['temperature']:g}, batch {first['batch']}: tokens/s")
    for row in table_rows(first):
        table.add_row(*row)
    console.print(table)
    for cell in result["cells"]:
        if cell["left_out"]:
            console.print(
                f"temperature {cell['temperature']:g}, batch {cell['batch']}: {len(cell['left_out'])} large trees are "
                "left out, their passes take too long to pay",
                highlight=False,
            )
    problems = [problem for p in result["prompts"] for problem in p["problems"]]
    for line in [
        *(f"left out: {problem}" for problem in problems),
        *doubts(result["cells"]),
        *result["advice"],
        "",
        *engine_lines(result["serve"]),
    ]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
