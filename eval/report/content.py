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
from ..metrics import Timing, acceptance, speedup, tau_interval, tokens_per_second
from ..tune import Tuning

SCHEMA = "draftsmith.report/1"


@dataclasses.dataclass(frozen=True)
class Measured:
    """Raw results on the held-out prompts, all in the order of `prompts`.

    Attributes:
        plain: plain decoding; fast: the chosen K, interleaved with it; deep: K = 4, decoded for acceptance only.
        generated: `transformers.generate` on the same prompts.
        check: comparison of `fast` with `plain`.
        sessions: processes that measured: more than one where an evaluation was killed and gone on with.
    """

    prompts: PromptSet
    max_new_tokens: int
    plain: list[Result]
    fast: list[Result]
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
            "acceptance_conditional": tuning.acceptance.conditional,
            "table": tuning.table,
        },
        "passes": {
            "target_seconds": {str(n): s for n, s in sorted(tuning.costs.target.items())},
            "draft_seconds": {str(k): s for k, s in sorted(tuning.costs.draft.items())},
            "rest_seconds": {str(k): s for k, s in sorted(tuning.costs.rest.items())},
        },
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
            "speculative": [{"id": r.id, "seconds": t.seconds, "steps": _steps(r)} for r, t in _timed(m.fast)],
            "depth_4": [{"id": r.id, "steps": _steps(r)} for r in m.deep],
            "generate": [
                {"id": r.id, "tokens": t.tokens, "seconds": t.seconds}
                for r, t in zip(m.prompts.requests, m.generated, strict=True)
            ],
        },
    }


def _summary(target: Target, tuning: Tuning, m: Measured) -> dict[str, Any]:
    shares, deep = acceptance([r.steps for r in m.fast]), acceptance([r.steps for r in m.deep])
    plain, fast = timings(m.plain), timings(m.fast)
    ratio, interval = speedup(plain, fast)
    ceiling = tuning.costs.ceiling(shares.tau)
    flag = None
    if m.check.passed and interval[0] > ceiling:
        flag = f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {ceiling:.2f}"
    return {
        "tau": shares.tau,
        "tau_ci": list(tau_interval([r.steps for r in m.fast])),
        "mal": shares.mal,
        "alpha": shares.alpha,
        "acceptance_conditional": shares.conditional,
        "acceptance_cumulative": shares.cumulative,
        "speedup": ratio if m.check.passed else None,
        "speedup_ci": list(interval) if m.check.passed else None,
        "setting": {
            "kind": "chain",
            "depth": tuning.depth,
            "nodes": tuning.depth + 1,
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
        "overhead": tuning.costs.overhead(tuning.depth),
        "tau_k4": deep.tau,
        "tau_k4_ci": list(tau_interval([r.steps for r in m.deep])),
        "acceptance_conditional_k4": deep.conditional,
        "acceptance_cumulative_k4": deep.cumulative,
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
