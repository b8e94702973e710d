"""The content of `report.json`: every figure, and the raw step logs they come from."""

from __future__ import annotations

import dataclasses
import math
import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ...heads.config import HeadConfig
from ...heads.target import Target
from ...manifest import library_versions
from ..benchmarks import PromptSet
from ..check import OutputCheck
from ..decoder.loop import Result
from ..metrics import Timing, acceptance, acceptance_by_rank, speedup, tau_interval, tokens_per_second
from ..tune import StepCost, Tuning

SCHEMA = "draftsmith.report/2"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Raw results on the held-out prompts, all in the order of `prompts`.

    Attributes:
        depth, nodes: K and N of the chosen tree.
        plain: plain decoding; fast: the chosen tree, interleaved with it.
        ranks: [P][D][R] of `fast`, see `metrics.acceptance_by_rank`.
        chain: text of the chain that is always reported; deep: its results, decoded for acceptance only.
        generated: `transformers.generate` on the same prompts.
        check: comparison of `fast` with `plain`.
        sessions: processes that measured: more than one where an evaluation was killed and gone on with.
    """

    prompts: PromptSet
    max_new_tokens: int
    depth: int
    nodes: int
    plain: list[Result]
    fast: list[Result]
    ranks: list[list[list[int]]]
    chain: str
    deep: list[Result]
    generated: list[Timing]
    check: OutputCheck
    sessions: int = 1


def timings(results: Sequence[Result]) -> list[Timing]:
    """Tokens and seconds of the decoding steps of each result."""
    return [Timing(sum(s.emitted for s in r.steps), r.seconds) for r in results]


def build_report(target: Target, head: HeadConfig, tuning: Tuning, measured: Measured) -> dict[str, Any]:
    """Assemble the report.

    Returns:
        `schema`, `summary` (what most readers want), then target, head, environment, tuning, pass costs, check and the
        raw logs of every prompt. `summary.speedup` is None unless the output check passed.
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
        "prompts": {
            "name": m.prompts.name,
            "sha256": m.prompts.sha256,
            "dropped": m.prompts.dropped,
            "max_new_tokens": m.max_new_tokens,
            "plain": [{"id": r.id, "tokens": t.tokens, "seconds": t.seconds} for r, t in _timed(m.plain)],
            "speculative": [
                {"id": r.id, "seconds": t.seconds, "steps": _steps(r), "ranks": ranks}
                for (r, t), ranks in zip(_timed(m.fast), m.ranks, strict=True)
            ],
            "chain": [{"id": r.id, "steps": _steps(r)} for r in m.deep],
            "generate": [
                {"id": r.id, "tokens": t.tokens, "seconds": t.seconds}
                for r, t in zip(m.prompts.requests, m.generated, strict=True)
            ],
        },
    }


def _summary(target: Target, tuning: Tuning, m: Measured) -> dict[str, Any]:
    logs = [r.steps for r in m.fast]
    shares = acceptance(logs)
    plain, fast = timings(m.plain), timings(m.fast)
    ratio, interval = speedup(plain, fast)
    ceiling = tuning.costs.ceiling(shares.tau)
    flag = None
    if m.check.passed and interval[0] > ceiling:
        flag = f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {ceiling:.2f}"
    return {
        "tau": shares.tau,
        "tau_ci": list(tau_interval(logs)),
        "mal": shares.mal,
        "alpha": shares.alpha,
        "acceptance_conditional": shares.conditional,
        "acceptance_cumulative": shares.cumulative,
        "acceptance_by_rank": acceptance_by_rank(logs, m.ranks),
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
        "n_prompts": len(m.fast),
        "tokens_per_s": tokens_per_second(fast),
        "baseline_tokens_per_s": tokens_per_second(plain),
        "generate_tokens_per_s": tokens_per_second(m.generated),
        "output_check": m.check.verdict,
        "flag": flag,
        "overhead": tuning.costs.ways[tuning.tree].overhead,
        "chain": _chain(m),
    }


def _chain(m: Measured) -> dict[str, Any]:
    """Figures of the chain by which heads are compared, whatever their trees."""
    logs = [r.steps for r in m.deep]
    shares = acceptance(logs)
    return {
        "tree": m.chain,
        "tau": shares.tau,
        "tau_ci": list(tau_interval(logs)),
        "acceptance_conditional": shares.conditional,
        "acceptance_cumulative": shares.cumulative,
    }


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


def _timed(results: Sequence[Result]) -> list[tuple[Result, Timing]]:
    return list(zip(results, timings(results), strict=True))


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
