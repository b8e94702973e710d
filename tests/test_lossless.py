"""Greedy losslessness (invariant 5): every drafter x tree x batch on tiny targets of six architectures."""

from __future__ import annotations

from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import NAMES, every_drafter, make_truth, random_prompts
from decoder_models import save_model

from draftsmith.heads.target import Target

ARCHITECTURES = ["llama", "qwen3", "gemma3", "mistral", "gpt_neox", "gpt_oss"]  # windows of 8, sinks
CASES = [("llama", 1), ("gemma3", 1), *((name, 3) for name in ARCHITECTURES)]  # one at a time: rope alone, and windows
NEW = 10


@pytest.fixture(scope="module")
def case(request: pytest.FixtureRequest, tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Target, its dense greedy texts for prompts that repeat themselves, and every drafter."""
    target = tiny_target
    if request.param != "llama":
        folder = save_model(request.param, tmp_path_factory.mktemp("lossless") / request.param)
        target = Target.load(str(folder), dtype=torch.float32, device="cpu")
    prompts = [p + p for p in random_prompts(target, [1, 9, 14, 3])]
    return target, make_truth(target, prompts, NEW), every_drafter(target)


@pytest.mark.parametrize(("case", "slots"), CASES, indirect=["case"])
def test_every_drafter_is_lossless(case: Any, slots: int) -> None:
    target, truth, drafters = case
    accepted = {}
    for name in NAMES:
        results = checks.check_lossless(target, drafters[name], truth, slots, lambda i: NEW - i % 3)
        accepted[name] = sum(s.accepted for r in results for s in r.steps)
    # the target as its own draft model is right wherever it is asked
    assert min(n for name, n in accepted.items() if name.startswith("model")) > 10, accepted
    assert accepted["plain"] == 0
