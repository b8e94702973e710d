"""A report of every part that a report can have, with figures that are easy to find again."""

from __future__ import annotations

from typing import Any

AWKWARD = 'a <b> & "c" \x07\ud800 ' + "long " * 9
"""A name as a user's file may hold it: markup, quotes, a control character, half a surrogate pair."""


def group(name: str, tau: float, speedup: float | None, **more: Any) -> dict[str, Any]:
    return {
        "name": name,
        "n_prompts": 7,
        "tau": tau,
        "tau_ci": [tau - 0.1, tau + 0.15],
        "alpha": 0.512,
        "speedup": speedup,
        "speedup_ci": None if speedup is None else [speedup - 0.07, speedup + 0.08],
        **more,
    }


def tree() -> dict[str, Any]:
    """Root, three children, two grandchildren below the second: an accepted path of two drafts."""
    nodes = [("The", -1, 0), (" a", 0, 1), (" cat", 0, 1), ("\n", 0, 1), (" sat", 2, 2), (" ran", 2, 2)]
    kept = (0, 2, 4)
    return {
        "nodes": [
            {"token": token, "parent": parent, "depth": depth, "accepted": i in kept}
            for i, (token, parent, depth) in enumerate(nodes)
        ],
        "bonus": " on",
        "id": "story-3",
        "step": 4,
    }


def sample() -> dict[str, Any]:
    pieces = [("Once", "plain", 0), (" upon", "drafted", 1), (" <b>a", "drafted", 2), (" time", "corrected", 3)]
    pieces += [("\n", "drafted", 1), (" there", "drafted", 9), (" was", "bonus", 10)]
    return {
        "id": "story-3",
        "prompt": "Tell me a story & more",
        "pieces": [{"text": text, "kind": kind, "depth": depth} for text, kind, depth in pieces],
    }


def report(**changes: Any) -> dict[str, Any]:
    """As `eval.report.content.build_report` returns it, of a tree with everything there is."""
    shares = {"acceptance_conditional": [0.701, 0.602, 0.503], "acceptance_cumulative": [0.704, 0.424, 0.213]}
    chain = {"tree": "chain:4", "tau": 2.05, "tau_ci": [1.95, 2.15]}
    chain |= {"acceptance_conditional": [0.61, 0.52, 0.43, 0.34], "acceptance_cumulative": [0.61, 0.31, 0.13, 0.045]}
    made = {
        "schema": "draftsmith.report/3",
        "summary": {
            "tau": 2.345, "tau_ci": [2.21, 2.48], "tau_mean": 2.4, "mal": 2.44, "alpha": 0.587, **shares,
            "acceptance_by_rank": [[0.5, 0.15, 0.054], [0.4, 0.024], [0.213]],
            "speedup": 1.52, "speedup_ci": [1.44, 1.61],
            "setting": {"kind": "dynamic", "tree": "dynamic:3x3x6", "depth": 3, "nodes": 6, "temperature": 0.0,
                        "batch": 1, "dtype": "float32"},
            "n_prompts": 2, "tokens_per_s": 33.1, "baseline_tokens_per_s": 21.8, "generate_tokens_per_s": 20.2,
            "output_check": "identical", "flag": None, "overhead": 0.031, "measuring_overhead": 0.0042, "chain": chain,
        },
        "target": {"id": "tiny", "revision": None, "fingerprint": "f" * 64, "chat_template_sha256": "c" * 64},
        "head": {"family": "eagle3"},
        "head_sha256": "a" * 64,
        "environment": {"processor": "A <fast> one", "device": "cpu", "cpus": 2, "threads": 1, "dtype": "float32",
                        "system": "Linux x86_64", "versions": {"torch": "2.13"}, "sessions": 1},
        "by": {
            "category": [group("coding", 2.9, 1.8), group("writing", 1.9, 1.2), group(AWKWARD, 2.2, 1.41)],
            "context": [group("<256", 2.5, None), group("<512", 2.1, None)],
            "language": [group("en", 2.4, 1.5), group("de", 1.6, 1.03)],
            "turn": [group("1", 2.4, 1.5)],
        },
        "temperatures": [
            {**group("", 2.345, 1.52), "temperature": 0.0, "output_check": "identical"},
            {**group("", 1.81, 1.17), "temperature": 0.7, "output_check": "sampled: law tested, not compared"},
        ],
        "ttft": {"plain": {"p50": 0.0512, "p95": 0.0834}, "speculative": {"p50": 0.0533, "p95": 0.0871}},
        "time": {"draft": 0.213, "verify": 0.702, "other": 0.085},
        "benchmarks": [
            group("mt-bench", 2.5, 1.6, source="mt.jsonl", licence="Apache-2.0", sha256="d" * 64, dropped=["q-7"],
                  problems=["no question: 2, first mt.jsonl:4"]),
            group("mine", 2.0, 1.3, source="mine.jsonl", licence=None, sha256="e" * 64, dropped=[], problems=[]),
        ],
        "samples": [sample()],
        "tree": tree(),
        "tuning": {
            "n_prompts": 20,
            "acceptance_conditional": {"chain:4": [0.6, 0.5, 0.4, 0.3]},
            "table": [
                {"tree": "chain:2", "depth": 2, "nodes": 3, "expected_tau": 1.93, "predicted_tokens_per_s": 30.3,
                 "measured_tokens_per_s": None, "predicted_speedup": 1.39, "measured_speedup": None},
                {"tree": "dynamic:3x3x6", "depth": 3, "nodes": 6, "expected_tau": 2.36, "predicted_tokens_per_s": 34.4,
                 "measured_tokens_per_s": 32.2, "predicted_speedup": 1.58, "measured_speedup": 1.49},
            ],
        },
        "passes": {
            "plain": {"rows": 1, "target_seconds": 0.0411, "draft_seconds": 0.0, "rest_seconds": 0.0007},
            "dynamic:3x3x6": {"rows": 6, "target_seconds": 0.0472, "draft_seconds": 0.0139, "rest_seconds": 0.0021},
        },
        "prompts": {
            "name": "mt-bench+mine", "sha256": "b" * 64, "dropped": ["mt-bench/q-7"], "max_new_tokens": 128,
            "plain": [{"id": "p1", "tokens": 9, "seconds": 0.409, "ttft": 0.05},
                      {"id": "p2", "tokens": 7, "seconds": 0.311, "ttft": 0.05}],
            "speculative": [
                {"id": "p1", "benchmark": "mt-bench", "category": "coding", "language": "en", "turn": 1,
                 "seconds": 0.267, "steps": [[3, 2, 3], [3, 3, 4], [3, 1, 2]]},
                {"id": "p2", "benchmark": "mine", "category": AWKWARD, "language": "de", "turn": 1,
                 "seconds": 0.288, "steps": [[3, 0, 1], [3, 1, 2], [3, 3, 4]]},
            ],
        },
    }  # fmt: skip
    return made | changes


