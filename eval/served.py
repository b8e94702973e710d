"""What `serve-check` is asked for, and what it makes of an engine's answers and counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from .benchmarks import PromptSet
from .decoder.loop import Result
from .metrics import acceptance
from .trained import Trained

SCHEMA = "draftsmith.serve_check/1"
TOLERANCE = 0.05
"""Most that vLLM's mean acceptance length may be from the decoder's."""
PLAIN, NGRAM, CONVERTED, SPECULATORS = "plain", "n-gram", "converted", "speculators"
"""Ways of serving beside the head's own name."""


@dataclass(frozen=True)
class ServeSettings:
    """What is served.

    Attributes:
        model: target: a short name, a hub id or a folder.
        head: name of a run's folder, head or head@run.
        runs: folder of all runs.
        prompts, max_new_tokens: held-out prompts, and tokens of each answer.
        depth: K, drafted tokens a step.
        threads: of the engine and of the decoder here.
        installed: folder of the engines' environments (`make engines`).
    """

    model: str
    head: str
    runs: Path
    prompts: int = 20
    max_new_tokens: int = 64
    depth: int = 3
    threads: int = 1
    installed: Path = Path(".engines")

    def __post_init__(self) -> None:
        for name in ("prompts", "max_new_tokens", "depth", "threads"):
            if (value := getattr(self, name)) < 1:
                raise DraftsmithError(f"--{name.replace('_', '-')} {value} must be at least 1")

    def python(self, engine: str) -> Path:
        """Interpreter of an engine's environment."""
        return self.installed / engine / "bin" / "python"


@dataclass(frozen=True)
class Here:
    """What the decoder of this package did.

    Attributes:
        prompts: that it decoded; stop: token ids that end an answer.
        answers: by way, PLAIN and the head's name. seconds: of each way's, prefill included.
    """

    prompts: PromptSet
    stop: list[int]
    answers: dict[str, list[Result]]
    seconds: dict[str, float]


def served_result(
    settings: ServeSettings,
    trained: Trained,
    here: Here,
    served: Mapping[str, Mapping[str, Any]],
    conversion: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Compare; `passed` says whether all that was asked for holds, `failures` what doesn't."""
    shares = acceptance([r.steps for r in here.answers[trained.name]])
    ways = {way: _way(found, served[PLAIN]["tokens"], here) for way, found in served.items() if way != PLAIN}
    heads = {way: facts for way, facts in ways.items() if way != NGRAM}
    failures = [
        f"{way}: outputs differ from vLLM's plain ones: {', '.join(facts['differing'][:3])}"
        for way, facts in ways.items()
        if facts["differing"]
    ]
    failures += [
        f"{way}: vLLM counts {facts['tau']:.3f} tokens a draft, the decoder {shares.mal:.3f}"
        for way, facts in heads.items()
        if abs(facts["tau"] - shares.mal) > TOLERANCE
    ]
    if conversion and conversion["differing"]:
        failures.append(f"speculators holds other values: {', '.join(conversion['differing'][:3])}")
    plain = [list(r.tokens) for r in here.answers[PLAIN]]
    return {
        "schema": SCHEMA,
        "model": settings.model,
        "head": trained.name,
        "passed": not failures,
        "failures": failures,
        "outputs_equal": not any(facts["differing"] for facts in ways.values()),
        "equal_to_decoder": sum(a == b for a, b in zip(plain, served[PLAIN]["tokens"], strict=True)),
        "vllm_tau": ways[trained.name]["tau"],
        "decoder_tau": shares.mal,
        "acceptance_cumulative": {"vllm": ways[trained.name]["by_depth"], "decoder": shares.cumulative},
        "tokens_per_s": {
            **{f"vllm {way}": _rate(found["tokens"], found["seconds"]) for way, found in served.items()},
            **{f"draftsmith {way}": _rate([r.tokens for r in a], here.seconds[way]) for way, a in here.answers.items()},
        },
        "ways": ways,
        "setting": {
            "dtype": "float32", "depth": settings.depth, "threads": settings.threads,
            "prompts": len(here.prompts.requests), "prompts_sha256": here.prompts.sha256,
            "max_new_tokens": settings.max_new_tokens,
        },
        "skipped": _skipped(served, settings),
        "versions": {"vllm": served[PLAIN]["version"], SPECULATORS: conversion and conversion["version"]},
    }  # fmt: skip


def _skipped(served: Mapping[str, Any], settings: ServeSettings) -> list[str]:
    """What was not tried although vLLM loads it."""
    missing = SPECULATORS in served and not settings.python(SPECULATORS).is_file()
    return [f"{SPECULATORS} is not installed in {settings.installed}: run 'make engines'"] if missing else []


def _way(found: Mapping[str, Any], plain: Sequence[Sequence[int]], here: Here) -> dict[str, Any]:
    """Figures of one way to speculate in vLLM, by its own counters."""
    drafts = found["drafts"]
    pairs = zip(here.prompts.requests, found["tokens"], plain, strict=True)
    return {
        "tau": 1 + found["accepted"] / drafts if drafts else 1.0,
        "drafts": drafts,
        "accepted": found["accepted"],
        "by_depth": [n / drafts for n in found["accepted_by_depth"]] if drafts else [],
        "differing": [request.id for request, own, other in pairs if own != other],
    }


def _rate(answers: Sequence[Sequence[int]], seconds: float) -> float:
    return sum(len(tokens) for tokens in answers) / seconds


def result_lines(result: Mapping[str, Any]) -> list[str]:
    """What `serve_check` returned, for people."""
    setting = result["setting"]
    lines = [
        f"{result['head']} for {result['model']} in vLLM {result['versions']['vllm']}: {setting['prompts']} prompts × "
        f"{setting['max_new_tokens']} tokens, K = {setting['depth']}, fp32, greedy",
        f"  outputs equal to vLLM's without speculation: {'yes' if result['outputs_equal'] else 'NO'}",
        f"  tokens a draft: vLLM {result['vllm_tau']:.3f}, the decoder here {result['decoder_tau']:.3f}",
        *(f"  {way:28} {rate:8.1f} tokens/s" for way, rate in result["tokens_per_s"].items()),
    ]
    lines += [f"  not tried: {text}" for text in result["skipped"]]
    return [*lines, *(f"FAILED: {text}" for text in result["failures"]), f"written: {result['path']}"]
