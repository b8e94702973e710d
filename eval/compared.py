"""What a comparison found: a table over all prompts, one of each benchmark, and the logs behind them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .benchmarks import Benchmark, PromptSet
from .check import OutputCheck, check_outputs
from .decoder.loop import Result
from .metrics import acceptance, speedup, tau_interval, timings, tokens_per_second
from .report.content import SAMPLED, environment
from .ways import SHOWN_DEPTHS, Way

SCHEMA = "draftsmith.compare/2"


@dataclass
class Compared:
    """Everything that was measured.

    Attributes:
        ways: in the order of the table.
        asked: the benchmarks; sets: their prompts.
        temperature: of all answers.
        found: by way, the answers in the order of the prompts, set by set.
        costs: seconds of each way's target pass.
    """

    ways: Sequence[Way]
    asked: Sequence[Benchmark]
    sets: Sequence[PromptSet]
    temperature: float
    found: Mapping[str, Sequence[Result]]
    costs: Mapping[str, float]

    def checks(self) -> dict[str, OutputCheck]:
        """All greedy answers of each way against plain decoding of the same target; none where answers are sampled."""
        if self.temperature > 0:
            return {}
        return {
            way.name: check_outputs(way.target, self.found[way.baseline], self.found[way.name], way.drafter.rows)
            for way in self.ways
            if way.name != way.baseline
        }

    def rows(self, checks: Mapping[str, OutputCheck], prompts: PromptSet | None = None) -> list[dict[str, Any]]:
        """One row a way, of all prompts or of one set."""
        found = self.found
        if prompts is not None:
            ids = {request.id for request in prompts.requests}
            found = {name: [r for r in results if r.id in ids] for name, results in found.items()}
        return [_row(way, found, self._ceiling(way), checks.get(way.name)) for way in self.ways]

    def _ceiling(self, way: Way) -> float:
        """c(1) / min c(N) of this way's target, as measured beside the comparison."""
        same = [self.costs[other.name] for other in self.ways if other.baseline == way.baseline]
        same = [seconds for seconds in same if seconds]
        return self.costs[way.baseline] / min(same) if same else math.inf


def compared_result(compared: Compared, model: str, max_new_tokens: int, sessions: int) -> dict[str, Any]:
    """Put together what `compare.json` holds.

    Returns:
        `schemes`, one row a way to decode over all prompts; `benchmarks`, each with its own `schemes`; `prompts`, the
        counts; `answers`, the raw logs. A row's `speedup` is over plain decoding of the same target, None unless its
        output check passed: all its answers count for that, whichever the benchmark. Sampled answers are not compared.
        A row whose answers all ended with their first token has none, either.
    """
    checks = compared.checks()
    return {
        "schema": SCHEMA,
        "model": model,
        "temperature": compared.temperature,
        "environment": {**environment(compared.ways[0].target), "sessions": sessions},
        "prompts": {
            "name": ", ".join(prompts.name for prompts in compared.sets),
            "count": sum(len(prompts.requests) for prompts in compared.sets),
            "dropped": [name for prompts in compared.sets for name in prompts.dropped],
            "max_new_tokens": max_new_tokens,
            "template_kwargs": dict(compared.sets[0].rendering.template_kwargs),
        },
        "schemes": compared.rows(checks),
        "benchmarks": [
            {
                "name": benchmark.name,
                "source": benchmark.source,
                "licence": benchmark.licence,
                "sha256": prompts.sha256,
                "n_prompts": len(prompts.requests),
                "dropped": prompts.dropped,
                "problems": [*benchmark.problems, *prompts.problems],
                "schemes": compared.rows(checks, prompts),
            }
            for benchmark, prompts in zip(compared.asked, compared.sets, strict=True)
        ],
        "answers": {
            name: [
                {"id": r.id, "seconds": r.seconds, "steps": [[s.drafted, s.accepted, s.emitted] for s in r.steps]}
                for r in results
            ]
            for name, results in compared.found.items()
        },
    }


def _row(way: Way, found: Mapping[str, Sequence[Result]], ceiling: float, check: OutputCheck | None) -> dict[str, Any]:
    """The figures of one way to decode."""
    plain, own = found[way.baseline], found[way.name]
    logs = [r.steps for r in own]
    shares = acceptance(logs)
    row: dict[str, Any] = {
        "name": way.name,
        **dict.fromkeys(("family", "parameters", "train_minutes", "drift")),
        **way.facts,
        "tree": way.tree,
        "depth": way.drafter.depth,
        "nodes": way.drafter.rows,
        "tau": shares.tau,
        "tau_ci": list(tau_interval(logs)),
        "acceptance_conditional": shares.conditional[:SHOWN_DEPTHS],
        "acceptance_cumulative": shares.cumulative[:SHOWN_DEPTHS],
        "tokens_per_s": tokens_per_second(timings(own)),
        "baseline": way.baseline,
        "speedup": None,
        "speedup_ci": None,
        "output_check": None,
        "lossless": True,
        "flag": None,
    }
    if way.name == way.baseline:
        return row
    row |= {"output_check": SAMPLED, "lossless": None} if check is None else {
        "output_check": check.verdict, "lossless": check.passed
    }  # fmt: skip
    stepped = shares.steps > 0 and any(r.steps for r in plain)
    if stepped and (check is None or check.passed):
        ratio, interval = speedup(timings(plain), timings(own))
        row |= {"speedup": ratio, "speedup_ci": list(interval)}
        if interval[0] > shares.tau * ceiling:
            row["flag"] = (
                f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {shares.tau * ceiling:.2f}"
            )
    return row