def sparse() -> dict[str, Any]:
    """The same of a chain and of an older version, that knew nothing of groups, temperatures, samples and trees."""
    old = {name: value for name, value in report().items() if name not in LATER}
    summary = dict(old["summary"])
    summary["setting"] = {**summary["setting"], "kind": "chain", "tree": "chain:3", "nodes": 4}
    for name in ("tau_mean", "measuring_overhead"):
        del summary[name]
    return {**old, "schema": "draftsmith.report/2", "summary": summary}


LATER = ("by", "temperatures", "ttft", "time", "benchmarks", "samples", "tree")
"""Parts that came with version 3."""

CURVE = [{"kind": "train", "step": i, "loss": 3.0 - i / 100} for i in range(1, 121)] + [
    {"kind": "validation", "step": 60, "tau_walk": 1.71, "tau": 1.66, "loss": 9.0},
    {"kind": "validation", "step": 120, "tau_walk": 1.93, "tau": None, "loss": 8.0},
]
STAGES: dict[str, dict[str, Any]] = {
    "regenerate": {"seconds": 12.5, "peak_rss_bytes": 3 * 2**20},
    "train": {"seconds": 321.0, "drift": {"kl": 0.0123, "compared_with": "the original"}},
}


def load(**changes: Any) -> dict[str, Any]:
    """As `eval.load.load` writes it to load.json, as far as a page reads it."""

    def around(speedup: float | None) -> list[float] | None:
        return None if speedup is None else [speedup - 0.05, speedup + 0.06]

    rows = [
        {"batch": batch, "speedup": speedup, "speedup_ci": around(speedup), "tokens_per_s": 31.7 * batch,
         "baseline_tokens_per_s": 21.3 * batch, "tau": 2.31, "output_check": check}
        for batch, speedup, check in ((1, 1.49, "identical"), (4, 1.27, "identical"), (8, None, "FAILED: p1 at 3"))
    ]  # fmt: skip
    clients = {"served_tokens_per_s": 44.4, "ttft": {"p50": 0.123, "p95": 0.456}, "latency": {"p50": 3.21, "p95": 6.54}}
    made = {
        "head_sha256": "a" * 64,
        "batches": rows,
        "sweep": {"setting": {"tree": "chain:3"}, "below_one": "the speed-up stays above 1 up to batch 4",
                  "same_steps": {"verdict": "the same steps for all 8 prompts at every batch"}},
        "replay": {"file": "day.jsonl", "concurrency": 6, "plain": clients,
                   "speculative": {**clients, "served_tokens_per_s": 66.6}, "output_check": "identical",
                   "throughput_ratio": 1.503},
    }  # fmt: skip
    return made | changes


def tune(**changes: Any) -> dict[str, Any]:
    """As `eval.tuned.tuned_result` puts tune.json together, as far as a page reads it."""

    def row(tree: str, depth: int, predicted: float, measured: float | None) -> dict[str, Any]:
        spread = None if measured is None else [measured - 0.03, measured + 0.04]
        return {"tree": tree, "depth": depth, "tau": 1 + depth / 2, "predicted_speedup": predicted,
                "measured_speedup": measured, "speedup_ci": spread}  # fmt: skip

    def cell(temperature: float, batch: int, best: float | None) -> dict[str, Any]:
        table = [row("chain:1", 1, 1.211, None), row("chain:2", 2, 1.337, best), row("dynamic:4x3x8", 3, 1.188, None)]
        found = {"tree": "chain:2", "speedup": best, "speedup_ci": [1.1, 1.7], "tokens_per_s": 35.5}
        return {"temperature": temperature, "batch": batch, "table": table, "plain_tokens_per_s": 23.7,
                "best": None if best is None else found}  # fmt: skip

    cells = [cell(0.0, 1, 1.354), cell(0.0, 4, 1.176), cell(0.7, 1, None)]
    return {"head_sha256": "a" * 64, "cells": cells, "advice": ["α = 0.59 greedy: K & the tree decide."]} | changes
