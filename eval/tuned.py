"""What a tuning has found: tables by batch and temperature, the best settings, what engines must be told, advice."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..heads.base import DraftHead
from ..heads.checkpoint import CONFIG
from ..heads.costs import head_costs
from ..heads.formats.contracts import contract, engines, serve_settings
from ..heads.formats.export_layouts import facts_of
from ..heads.named import head_names
from ..heads.target import Target
from . import advice
from .benchmarks import Benchmark, PromptSet
from .decoder.probe import kv_shapes
from .decoder.search import Chain, Dynamic, Shape
from .given_head import EXPORT, GivenHead
from .metrics import Acceptance
from .report.content import environment
from .tune import PLAIN, PassCosts, predict

SCHEMA = "draftsmith.tune/1"


@dataclass(frozen=True)
class Timed:
    """What decoding in one way gave, in turns with plain decoding.

    Attributes:
        tokens_per_s: of the steps of the whole batch; tau: tokens emitted a step.
        speedup, speedup_ci: over plain decoding; None unless the outputs passed.
        output_check: the verdict, or why there is none.
    """

    tokens_per_s: float
    tau: float
    speedup: float | None
    speedup_ci: Sequence[float] | None
    output_check: str


@dataclass
class Found:
    """Everything that was measured.

    Attributes:
        asked: the benchmarks; sets: their prompts.
        trees: the settings.
        shares: acceptance by temperature and tree; exact: at each temperature the trees of which that is no estimate.
        answer_steps: plain steps of an answer, a mean.
        costs: of every tree, by batch and whether answers are sampled.
        prefill: seconds of each prompt at batch 1.
        cells: by temperature and batch what was decoded in turns; plain decoding is there, too.
    """

    asked: Sequence[Benchmark]
    sets: Sequence[PromptSet]
    trees: Mapping[str, Shape]
    shares: dict[float, dict[str, Acceptance]] = field(default_factory=dict)
    exact: dict[float, frozenset[str]] = field(default_factory=dict)
    answer_steps: float = 0.0
    costs: dict[tuple[int, bool], PassCosts] = field(default_factory=dict)
    prefill: list[float] = field(default_factory=list)
    cells: dict[tuple[float, int], dict[str, Timed]] = field(default_factory=dict)

    def predicted(self, temperature: float, batch: int) -> dict[str, float]:
        """Tokens/s of every tree whose passes were timed, and of plain decoding."""
        costs = self.costs[batch, temperature > 0]
        taus = {PLAIN: 1.0, **{tree: shares.tau for tree, shares in self.shares[temperature].items()}}
        return predict(costs, {tree: tau for tree, tau in taus.items() if tree in costs.ways}, batch)


def tuned_result(
    target: Target, head: DraftHead, given: GivenHead, called: str, model: str, found: Found, sessions: int
) -> dict[str, Any]:
    """Put together what `tune.json` holds.

    Args:
        called: the target as the user gave it; model: as engines find it.
        sessions: processes that measured.

    Returns:
        `cells` (a table of all settings for each temperature and batch, with the best one), `break_even`, `prediction`,
        `acceptance`, `passes`, `prefill`, `memory`, `serve`, `advice`, and what they were measured on; `head_sha256` is
        of the weights of a head that was trained here.
    """
    cells = [_cell(found, temperature, batch) for temperature, batch in sorted(found.cells)]
    memory = _memory(target, head, found, cells)
    return {
        "schema": SCHEMA,
        "model": called,
        "head": {
            "name": given.name,
            "family": head.config.family,
            "parameters": sum(p.numel() for p in head.parameters()),
        },
        "head_sha256": given.weights_sha256,
        "environment": {**environment(target), "sessions": sessions},
        "prompts": [_prompts(*pair) for pair in zip(found.asked, found.sets, strict=True)],
        "cells": cells,
        "break_even": [{"temperature": t, "batch": advice.break_even(_speedups(cells, t))} for t in found.shares],
        "prediction": _prediction(cells),
        "acceptance": _acceptance(found),
        "passes": _passes(found),
        "prefill": {"median_seconds": statistics.median(found.prefill), "answer_steps": found.answer_steps},
        "memory": {**dataclasses.asdict(memory), "trees": memory.trees},
        "serve": _serve(head, given, model, cells, found.trees),
        "advice": _advice(found, cells, memory),
    }


def _prompts(benchmark: Benchmark, prompts: PromptSet) -> dict[str, Any]:
    return {
        "name": benchmark.name,
        "source": benchmark.source,
        "licence": benchmark.licence,
        "sha256": prompts.sha256,
        "count": len(prompts.requests),
        "dropped": prompts.dropped,
        "problems": [*benchmark.problems, *prompts.problems],
        "max_new_tokens": prompts.rendering.max_new_tokens,
        "template_kwargs": dict(prompts.rendering.template_kwargs),
    }


# --- tables -----------------------------------------------------------------------------------------------------------


def _cell(found: Found, temperature: float, batch: int) -> dict[str, Any]:
    """All settings at one temperature and batch.

    Predictions are of the speed relative to plain decoding, and told for the machine as fast as it was when plain
    decoding took its turns with the leaders.
    """
    timed, predicted = found.cells[temperature, batch], found.predicted(temperature, batch)
    plain = timed[PLAIN].tokens_per_s
    now = {tree: plain * speed / predicted[PLAIN] for tree, speed in predicted.items()}
    rows = [
        {
            "tree": tree,
            "depth": shape.depth,
            "nodes": shape.rows,
            "tau": found.shares[temperature][tree].tau,
            "predicted_tokens_per_s": now[tree],
            "predicted_speedup": now[tree] / plain,
            **_measured(timed.get(tree), now[tree], found.costs[batch, temperature > 0]),
        }
        for tree, shape in found.trees.items()
        if tree in predicted
    ]
    return {
        "temperature": temperature,
        "batch": batch,
        "plain_tokens_per_s": plain,
        "best": _best(rows),
        "best_chain": _best([row for row in rows if isinstance(found.trees[row["tree"]], Chain)]),
        "table": rows,
        "left_out": [tree for tree in found.trees if tree not in predicted],
    }


def _measured(timed: Timed | None, predicted: float, costs: PassCosts) -> dict[str, Any]:
    if timed is None:
        names = ("measured_tokens_per_s", "measured_tau", "measured_speedup", "speedup_ci", "flag", "output_check")
        return dict.fromkeys((*names, "error"))
    return {
        "measured_tokens_per_s": timed.tokens_per_s,
        "measured_tau": timed.tau,
        "measured_speedup": timed.speedup,
        "speedup_ci": timed.speedup_ci,
        "flag": None if timed.speedup_ci is None else costs.doubt(timed.tau, timed.speedup_ci),
        "output_check": timed.output_check,
        "error": predicted / timed.tokens_per_s - 1,
    }


def _best(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """The fastest setting that was timed and whose outputs passed; `pays` says whether it beats plain decoding."""
    passed = [row for row in rows if row["measured_speedup"] is not None]
    if not passed:
        return None
    row = max(passed, key=lambda row: row["measured_speedup"])
    return {
        "tree": row["tree"],
        "speedup": row["measured_speedup"],
        "speedup_ci": row["speedup_ci"],
        "flag": row["flag"],
        "tokens_per_s": row["measured_tokens_per_s"],
        "pays": row["measured_speedup"] >= 1,
    }


def _speedups(cells: Sequence[Mapping[str, Any]], temperature: float) -> dict[int, float]:
    """The best measured speed-up of each batch."""
    return {c["batch"]: c["best"]["speedup"] for c in cells if c["temperature"] == temperature and c["best"]}


def _prediction(cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """How far the predicted tokens/s of what was timed were off."""
    errors = [row["error"] for cell in cells for row in cell["table"] if row["error"] is not None]
    return {
        "settings": len(errors),
        "largest_error": max(errors, key=abs),
        "median_error": statistics.median(map(abs, errors)),
    }


def _acceptance(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "temperature": temperature,
            "tree": tree,
            "exact": tree in found.exact[temperature],
            "tau": share.tau,
            "alpha": share.alpha,
            "acceptance_conditional": share.conditional,
            "steps": share.steps,
        }
        for temperature, shares in found.shares.items()
        for tree, share in shares.items()
    ]


def _passes(found: Found) -> list[dict[str, Any]]:
    return [
        {
            "batch": batch,
            "sampled": sampled,
            "tree": tree,
            "rows": cost.rows,
            "target_seconds": cost.target,
            "draft_seconds": cost.draft,
            "rest_seconds": cost.rest,
        }
        for (batch, sampled), costs in found.costs.items()
        for tree, cost in costs.ways.items()
    ]


# --- what follows -----------------------------------------------------------------------------------------------------


def _memory(target: Target, head: DraftHead, found: Found, cells: Sequence[Mapping[str, Any]]) -> advice.Memory:
    """Bytes in the target's dtype; its weights are counted on a model without memory, as ours may be packed."""
    size = target.dtype.itemsize
    with torch.device("meta"):
        weights = sum(p.numel() for p in type(target.model)(target.model.config).parameters())
    best = [found.trees[cell["best"]["tree"]].rows for cell in cells if cell["best"]]
    return advice.Memory(
        target=size * weights,
        head=size * sum(p.numel() for p in head.parameters()),
        target_token=size * sum(heads * (keys + values) for heads, keys, values in kv_shapes(target)),
        head_token=size * head_costs(head).kv,
        rows=max(best, default=1),
        batch=max(cell["batch"] for cell in cells),
        quantised=getattr(target.model.config, "quantization_config", None) is not None,
    )


