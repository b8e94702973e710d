"""The trainer against a dense implementation in fp64 that takes the same steps on the same features."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import reference
import reference_eagle3
import torch
from torch import Tensor, nn
from train_worker import make_fit, make_store, recipe

from draftsmith.data_recipes.store import FeatureStore
from draftsmith.heads.base import DraftHead, TargetParts
from draftsmith.progress import Progress
from draftsmith.train.batches import plans_of
from draftsmith.train.fit import Trainer
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.ranks import process_group
from draftsmith.train.schedule import lr_factor
from draftsmith.train.settings import TrainSettings

STEPS = 10


def documents(store: FeatureStore, numbers: list[int], max_length: int) -> list[reference.Document]:
    found = [store.document(i, max_length) for i in numbers]
    return [
        reference.Document(d.tokens.tolist(), d.answer.tolist(), d.features.double(), d.last.double())
        for d in found
        if d.last is not None
    ]


def dense_losses(
    weights: dict[str, Any], head: DraftHead, docs: list[reference.Document], parts: TargetParts
) -> list[reference.Step]:
    ids = head.vocab.target_ids.tolist()
    wide = {name: x.double() for name, x in weights.items()}
    return reference.losses(reference_eagle3, wide, head.config, docs, parts, ids)


def train_densely(
    settings: TrainSettings, store: FeatureStore, parts: TargetParts, head: DraftHead
) -> dict[str, nn.Parameter]:
    """The head's weights after `STEPS` steps of the oracle's loss; fp32 weights, everything else in fp64."""
    weights = {name: nn.Parameter(p.detach().clone()) for name, p in head.named_parameters()}
    optimizer = MuonAdamW(
        weights.items(), lr_matrix=settings.lr_matrix, lr_other=settings.lr_other, momentum=settings.momentum,
        betas=(settings.betas[0], settings.betas[1]), weight_decay=settings.weight_decay, clip=settings.clip,
    )  # fmt: skip
    plan = plans_of(store, settings)[0]
    for step, (_, numbers) in zip(range(STEPS), plan.from_position((0, 0)), strict=False):
        optimizer.set_lr_factor(lr_factor(step, STEPS, settings))
        optimizer.zero_grad()
        sums = dense_losses(weights, head, documents(store, numbers, settings.max_length), parts)
        loss: Any = sum(
            settings_weight * s.num / max(s.den, 1) for settings_weight, s in zip(decay(head), sums, strict=True)
        )
        loss.backward()
        optimizer.step()
    return weights


def decay(head: DraftHead) -> list[float]:
    return [head.config.step_decay**s for s in range(head.config.steps)]


def expected_acceptance(found: list[reference.Step]) -> list[float]:
    return [s.overlap / s.rows for s in found]


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def test_held_out_acceptance_is_not_below_the_dense_implementations(
    tiny_target: Any, tiny_folder: Path, tmp_path: Path, quiet: None
) -> None:
    store = make_store(tiny_target, tmp_path / "features", documents=15)
    settings, opened, parts, head = make_fit(store, tiny_folder, recipe(steps=STEPS, token_budget=72, wandb=False))
    wide = parts.to("cpu", torch.float64)
    held_out = documents(opened, plans_of(opened, settings)[1].documents, settings.max_length)
    untrained = expected_acceptance(dense_losses(dict(head.named_parameters()), head, held_out, wide))
    dense = train_densely(settings, opened, wide, head)
    with process_group() as ranks:
        trainer = Trainer(settings, opened, parts, head, tmp_path / "run", ranks)
        trainer.state.total_steps = STEPS
        for _ in range(STEPS):
            trainer.train_step(Progress("train", STEPS, "steps"))
        trainer.close()
    ours: dict[str, Tensor] = {name: p.detach() for name, p in trainer.head.named_parameters()}
    with torch.no_grad():
        theirs = expected_acceptance(dense_losses(dict(dense), head, held_out, wide))
        found = expected_acceptance(dense_losses(ours, head, held_out, wide))
    assert math.fsum(theirs) > math.fsum(untrained) + 0.02, "the steps must have taught something"
    for mine, other in zip(found, theirs, strict=True):
        assert mine >= other - 0.002
    for name, p in dense.items():
        torch.testing.assert_close(ours[name], p.detach(), rtol=1e-3, atol=1e-4)
