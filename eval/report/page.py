"""One self-contained page with every figure of a report: drawings as text, no script, nothing from a network."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...files import read_json, write_text
from . import LOAD, PAGE, REPORT, TUNE
from .charts import figure
from .drawing import coloured_text, left_out, legend, tree_drawing
from .figures import ABSENT, Row, Shown, amount, interval, sections
from .markup import model_name, opened_on_demand, said, table
from .style import STYLE
from .terminal import caution, summary_rows

CURVE = "metrics.jsonl"
DEFINITIONS = (
    "τ is the number of tokens that decoding steps emitted / the number of steps, pooled over all of them; a step is "
    "one draft and one pass of the target. The prompt's pass and its token are left out; the target's own token at the "
    "end of a step counts; tokens behind the end of the answer don't. mal is 1 + accepted drafts / steps that drafted, "
    "before an answer is cut at its end. α is accepted drafts / (accepted drafts + first refusals). Cumulative "
    "acceptance at depth d is the share of the steps that drafted so deep whose accepted path reaches it; conditional "
    "acceptance is the same among those that reached the depth before. The speed-up is tokens/s of decoding steps "
    "against plain decoding in the same loop, process and number format, on the same prompts, taking turns. Intervals "
    "are 95 % bootstrap intervals over prompts."
)


def write_page(
    path: Path,
    report: Mapping[str, Any],
    curve: Sequence[Row],
    stages: Mapping[str, Row],
    load: Mapping[str, Any] | None = None,
    tune: Mapping[str, Any] | None = None,
) -> None:
    """Write the page.

    Args:
        path: where, e.g. `report.html`.
        report: the content of `report.json`. Where it is of an older version, what it doesn't hold is left out.
        curve: rows of the training run's `metrics.jsonl`; may be empty.
        stages: `record` parts of the stages' manifests by name, in order; may be empty.
        load, tune: the contents of `load.json` and `tune.json`, if there are any.
    """
    stale = {LOAD: load, TUNE: tune}
    stale = {name: found for name, found in stale.items() if found is not None and _is_other(report, found)}
    shown = Shown(report, curve, stages, None if LOAD in stale else load, None if TUNE in stale else tune)
    name = f"{report['head']['family']} for {model_name(report['target']['id'])}"
    parts = [
        '<!doctype html><html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{said(name)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{said(name)}</h1>",
        f'<p class="soft">{said(_where(report))}</p>',
        "<h2>Result</h2>" + table([], summary_rows(report), "result"),
    ]
    if (warning := caution(report)) is not None:
        parts.append(f'<p class="bad">{said(warning)}</p>')
    for name in stale:
        parts.append(f'<p class="bad">{name} is of other weights than this report, and left out: measure again.</p>')
    parts.append(f'<p class="soft">{said(DEFINITIONS)}</p>')
    for heading, charts in sections(shown).items():
        parts.append(f'<h2>{said(heading)}</h2><div class="charts">{"".join(chart.html() for chart in charts)}</div>')
    parts += [*_advice(shown.tune), *_tree(report), *_samples(report), *_drift(stages.get("train", {}).get("drift"))]
    parts += [*_measured(report), *_prompts(report)]
    write_text(path, "\n".join([*parts, "</body></html>", ""]))


def refresh_page(folder: Path) -> Path | None:
    """Write a run's page anew from what lies in its folder; call it when a report, `load.json` or `tune.json` appeared.

    Args:
        folder: of the run: `report.json` lies there, with the records of the run's stages under "stages" where there
            were any; the training curve is found as `eval.trained` finds a head's training.

    Returns:
        The page; None where there is no report yet: it will show all of this once it is made.
    """
    from ..trained import trained_at  # which imports this package

    if not (folder / REPORT).exists():
        return None
    report = read_json(folder / REPORT)
    more = {name: read_json(folder / name) if (folder / name).exists() else None for name in (LOAD, TUNE)}
    curve = _curve(trained_at(folder.parent, folder.name).train / CURVE)
    write_page(folder / PAGE, report, curve, report.get("stages", {}), more[LOAD], more[TUNE])
    return folder / PAGE


def _curve(path: Path) -> list[Row]:
    """Rows of a training's figures up to the first line that isn't whole: a killed process tears its last one."""
    rows: list[Row] = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def _is_other(report: Mapping[str, Any], found: Mapping[str, Any]) -> bool:
    """Whether something was measured of other weights than the report, as far as both say."""
    here, there = report.get("head_sha256"), found.get("head_sha256")
    return here is not None and there is not None and here != there


def _where(report: Mapping[str, Any]) -> str:
    e = report["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return f"{e['processor']}, {_threads(e)}, {e['device']}, {e['dtype']}; {versions}"


def _threads(environment: Mapping[str, Any]) -> str:
    count = environment["threads"]
    return f"{count} thread{'s' * (count != 1)}"


def _advice(tune: Mapping[str, Any] | None) -> list[str]:
    """What a tuning says in words."""
    lines = "".join(f"<li>{said(line)}</li>" for line in (tune or {}).get("advice", []))
    return [f"<h2>What the tuning says</h2><ul>{lines}</ul>"] if lines else []


def _tree(report: Mapping[str, Any]) -> list[str]:
    """One drawn tree."""
    found = report.get("tree")
    if not found:
        return []
    nodes = found["nodes"]
    accepted = sum(node["accepted"] for node in nodes) - 1
    text = f"Step {found['step']} of {found['id']}, the one that accepted most of this answer: {accepted} drafts."
    if "bonus" in found:
        text += f" The target's own token behind them: {found['bonus']!r}."
    if left_out(nodes):
        text += f" {left_out(nodes)} more nodes were refused and are not drawn."
    drawing = tree_drawing(f"A tree of {len(nodes)} nodes", nodes)
    rows = [
        [repr(n["token"]), str(n["depth"]), ABSENT if n["parent"] < 0 else repr(nodes[n["parent"]]["token"]),
         "accepted" if n["accepted"] else "refused"]
        for n in nodes
    ]  # fmt: skip
    nodes_table = opened_on_demand("nodes", table(["token", "depth", "behind", ""], rows))
    box = f'<div class="scroll wide" role="group" aria-label="tree" tabindex="0">{drawing}</div>'
    return [f"<h2>One drawn tree</h2><figure>{box}<figcaption>{said(text)}</figcaption>{nodes_table}</figure>"]


def _samples(report: Mapping[str, Any]) -> list[str]:
    """Answers by how each token came."""
    samples = [sample for sample in report.get("samples", []) if sample["pieces"]]
    if not samples:
        return []
    parts = ["<h2>How each token came</h2>" + legend([piece for s in samples for piece in s["pieces"]])]
    for sample in samples:
        parts.append(f'<h3>{said(sample["id"])}</h3><p class="prompt">{said(sample["prompt"])}</p>')
        parts.append(coloured_text(sample["pieces"]))
    return parts


def _drift(drift: Row | None) -> list[str]:
    """How far a target that was tuned with its head moved from the original one; nothing for other heads."""
    if not drift:
        return []
    rows = [[name.replace("_", " "), figure(v) if isinstance(v, int | float) else str(v)] for name, v in drift.items()]
    return ["<h2>How far the tuned target is from the original</h2>" + table([], rows)]


def _measured(report: Mapping[str, Any]) -> list[str]:
    """What was measured on what, and by which versions."""
    target, e, prompts = report["target"], report["environment"], report["prompts"]
    rows = [
        ("target", f"{model_name(target['id'])}, revision {target['revision'] or ABSENT}"),
        ("target's fingerprint", target["fingerprint"]),
        ("chat template, sha256", target["chat_template_sha256"] or ABSENT),
        ("head's weights, sha256", report.get("head_sha256", ABSENT)),
        ("prompts", f"{prompts['name']}, sha256 {prompts['sha256']}"),
        ("machine", f"{e['processor']}, {e['cpus']} CPUs, {e['system']}"),
        ("decoding", f"{e['device']}, {e['dtype']}, {_threads(e)}; processes that measured: {e['sessions']}"),
        *((name, str(version)) for name, version in e["versions"].items()),
    ]
    parts = ["<h2>Measured on</h2>" + table([], rows, "measured on")]
    benchmarks = report.get("benchmarks", [])
    if benchmarks:
        head = ["benchmark", "source", "licence", "answers", "τ, 95 %", "speed-up", "left out", "sha256"]
        lines = [
            [b["name"], b["source"], b["licence"] or ABSENT, str(b["n_prompts"]), interval(b["tau_ci"]),
             amount(b["speedup"]), str(len(b["dropped"])), b["sha256"][:12]]
            for b in benchmarks
        ]  # fmt: skip
        parts.append(table(head, lines, "benchmarks"))
        problems = [f"{b['name']}: {problem}" for b in benchmarks for problem in b["problems"]]
        if problems:
            items = "".join(f"<li>{said(problem)}</li>" for problem in problems)
            parts.append(opened_on_demand(f"{len(problems)} problems with benchmark files", f"<ul>{items}</ul>"))
    return parts


def _prompts(report: Mapping[str, Any]) -> list[str]:
    """Every held-out prompt."""
    rows = [
        [p["id"], str(len(p["steps"])), str(sum(s[2] for s in p["steps"])), figure(p["seconds"]), figure(b["seconds"])]
        for p, b in zip(report["prompts"]["speculative"], report["prompts"]["plain"], strict=True)
    ]
    head = ["prompt", "steps", "tokens", "seconds", "seconds plain"]
    return [opened_on_demand(f"{len(rows)} prompts", table(head, rows, "prompts"))]
