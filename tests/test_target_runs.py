"""The whole pipeline, from prompts to a report, on targets of other architectures than Llama."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from target_models import save_target

from draftsmith import pipeline
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import TargetParts
from draftsmith.heads.config import default_layer_ids, stored_layer_ids
from draftsmith.heads.target import Target
from draftsmith.run_config import resolve
from draftsmith.train import stage

SMALL = [
    "prepare.val_every=4", "prepare.chunk=8", "regenerate.max_new_tokens=10", "train.steps=4", "train.validate_every=4",
    "train.token_budget=256", "train.warmup=1", "head.steps=2", "eval.prompts=2", "eval.max_new_tokens=8",
    "eval.trees=[chain:2]", "eval.tuning_prompts=1", "eval.tuning_new_tokens=4", "eval.timed_prompts=1",
    "eval.timed_new_tokens=4",
]  # fmt: skip
THINGS = ("ship", "fox", "dog", "winter")


def write_prompts(path: Path) -> Path:
    """Twelve short prompts."""
    lines = [{"prompt": f"write about the {a} and the {b}"} for a in THINGS for b in THINGS if a != b]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prompts(tmp_path_factory.mktemp("data") / "mine.jsonl")


def run(model: Path, prompts: Path, runs: Path, *more: str) -> dict[str, Any]:
    flags = {"model": str(model), "data": prompts, "runs": runs, "minutes": 1.0}
    return pipeline.run_all(resolve("run", flags, None, [*SMALL, *more]))


@pytest.mark.parametrize(
    ("name", "heads"),
    [("gemma2", ["eagle3", "eagle1"]), ("gemma3", ["eagle3"]), ("gpt_oss", ["eagle3"]), ("mixtral", ["medusa1"]),
     ("gpt2", ["eagle3"])],
)  # fmt: skip
def test_prompts_become_a_report(prompts: Path, tmp_path: Path, name: str, heads: list[str]) -> None:
    folder = save_target(name, tmp_path / name)
    for head in heads:
        result = run(folder, prompts, tmp_path / "runs", f"head={head}")
        assert head.startswith(result["head"]["family"])
        assert result["summary"]["output_check"] in ("identical", "ties"), result["summary"]
        assert result["summary"]["tau"] >= 1.0


def test_a_bf16_run_trains_with_the_pieces_of_the_bf16_model(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma rounds the embedding's factor to its dtype; the pieces are read in fp32, for the head's start."""
    folder = save_target("gemma2", tmp_path / "gemma2")
    seen: list[TargetParts] = []

    def fit(settings: Any, store: Any, parts: TargetParts, *_: Any, **__: Any) -> None:
        seen.append(parts)
        raise DraftsmithError("seen")

    monkeypatch.setattr(stage, "fit", fit)
    with pytest.raises(DraftsmithError, match="seen"):
        run(folder, prompts, tmp_path / "runs", "train.dtype=bfloat16", "train.mode=offline")
    own = Target.load(str(folder), dtype=torch.bfloat16, device="cpu").parts()
    assert seen[0].embed.dtype == torch.float32
    assert torch.equal(seen[0].to("cpu", torch.bfloat16).embed, own.embed)


def test_three_layers_are_enough_for_heads_that_read_no_inner_state(prompts: Path, tmp_path: Path) -> None:
    folder = save_target("llama", tmp_path / "short", num_hidden_layers=3)
    result = run(folder, prompts, tmp_path / "runs", "head=medusa1")
    assert result["summary"]["output_check"] in ("identical", "ties"), result["summary"]
    with pytest.raises(DraftsmithError, match="3 layers has no three distinct inner states"):
        run(folder, prompts, tmp_path / "others", "head=eagle3")
    assert not (tmp_path / "others" / "data").exists(), "before any work"
    assert [stored_layer_ids(n, "mtp") for n in (1, 2, 3, 4)] == [[], [1], [1, 2], default_layer_ids(4)]
