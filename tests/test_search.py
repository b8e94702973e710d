"""Tree search against plain Python over a table of logits, and with the real EAGLE-3 head against its dense oracle."""

from __future__ import annotations

import math
import re
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import ScriptedEagle3, make_truth, pieces, random_head, random_prompts
from families import make_case, make_document
from reference import Document
from search_checks import (
    COLUMNS,
    TABLE,
    VOCAB,
    WIDE,
    Path,
    RecordedPaths,
    Toy,
    best_columns,
    children_by_rank,
    make_draws,
    paths_of,
    penalised,
    table,
)
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.network import HeadDrafter
from draftsmith.eval.decoder.sampling import DRAFT, Sampling, uniform
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static, parse_shape

# --- known trees ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("columns", [None, COLUMNS])
@pytest.mark.parametrize("setting", [Sampling(), Sampling(repetition_penalty=1.7), Sampling(temperature=0.9)])
def test_a_static_tree_holds_the_most_likely_tokens(columns: list[int] | None, setting: Sampling) -> None:
    toy = Toy(table(1, VOCAB if columns is None else len(columns)), columns)
    shape = Static(WIDE, sampled=False)
    assert (shape.rows, shape.depth, shape.expanded) == (13, 4, 5)
    draws = make_draws([setting] * 3)
    tree = shape.grow(toy, torch.tensor([3, 9, 4]), draws)
    assert tree.tokens[:, 0].tolist() == [3, 9, 4]
    assert tree.valid.all()
    assert (tree.proposal, tree.is_chain, tree.deepest) == (None, False, 4)
    order = [(), *sorted(map(tuple, WIDE), key=lambda p: (len(p), p))]
    for row in range(3):
        want = children_by_rank(toy, WIDE, row, setting)
        assert paths_of(tree, row) == [want[ranks] for ranks in order]
    assert len(toy.rows[0]) == shape.expanded


def test_a_chain_is_the_static_tree_of_one_path() -> None:
    toy = Toy(table(2, VOCAB))
    one = Static([[0] * d for d in range(1, 6)])
    for settings in ([Sampling()] * 2, [Sampling(temperature=1.0), Sampling(temperature=0.4)]):
        trees = [s.grow(toy, torch.tensor([3, 9]), make_draws(settings)) for s in (Chain(5), one)]
        assert all(t.is_chain and t.deepest == 5 for t in trees)
        assert torch.equal(trees[0].tokens, trees[1].tokens)
        assert [paths_of(t, 1)[-1] for t in trees] == [tuple(trees[0].tokens[1, 1:].tolist())] * 2
    assert (Chain(5).rows, Chain(5).depth, Chain(5).expanded) == (6, 5, 4)


def test_paths_may_come_in_any_order() -> None:
    assert Static(WIDE[::-1]) == Static(WIDE)


# --- drawn children ---------------------------------------------------------------------------------------------------

SETTINGS = [
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=0.7, top_k=5, repetition_penalty=1.4),
    Sampling(repetition_penalty=1.2),
    Sampling(temperature=1.3, top_p=0.8, seed=1),
    Sampling(),
]


def warped(logits: list[float], setting: Sampling) -> list[float]:
    """Temperature, top-k and top-p by hand, in fp64."""
    x = [v / setting.temperature for v in logits]
    order = best_columns(x, len(x))
    kept = order[: setting.top_k or len(x)]
    total = sum(math.exp(x[c]) for c in kept)
    mass, inside = 0.0, []
    for column in kept:
        if mass < setting.top_p:
            inside.append(column)
        mass += math.exp(x[column]) / total
    total = sum(math.exp(x[c]) for c in inside)
    return [math.exp(x[c]) / total if c in inside else 0.0 for c in range(len(x))]


def draw_by_hand(q: list[float], taken: list[int], u: float) -> int:
    left = [0.0 if c in taken else v for c, v in enumerate(q)]
    at, total = u * sum(left), 0.0
    for column, value in enumerate(left):
        total += value
        if value and at < total:
            return column
    raise AssertionError("nothing is left")