def _advice(found: Found, cells: Sequence[Mapping[str, Any]], memory: advice.Memory) -> list[str]:
    """Sentences, the most important first."""
    lines: list[str | None] = []
    for temperature, shares in found.shares.items():
        deepest = max(found.trees, key=lambda tree: (isinstance(found.trees[tree], Chain), found.trees[tree].depth))
        lines.append(advice.on_acceptance(shares[deepest].alpha, temperature))
        speedups = _speedups(cells, temperature)
        lines.append(advice.on_batches(speedups, temperature) if speedups else None)
    first = min(batch for _, batch in found.cells)
    left = {t: _speedups(cells, t)[first] for t in found.shares if first in _speedups(cells, t)}
    lines.append(advice.on_temperatures(left, first))
    lowest = min(found.shares)
    if lowest in left:
        seconds = first * found.answer_steps / found.cells[lowest, first][PLAIN].tokens_per_s
        lines.append(advice.on_prefill(statistics.median(found.prefill), seconds, left[lowest]))
    errors = [row["error"] for cell in cells for row in cell["table"] if row["error"] is not None]
    return [line for line in [*lines, advice.on_memory(memory), advice.on_errors(errors)] if line is not None]


def _serve(
    head: DraftHead, given: GivenHead, model: str, cells: Sequence[Mapping[str, Any]], trees: Mapping[str, Shape]
) -> list[dict[str, Any]]:
    """What each engine must be told at the lowest temperature: one entry for all batches with the same best setting."""
    kind = given.name.partition("@")[0]
    kind = kind if kind in head_names() else head.config.family
    entries: list[dict[str, Any]] = []
    for engine in engines():
        found = contract(engine, kind)
        if problems := found.problems(facts_of(head.config.to_dict())):
            entries.append({"engine": engine, "title": found.title, "refused": "; ".join(problems)})
            continue
        kinds = (Chain, Dynamic) if "tree" in found.shapes else (Chain,)
        for tree, speedups in _best_of(kinds, cells, trees).items():
            shape = trees[tree]
            width = {"nodes": shape.rows, "topk": shape.top_k} if isinstance(shape, Dynamic) else {}
            told = serve_settings(
                engine, kind, folder=_place(given, engine), model=model, depth=shape.depth,
                layer_ids=head.config.layer_ids or None, **width,
            )  # fmt: skip
            shown: dict[str, Any] = {"title": found.title, "checked": found.checked, "tree": tree}
            shown |= {"batches": list(speedups), "speedups": list(speedups.values())}
            entries.append({**shown, **dataclasses.asdict(told)})
    return entries


