"""Held-out figures without decoding: expected acceptance by depth, and tau_walk; and which head is the best so far.

Where the target is trained, too, the held-out text is still the original target's, as it answered before training. The
tuned one would write another text here and there, so that tau_walk is then an approximation of what decoding gives, the
closer the smaller target_kl is; on a frozen target's own greedy text it is exact. `decoded.py` decodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data_recipes.packing import make_batch
from ..data_recipes.store import FeatureStore
from ..heads.base import StepStats
from .batches import BatchPlan
from .checkpoint import RunState
from .metrics import ratio, summarise
from .ranks import Ranks
from .step import SUMS, TrainStep, stat_sums


def walk(right: Tensor, supervised: Tensor, depth: int) -> tuple[int, int]:
    """Walk every answer as a chain decoder with K = `depth` would on this text; return (tokens, steps).

    From the first draftable row of an answer on, a step at row j emits the matched prefix of its guesses (at most K)
    and one token of the target's own, and goes on that much further. Tokens behind the answer's end don't count.

    Args:
        right: [steps, T] bool, whose guess at a step is the text's token.
        supervised: [T] bool, rows supervised at step 0; consecutive ones are one answer.
        depth: K.
    """
    return int(supervised.sum()), len(walked_steps(right, supervised, depth))


def walked_steps(right: Tensor, supervised: Tensor, depth: int) -> list[int]:
    """Accepted drafts of each step of `walk`, before the answer's end cuts them."""
    matched = right[:depth].long().cumprod(0).sum(0).tolist()
    steps, at = [], -1  # `at`: the row where the walk stands next
    previous = None
    for row in supervised.nonzero().flatten().tolist():
        if previous is None or row != previous + 1:
            at = row
        if row == at:
            steps.append(matched[row])
            at = row + matched[row] + 1
        previous = row
    return steps


@torch.no_grad()
def validate(step: TrainStep, store: FeatureStore, plan: BatchPlan, depth: int, ranks: Ranks) -> dict[str, Any]:
    """Measure the head on a plan's documents, each once; ranks share the batches.

    Returns:
        The figures of `metrics.summarise`, and
        expected_acceptance: sum of min(p, q) / rows by depth, with p over the full vocabulary;
        tau_walk: tokens / steps of `walk` over all answers; walk_tokens, walk_steps, documents;
        the step's extra losses by name, means per row: target_kl where the target is trained, too.
    """
    n = step.head.steps_for(depth)
    sums = torch.zeros(n, len(SUMS) + 1, dtype=torch.float64, device=ranks.device)
    extra = torch.zeros(len(step.extra), 2, dtype=torch.float64, device=ranks.device)
    walked = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    for documents in plan.epoch(0)[ranks.rank :: ranks.world]:
        batch = step.seen(make_batch(store, documents, plan.max_length).to(ranks.device, step.dtype))
        with step.autocast():
            stats = step.head.losses(batch, step.parts, overlap=True, steps=n)
        overlap = torch.stack([s.overlap.double() if s.overlap is not None else s.num.new_zeros(()) for s in stats])
        sums += torch.cat((stat_sums(stats), overlap[:, None]), 1)
        extra += step.extra_sums(batch)
        supervised = step.head.supervised_rows(batch, n)[0]
        walked += torch.tensor(walk(_right(stats, supervised), supervised, depth), device=walked.device)
    ranks.all_sum(sums)
    figures = ranks.all_sum(extra).tolist()
    tokens, steps = ranks.all_sum(walked).tolist()
    return {
        **summarise(sums, step.head.step_weights(n)),
        "expected_acceptance": [ratio(a, b) for a, b in zip(sums[:, -1].tolist(), sums[:, 2].tolist(), strict=True)],
        "tau_walk": ratio(tokens, steps),
        "walk_tokens": int(tokens),
        "walk_steps": int(steps),
        "documents": len(plan.documents),
        **{name: ratio(*pair) for name, pair in zip(step.extra, figures, strict=True)},
    }


def _right(stats: Sequence[StepStats], supervised: Tensor) -> Tensor:
    """Whose guess is the text's token, bool [steps, T], from what the losses say of the supervised rows."""
    right = torch.zeros(len(stats), len(supervised), dtype=torch.bool, device=supervised.device)
    for line, s in zip(right, stats, strict=True):
        line[supervised] = s.right
    return right


def note(found: Mapping[str, Any], state: RunState, by: str) -> bool:
    """Note a validation in the run's state; returns whether its head is the best so far.

    Args:
        found: what `validate` returns; with `tau` where the head was decoded.
        by: "tau" or "tau_walk". By tau a validation without decoding changes nothing; of equal taus, which few steps
            make likely, the one with the larger tau_walk is the better.
    """
    if by == "tau":
        if "tau" not in found:
            return False
        new: list[Any] = [found["tau"], found["tau_walk"]]
        old: list[Any] = [state.best_tau, state.best_tau_walk]
    else:
        new, old = [found["tau_walk"]], [state.best_tau_walk]
    if state.best_step is not None and not new > old:
        state.below_best += 1
        return False
    state.best_step, state.best_tau, state.best_tau_walk = state.step, found.get("tau"), found["tau_walk"]
    state.below_best = 0
    return True


def is_past_best(state: RunState, patience: int | None) -> bool:
    """Whether the run is to end: `patience` validations in a row were below the best one; None = never."""
    return patience is not None and state.below_best >= patience


def describe(found: Mapping[str, Any]) -> str:
    """A validation in a line or two, with what a user should know of it."""
    text = f"tau_walk {found['tau_walk']:.3f}, first draft right {found['acceptance_cumulative'][0]:.1%}"
    if "tau" in found:
        interval = f"{found['tau_low']:.3f} to {found['tau_high']:.3f}"
        text += f", decoded tau {found['tau']:.3f} ({interval}) on {found['decoded_documents']} prompts"
    return text + (f"\nwarning: {found['disagreement']}" if "disagreement" in found else "")
