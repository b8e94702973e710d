"""Held-out figures without decoding: expected acceptance by depth, and tau_walk.

Where the target is trained, too, the held-out text is still the original target's, as it answered before training. The
tuned one would write another text here and there, so that tau_walk is then an approximation of what decoding gives, the
closer the smaller target_kl is; on a frozen target's own greedy text it is exact.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..data_recipes.packing import make_batch
from ..data_recipes.store import FeatureStore
from .batches import BatchPlan
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
    matched = right[:depth].long().cumprod(0).sum(0).tolist()
    rows = supervised.nonzero().flatten().tolist()
    steps, at = 0, -1  # `at`: the row where the walk stands next
    previous = None
    for row in rows:
        if previous is None or row != previous + 1:
            at = row
        if row == at:
            steps += 1
            at = row + matched[row] + 1
        previous = row
    return len(rows), steps


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
            right, supervised = step.head.matches(batch, step.parts, n)
        overlap = torch.stack([s.overlap.double() if s.overlap is not None else s.num.new_zeros(()) for s in stats])
        sums += torch.cat((stat_sums(stats), overlap[:, None]), 1)
        extra += step.extra_sums(batch)
        walked += torch.tensor(walk(right, supervised[0], depth), device=walked.device)
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
