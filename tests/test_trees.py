"""Trees made from measured accuracies: the greedy choice against all trees there are, and the figures by hand."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import reference_medusa
import torch
from decoder_checks import random_head
from reference import Document, supervised
from train_worker import make_store

from draftsmith.data_recipes.packing import make_batch
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.search import Chain, Static
from draftsmith.eval.decoder.trees import OwnTree, best_paths, shape_for
from draftsmith.heads.checkpoint import MeasuredTree, load_tree, save_tree
from draftsmith.heads.target import load_parts
from draftsmith.train.batches import BatchPlan
from draftsmith.train.ranks import Ranks
from draftsmith.train.step import TrainStep
from draftsmith.train.trees import measure_tree

ALONE = Ranks(0, 1, torch.device("cpu"))


# --- the choice -------------------------------------------------------------------------------------------------------


def value(path: tuple[int, ...], accuracies: list[list[float]]) -> float:
    return math.prod(accuracies[s][rank] for s, rank in enumerate(path))


def is_tree(paths: Any) -> bool:
    """Every parent and every earlier sibling is there."""
    known = set(paths)
    return all(p[:-1] in known | {()} and (p[-1] == 0 or (*p[:-1], p[-1] - 1) in known) for p in known)


def random_accuracies(seed: int, depth: int, ranks: int) -> list[list[float]]:
    """Falling with the rank; rows add up to less than 1."""
    g = torch.Generator().manual_seed(seed)
    rows = torch.rand(depth, ranks, generator=g, dtype=torch.float64).sort(descending=True).values
    return (rows / rows.sum(1, keepdim=True) * 0.9).tolist()


@pytest.mark.parametrize(("depth", "ranks", "count"), [(2, 3, 6), (3, 2, 7), (3, 3, 4)])
def test_the_first_n_nodes_are_the_best_tree_of_n(depth: int, ranks: int, count: int) -> None:
    everything = [p for d in range(1, depth + 1) for p in itertools.product(range(ranks), repeat=d)]
    trees = [[x for x in itertools.combinations(everything, n) if is_tree(x)] for n in range(1, count + 1)]
    for seed in range(4):
        accuracies = random_accuracies(seed, depth, ranks)
        chosen = best_paths(accuracies, count)
        for n, all_trees in enumerate(trees, 1):
            best = max(sum(value(p, accuracies) for p in paths) for paths in all_trees)
            assert sum(value(p, accuracies) for p in chosen[:n]) == pytest.approx(best, rel=1e-12)
            assert is_tree(chosen[:n])


def test_every_choice_is_the_likeliest_open_node() -> None:
    """With accuracies that rise with the rank here and there, and a tie: step by step by hand."""
    accuracies = [[0.5, 0.1, 0.3], [0.2, 0.2, 0.05], [0.0, 0.0, 0.0]]
    everything = [p for d in (1, 2, 3) for p in itertools.product(range(3), repeat=d)]
    chosen = best_paths(accuracies, 39)
    assert sorted(chosen) == sorted(everything), "nodes that were never right come last, but come"
    for n, path in enumerate(chosen):
        known = set(chosen[:n])
        free = [p for p in everything if p not in known and is_tree([*known, p])]
        assert path == min(free, key=lambda p: (-value(p, accuracies), len(p), p))
        Static(chosen[: n + 1])
    assert chosen[:4] == [(0,), (1,), (2,), (0, 0)]
    assert best_paths(accuracies, 100) == chosen


# --- the figures ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def store(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> FeatureStore:
    return FeatureStore.open(make_store(tiny_target, tmp_path_factory.mktemp("trees") / "features", documents=10))


@pytest.fixture(scope="module")
def parts(tiny_folder: Path) -> Any:
    return load_parts(str(tiny_folder), None, torch.float32)


def plan_over(store: FeatureStore) -> BatchPlan:
    return BatchPlan.over(store, list(range(len(store))), 60, 20, seed=0)


def test_accuracies_are_the_counts_by_hand(tiny_target: Any, store: FeatureStore, parts: Any) -> None:
    """Each guess of each head, from the formulas in fp64."""
    head = random_head(tiny_target, size=12, family="medusa")
    tree = measure_tree(TrainStep(head, parts, torch.float32), store, plan_over(store), 3, ALONE)
    weights = {n: w.detach().double() for n, w in head.named_parameters()}
    ids, wide = head.vocab.target_ids.tolist(), parts.to("cpu", torch.float64)
    hits, rows = [[0] * 10 for _ in range(3)], [0] * 3
    for i in range(len(store)):
        d = store.document(i)
        tokens, answer = d.tokens[:20].tolist(), d.answer[:20].tolist()
        doc = Document(tokens, answer, d.features, d.last.double())
        for j, s in itertools.product(range(len(tokens)), range(3)):
            if not supervised(answer, j, s):
                continue
            rows[s] += 1
            logits = reference_medusa.guess(weights, head.config, doc, wide, j, s)
            guesses = [ids[k] for k in logits.argsort(descending=True)[:10].tolist()]
            if tokens[j + 2 + s] in guesses:
                hits[s][guesses.index(tokens[j + 2 + s])] += 1
    assert (tree.rows, tree.documents) == (rows, 10)
    assert rows[0] > rows[1] > rows[2] > 50
    assert sum(map(sum, hits)) > 10
    assert [[round(a * n) for a in found] for found, n in zip(tree.accuracies, rows, strict=True)] == hits
    assert tree.accuracies[1] == [h / rows[1] for h in hits[1]]
    assert [tuple(p) for p in tree.paths] == best_paths(tree.accuracies, 63)
    assert len(tree.paths) == 63


def test_a_head_that_drafts_from_its_drafts_is_measured_below_the_texts_tokens(
    tiny_target: Any, store: FeatureStore, parts: Any
) -> None:
    head = random_head(tiny_target, size=12, family="eagle3")
    step = TrainStep(head, parts, torch.float32)
    tree = measure_tree(step, store, plan_over(store), 9, ALONE)
    assert len(tree.accuracies) == 9, "deeper than it was trained"
    right = torch.zeros(9)
    for documents in plan_over(store).epoch(0):
        right += head.matches(make_batch(store, documents, 20), parts, 9)[0].sum(1)
    assert [round(a[0] * n) for a, n in zip(tree.accuracies, tree.rows, strict=True)] == right.tolist()
    assert measure_tree(step, store, plan_over(store), 9, ALONE) == tree


def test_depth_and_ranks_are_those_that_the_head_has(tiny_target: Any, store: FeatureStore, parts: Any) -> None:
    head = random_head(tiny_target, size=4, family="medusa")
    tree = measure_tree(TrainStep(head, parts, torch.float32), store, plan_over(store), 9, ALONE)
    assert [len(row) for row in tree.accuracies] == [4] * 5
    assert max(len(p) for p in tree.paths) <= 5


class Both(Ranks):
    """One of two ranks; `shares` collects what each adds."""

    shares: ClassVar[list[torch.Tensor]] = []

    def all_sum(self, x: torch.Tensor) -> torch.Tensor:
        self.shares.append(x.clone())
        return x.copy_(sum(self.shares))


def test_ranks_share_the_documents(tiny_target: Any, store: FeatureStore, parts: Any) -> None:
    step = TrainStep(random_head(tiny_target, size=12, family="medusa"), parts, torch.float32)
    Both.shares.clear()
    measure_tree(step, store, plan_over(store), 4, Both(0, 2, ALONE.device))
    two = measure_tree(step, store, plan_over(store), 4, Both(1, 2, ALONE.device))
    assert two == measure_tree(step, store, plan_over(store), 4, ALONE)
    assert all(share[0, -1] > 0 for share in Both.shares)


# --- on disk, and as text ---------------------------------------------------------------------------------------------

TREE = MeasuredTree([[0], [0, 0], [1], [0, 1]], [[0.6, 0.2], [0.4, 0.3]], [100, 90], 7)


def test_a_tree_survives_its_file(tmp_path: Path) -> None:
    save_tree(TREE, tmp_path)
    assert load_tree(tmp_path) == TREE


def test_own_is_the_first_nodes_of_the_heads_tree(tmp_path: Path) -> None:
    save_tree(TREE, tmp_path)
    assert shape_for("own:3", tmp_path) == Static([[0], [0, 0]])
    assert shape_for("own:5", tmp_path) == Static(TREE.paths)
    assert shape_for("own:5", tmp_path).rows == 5
    assert shape_for("chain:2", tmp_path / "nowhere") == Chain(2)
    assert OwnTree.parse("static:0") is None


@pytest.mark.parametrize("text", ["own", "own:", "own:x", "own:1", "own:-3", "own:4.5"])
def test_text_that_is_no_own_tree_is_refused(text: str, tmp_path: Path) -> None:
    save_tree(TREE, tmp_path)
    with pytest.raises(DraftsmithError, match=f"'{text}' can't be read; write own:32"):
        shape_for(text, tmp_path)


def test_what_a_heads_tree_lacks_is_said(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"has no tree\.json.*another tree such as chain:4"):
        shape_for("own:3", tmp_path)
    save_tree(TREE, tmp_path)
    with pytest.raises(DraftsmithError, match="has 5 nodes with its root: own:6 asks for more"):
        shape_for("own:6", tmp_path)
    (tmp_path / "tree.json").write_text(json.dumps({"paths": [[0]]}))
    with pytest.raises(DraftsmithError, match=r"tree\.json is no measured tree: it must have the keys accuracies"):
        shape_for("own:2", tmp_path)