def _best_of(
    kinds: tuple[type, ...], cells: Sequence[Mapping[str, Any]], trees: Mapping[str, Shape]
) -> dict[str, dict[int, float]]:
    """The best settings of some kinds at the lowest temperature: the speed-up of each batch whose best it is."""
    lowest = min(cell["temperature"] for cell in cells)
    batches: dict[str, dict[int, float]] = {}
    for cell in cells:
        speeds = {row["tree"]: _speed(row) for row in cell["table"] if isinstance(trees[row["tree"]], kinds)}
        known = {tree: speed for tree, speed in speeds.items() if speed is not None}
        if cell["temperature"] == lowest and known:
            best = max(known, key=lambda tree: known[tree])
            batches.setdefault(best, {})[cell["batch"]] = known[best]
    return batches


def _speed(row: Mapping[str, Any]) -> float | None:
    """The speed-up that a setting is judged by: measured where it was timed, else predicted; None if outputs failed."""
    measured: float | None = row["measured_speedup"]
    predicted: float = row["predicted_speedup"]
    return predicted if row["output_check"] is None else measured


def _place(given: GivenHead, engine: str) -> Path:
    """Where an engine finds the head: in the folder that it came in, or where `draftsmith export` puts it."""
    return given.folder / EXPORT / engine if (given.checkpoint / CONFIG).is_file() else given.checkpoint
