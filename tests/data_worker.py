"""What the kill tests run in child processes: the data stages on a tiny target, perhaps killed on the way."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM  # noqa: F401 - imported before the forks

from draftsmith.data_recipes.collect import CollectSettings, collect
from draftsmith.data_recipes.layout import TargetInfo
from draftsmith.data_recipes.prepare import PrepareSettings, prepare
from draftsmith.data_recipes.recipe import Recipe, SourceSpec
from draftsmith.data_recipes.regenerate import RegenerateSettings, regenerate
from draftsmith.heads.target import Target, load_tokenizer

LAYERS = (1, 2, 3)
NEW = 8


def stages(target: str, source: str, data: str, record: bool, kill_before_replace: int | None = None) -> None:
    """Run prepare, regenerate and collect; `kill_before_replace` = n kills the process where the n-th file appears."""
    _begin(kill_before_replace)

    def load() -> Target:
        return Target.load(target, dtype=torch.float32, device="cpu")

    info = TargetInfo.read(target)
    recipe = Recipe(name="r", sources=[SourceSpec(source=source)])
    prepare(PrepareSettings(max_new_tokens=NEW, chunk=5), recipe, Path(data), info, lambda: load_tokenizer(target))
    collecting = CollectSettings(LAYERS, token_budget=100)
    settings = RegenerateSettings(max_new_tokens=NEW, slots=3)
    regenerate(settings, Path(data), info, load, record=collecting if record else None)
    collect(collecting, Path(data), info, load)


def prepare_own_answers(target: str, sources: list[str], data: str, kill_before_replace: int | None = None) -> None:
    """Run prepare on conversations with answers of their own, two a chunk."""
    _begin(kill_before_replace)
    recipe = Recipe(name="r", sources=[SourceSpec(source=source) for source in sources])
    settings = PrepareSettings(answers="dataset", chunk=2, max_tokens=60, malformed_cap=0.5)
    prepare(settings, recipe, Path(data), TargetInfo.read(target), lambda: load_tokenizer(target))


def _begin(kill_before_replace: int | None) -> None:
    os.environ["DRAFTSMITH_QUIET"] = "1"
    torch.set_num_threads(1)
    if kill_before_replace is not None:
        _kill_before(kill_before_replace)


def _kill_before(n: int) -> None:
    real, count = os.replace, 0

    def replace(*args: object) -> None:
        nonlocal count
        count += 1
        if count == n:
            os.kill(os.getpid(), signal.SIGKILL)
        real(*args)  # type: ignore[arg-type]

    os.replace = replace  # type: ignore[assignment]
