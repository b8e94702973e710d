"""A comparison of all ways to decode as one table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .charts import short

COLUMNS = (
    "scheme", "training", "parameters", "tree", "τ", "acceptance by depth", "speed-up", "tokens/s", "lossless",
)  # fmt: skip
WIDTH = 150
"""Characters of the table where standard output is no terminal that says how wide it is."""


def comparison_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a way to decode, in the order of COLUMNS."""
    return [_row(scheme) for scheme in result["schemes"]]


def _row(s: Mapping[str, Any]) -> tuple[str, ...]:
    parameters, minutes = s["parameters"], s["train_minutes"]
    return (
        s["name"],
        "none" if s["kind"] != "head" else "unfinished" if minutes is None else f"{minutes:.1f} min",
        "–" if parameters is None else f"{parameters / 1e6:.1f} M",
        short(s["tree"] or "–", 18),
        f"{s['tau']:.2f}",
        " ".join(f"{share:.2f}" for share in s["acceptance_conditional"]) or "–",
        _speedup(s),
        f"{s['tokens_per_s']:.1f}",
        _lossless(s),
    )


def _speedup(s: Mapping[str, Any]) -> str:
    if s["name"] == s["baseline"]:
        return "baseline"
    if s["speedup"] is None:
        return "–"
    low, high = s["speedup_ci"]
    return f"{s['speedup']:.2f}× [{low:.2f}, {high:.2f}]" + (" (doubtful)" if s["flag"] else "")


def _lossless(s: Mapping[str, Any]) -> str:
    if not s["lossless"]:
        return "no"
    return "yes" if s["baseline"] == "plain" else "vs the tuned target"


def print_comparison(result: Mapping[str, Any]) -> None:
    """Print the table on standard output, and below it what it doesn't say."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    prompts, e = result["prompts"], result["environment"]
    title = f"{result['model']}: {prompts['count']} held-out prompts × {prompts['max_new_tokens']} new tokens, greedy"
    table = Table(*COLUMNS, title=title, caption=f"{e['processor']}, {e['threads']} threads, {e['dtype']}")
    for row in comparison_rows(result):
        table.add_row(*row)
    console.print(table)
    for s in result["schemes"]:
        if not s["lossless"]:
            console.print(f"{s['name']}: {s['output_check']}; no speed-up is given", markup=False)
        if s["flag"]:
            console.print(f"{s['name']}: {s['flag']}", markup=False)
        if s["drift"]:
            moved = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in s["drift"].items())
            console.print(f"{s['name']}, its target against the original: {moved}", markup=False)
