"""The charts of a page, each with its figures as a table below it.

A builder gives a chart for each thing that there is to show: none where a report has nothing of its kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .bars import lying_bars, shares_bar
from .charts import bar_chart, figure, line_chart
from .markup import opened_on_demand, said, table

MOST_ROWS = 40
"""Rows of a training curve's table; a longer curve is thinned evenly, its last row kept."""
ABSENT = "–"
PERCENTILES = ("p50", "p95")
SPEEDUP = "speed-up against plain decoding"
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Shown:
    """What a page shows.

    Attributes:
        report: the content of `report.json`.
        curve: rows of the training run's `metrics.jsonl`.
        stages: `record` parts of the stages' manifests by name, in order.
        load: the content of `load.json`; tune: of `tune.json`; None where these commands weren't run.
    """

    report: Mapping[str, Any]
    curve: Sequence[Row] = ()
    stages: Mapping[str, Row] = field(default_factory=dict)
    load: Mapping[str, Any] | None = None
    tune: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Chart:
    """A drawing and its figures.

    Attributes:
        note: a sentence below the drawing.
    """

    drawing: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""

    def html(self) -> str:
        """The drawing with its note and its table."""
        note = f"<figcaption>{said(self.note)}</figcaption>" if self.note else ""
        return f"<figure>{self.drawing}{note}{opened_on_demand('figures', table(self.head, self.rows))}</figure>"


def amount(value: float | None) -> str:
    """A figure, or a dash where there is none."""
    return ABSENT if value is None else figure(value)


def interval(pair: Sequence[float] | None) -> str:
    """A 95 % interval, or a dash."""
    return ABSENT if pair is None else f"{figure(pair[0])} to {figure(pair[1])}"


def temperature_name(value: float) -> str:
    """How a temperature is called."""
    return "greedy" if value == 0 else f"temperature {value:g}"


# --- acceptance -------------------------------------------------------------------------------------------------------


def by_depth(shown: Shown) -> list[Chart]:
    """Acceptance by depth of the chosen tree and of the chain that is always given."""
    s = shown.report["summary"]
    charts = []
    for tree, found in {s["setting"]["tree"]: s, s["chain"]["tree"]: s["chain"]}.items():
        shares = {"conditional": found["acceptance_conditional"], "cumulative": found["acceptance_cumulative"]}
        depths = [str(d) for d in range(1, 1 + len(shares["cumulative"]))]
        rows = [[d, *map(figure, pair)] for d, *pair in zip(depths, *shares.values(), strict=True)]
        drawing = bar_chart(f"Acceptance by depth, {tree}", depths, shares, "depth of the drafted token")
        charts.append(Chart(drawing, ["depth", *shares], rows))
    return charts


def by_rank(shown: Shown) -> list[Chart]:
    """Of a tree that is no chain: which of its parent's children each accepted node was."""
    s = shown.report["summary"]
    depths = s["acceptance_by_rank"] if s["setting"]["kind"] != "chain" else []
    lines = {f"depth {d}": [(float(r), share) for r, share in enumerate(row, 1)] for d, row in enumerate(depths, 1)}
    drawing = line_chart(f"Acceptance by rank, {s['setting']['tree']}", lines, "rank of the child")
    widest = max(map(len, depths), default=0)
    head = ["depth", *(f"child {r}" for r in range(1, 1 + widest))]
    rows = [[str(d), *map(figure, row), *[ABSENT] * (widest - len(row))] for d, row in enumerate(depths, 1)]
    return [Chart(drawing, head, rows, "Share of steps whose accepted path goes through a parent's r-th child.")]


# --- where it pays ----------------------------------------------------------------------------------------------------

GROUPS = {"category": "category", "context": "tokens before the step", "language": "language", "turn": "turn"}
"""Keys of a report's `by`, and what they are called."""


def by_group(shown: Shown) -> list[Chart]:
    """Tau by category, context length, language and turn; of what there is only one of, nothing."""
    found = {f"τ by {name}": shown.report.get("by", {}).get(key, []) for key, name in GROUPS.items()}
    return [_taus(title, rows, [str(row["name"]) for row in rows]) for title, rows in found.items() if len(rows) > 1]


