"""An evaluation on Weights & Biases: summary, tables, plots, the page; online, a W&B Report around them."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import DraftsmithError
from ...files import read_json, write_text
from ...progress import say
from . import PAGE, REPORT
from .charts import short
from .markup import model_name
from .terminal import summary_rows
from .wandb_run import end_run, is_wanted, start_run, without_key

REPORT_URL = "wandb-report.txt"
"""In the run's folder: where its W&B Report is, which a later evaluation brings up to date."""
MOST_TITLE = 120
PROMPTS = "prompts"
_SUMMARY = (
    "tau", "mal", "alpha", "speedup", "tokens_per_s", "baseline_tokens_per_s", "generate_tokens_per_s", "output_check",
    "overhead", "n_prompts", "flag",
)  # fmt: skip
Table = tuple[list[str], list[list[Any]]]
"""Titles of the columns, and rows."""


def upload_report(folder: Path, wandb: bool | None) -> None:
    """Log what lies in a run's folder.

    Its run is one of its own, in the group of the head's folder: training may go on in the run that it began.

    Args:
        folder: of the run, with `report.json` and `report.html`.
        wandb: True or False; None means: when WANDB_API_KEY is set, as in training.
    """
    if not is_wanted(wandb):
        return
    report = read_json(folder / REPORT)
    group = "/".join(folder.parts[-2:])
    config = {name: report[name] for name in ("head", "target", "environment")}
    config |= {"setting": report["summary"]["setting"], "prompts_sha256": report["prompts"]["sha256"]}
    run = start_run(folder, f"{group}/eval", config, job_type="eval", group=group)
    if run is None:
        return
    try:
        _log(run, folder, report)
    except Exception as error:  # the report lies in the folder, whatever happens to its copy
        say(f"Weights & Biases: the report is not complete there: {without_key(str(error))}")
    end_run(run)


def _log(run: Any, folder: Path, report: Mapping[str, Any]) -> None:
    import wandb

    def table(content: Table) -> Any:
        return wandb.Table(columns=content[0], data=content[1])

    found = tables(report)
    values: dict[str, Any] = {f"eval/{name}": table(content) for name, content in found.items()}
    for name, (tree, depths, shares) in _acceptance(report).items():
        values[f"eval/acceptance_{name}"] = wandb.plot.line_series(
            depths, list(shares.values()), list(shares), f"Acceptance by depth, {tree}", "depth"
        )
    for name in [name for name, (_, rows) in found.items() if name != PROMPTS and len(rows) > 1]:
        values[f"eval/tau_by_{name}"] = wandb.plot.bar(table(found[name]), name, "τ", title=f"τ by {name}")
    values["eval/page"] = wandb.Html(str(folder / PAGE), inject=False)
    run.log(values)
    run.summary.update(flat_summary(report))
    artifact = wandb.Artifact(f"report-{run.id}", type="report")
    for name in (REPORT, PAGE):
        artifact.add_file(str(folder / name))
    run.log_artifact(artifact)
    if not run.offline:
        _write_report(run, folder, report, list(found))


