"""The content of `report.json`: every figure, and the raw step logs they come from."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ...files import sha256_json
from ...heads.config import HeadConfig
from ...heads.target import Target
from ...manifest import library_versions
from ..benchmarks import Benchmark, PromptSet
from ..breakdown import Pair, breakdown, figures, speedup_by_question, steps_by_question
from ..check import OutputCheck
from ..decoder.loop import Result
from ..metrics import Timing, acceptance, acceptance_by_rank, percentiles, tau_interval, timings, tokens_per_second
from ..samples import pieces
from ..tune import StepCost, Tuning

SCHEMA = "draftsmith.report/3"
SAMPLES = 3
"""Answers that are shown piece by piece: the first ones to first turns, which are of different categories."""
SAMPLED = "sampled: law tested, not compared"
"""What stands for the output check above temperature 0."""


@dataclasses.dataclass(frozen=True)
class Part:
    """One benchmark of an evaluation, as it is and as its prompts are rendered."""

    benchmark: Benchmark
    prompts: PromptSet


@dataclasses.dataclass(frozen=True)
class Measured:
    """Raw results on the held-out prompts.

    Attributes:
        parts: the benchmarks, in their order.
        depth, nodes: K and N of the chosen tree.
        pairs: greedy answers, plain and with the chosen tree, interleaved.
        sampled: the same for each temperature above 0.
        chain: text of the chain that is always reported; deep: its results for `pairs`, decoded for acceptance only.
        generated: `transformers.generate` on the first prompts of each benchmark, by id.
        check: comparison of the answers of `pairs`.
        tree: one drawn tree.
        sessions: processes that measured: more than one where an evaluation was killed and gone on with.
    """

    parts: list[Part]
    max_new_tokens: int
    depth: int
    nodes: int
    pairs: list[Pair]
    sampled: Mapping[float, list[Pair]]
    chain: str
    deep: list[Result]
    generated: Mapping[str, Timing]
    check: OutputCheck
    tree: dict[str, Any] | None = None
    sessions: int = 1

    @property
    def plain(self) -> list[Result]:
        """Greedy answers of plain decoding."""
        return [pair.plain for pair in self.pairs]

    @property
    def fast(self) -> list[Result]:
        """Those of the chosen tree."""
        return [pair.fast for pair in self.pairs]


def build_report(target: Target, head: HeadConfig, tuning: Tuning, measured: Measured) -> dict[str, Any]:
    """Assemble the report, schema "draftsmith.report/3". All but `temperatures` and `prompts.sampled` is greedy.

    Intervals are 95 % bootstrap intervals over questions (the turns of one are resampled together). Every `speedup` and
    `speedup_ci` is None unless the output check passed, and where seconds can't be told apart.

    Returns:
        schema: as above.
        summary: what most readers want: tau, tau_ci, tau_mean (of answers, unpooled), mal, alpha,
            acceptance_conditional and acceptance_cumulative [by depth], acceptance_by_rank [by depth][by rank],
            speedup, speedup_ci, setting {kind, tree, depth, nodes, temperature, batch, dtype}, n_prompts (answers: each
            turn is one), tokens_per_s, baseline_tokens_per_s, generate_tokens_per_s, output_check, flag, overhead,
            measuring_overhead (share of the wall time of the interleaved answers that the loop did not take), chain
            {tree, tau, tau_ci, acceptance_conditional, acceptance_cumulative}.
        target, head, environment, tuning, passes, check: what was measured, where, how the tree was chosen, what a step
            costs, and where outputs differ.
        by: {"category" | "language" | "context" | "turn": [{name, n_prompts, tau, tau_ci, alpha,
            acceptance_conditional, speedup, speedup_ci}]}, in the order of the prompts or of size. "context" puts each
            STEP into the bucket of the tokens before it, prompt and answer ("<256", "<512", "<1k", ...; no speed-up:
            seconds are known by answer); its n_prompts are answers with a step there.
        temperatures: [{temperature, n_prompts, tau, tau_ci, alpha, speedup, speedup_ci, tokens_per_s,
            baseline_tokens_per_s, output_check}], greedy first.
        ttft: {"plain" | "speculative": {p50, p95}}, seconds from when the loop takes a prompt to its first token.
        time: shares of a step {draft, verify, other}: the head's passes, the target's, all else; on the timed tuning
            prompts.
        benchmarks: [{name, source, licence, sha256, n_prompts, dropped, problems, tau, tau_ci, speedup, speedup_ci}].
        samples: [{id, prompt, pieces: [{text, kind, depth}]}], see `eval.samples`.
        tree: one drawn tree {id, step, nodes: [{token, parent, depth, accepted}]}; None where nothing was drafted.
        prompts: raw logs: name, sha256, dropped, max_new_tokens, plain [{id, tokens, seconds, ttft}], speculative [{id,
            benchmark, question, turn, category, language, prompt_tokens, sha256, seconds, ttft, steps [[drafted,
            accepted, emitted]], ranks}], chain [{id, steps}], generate [{id, tokens, seconds}] on the first ones of
            each benchmark, sampled [{temperature, plain, speculative}] with rows like those above.
    """
    m = measured
    return {
        "schema": SCHEMA,
        "summary": _summary(target, tuning, m),
        "target": {
            "id": head.target_id,
            "revision": head.target_revision,
            "fingerprint": target.fingerprint,
            "chat_template_sha256": target.template_sha256,
        },
        "head": head.to_dict(),
        "environment": {**environment(target), "sessions": m.sessions},
        "by": breakdown(m.pairs, m.check.passed),
        "temperatures": [
            _at(0.0, m.pairs, m.check.passed, m.check.verdict),
            *(_at(temperature, pairs, m.check.passed, SAMPLED) for temperature, pairs in m.sampled.items()),
        ],
        "benchmarks": [_benchmark(part, m) for part in m.parts],
        "ttft": {way: percentiles([p.ttft[way] for p in m.pairs]) for way in ("plain", "speculative")},
        "time": _time(tuning.costs.ways[tuning.tree]),
        "samples": [
            {"id": p.fast.id, "prompt": p.prompt, "pieces": pieces(target.tokenizer, p.fast)}
            for p in [p for p in m.pairs if p.about.turn == 1][:SAMPLES]
        ],
        "tree": m.tree,
        "tuning": {
            "n_prompts": tuning.n_prompts,
            "acceptance_conditional": {tree: a.conditional for tree, a in tuning.acceptance.items()},
            "table": tuning.table,
        },
        "passes": {way: _cost(cost) for way, cost in tuning.costs.ways.items()},
        "check": {
            "bound": m.check.bound,
            "noise": m.check.noise,
            "differences": [_finite(dataclasses.asdict(d)) for d in m.check.differences],
        },
        "prompts": _prompts(m),
    }


def _prompts(m: Measured) -> dict[str, Any]:
    """The raw logs."""
    digests = [part.prompts.sha256 for part in m.parts]
    return {
        "name": "+".join(part.prompts.name for part in m.parts),
        "sha256": digests[0] if len(digests) == 1 else sha256_json(digests),
        "dropped": [name for part in m.parts for name in part.prompts.dropped],
        "max_new_tokens": m.max_new_tokens,
        "plain": _plain_rows(m.pairs),
        "speculative": _fast_rows(m.pairs),
        "chain": [{"id": r.id, "steps": _steps(r)} for r in m.deep],
        "generate": [{"id": name, "tokens": t.tokens, "seconds": t.seconds} for name, t in m.generated.items()],
        "sampled": [
            {"temperature": temperature, "plain": _plain_rows(pairs), "speculative": _fast_rows(pairs)}
            for temperature, pairs in m.sampled.items()
        ],
    }


def _plain_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {"id": p.plain.id, "tokens": t.tokens, "seconds": t.seconds, "ttft": p.ttft["plain"]}
        for p, t in zip(pairs, timings([p.plain for p in pairs]), strict=True)
    ]


def _fast_rows(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [
        {
            "id": p.fast.id,
            "benchmark": p.benchmark,
            **dataclasses.asdict(p.about),
            "sha256": sha256_json([p.request.tokens, p.request.max_new_tokens])[:16],
            "seconds": p.fast.seconds,
            "ttft": p.ttft["speculative"],
            "steps": _steps(p.fast),
            "ranks": p.ranks,
        }
        for p in pairs
    ]


def _summary(target: Target, tuning: Tuning, m: Measured) -> dict[str, Any]:
    logs = [r.steps for r in m.fast]
    shares = acceptance(logs)
    plain, fast = timings(m.plain), timings(m.fast)
    ratio, interval = speedup_by_question(m.pairs)
    ceiling = tuning.costs.ceiling(shares.tau)
    flag = None
    if m.check.passed and interval[0] > ceiling:
        flag = f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {ceiling:.2f}"
    return {
        "tau": shares.tau,
        "tau_ci": list(tau_interval(steps_by_question(m.pairs, m.fast))),
        "tau_mean": _mean_tau(logs),
        "mal": shares.mal,
        "alpha": shares.alpha,
        "acceptance_conditional": shares.conditional,
        "acceptance_cumulative": shares.cumulative,
        "acceptance_by_rank": acceptance_by_rank(logs, [p.ranks for p in m.pairs]),
        "speedup": ratio if m.check.passed else None,
        "speedup_ci": list(interval) if m.check.passed else None,
        "setting": {
            "kind": tuning.tree.partition(":")[0],
            "tree": tuning.tree,
            "depth": m.depth,
            "nodes": m.nodes,
            "temperature": 0.0,
            "batch": 1,
            "dtype": _name(target.dtype),
        },
        "n_prompts": len(m.pairs),
        "tokens_per_s": tokens_per_second(fast),
        "baseline_tokens_per_s": tokens_per_second(plain),
        "generate_tokens_per_s": tokens_per_second(list(m.generated.values())),
        "output_check": m.check.verdict,
        "flag": flag,
        "overhead": tuning.costs.ways[tuning.tree].overhead,
        "measuring_overhead": _measuring([*m.pairs, *(p for pairs in m.sampled.values() for p in pairs)]),
        "chain": _chain(m),
    }


def _mean_tau(logs: Sequence[Sequence[Any]]) -> float:
    """Tau of each answer, averaged: long answers count no more than short ones. Answers without a step don't count."""
    taus = [sum(s.emitted for s in steps) / len(steps) for steps in logs if steps]
    return statistics.fmean(taus) if taus else 0.0


