"""A static tree for a trained head, from its accuracies by rank on held-out documents."""

from __future__ import annotations

from pathlib import Path

import torch

from ..data_recipes.packing import make_batch
from ..data_recipes.store import FeatureStore
from ..eval.decoder.trees import best_paths
from ..heads.adapter import FOLDER
from ..heads.checkpoint import WEIGHTS, MeasuredTree, load_weights, save_tree
from .batches import BatchPlan
from .ranks import Ranks
from .step import TrainStep

NODES, RANKS = 63, 10
"""Nodes of a measured tree, the root left out, and most children of any of them: those of the published trees."""


@torch.no_grad()
def measure_tree(
    step: TrainStep, store: FeatureStore, plan: BatchPlan, depth: int, ranks: Ranks, *, nodes: int = NODES
) -> MeasuredTree:
    """Measure a[s][i], how often the text's token is the i-th guess of step s, and build the best tree from it.

    Teacher-forced: the drafts above are the text's own tokens, so that a[s][i] is what a node's acceptance is given
    that its parent was accepted. Rows whose token lies outside the draft vocabulary count as misses.

    Args:
        step: the trained head with its target's parts.
        plan: its documents are looked at once each; ranks share the batches and get the same tree.
        depth: K, most depth of the tree; less where the head drafts less.
    """
    steps = depth if step.head.most_depth is None else min(depth, step.head.most_depth)
    width = min(RANKS, step.head.config.draft_vocab_size)
    counts = torch.zeros(steps, width + 1, dtype=torch.float64, device=ranks.device)  # hits by rank, supervised rows
    for documents in plan.epoch(0)[ranks.rank :: ranks.world]:
        batch = step.seen(make_batch(store, documents, plan.max_length).to(ranks.device, step.dtype))
        with step.autocast():
            found, supervised = step.head.label_ranks(batch, step.parts, width, steps)
        hits = found[..., None] == torch.arange(width, device=found.device)
        counts += torch.cat((hits.sum(1), supervised.sum(1, keepdim=True)), 1)
    table = ranks.all_sum(counts).tolist()
    accuracies = [[hits / max(row[-1], 1.0) for hits in row[:-1]] for row in table]
    return MeasuredTree(
        paths=[list(path) for path in best_paths(accuracies, nodes)],
        accuracies=accuracies,
        rows=[int(row[-1]) for row in table],
        documents=len(plan.documents),
    )


def grow_tree(best: Path, step: TrainStep, store: FeatureStore, plan: BatchPlan, depth: int, ranks: Ranks) -> None:
    """Measure the tree of the head in the folder `best` and save it there; `step` holds that head from here on."""
    ranks.barrier()  # rank 0 may still be writing it
    load_weights(step.head, best / WEIGHTS)
    if step.adapter is not None:
        step.adapter.load(best / FOLDER)
    tree = measure_tree(step, store, plan, step.head.steps_for(depth), ranks)
    if ranks.is_main:
        save_tree(tree, best)
