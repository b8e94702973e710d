"""Held-out figures without decoding: expected acceptance by depth, and tau_walk; and which head is the best so far.

Where the target is trained, too, the held-out text is still the original target's, as it answered before training. The
tuned one would write another text here and there, so that tau_walk is then an approximation of what decoding gives, the
closer the smaller target_kl is; on a frozen target's own greedy text it is exact. `decoded.py` decodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..data_recipes.packing import make_batch
from ..data_recipes.store import FeatureStore
from ..errors import DraftsmithError
from ..heads.base import DraftHead, StepStats
from .batches import BatchPlan
from .checkpoint import RunState
from .faults import shown
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
        loss_<objective>: where several are mixed, the loss by each alone, without a family's feature loss;
        tau_walk: tokens / steps of `walk` over all answers; walk_tokens, walk_steps, documents;
        left_out: ids of the documents whose figures aren't finite: they are in none of the others;
        the step's extra losses by name, means per row: target_kl where the target is trained, too.

    Raises:
        DraftsmithError: no document has finite figures.
    """
    n = step.head.steps_for(depth)
    sums = torch.zeros(n, len(SUMS) + 1 + len(_terms(step.head)), dtype=torch.float64, device=ranks.device)
    extra = torch.zeros(len(step.extra), 2, dtype=torch.float64, device=ranks.device)
    walked = torch.zeros(2, dtype=torch.float64, device=ranks.device)
    left_out: list[str] = []
    for documents in plan.epoch(0)[ranks.rank :: ranks.world]:
        found = [_measured(step, store, documents, plan.max_length, depth)]
        if not _is_finite(found[0]):  # one document spoils all figures of its batch
            alone = {i: _measured(step, store, [i], plan.max_length, depth) for i in documents}
            found = [x for x in alone.values() if _is_finite(x)]
            left_out += [str(store.ids[i]) for i, x in alone.items() if not _is_finite(x)]
        for own, own_extra, own_walked in found:
            sums += own
            extra += own_extra
            walked += own_walked
    ranks.all_sum(sums)
    figures = ranks.all_sum(extra).tolist()
    tokens, steps = ranks.all_sum(walked).tolist()
    left_out = sorted(ranks.gather(left_out))
    if not steps:
        raise DraftsmithError(
            f"the figures of all {len(plan.documents)} held-out documents are not finite ({shown(left_out)}): look at "
            "those documents, or lower train.lr_matrix"
        )
    weights = step.head.step_weights(n)
    return {
        **summarise(sums[:, : len(SUMS)], weights),
        "expected_acceptance": [ratio(a, b) for a, b in zip(sums[:, 6].tolist(), sums[:, 2].tolist(), strict=True)],
        **{f"loss_{name}": _mean(sums[:, 7 + i], sums[:, 1], weights) for i, name in enumerate(_terms(step.head))},
        "tau_walk": ratio(tokens, steps),
        "walk_tokens": int(tokens),
        "walk_steps": int(steps),
        "documents": len(plan.documents) - len(left_out),
        "left_out": left_out,
        **{name: ratio(*pair) for name, pair in zip(step.extra, figures, strict=True)},
    }


def _measured(
    step: TrainStep, store: FeatureStore, documents: Sequence[int], max_length: int, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """One batch's figures: by step `SUMS`, the overlap and each objective's sum; the extra losses; tokens and steps."""
    n = step.head.steps_for(depth)
    batch = step.seen(make_batch(store, documents, max_length).to(step.parts.embed.device, step.dtype))
    with step.autocast():
        stats = step.head.losses(batch, step.parts, overlap=True, steps=n)
        terms = []
        for name in _terms(step.head):
            with _learning(step.head, name):
                terms.append([s.num for s in step.head.losses(batch, step.parts, steps=n)])
    columns = [torch.stack([s.overlap if s.overlap is not None else s.num.new_zeros(()) for s in stats])]
    columns += [torch.stack(term) for term in terms]
    sums = torch.cat((stat_sums(stats), torch.stack(columns, 1).double()), 1)
    supervised = step.head.supervised_rows(batch, n)[0]
    walked = walk(_right(stats, supervised), supervised, depth)
    return sums, step.extra_sums(batch), sums.new_tensor(walked)


def _is_finite(figures: Sequence[Tensor]) -> bool:
    return all(bool(torch.isfinite(x).all()) for x in figures)


def _terms(head: DraftHead) -> list[str]:
    """Objectives whose own losses are measured: all, where several are mixed."""
    return list(head.objective) if len(head.objective) > 1 else []


@contextlib.contextmanager
def _learning(head: DraftHead, name: str) -> Iterator[None]:
    """Context in which the head's losses are one objective's alone."""
    before = head.objective
    head.objective = {name: 1.0}
    head.feature_loss = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        head.objective = before
        del head.feature_loss


def _mean(nums: Tensor, dens: Tensor, weights: Sequence[float]) -> float:
    """A loss from sums by step, as `summarise` has it."""
    pairs = zip(nums.tolist(), dens.tolist(), strict=True)
    return sum(w * (ratio(*pair) or 0.0) for w, pair in zip(weights, pairs, strict=True))


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
