"""What a model card is made of: tables, code, and the figures of a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_LANGUAGE = re.compile(r"[a-z]{2,3}|code")
_BY = {"category": "kind of prompt", "language": "language", "turn": "turn", "context": "tokens before the step"}
"""Parts of a report's `by`, and what their first column is called."""


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; cells may hold any text, which stands on one line."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(
        "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in line) + " |" for line in lines
    )


def code(language: str, lines: Sequence[str]) -> str:
    """A block of code."""
    return "\n".join([f"```{language}", *(line.rstrip("\n") for line in lines), "```"])


def sentence(text: str) -> str:
    """A line of prose, on one line and with a stop at its end."""
    text = " ".join(text.split())
    return text if text.endswith((".", "!", "?")) else text + "."


def interval(value: float | None, ends: Sequence[float] | None, unit: str = "") -> str:
    """A figure and its 95 % interval; a dash where it isn't known."""
    if value is None:
        return "–"
    around = "" if ends is None else f" ({ends[0]:.2f}–{ends[1]:.2f})"
    return f"{value:.2f}{unit}{around}"


def languages(report: Mapping[str, Any] | None) -> list[str]:
    """Languages of the prompts that a report is on, in codes that the Hub takes; empty where it says none."""
    rows = [] if report is None else report["by"]["language"]
    return [row["name"] for row in rows if _LANGUAGE.fullmatch(row["name"])]


def figures(report: Mapping[str, Any] | None) -> list[str]:
    """Sections with every figure, the circumstances beside it; one sentence where nothing was measured."""
    if report is None:
        return ["## Measured", "It was pushed without a measurement of these weights: nothing is claimed for it."]
    parts = ["## Measured", _circumstances(report), _result(report)]
    if report["summary"]["flag"]:
        parts.append(f"Take the speed-up with care: {sentence(report['summary']['flag'])}")
    parts += ["### Acceptance by depth", _by_depth(report)]
    for name, title in _BY.items():
        rows = report["by"][name]
        if len(rows) > 1:
            parts += [f"### By {title}", _rows(title, rows)]
    if len(report["temperatures"]) > 1:
        rows = [{**row, "name": f"{row['temperature']:g}"} for row in report["temperatures"]]
        parts += ["### By temperature", _rows("temperature", rows)]
    if len(report["benchmarks"]) > 1:
        parts += ["### By benchmark", _rows("benchmark", report["benchmarks"])]
    return parts


def _circumstances(report: Mapping[str, Any]) -> str:
    at, prompts, setting = report["environment"], report["prompts"], report["summary"]["setting"]
    versions = ", ".join(f"{name} {version}" for name, version in at["versions"].items())
    return (
        f"On {at['processor']} ({at['threads']} threads, {at['device']}, {at['dtype']}; {versions}): "
        f"{report['summary']['n_prompts']} answers of at most {prompts['max_new_tokens']} tokens to the prompts "
        f"{prompts['name']} (sha256 `{prompts['sha256'][:16]}`), greedy, batch {setting['batch']}, each in turns with "
        "plain decoding in the same loop, process and dtype. Intervals are 95 % bootstrap intervals over prompts. "
        "Prefill is left out of tokens a second."
    )


def _result(report: Mapping[str, Any]) -> str:
    s, ttft = report["summary"], report["ttft"]
    setting, chain = s["setting"], s["chain"]
    rows = [
        ("tree", f"`{setting['tree']}`: {setting['depth']} deep, {setting['nodes']} nodes with the root"),
        ("tokens a step, τ", interval(s["tau"], s["tau_ci"])),
        (f"τ of `{chain['tree']}`", interval(chain["tau"], chain["tau_ci"])),
        ("acceptance of a draft, α", f"{s['alpha']:.2f}"),
        (
            "speed-up over plain decoding",
            "not given" if s["speedup"] is None else interval(s["speedup"], s["speedup_ci"], "×"),
        ),
        ("tokens a second", f"{s['tokens_per_s']:.1f}, plain {s['baseline_tokens_per_s']:.1f}"),
        ("first token, p50", f"{ttft['speculative']['p50']:.3f} s, plain {ttft['plain']['p50']:.3f} s"),
        ("outputs", s["output_check"]),
    ]
    return table(["", ""], rows)


def _by_depth(report: Mapping[str, Any]) -> str:
    """Of the chain, by which heads compare, and of the chosen tree where that is another."""
    summary = report["summary"]
    found = {summary["chain"]["tree"]: summary["chain"], summary["setting"]["tree"]: summary}
    deepest = max(len(one["acceptance_cumulative"]) for one in found.values())
    rows = [
        [f"`{tree}`, {name}", *(f"{share:.2f}" for share in one[key]), *["–"] * (deepest - len(one[key]))]
        for tree, one in found.items()
        for name, key in (
            ("if the one before is accepted", "acceptance_conditional"),
            ("of all steps", "acceptance_cumulative"),
        )
    ]
    return table(["drafted token", *(str(depth) for depth in range(1, deepest + 1))], rows)


def _rows(title: str, rows: Sequence[Mapping[str, Any]]) -> str:
    """Figures of parts of the prompts; those that no row has are left out."""
    shown: dict[str, Callable[[Mapping[str, Any]], str]] = {
        title: lambda row: row["name"],
        "answers": lambda row: str(row["n_prompts"]),
        "τ": lambda row: interval(row["tau"], row["tau_ci"]),
        "α": lambda row: interval(row.get("alpha"), None),
        "speed-up": lambda row: interval(row["speedup"], row["speedup_ci"], "×"),
    }
    cells = {name: [tell(row) for row in rows] for name, tell in shown.items()}
    cells = {name: column for name, column in cells.items() if set(column) != {"–"}}
    return table(list(cells), list(zip(*cells.values(), strict=True)))
