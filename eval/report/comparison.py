"""A comparison of all ways to decode in the terminal: one table over all prompts, and one a benchmark."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import short

COLUMNS = (
    "scheme", "training", "parameters", "tree", "τ", "acceptance by depth", "speed-up", "tokens/s", "lossless",
)  # fmt: skip
WIDTH = 150
"""Characters of the table where standard output is no terminal that says how wide it is."""


BENCHMARK_COLUMNS = ("scheme", "all")
"""Of the table by benchmark; a column a benchmark comes behind them."""


def comparison_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """One row a way to decode, in the order of COLUMNS."""
    return [_row(scheme) for scheme in result["schemes"]]


def benchmark_rows(result: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """τ and speed-up of each way over all prompts and over each benchmark's."""
    tables: list[Sequence[Mapping[str, Any]]] = [result["schemes"], *(b["schemes"] for b in result["benchmarks"])]
    return [(row[0]["name"], *map(_short_figures, row)) for row in zip(*tables, strict=True)]


def _short_figures(s: Mapping[str, Any]) -> str:
    return f"{s['tau']:.2f}, " + (_speedup(s) if s["speedup"] is None else f"{s['speedup']:.2f}×")


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
    if s["lossless"] is None:
        return "by its law"
    if not s["lossless"]:
        return "no"
    return "yes" if s["baseline"] == "plain" else "vs the tuned target"


def print_comparison(result: Mapping[str, Any]) -> None:
    """Print the tables on standard output, and below them what they don't say."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = WIDTH
    prompts, e = result["prompts"], result["environment"]
    how = f"temperature {result['temperature']:g}" if result["temperature"] else "greedy"
    title = (
        f"{result['model']}: {prompts['count']} prompts ({prompts['name']}) × {prompts['max_new_tokens']} new tokens"
    )
    table = Table(*COLUMNS, title=f"{title}, {how}", caption=f"{e['processor']}, {e['threads']} threads, {e['dtype']}")
    for row in comparison_rows(result):
        table.add_row(*row)
    console.print(table)
    if len(result["benchmarks"]) > 1:
        by = Table(*BENCHMARK_COLUMNS, *(b["name"] for b in result["benchmarks"]), title="τ and speed-up by benchmark")
        for row in benchmark_rows(result):
            by.add_row(*row)
        console.print(by)
    for benchmark in result["benchmarks"]:
        for problem in benchmark["problems"]:
            console.print(f"{benchmark['name']}: {problem}", markup=False)
    for s in result["schemes"]:
        if not s["tau"]:
            console.print(f"{s['name']}: every answer ends with its first token; no speed-up is given", markup=False)
        if s["lossless"] is False:
            console.print(f"{s['name']}: {s['output_check']}; no speed-up is given", markup=False)
        if s["flag"]:
            console.print(f"{s['name']}: {s['flag']}", markup=False)
        if s["drift"]:
            moved = ", ".join(f"{name.replace('_', ' ')} {value:.4g}" for name, value in s["drift"].items())
            console.print(f"{s['name']}, its target against the original: {moved}", markup=False)