def flat_summary(report: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a report as W&B's summary has them: numbers and texts under `eval/`, intervals as low and high."""
    s = report["summary"]
    flat = {f"eval/{name}": s.get(name) for name in _SUMMARY}
    for name in ("tau_ci", "speedup_ci"):
        low, high = s[name] or (None, None)
        flat |= {f"eval/{name}_low": low, f"eval/{name}_high": high}
    for kind in ("conditional", "cumulative"):
        flat |= {f"eval/{kind}_{depth}": share for depth, share in enumerate(s[f"acceptance_{kind}"], 1)}
    return {name: value for name, value in flat.items() if value is not None}


def tables(report: Mapping[str, Any]) -> dict[str, Table]:
    """Prompts, and whatever the figures are grouped by, by name."""
    groups = {**report.get("by", {}), "benchmark": report.get("benchmarks", [])}
    groups["temperature"] = [{**row, "name": f"{row['temperature']:g}"} for row in report.get("temperatures", [])]
    found = {name: _group_table(name, rows) for name, rows in groups.items() if rows}
    return {PROMPTS: _prompt_table(report["prompts"]), **found}


def _prompt_table(prompts: Mapping[str, Any]) -> Table:
    about = ["benchmark", "category", "language", "turn"]
    rows = []
    for fast, plain in zip(prompts["speculative"], prompts["plain"], strict=True):
        tokens, steps = sum(step[2] for step in fast["steps"]), len(fast["steps"])
        tau = tokens / steps if steps else None
        known = [fast.get(name) for name in about]
        rows.append([fast["id"], *known, steps, tokens, tau, fast["seconds"], plain["seconds"]])
    return ["prompt", *about, "steps", "tokens", "τ", "seconds", "seconds plain"], rows


def _group_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    head = [name, "answers", "τ", "τ low", "τ high", "α", "speed-up", "speed-up low", "speed-up high"]
    lines = [
        [row["name"], row["n_prompts"], row["tau"], *(row["tau_ci"] or (None, None)), row.get("alpha"),
         row.get("speedup"), *(row.get("speedup_ci") or (None, None))]
        for row in rows
    ]  # fmt: skip
    return head, lines


def _acceptance(report: Mapping[str, Any]) -> dict[str, tuple[str, list[int], dict[str, list[float]]]]:
    """Of the chosen tree and of the chain that is always given: its text, depths, and shares by kind."""
    s = report["summary"]
    found = {}
    for name, tree, figures in (("tree", s["setting"]["tree"], s), ("chain", s["chain"]["tree"], s["chain"])):
        shares = {kind: figures[f"acceptance_{kind}"] for kind in ("conditional", "cumulative")}
        found[name] = tree, list(range(1, 1 + len(shares["cumulative"]))), shares
    return found


def _write_report(run: Any, folder: Path, report: Mapping[str, Any], names: Sequence[str]) -> None:
    """A W&B Report, where the package for it is installed; an earlier one of this folder is brought up to date."""
    try:
        wr: Any = importlib.import_module("wandb_workspaces.reports.v2")
    except ImportError:
        say("a W&B Report needs the package wandb-workspaces (pip install wandb-workspaces); all else is uploaded")
        return
    place = folder / REPORT_URL
    title = short(f"{report['head']['family']} for {model_name(report['target']['id'])}", MOST_TITLE)
    page = _earlier(wr, place) if place.exists() else wr.Report(project=run.project, entity=run.entity, title=title)
    page.title, page.description = title, "Speculative decoding with a draft head, measured against plain decoding."
    page.blocks = _blocks(wr, run, report, names)
    page.save()
    write_text(place, page.url + "\n")
    say(f"W&B Report: {page.url}")


def _earlier(wr: Any, place: Path) -> Any:
    url = place.read_text(encoding="utf-8").strip()
    try:
        return wr.Report.from_url(url)
    except Exception as error:
        raise DraftsmithError(f"{url} can't be opened ({error}); delete {place} to begin a new one") from error


def _blocks(wr: Any, run: Any, report: Mapping[str, Any], names: Sequence[str]) -> list[Any]:
    """The result in words, then panels of this very run."""
    lines = [f"| {name.strip()} | {text.replace('|', '/')} |" for name, text in summary_rows(report)]
    runs = wr.Runset(project=run.project, entity=run.entity, filters=f"Metric('ID') == '{run.id}'")
    numbers = {"τ": "tau", "speed-up": "speedup", "tokens/s": "tokens_per_s", "tokens/s plain": "baseline_tokens_per_s"}
    charts = [
        wr.ScalarChart(title=title, metric=wr.SummaryMetric(name=f"eval/{name}")) for title, name in numbers.items()
    ]
    shown = [wr.WeavePanelSummaryTable(table_name=f"eval/{name}") for name in names]
    return [
        wr.H1(text="Result"),
        wr.MarkdownBlock(text="\n".join(["| | |", "|---|---|", *lines])),
        wr.PanelGrid(runsets=[runs], panels=charts),
        wr.H1(text="Tables"),
        wr.PanelGrid(runsets=[runs], panels=shown),
        wr.H1(text="The page"),
        wr.PanelGrid(runsets=[runs], panels=[wr.MediaBrowser(media_keys=["eval/page"])]),
    ]
