"""The overfit gate of every head on a tiny target (invariant 8), and what tau_walk says about decoding."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from train_worker import make_fit, make_store

from draftsmith.heads.adapter import TunedConfig
from draftsmith.heads.registry import family_names, head_family
from draftsmith.train.settings import head_names, load_head_recipe

DEPTH = 4
_TRAIN = {
    "steps": 80, "token_budget": 700, "lr_matrix": 0.04, "lr_other": 0.02, "weight_decay": 0.0, "dtype": "float32",
    "warmup": 2, "seed": 1, "validate_every": 80,
}  # fmt: skip
# By head (what follows a plus is another form of it): what of its YAML differs here, beside `_TRAIN` and as many steps
# as are drafted.
GATES: dict[str, dict[str, Any]] = {
    "eagle3": {},
    "eagle3.1": {},
    "eagle1": {"head": {"options": {"noise": 0.0, "token_weight": 1.0}}},
    "hass": {},
    "medusa1": {},
    "hydra": {"train": {"steps": 40, "lr_matrix": 0.02, "lr_other": 0.01}},
    "mtp": {"train": {"steps": 40}},
    "mtp+modules": {"head": {"options": {"modules": DEPTH}}, "train": {"steps": 40}},
}


@pytest.fixture(scope="module")
def store(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tiny_target, tmp_path_factory.mktemp("store") / "features", documents=20, new_tokens=28, seed=3)


def test_every_family_has_a_gate() -> None:
    """That of heads which are trained together with their target: test_medusa2_runs.py."""
    families = {name for name in family_names() if not issubclass(head_family(name).config, TunedConfig)}
    names = {_file(name) for name in GATES}
    assert {load_head_recipe(name).head.family for name in names} == families
    assert names <= set(head_names())


def _file(name: str) -> str:
    return name.partition("+")[0]


def fitted(name: str, store: Path, folder: Path, out: Path) -> tuple[Any, Any, Any]:
    """Train a head; returns (store, parts, head).

    The teacher's logits are scaled: the random target's laws are almost flat, its greedy text stays the same.
    """
    from draftsmith.train.fit import fit

    own = GATES[name]
    recipe = load_head_recipe(
        _file(name),
        {
            "head": {"steps": DEPTH, "draft_vocab_size": 320, **own.get("head", {})},
            "train": {**_TRAIN, **own.get("train", {})},
        },
    )
    settings, opened, parts, head = make_fit(store, folder, recipe)
    parts = dataclasses.replace(parts, lm_head=parts.lm_head * 8)
    head.initialise(parts, torch.Generator().manual_seed(0))
    fit(settings, opened, parts, head, out)
    return opened, parts, head


def decoded_steps(target: Any, head: Any, documents: list[Any], new_tokens: int) -> list[Any]:
    from draftsmith.eval.decoder.drafters import make_drafter
    from draftsmith.eval.decoder.loop import Request, decode
    from draftsmith.eval.decoder.search import Chain

    requests = [Request(d.id, d.tokens[~d.answer].tolist(), min(new_tokens, int(d.answer.sum()))) for d in documents]
    found = decode(target, make_drafter(head, target.parts(), Chain(DEPTH)), requests, slots=4, capacity=64)
    return [s for r in found for s in r.steps]


@pytest.mark.parametrize("name", GATES)
def test_answers_are_learned_by_heart(
    name: str, store: Path, tiny_target: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mean accepted drafts / K >= 0.9; of heads that don't draft from their own drafts the first draft's acceptance.

    And tau_walk on the target's own greedy text is chain decoding (fp32).
    """
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")
    started = time.monotonic()
    opened, parts, head = fitted(name, store, tiny_folder, tmp_path)
    documents = [opened.document(i) for i in range(len(opened)) if opened.split(i) == "train"]
    assert len(documents) == 16
    # answers were trained to 28 tokens: decode fewer, so that no draft lies where nothing was trained
    trained = decoded_steps(tiny_target, head, documents, 22)
    share = sum(s.accepted for s in trained) / (DEPTH * len(trained))
    first = sum(s.accepted > 0 for s in trained) / len(trained)
    print(f"{name}: accepted / K {share:.3f}, first draft {first:.3f}, {time.monotonic() - started:.1f} s")
    goal = share if head.most_depth is None else first
    assert goal >= 0.9, f"accepted / K = {share:.3f}, first draft {first:.3f}"
    assert time.monotonic() - started < 40, "20 s on a quiet machine"
    check_tau_walk(tiny_target, opened, parts, head, documents)


def check_tau_walk(target: Any, opened: Any, parts: Any, head: Any, documents: list[Any]) -> None:
    """With a head that is right about half of the time, so that there is something to walk over."""
    from draftsmith.heads.base import Batch, Needs
    from draftsmith.train.validate import walk

    with torch.no_grad():
        noise = torch.Generator().manual_seed(0)
        for weight in head.parameters():
            if weight.ndim == 2:
                weight += torch.randn(weight.shape, generator=noise) * weight.std() * 0.5
    tokens = steps = 0
    for d in documents:
        with target.attention("sdpa"):
            aux, last = target.states(d.tokens[None], Needs(opened.layer_ids, last=True))
        n = len(d.tokens)
        batch = Batch(d.tokens, d.answer, torch.zeros(n, dtype=torch.int64), torch.arange(n), aux[0], last[0])
        right, supervised = head.matches(batch, parts, DEPTH)
        walked = walk(right, supervised[0], DEPTH)
        tokens, steps = tokens + walked[0], steps + walked[1]
    decoded = decoded_steps(target, head, documents, 28)
    assert (tokens, steps) == (sum(s.emitted for s in decoded), len(decoded))
    assert 1.1 < tokens / steps < 4.5
