"""A report and other facts of a head that was never trained, with figures known by hand; and a run with such a head."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from decoder_checks import random_head

from draftsmith.card import Data, Facts, Serving
from draftsmith.files import sha256_file, write_json
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.export_run import export_run
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target

WEIGHTS = "a" * 64
EXPORTED = ["config.json", "draftsmith.json", "model.safetensors"]
PUSHED = sorted(["README.md", *EXPORTED, "report.html", "report.json"])


def report(**changes: Any) -> dict[str, Any]:
    """What `eval` writes, as far as cards read it."""

    def row(name: str, n: int, tau: float, speedup: float | None) -> dict[str, Any]:
        ci = None if speedup is None else [speedup - 0.1, speedup + 0.1]
        return {
            "name": name, "n_prompts": n, "tau": tau, "tau_ci": [tau - 0.2, tau + 0.2], "alpha": 0.5,
            "acceptance_conditional": [0.6, 0.5], "speedup": speedup, "speedup_ci": ci,
        }  # fmt: skip

    return {
        "schema": "draftsmith.report/3",
        "head_sha256": WEIGHTS,
        "summary": {
            "tau": 2.25, "tau_ci": [2.1, 2.4], "mal": 2.3, "alpha": 0.55,
            "acceptance_conditional": [0.7, 0.6], "acceptance_cumulative": [0.7, 0.42],
            "speedup": 1.5, "speedup_ci": [1.4, 1.6],
            "setting": {"kind": "chain", "tree": "chain:2", "depth": 2, "nodes": 3, "temperature": 0.0, "batch": 1,
                        "dtype": "float32"},
            "n_prompts": 8, "tokens_per_s": 30.0, "baseline_tokens_per_s": 20.0, "generate_tokens_per_s": 18.0,
            "output_check": "identical", "flag": None, "overhead": 0.02,
            "chain": {"tree": "chain:4", "tau": 2.5, "tau_ci": [2.3, 2.7],
                      "acceptance_conditional": [0.7, 0.6, 0.5, 0.4],
                      "acceptance_cumulative": [0.7, 0.42, 0.21, 0.08]},
        },
        "environment": {"processor": "A Processor", "device": "cpu", "cpus": 2, "threads": 2, "dtype": "float32",
                        "system": "Linux x86_64", "versions": {"torch": "2.13.0"}, "sessions": 1},
        "by": {
            "category": [row("code", 4, 2.6, 1.7), row("a|b", 4, 1.9, 1.3)],
            "language": [row("en", 5, 2.3, 1.5), row("zh", 2, 2.1, 1.4), row("other", 1, 2.0, 1.3)],
            "turn": [row("1", 8, 2.25, 1.5)],
            "context": [row("<256", 8, 2.3, None), row("<512", 3, 2.0, None)],
        },
        "temperatures": [{"temperature": 0.0, **row("", 8, 2.25, 1.5)}, {"temperature": 1.0, **row("", 8, 1.9, None)}],
        "benchmarks": [row("builtin", 8, 2.25, 1.5) | {"source": "builtin", "licence": "apache-2.0"}],
        "ttft": {"plain": {"p50": 0.1, "p95": 0.2}, "speculative": {"p50": 0.123, "p95": 0.3}},
        "tuning": {"table": [
            {"tree": "chain:2", "depth": 2, "predicted_tokens_per_s": 30.0},
            {"tree": "chain:4", "depth": 4, "predicted_tokens_per_s": 31.0},
            {"tree": "dynamic:2x4x8", "depth": 4, "predicted_tokens_per_s": 40.0},
        ]},
        "prompts": {"name": "builtin", "sha256": "b" * 64, "dropped": [], "max_new_tokens": 64},
        **changes,
    }  # fmt: skip


def head(**changes: Any) -> dict[str, Any]:
    """What a HeadConfig of EAGLE-3 says, as far as cards read it."""
    return {
        "family": "eagle3", "layer_ids": [2, 18, 33], "steps": 4, "vocab_size": 151936, "draft_vocab_size": 32000,
        "target_id": "Qwen/Qwen3-8B", "target_revision": "b968826d9c46dd6066d109eabc6255188de91218",
        "target_fingerprint": "f" * 64, "chat_template_sha256": "c" * 64, "trained_length": 2048,
        **changes,
    }  # fmt: skip


def facts(**changes: Any) -> Facts:
    """Facts of a head whose every part is known."""
    data = Data(
        recipe="sharegpt-ultrachat",
        sources=[("sharegpt", "Aeala/ShareGPT_Vicuna_unfiltered", "0123456789abcdef"), ("mine", None, None)],
        answers="target",
        documents=1000,
        tokens=500_000,
        answer_tokens=300_000,
        temperatures=[0.0, 0.8],
    )
    known: dict[str, Any] = {
        "repo": "me/Head",
        "kind": "eagle3",
        "model": "Qwen3-8B",
        "head": head(),
        "parameters": 123_400_000,
        "dtype": "bfloat16",
        "layout": "EAGLE-3",
        "report": report(),
        "training": {"tokens": 4_000_000, "step": 1500, "vocabulary_coverage": 0.9876},
        "data": data,
        "serving": [Serving("vLLM", ["vllm serve Qwen/Qwen3-8B"], "from vllm import LLM\n", ["chains alone"])],
        "unsupported": [("TGI", "it has no EAGLE-3")],
    }
    return Facts(**{**known, **changes})


def make_data(home: Path) -> str:
    """A data folder as its stages leave it, as far as cards read it; returns the digest of its store."""
    data = home / "data" / "mixture"
    write_json(data / "features" / "index.json", {"any": "index"})
    write_json(data / "features" / "manifest.json", {"record": {"documents": 7, "tokens": 900, "answer_tokens": 300}})
    sources = [
        {"name": "chat", "kind": "hf", "dataset": "hf:acme/chat:default:train", "revision": None},
        {"name": "builtin", "kind": "builtin", "sha256": "0" * 64},
    ]
    write_json(data / "prompts" / "plan.json", {"sources": sources, "answers": "target"})
    write_json(data / "prompts" / "commits.json", {"date": "2026-01-01", "commits": {"chat": "abcdef0123456789"}})
    write_json(data / "answers" / "plan.json", {"temperatures": [0.0]})
    return sha256_file(data / "features" / "index.json")


def make_run(runs: Path, target: Target, folder: Path) -> Path:
    """A run's folder: an untrained head, exported for vLLM, with a report and what its stages noted.

    Args:
        folder: of the target.
    """
    home = runs / resolve_target(str(folder)).name
    best = home / "eagle3" / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    head = random_head(target)
    known = {"target_id": "acme/tiny", "target_fingerprint": target.fingerprint}
    head.config = dataclasses.replace(head.config, chat_template_sha256=target.template_sha256, **known)
    save_head(head, best)
    write_json(best.parents[1] / "plan.json", {"features": make_data(home)})
    record = {"step": 40, "tokens": 12000, "train_seconds": 9.0, "vocabulary_coverage": 0.75}
    write_json(best.parents[1] / "manifest.json", {"identity": {}, "record": record})
    weights = sha256_file(best / "model.safetensors")
    write_json(home / "eagle3" / "report.json", {**report(), "head_sha256": weights})
    (home / "eagle3" / "report.html").write_text("<!doctype html><title>x</title>")
    export_run(home / "eagle3", "vllm", model=str(folder))
    return home / "eagle3"