@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_children_are_drawn_without_replacement(columns: list[int] | None) -> None:
    """Every q row, every drawn token and every validity, in a batch with greedy sequences."""
    toy = Toy(table(3, VOCAB if columns is None else len(columns), scale=0.6), columns)
    ids = list(range(VOCAB)) if columns is None else columns
    draws = make_draws(SETTINGS)
    assert draws.mixed
    tree = Static(WIDE).grow(toy, torch.arange(5), draws)
    proposal = tree.proposal
    assert proposal is not None
    assert (proposal.width, proposal.q.shape) == (3, (5, 6, len(ids)))
    assert proposal.ids is None if columns is None else proposal.ids.tolist() == columns
    order = [(), *sorted(map(tuple, WIDE), key=lambda p: (len(p), p))]
    for row, setting in enumerate(SETTINGS):
        tokens = paths_of(tree, row)
        assert bool(tree.valid[row].all()), "five tokens are left even of the narrowest q"
        assert proposal.drawn[row].tolist() == [False] + [setting.temperature > 0] * 12
        greedy = children_by_rank(toy, WIDE, row, setting)
        for node, ranks in enumerate(order):
            children = [i for i in range(13) if int(tree.parent[row, i]) == node]
            number = int(proposal.row[row, node])
            assert (number >= 0) == bool(children)
            if not children or setting.temperature == 0:
                assert setting.temperature > 0 or tokens[node] == greedy[ranks]
                continue
            q = warped(penalised(toy, row, tokens[node], setting, (4, 5)), setting)
            torch.testing.assert_close(proposal.q[row, number].double(), torch.tensor(q).double(), rtol=1e-5, atol=1e-7)
            taken: list[int] = []
            for rank, child in enumerate(children):
                u = uniform(draws.seeds, draws.keys, draws.roots + len(ranks) + 1, DRAFT + rank)[row]
                taken.append(draw_by_hand(q, taken, float(u)))
                assert int(tree.tokens[row, child]) == ids[taken[-1]]


def test_a_sequence_draws_the_same_alone_and_in_a_batch() -> None:
    toy = Toy(table(4, VOCAB))
    toy.code = lambda sequence, path: Toy.code(toy, 0, path)  # type: ignore[method-assign]
    together = Static(WIDE).grow(toy, torch.arange(5), make_draws(SETTINGS))
    seen = set()
    for row, setting in enumerate(SETTINGS):
        alone = Static(WIDE).grow(toy, torch.tensor([row]), make_draws([setting], first=row))
        assert torch.equal(alone.tokens[0], together.tokens[row])
        seen.add(tuple(alone.tokens[0, 1:].tolist()))
    assert len(seen) > 3


def test_an_exhausted_q_gives_no_more_siblings() -> None:
    """Where q keeps two tokens a third child is invalid, and whatever hangs below it."""
    draws = make_draws([Sampling(temperature=1.0, top_k=2), Sampling(temperature=1.0, top_k=3)])
    tree = Static([[0], [1], [2], [2, 0], [2, 0, 0], [0, 0], [0, 1], [0, 2]]).grow(
        Toy(table(5, VOCAB)), torch.tensor([1, 1]), draws
    )
    # nodes: 0, 1, 2 | 00 01 02 20 | 200
    assert tree.valid.tolist() == [[True] * 3 + [False] + [True] * 2 + [False] * 3, [True] * 9]
    paths = paths_of(tree, 1)
    assert len(set(paths)) == 9, "siblings are distinct"


def test_a_broken_network_proposes_nothing() -> None:
    """NaN logits: no drawn child counts, and every node of a dynamic tree still hangs below its own parent."""
    draws = make_draws([Sampling(temperature=1.0)])
    tree = Static(WIDE).grow(Toy(torch.full((TABLE, VOCAB), math.nan)), torch.tensor([1]), draws)
    assert not tree.valid[:, 1:].any()
    for total in (5, 8, 12, 20):
        broken = table(total, VOCAB)
        broken[::3] = math.nan
        tree = Dynamic(4, 4, total).grow(Toy(broken), torch.arange(8), make_draws([Sampling()] * 8))
        assert all(len(set(paths_of(tree, row))) == total for row in range(8))


# --- dynamic trees ----------------------------------------------------------------------------------------------------


