"""The result as tables in the terminal, readable in 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from .charts import figure, short
from .figures import ABSENT, GROUPS, temperature_name
from .markup import fit, model_name

NAME = 20
"""Characters of a group's name."""
COLUMNS = ("answers", "τ", "α", "speed-up")


def summary_rows(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The figures a user looks for, as (name, text), in reading order."""
    s, setting = report["summary"], report["summary"]["setting"]
    rows = [
        ("tree", f"{setting['tree']}, K = {setting['depth']}, N = {setting['nodes']}"),
        ("setting", f"{temperature_name(setting['temperature'])}, batch {setting['batch']}, {setting['dtype']}"),
        ("prompts", f"{s['n_prompts']} held out × {report['prompts']['max_new_tokens']} new tokens"),
        ("τ, tokens a step", f"{s['tau']:.3f}  {_interval(s['tau_ci'])}"),
    ]
    if setting["tree"] != s["chain"]["tree"]:
        rows.append((f"τ with {s['chain']['tree']}", f"{s['chain']['tau']:.3f}  {_interval(s['chain']['tau_ci'])}"))
    rows += [
        ("mal (before cutting)", f"{s['mal']:.3f}"),
        ("α", f"{s['alpha']:.3f}"),
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
        *_times(report),
    ]
    if s.get("overhead") is not None:
        rows.append(("overhead of a step", f"{100 * s['overhead']:.1f} %"))
    if s.get("measuring_overhead") is not None:
        rows.append(("overhead of measuring", f"{100 * s['measuring_overhead']:.2f} %"))
    if s.get("flag"):
        rows.append(("doubtful", s["flag"]))
    return rows


def caution(report: Mapping[str, Any]) -> str | None:
    """What must be known before the head is used; None where nothing speaks against it."""
    s = report["summary"]
    if s["speedup"] is None:
        return "The output check failed, so no speed-up is given."
    if s["speedup"] < 1:
        return "With this head decoding is slower than without it on these prompts: don't deploy it so."
    return None


def group_rows(report: Mapping[str, Any]) -> dict[str, list[tuple[str, ...]]]:
    """Figures by benchmark, category and the like, by what they are grouped by: (name, *COLUMNS).

    Of what there is only one of, nothing.
    """
    by = report.get("by", {})
    named = [{**row, "name": temperature_name(row["temperature"])} for row in report.get("temperatures", [])]
    groups = {"benchmark": report.get("benchmarks", []), **{name: by.get(key, []) for key, name in GROUPS.items()}}
    groups["temperature"] = named
    return {what: [_group_row(row) for row in rows] for what, rows in groups.items() if len(rows) > 1}


def print_summary(report: Mapping[str, Any]) -> None:
    """Print all of it on standard output."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console()
    table = Table(title=f"{report['head']['family']} for {model_name(report['target']['id'])}", show_header=False)
    for name, text in summary_rows(report):
        table.add_row(name, Text(text))
    console.print(table)
    for what, rows in group_rows(report).items():
        table = Table(what, *COLUMNS, box=box.SIMPLE, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        console.print(table)
    for line in _left_out(report):
        console.print(fit(line), markup=False, highlight=False)
    if (warning := caution(report)) is not None:
        console.print(warning, style="bold red", markup=False)


def _times(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """To the first token, and the parts of a step."""
    rows = []
    if ttft := report.get("ttft"):
        rows += [
            (f"first token, {way}", " ".join(f"{name} {_ms(seconds)}" for name, seconds in times.items()))
            for way, times in ttft.items()
        ]
    if time := report.get("time"):
        rows.append(("time of a step", ", ".join(f"{name} {100 * share:.0f} %" for name, share in time.items())))
    return rows


def _left_out(report: Mapping[str, Any]) -> list[str]:
    """What of the benchmarks could not be measured."""
    lines = []
    for b in report.get("benchmarks", []):
        count = len(b["dropped"])
        if count:
            lines.append(f"{b['name']}: {count} prompt{'s' * (count != 1)} did not fit the context and were left out")
        lines += [f"{b['name']}: {problem}" for problem in b["problems"]]
    return lines


def _group_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    alpha, speedup = row.get("alpha"), row.get("speedup")
    return (
        short(fit(row["name"]), NAME),
        str(row["n_prompts"]),
        f"{row['tau']:.2f} {_two(row['tau_ci'])}",
        ABSENT if alpha is None else f"{alpha:.2f}",
        ABSENT if speedup is None else f"{speedup:.2f}× {_two(row['speedup_ci'])}",
    )


def _ms(seconds: float | None) -> str:
    return ABSENT if seconds is None else f"{figure(1000 * seconds)} ms"


def _interval(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"[{pair[0]:.3f}, {pair[1]:.3f}]"


def _two(pair: Sequence[float] | None) -> str:
    return "" if pair is None else f"[{pair[0]:.2f}, {pair[1]:.2f}]"


def _shares(values: Sequence[float]) -> str:
    return " ".join(f"{v:.3f}" for v in values)
