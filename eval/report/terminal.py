"""The result as a table in the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures a user looks for, as (name, text), in reading order."""
    s, setting = report["summary"], report["summary"]["setting"]
    rows = [
        ("tree", f"{setting['tree']}, K = {setting['depth']}, N = {setting['nodes']}"),
        ("setting", f"greedy, batch {setting['batch']}, {setting['dtype']}"),
        ("prompts", f"{s['n_prompts']} held out × {report['prompts']['max_new_tokens']} new tokens"),
        ("τ, tokens a step", f"{s['tau']:.3f}  {_interval(s['tau_ci'])}"),
    ]
    if setting["tree"] != s["chain"]["tree"]:
        rows.append((f"τ with {s['chain']['tree']}", f"{s['chain']['tau']:.3f}  {_interval(s['chain']['tau_ci'])}"))
    rows += [
        ("mal (before cutting)", f"{s['mal']:.3f}"),
        ("acceptance, conditional", _shares(s["acceptance_conditional"])),
        ("acceptance, cumulative", _shares(s["acceptance_cumulative"])),
    ]
    if setting["kind"] != "chain":
        rows += [(f"  depth {d}, by rank", _shares(ranks)) for d, ranks in enumerate(s["acceptance_by_rank"], 1)]
    if s["speedup"] is not None:
        rows.append(("speed-up", f"{s['speedup']:.2f}×  {_interval(s['speedup_ci'])}"))
    rows += [
        ("tokens/s", f"{s['tokens_per_s']:.1f} with the head, {s['baseline_tokens_per_s']:.1f} plain, same loop"),
        ("transformers.generate", f"{s['generate_tokens_per_s']:.1f} tokens/s"),
        ("outputs against plain", s["output_check"]),
    ]
    if s.get("overhead") is not None:
        rows.append(("overhead of a step", f"{100 * s['overhead']:.1f} %"))
    if s.get("flag"):
        rows.append(("doubtful", s["flag"]))
    return rows


def print_summary(report: Mapping[str, Any]) -> None:
    """Print the table on standard output."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"{report['head']['family']} for {report['target']['id']}", show_header=False)
    for name, text in summary_rows(report):
        table.add_row(name, text)
    Console().print(table)


def _interval(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"[{pair[0]:.3f}, {pair[1]:.3f}]"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values)