def by_benchmark(shown: Shown) -> list[Chart]:
    """Tau and speed-up of each benchmark, where there is more than one."""
    rows = shown.report.get("benchmarks", [])
    return _both("benchmark", rows, [str(row["name"]) for row in rows])


def by_temperature(shown: Shown) -> list[Chart]:
    """Tau and speed-up at each temperature, where there is more than one."""
    rows = shown.report.get("temperatures", [])
    names = [temperature_name(row["temperature"]) for row in rows]
    told = [f"{name}: {row['output_check']}" for name, row in zip(names, rows, strict=True)]
    return _both("temperature", rows, names, f"Outputs, {'; '.join(told)}.")


def _both(what: str, rows: Sequence[Row], names: Sequence[str], note: str = "") -> list[Chart]:
    if len(rows) < 2:
        return []
    speedups = _grouped(f"Speed-up by {what}", rows, names, "speedup", SPEEDUP, mark=1.0, note=note)
    return [_taus(f"τ by {what}", rows, names), speedups]


def _taus(title: str, rows: Sequence[Row], names: Sequence[str]) -> Chart:
    return _grouped(title, rows, names, "tau", "τ, tokens a step")


def _grouped(
    title: str, rows: Sequence[Row], names: Sequence[str], key: str, label: str, *, mark: float | None = None,
    note: str = "",
) -> Chart:  # fmt: skip
    bars, spreads = {label: [row[key] for row in rows]}, {label: [row[f"{key}_ci"] for row in rows]}
    drawing = lying_bars(title, names, bars, label, intervals=spreads, mark=mark)
    head = ["", "answers", "τ", "τ, 95 %", "α", "speed-up", "speed-up, 95 %"]
    lines = [
        [
            name, amount(row.get("n_prompts")), amount(row["tau"]), interval(row["tau_ci"]), amount(row.get("alpha")),
            amount(row.get("speedup")), interval(row.get("speedup_ci")),
        ]
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    return Chart(drawing, head, lines, note)


# --- speed ------------------------------------------------------------------------------------------------------------


def by_tree(shown: Shown) -> list[Chart]:
    """Speed-up of each tree that was tried on the tuning prompts."""
    tuning = shown.report["tuning"]
    rows = [row for row in tuning["table"] if row["predicted_speedup"] is not None]
    speeds = {name: [row[f"{name}_speedup"] for row in rows] for name in ("predicted", "measured")}
    title = f"Speed-up by tree, {tuning['n_prompts']} tuning prompts"
    names = ["expected_tau", "predicted_tokens_per_s", "measured_tokens_per_s", "predicted_speedup", "measured_speedup"]
    head = ["tree", "K", "N", *(n.replace("_per_s", "/s").replace("_", " ").replace("tau", "τ") for n in names)]
    lines = [[r["tree"], str(r["depth"]), str(r["nodes"]), *(amount(r[n]) for n in names)] for r in tuning["table"]]
    drawing = lying_bars(title, [row["tree"] for row in rows], speeds, SPEEDUP, mark=1.0)
    return [Chart(drawing, head, lines, "The leaders by prediction were measured.")]


def by_pass(shown: Shown) -> list[Chart]:
    """What a pass of the target costs by its rows, and the other parts of a step."""
    passes = shown.report["passes"]
    costs = sorted({(float(c["rows"]), 1000 * c["target_seconds"]) for c in passes.values()})
    parts = ("target", "draft", "rest")
    rows = [
        [way, str(c["rows"]), *(figure(1000 * c[f"{part}_seconds"]) for part in parts)] for way, c in passes.items()
    ]
    drawing = line_chart("Cost of a target pass, ms", {"pass": costs}, "rows N")
    return [Chart(drawing, ["tree", "N", *(f"{part}, ms" for part in parts)], rows)]


def by_part(shown: Shown) -> list[Chart]:
    """Where the time of a step goes."""
    shares = shown.report.get("time") or {}
    rows = [[name, f"{100 * share:.1f} %"] for name, share in shares.items()]
    note = "Other: search, verification and bookkeeping, measured on the timed tuning prompts."
    return [Chart(shares_bar("Where the time of a step goes", shares), ["part", "share"], rows, note)]


def first_tokens(shown: Shown) -> list[Chart]:
    """Time to the first token, plain and with the head."""
    found = shown.report.get("ttft") or {}
    bars = {way: [_ms(times[p]) for p in PERCENTILES] for way, times in found.items()}
    rows = [[way, *map(amount, times)] for way, times in bars.items()]
    drawing = bar_chart("Time to the first token, ms", PERCENTILES, bars, "of the held-out prompts")
    return [Chart(drawing, ["", *(f"{p}, ms" for p in PERCENTILES)], rows)]


def by_batch(shown: Shown) -> list[Chart]:
    """Speed-up at each batch that `draftsmith load` measured."""
    rows = (shown.load or {}).get("batches", [])
    if not rows:
        return []
    assert shown.load is not None
    sweep = shown.load["sweep"]
    names = [str(row["batch"]) for row in rows]
    bars, spreads = {SPEEDUP: [row["speedup"] for row in rows]}, {SPEEDUP: [row["speedup_ci"] for row in rows]}
    title = f"Speed-up by batch, {sweep['setting']['tree']}"
    drawing = bar_chart(title, names, bars, "sequences at a time", intervals=spreads, mark=1.0)
    head = ["batch", "speed-up", "speed-up, 95 %", "tokens/s", "tokens/s plain", "τ", "outputs"]
    lines = [
        [
            name, amount(row["speedup"]), interval(row["speedup_ci"]), figure(row["tokens_per_s"]),
            figure(row["baseline_tokens_per_s"]), figure(row["tau"]), row["output_check"],
        ]
        for name, row in zip(names, rows, strict=True)
    ]  # fmt: skip
    without = [f"batch {row['batch']}: {row['output_check']}" for row in rows if row["speedup"] is None]
    told = [sweep["below_one"], sweep["same_steps"]["verdict"], *(f"no speed-up at {line}" for line in without)]
    return [Chart(drawing, head, lines, f"{'; '.join(told)}.")]


def by_k(shown: Shown) -> list[Chart]:
    """Speed-up of chains by K, one line a batch, at the lowest temperature that `draftsmith tune` was given."""
    cells = (shown.tune or {}).get("cells", [])
    lowest = min((cell["temperature"] for cell in cells), default=0)
    tables = {f"batch {cell['batch']}": cell["table"] for cell in cells if cell["temperature"] == lowest}
    chains = {name: [row for row in rows if row["tree"].startswith("chain:")] for name, rows in tables.items()}
    lines = {
        name: [(float(row["depth"]), row["predicted_speedup"]) for row in rows] for name, rows in chains.items() if rows
    }
    head = ["", "K", "τ", "predicted speed-up", "measured speed-up", "measured, 95 %"]
    rows = [
        [
            name, str(row["depth"]), figure(row["tau"]), figure(row["predicted_speedup"]),
            amount(row["measured_speedup"]), interval(row["speedup_ci"]),
        ]
        for name, table in chains.items()
        for row in table
    ]  # fmt: skip
    drawing = line_chart("Speed-up of chains by K, predicted", lines, "K, drafted tokens a step", mark=1.0)
    return [Chart(drawing, head, rows, "From the cost of every pass and acceptance, both measured.")]


def best_settings(shown: Shown) -> list[Chart]:
    """The best setting of each batch and temperature, as measured by `draftsmith tune`."""
    cells = [cell for cell in (shown.tune or {}).get("cells", []) if cell["best"]]
    names = [f"batch {cell['batch']}, {temperature_name(cell['temperature'])}" for cell in cells]
    bars = {SPEEDUP: [cell["best"]["speedup"] for cell in cells]}
    spreads = {SPEEDUP: [cell["best"]["speedup_ci"] for cell in cells]}
    head = ["", "best tree", "speed-up", "speed-up, 95 %", "tokens/s", "tokens/s plain"]
    rows = [
        [
            name, cell["best"]["tree"], figure(cell["best"]["speedup"]), interval(cell["best"]["speedup_ci"]),
            figure(cell["best"]["tokens_per_s"]), figure(cell["plain_tokens_per_s"]),
        ]
        for name, cell in zip(names, cells, strict=True)
    ]  # fmt: skip
    drawing = lying_bars("Speed-up of the best setting", names, bars, SPEEDUP, intervals=spreads, mark=1.0)
    doubtful = [
        f"{name}: {flag}" for name, cell in zip(names, cells, strict=True) if (flag := cell["best"].get("flag"))
    ]
    return [Chart(drawing, head, rows, f"Doubtful: {'; '.join(doubtful)}." if doubtful else "")]


def by_client(shown: Shown) -> list[Chart]:
    """What clients of recorded requests would have seen, by `draftsmith load --replay`."""
    found = (shown.load or {}).get("replay")
    if not found:
        return []
    waits = {"first token": "ttft", "whole answer": "latency"}
    labels = [f"{name}, {p}" for name in waits for p in PERCENTILES]
    bars = {
        way: [found[way][key][p] for key in waits.values() for p in PERCENTILES] for way in ("plain", "speculative")
    }
    title = f"{found['file']} replayed, {found['concurrency']} at a time: seconds"
    rows = [[label, *map(figure, pair)] for label, *pair in zip(labels, *bars.values(), strict=True)]
    rows.append(["answer tokens/s", *(figure(found[way]["served_tokens_per_s"]) for way in bars)])
    ratio = found["throughput_ratio"]
    note = f"Outputs: {found['output_check']}." + ("" if ratio is None else f" Throughput {figure(ratio)}× of plain.")
    return [Chart(lying_bars(title, labels, bars, "seconds"), ["", *bars], rows, note)]


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else 1000 * seconds


# --- training and stages ----------------------------------------------------------------------------------------------


def training(shown: Shown) -> list[Chart]:
    """Loss and tau while the head was trained."""
    loss = _points(shown.curve, "train", "loss")
    taus = {
        "τ_walk": _points(shown.curve, "validation", "tau_walk"),
        "τ decoded": _points(shown.curve, "validation", "tau"),
    }
    drawings = {
        "loss": line_chart("Training loss", {"loss": loss} if loss else {}, "step", dots=len(loss) < MOST_ROWS),
        "τ": line_chart(
            "τ on held-out answers while training", {n: line for n, line in taus.items() if line}, "step", zero=False
        ),
    }
    tables = {
        "loss": [[figure(x), figure(y)] for x, y in _thinned(loss)],
        "τ": [[name, figure(x), figure(y)] for name, line in taus.items() for x, y in _thinned(line)],
    }
    heads = {"loss": ["step", "loss"], "τ": ["", "step", "τ"]}
    return [Chart(drawing, heads[name], tables[name]) for name, drawing in drawings.items()]


def _points(curve: Sequence[Row], kind: str, key: str) -> list[tuple[float, float]]:
    return [(float(row["step"]), float(row[key])) for row in curve if row["kind"] == kind and row.get(key) is not None]


def _thinned(line: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    every = -(-len(line) // MOST_ROWS) or 1
    return list(line[::-every])[::-1]


def stage_times(shown: Shown) -> list[Chart]:
    """Seconds and memory of each stage of the run."""
    seconds = {name: record["seconds"] for name, record in shown.stages.items() if "seconds" in record}
    rows = [
        [name, amount(record.get("seconds")), amount(_mib(record.get("peak_rss_bytes")))]
        for name, record in shown.stages.items()
    ]
    drawing = bar_chart(
        "Seconds of each stage", list(seconds), {"s": list(seconds.values())} if seconds else {}, "stage"
    )
    return [Chart(drawing, ["stage", "seconds", "peak memory, MiB"], rows)]


def _mib(size: float | None) -> float | None:
    return None if size is None else size / 2**20


SECTIONS: dict[str, tuple[Callable[[Shown], list[Chart]], ...]] = {
    "What is accepted": (by_depth, by_rank),
    "Where it pays": (by_group, by_benchmark, by_temperature),
    "Speed": (by_tree, by_batch, best_settings, by_k, by_client, by_pass, by_part, first_tokens),
    "Training": (training, stage_times),
}
"""Builders by the heading that they stand under, in the order of the page."""


def sections(shown: Shown) -> dict[str, list[Chart]]:
    """All charts that there is something to show in, by their heading."""
    found = {name: [c for build in builders for c in build(shown) if c.drawing] for name, builders in SECTIONS.items()}
    return {name: charts for name, charts in found.items() if charts}