def eagle2(toy: Toy, shape: Dynamic, sequence: int, setting: Sampling) -> list[Path]:
    """EAGLE-2's tree of one sequence: expansion, then reranking over all candidates, shallow ones first in ties."""
    ids = list(range(VOCAB)) if toy.columns is None else toy.columns.tolist()

    def children(path: Path, score: Tensor) -> list[tuple[Tensor, Path]]:
        logits = torch.tensor(penalised(toy, sequence, path, setting, (4, 5)))
        log_q = torch.log_softmax(logits, 0)
        return [(score + log_q[c], (*path, ids[c])) for c in best_columns(logits.tolist(), shape.top_k)]

    def best(nodes: list[tuple[Tensor, Path]], count: int) -> list[tuple[Tensor, Path]]:
        return sorted(nodes, key=lambda node: -float(node[0]))[:count]  # sorted keeps the order of equals

    level = children((), torch.zeros(()))
    everything = list(level)
    for _ in range(shape.depth - 1):
        level = [child for score, path in best(level, shape.top_k) for child in children(path, score)]
        everything += level
    kept = {path for _, path in best(everything, shape.total - 1)}
    return [(), *(path for _, path in everything if path in kept)]


SHAPES = [Dynamic(4, 3, 12), Dynamic(3, 5, 24), Dynamic(1, 4, 5), Dynamic(5, 1, 4), Dynamic(2, 2, 7), Dynamic(6, 4, 60)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("columns", [None, COLUMNS])
def test_a_dynamic_tree_is_eagle2s(shape: Dynamic, columns: list[int] | None) -> None:
    settings = [Sampling(), Sampling(temperature=0.8), Sampling(repetition_penalty=1.5), Sampling(temperature=2.0)]
    for seed, scale in ((0, 0.5), (1, 2.0), (2, 8.0)):
        toy = Toy(table(seed, VOCAB if columns is None else len(columns), scale=scale), columns)
        tree = shape.grow(toy, torch.arange(4), make_draws(settings))
        assert tree.proposal is None
        assert tree.valid.all()
        assert tree.is_chain == (shape.top_k == 1)
        assert tree.tokens.shape == (4, shape.rows)
        for row, setting in enumerate(settings):
            assert paths_of(tree, row) == eagle2(toy, shape, row, setting)
        assert len(toy.rows[0]) == shape.expanded


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_ties_never_lose_a_parent(shape: Dynamic) -> None:
    """The same logits everywhere make products of paths equal; a sure token makes a child equal to its parent."""
    sure = torch.zeros(1, VOCAB)
    sure[0] = torch.arange(VOCAB) * 0.01
    sure[0, 6] = 200.0
    assert float(torch.log_softmax(sure, -1)[0, 6]) == 0.0
    sharp = table(8, VOCAB, 2)
    sharp[0] = sure[0]
    for logits in (table(7, VOCAB, 1), sure, sharp):
        toy = Toy(logits)
        tree = shape.grow(toy, torch.arange(2), make_draws([Sampling()] * 2))
        for row in range(2):
            paths = paths_of(tree, row)
            assert len(set(paths)) == shape.total
            assert paths == eagle2(toy, shape, row, Sampling())


# --- errors and text --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain(0), "depth 0 must be at least 1"),
        (lambda: Dynamic(0, 2, 5), "top_k 0 must be at least 1"),
        (lambda: Dynamic(2, 0, 5), "depth 0 must be at least 1"),
        (lambda: Dynamic(2, 5, 5), "depth 5 is deeper than its budget of 5 nodes: give it at least 6"),
        (lambda: Dynamic(2, 2, 8), "find at most 7 nodes, not 8"),
        (lambda: Static([]), "at least one path"),
        (lambda: Static([[0], []]), r"path \[\] must hold ranks"),
        (lambda: Static([[0], [-1]]), r"path \[-1\] must hold ranks"),
        (lambda: Static([[0], [1], [0]]), r"path \[0\] is there 2 times"),
        (lambda: Static([[0], [1, 0]]), r"path \[1, 0\] hangs below no node: \[1\] is missing"),
        (lambda: Static([[0], [0, 1]]), r"sibling \[0, 0\] is missing"),
        (lambda: Static([[1]]), r"sibling \[0\] is missing"),
        (lambda: Dynamic(5, 1, 4).check(4), "top_k 5 must be at most the draft vocabulary's 4"),
        (lambda: Static([[0], [1], [2]]).check(2), "3 children, the draft vocabulary only 2"),
        (lambda: parse_shape("chain:0"), "depth 0 must be at least 1"),
    ],
)
def test_shapes_that_cannot_be_are_refused(make: Any, message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        make()


@pytest.mark.parametrize(
    "text", ["", "chain", "chain:x", "tree:4", "static:", "static:0,,1", "dynamic:3x4", "dynamic:1x2x3x4"]
)
def test_text_that_is_no_shape_is_refused(text: str) -> None:
    with pytest.raises(DraftsmithError, match=re.escape(repr(text)) + ".*chain:4.*static:.*dynamic:10x6x60"):
        parse_shape(text)


def test_text_becomes_a_shape() -> None:
    shapes = {"chain:4": Chain(4), "static:0,1,0.0": Static([[0], [1], [0, 0]]), "dynamic:10x6x60": Dynamic(10, 6, 60)}
    assert {text: parse_shape(text) for text in shapes} == shapes


def test_a_drafter_refuses_a_shape_wider_than_its_vocabulary(tiny_target: Any) -> None:
    with pytest.raises(DraftsmithError, match="top_k 201"):
        make_drafter(random_head(tiny_target), tiny_target.parts(), Dynamic(201, 1, 3))


# --- with a head ------------------------------------------------------------------------------------------------------


class Recorded(RecordedPaths, HeadDrafter):
    """Keeps what it drafted from."""


@torch.no_grad()
@pytest.mark.parametrize("shape", [Chain(4), Static(WIDE), Dynamic(3, 4, 14)], ids=["chain", "static", "dynamic"])
@pytest.mark.parametrize("variant", ["gqa", "mqa-llama3"])
def test_drafts_in_a_tree_are_the_oracles_chain_drafts(shape: Shape, variant: str) -> None:
    """Logits of every node that was expanded, for sequences of different length; committed rows stay as they are."""
    case = make_case("eagle3", variant)
    texts = [make_document(case, [True] * n, n) for n in (9, 4, 12)]
    drafter = Recorded(case.head, case.parts, shape)
    drafter.allocate(3, 32)
    for slot, doc in enumerate(texts):
        drafter.begin(slot, torch.tensor(doc.tokens), doc.features[:-1], None)
    cached = (drafter.cache.keys, drafter.cache.values)
    before = [x.clone() for x in (*cached, drafter.logits, drafter.state)]
    roots = torch.tensor([doc.tokens[-1] for doc in texts])
    trees = [drafter.propose(roots, make_draws([Sampling()] * 3)) for _ in range(2)]
    assert torch.equal(trees[0].tokens, trees[1].tokens), "an earlier draft is still visible"
    weights = case.weights()
    for slot, doc in enumerate(texts):
        row = len(doc.tokens) - 2
        assert len(drafter.made[slot]) == shape.expanded
        for path, logits in drafter.made[slot]:
            longer = Document([*doc.tokens, *path], [], doc.features, doc.last)
            want = case.reference.draft(weights, case.config, longer, case.parts, case.ids, row, len(path) + 1)[-1]
            torch.testing.assert_close(logits, want, rtol=2e-6, atol=2e-6)
        for old, new in zip(before[:2], cached, strict=True):
            assert torch.equal(old[slot, :, : row + 1], new[slot, :, : row + 1]), "drafting changed committed rows"
    assert drafter.cache.lengths.tolist() == [len(doc.tokens) - 1 for doc in texts]
    assert torch.equal(before[2], drafter.logits)
    assert torch.equal(before[3], drafter.state)


@pytest.mark.parametrize("shape", [Static(WIDE), Dynamic(4, 3, 12)], ids=["static", "dynamic"])
def test_trees_of_a_head_are_lossless_and_leave_its_cache_true(tiny_target: Any, shape: Shape) -> None:
    truth = make_truth(tiny_target, random_prompts(tiny_target, [1, 9, 14, 5]), 20)
    head = random_head(tiny_target)
    drafter = ScriptedEagle3(head, pieces(tiny_target), shape).script(truth, 0.8)
    results = checks.check_lossless(tiny_target, drafter, truth, 1, lambda i: 12 - 2 * i)
    assert max(step.accepted for r in results for step in r.steps) > 1
    drafter = ScriptedEagle3(head, pieces(tiny_target), shape).script(truth, 0.6)
    assert checks.check_cache_truth(tiny_target, drafter, truth, 3, lambda _: 10, head) > 5


def test_a_head_drafts_at_the_end_of_its_cache(tiny_target: Any) -> None:
    """Far more rows are expanded than the tree keeps."""
    truth = make_truth(tiny_target, random_prompts(tiny_target, [490, 487]), 10)
    drafter = make_drafter(random_head(tiny_target), tiny_target.parts(), Dynamic(10, 4, 8))
    checks.check_lossless(tiny_target, drafter, truth, 2, lambda _: 10)