def _measuring(pairs: Sequence[Pair]) -> float:
    """Share of the wall time of the pairs that the loop did not take."""
    wall = sum(p.spent["wall"] for p in pairs)
    return 1 - sum(p.spent["decoding"] for p in pairs) / wall if wall else 0.0


def _chain(m: Measured) -> dict[str, Any]:
    """Figures of the chain by which heads are compared, whatever their trees."""
    shares = acceptance([r.steps for r in m.deep])
    return {
        "tree": m.chain,
        "tau": shares.tau,
        "tau_ci": list(tau_interval(steps_by_question(m.pairs, m.deep))),
        "acceptance_conditional": shares.conditional,
        "acceptance_cumulative": shares.cumulative,
    }


def _at(temperature: float, pairs: Sequence[Pair], passed: bool, verdict: str) -> dict[str, Any]:
    """One row of `temperatures`."""
    found = figures(pairs, passed)
    return {
        "temperature": temperature,
        **{name: value for name, value in found.items() if name != "acceptance_conditional"},
        "tokens_per_s": tokens_per_second(timings([p.fast for p in pairs])),
        "baseline_tokens_per_s": tokens_per_second(timings([p.plain for p in pairs])),
        "output_check": verdict,
    }


def _benchmark(part: Part, m: Measured) -> dict[str, Any]:
    """One row of `benchmarks`."""
    found = figures([p for p in m.pairs if p.benchmark == part.benchmark.name], m.check.passed)
    shown = ("n_prompts", "tau", "tau_ci", "speedup", "speedup_ci")
    return {
        **{name: getattr(part.benchmark, name) for name in ("name", "source", "licence", "sha256")},
        "dropped": part.prompts.dropped,
        "problems": [*part.benchmark.problems, *part.prompts.problems],
        **{name: found[name] for name in shown},
    }


def _time(cost: StepCost) -> dict[str, float]:
    return {"draft": cost.draft / cost.step, "verify": cost.target / cost.step, "other": cost.rest / cost.step}


def environment(target: Target) -> dict[str, Any]:
    """What the figures were measured on."""
    return {
        "processor": processor(target.device),
        "device": str(target.device),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "dtype": _name(target.dtype),
        "system": f"{platform.system()} {platform.machine()}",
        "versions": library_versions(),
    }


def processor(device: torch.device) -> str:
    """Name of the device, or of the processor."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass  # not Linux
    return platform.processor() or platform.machine()


def _steps(result: Result) -> list[list[int]]:
    return [[s.drafted, s.accepted, s.emitted] for s in result.steps]


def _cost(cost: StepCost) -> dict[str, float]:
    """Rows N of the target's pass, and seconds."""
    return {
        "rows": cost.rows,
        "target_seconds": cost.target,
        "draft_seconds": cost.draft,
        "rest_seconds": cost.rest,
    }


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
