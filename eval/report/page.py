"""One self-contained page with every figure of a report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from ...files import write_text
from .charts import bar_chart, figure, line_chart, short
from .terminal import summary_rows

STYLE = """
:root{--a:#2563a8;--b:#c8641b;--c:#3d8b4e;--ink:#1d2329;--soft:#68727d;--line:#dfe3e8;--back:#fff}
@media (prefers-color-scheme:dark){:root{--a:#6aa8ee;--b:#eb9350;--c:#74c487;--ink:#e6e9ec;--soft:#98a2ad;
--line:#363d45;--back:#15191d}}
body{background:var(--back);color:var(--ink);font:15px/1.5 system-ui,sans-serif;max-width:1000px;margin:2em auto;
padding:0 1em}
h1{font-size:1.5em;margin-bottom:.1em}h2{font-size:1.1em;margin:1.8em 0 .4em}.soft{color:var(--soft)}.bad{color:#c62828}
table{border-collapse:collapse;margin:.4em 0}
td,th{padding:.2em .8em .2em 0;text-align:left;border-bottom:1px solid var(--line)}
td.n{text-align:right;font-variant-numeric:tabular-nums}.charts{display:flex;flex-wrap:wrap;gap:1.2em}
svg{font:11px system-ui,sans-serif;max-width:100%;height:auto}svg text{fill:var(--ink)}.grid{stroke:var(--line)}
.title{font-weight:600;font-size:13px}details{margin:.6em 0}pre{white-space:pre-wrap;font-size:12px}
"""


def write_page(
    path: Path, report: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], stages: Mapping[str, Mapping[str, Any]]
) -> None:
    """Write the page.

    Args:
        path: where, e.g. `report.html`.
        report: the content of `report.json`.
        curve: rows of the training run's `metrics.jsonl`; may be empty.
        stages: `record` parts of the stages' manifests by name, in order; may be empty.
    """
    target, head = report["target"]["id"], report["head"]["family"]
    failed = report["summary"]["speedup"] is None
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>{escape(head)} for {escape(target)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{escape(head)} for {escape(target)}</h1>",
        f"<p class='soft'>{escape(_where(report))}</p>",
        "<h2>Result</h2>" + _table(["", ""], summary_rows(report)),
    ]
    if failed:
        parts.append("<p class='bad'>The output check failed, so no speed-up is given.</p>")
    parts.append(f"<div class='charts'>{''.join(_charts(report, curve, stages))}</div>")
    parts += _tables(report, stages)
    write_text(path, "\n".join([*parts, "</body></html>", ""]))


def _where(report: Mapping[str, Any]) -> str:
    e = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return f"{e['processor']}, {e['threads']} threads, {e['device']}, {e['dtype']}; {versions}"


def _charts(
    report: Mapping[str, Any], curve: Sequence[Mapping[str, Any]], stages: Mapping[str, Mapping[str, Any]]
) -> list[str]:
    chain, passes = report["summary"]["chain"], report["passes"]
    shares = {"conditional": chain["acceptance_conditional"], "cumulative": chain["acceptance_cumulative"]}
    depths = [str(d + 1) for d in range(len(shares["cumulative"]))]
    loss = _points(curve, "train", "loss")
    taus = {"τ_walk": _points(curve, "validation", "tau_walk"), "τ decoded": _points(curve, "validation", "tau")}
    taus = {name: points for name, points in taus.items() if points}
    table = [row for row in report["tuning"]["table"] if row["predicted_speedup"] is not None]
    trees = [short(row["tree"]) for row in table]
    speeds = {name: [row[f"{name}_speedup"] for row in table] for name in ("predicted", "measured")}
    costs = sorted({(float(c["rows"]), 1000 * c["target_seconds"]) for c in passes.values()})
    seconds = {name: record["seconds"] for name, record in stages.items() if "seconds" in record}
    return [
        bar_chart(f"Acceptance by depth, {chain['tree']}", depths, shares, "drafted token"),
        line_chart("Training loss", {"loss": loss}, "step", dots=len(loss) < 40) if loss else "",
        line_chart("τ on held-out answers while training", taus, "step", zero=False),
        bar_chart("Speed-up by tree (tuning prompts)", trees, speeds, "tree") if table else "",
        line_chart("Cost of a target pass, ms", {"pass": costs}, "rows N"),
        bar_chart("Seconds of each stage", list(seconds), {"s": list(seconds.values())}, "stage") if seconds else "",
    ]


def _points(curve: Sequence[Mapping[str, Any]], kind: str, key: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[key])) for row in curve if row["kind"] == kind and row.get(key) is not None]


def _tables(report: Mapping[str, Any], stages: Mapping[str, Mapping[str, Any]]) -> list[str]:
    passes, tuning = report["passes"], report["tuning"]
    parts = _acceptance(report["summary"])
    names = ["expected_tau", "predicted_tokens_per_s", "measured_tokens_per_s", "predicted_speedup", "measured_speedup"]
    speeds = [
        [r["tree"], str(r["depth"]), str(r["nodes"]), *("–" if r[n] is None else figure(r[n]) for n in names)]
        for r in tuning["table"]
    ]
    titles = ["tree", "K", "N", *(n.replace("_per_s", "/s").replace("_", " ").replace("tau", "τ") for n in names)]
    parts.append(f"<h2>Choice of the tree on {tuning['n_prompts']} tuning prompts</h2>" + _table(titles, speeds))
    costs = [
        [way, str(c["rows"]), *(figure(1000 * c[f"{part}_seconds"]) for part in ("target", "draft", "rest"))]
        for way, c in passes.items()
    ]
    parts.append("<h2>Cost of a step's parts, in ms</h2>" + _table(["tree", "N", "target", "draft", "rest"], costs))
    parts += _drift(stages.get("train", {}).get("drift"))
    if stages:
        spent = [
            [name, figure(r.get("seconds", 0.0)), figure(r.get("peak_rss_bytes", 0) / 2**20)]
            for name, r in stages.items()
        ]
        parts.append("<h2>Stages</h2>" + _table(["stage", "seconds", "peak memory, MiB"], spent))
    prompts = [
        [p["id"], str(len(p["steps"])), str(sum(s[2] for s in p["steps"])), figure(p["seconds"]), figure(b["seconds"])]
        for p, b in zip(report["prompts"]["speculative"], report["prompts"]["plain"], strict=True)
    ]
    head = ["prompt", "steps", "tokens", "seconds", "seconds plain"]
    parts.append(f"<details><summary>{len(prompts)} prompts</summary>{_table(head, prompts)}</details>")
    return parts


def _acceptance(summary: Mapping[str, Any]) -> list[str]:
    """Acceptance by depth of the chosen tree and of the chain that is always given; by rank for trees."""
    parts = []
    for name, figures in {summary["chain"]["tree"]: summary["chain"], summary["setting"]["tree"]: summary}.items():
        rows = zip(figures["acceptance_conditional"], figures["acceptance_cumulative"], strict=True)
        shares = [[str(d), figure(a), figure(b)] for d, (a, b) in enumerate(rows, 1)]
        parts.append(f"<h2>Acceptance, {escape(name)}</h2>" + _table(["depth", "conditional", "cumulative"], shares))
    if summary["setting"]["kind"] != "chain":
        by_rank = summary["acceptance_by_rank"]
        ranks = [f"child {r}" for r in range(1, 1 + max(map(len, by_rank), default=0))]
        lines = [[str(d), *map(figure, row)] for d, row in enumerate(by_rank, 1)]
        parts.append("<h2>Share of steps that accept a parent's r-th child</h2>" + _table(["depth", *ranks], lines))
    return parts


def _drift(drift: Mapping[str, Any] | None) -> list[str]:
    """How far a target that was tuned with its head moved from the original one; nothing for other heads."""
    if not drift:
        return []
    rows = [[name.replace("_", " "), figure(v) if isinstance(v, int | float) else str(v)] for name, v in drift.items()]
    return ["<h2>How far the tuned target is from the original</h2>" + _table(["", ""], rows)]


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    top = "".join(f"<th>{escape(h)}</th>" for h in head) if any(head) else ""
    lines = ["".join(_cell(text, number=i > 0) for i, text in enumerate(row)) for row in rows]
    body = "".join(f"<tr>{line}</tr>" for line in ([top] if top else []) + lines)
    return f"<table>{body}</table>"


def _cell(text: str, number: bool) -> str:
    return f'<td class="n">{escape(text)}</td>' if number else f"<td>{escape(text)}</td>"
