"""Verification of single trees against walks written out in plain Python; what happens at the edges of the numbers."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from device_guard import no_waiting
from sampling_checks import make_draws
from torch import Tensor

from draftsmith.eval.decoder.sampling import ACCEPT, GREEDY, TOKEN, Draws, Sampling, penalise
from draftsmith.eval.decoder.types import Proposal, TokenTree, Verdict, chain
from draftsmith.eval.decoder.verify import Typical, accepts, residual, verify, without

VOCAB, BATCH = 6, 40
SAMPLINGS = [Sampling(1.0), Sampling(0.7, 3, repetition_penalty=1.5), GREEDY, Sampling(1.4, 0, 0.9, 0.1)]


def random_tree(nodes: int, seed: int, width: int = 4, ids: tuple[int, ...] | None = None) -> TokenTree:
    """Any shape; few tokens, so that twins and matches are many; a fifth of the nodes is never accepted."""
    g = torch.Generator().manual_seed(seed)
    parent, depth = torch.full((BATCH, nodes), -1), torch.zeros(BATCH, nodes, dtype=torch.int64)
    for b in range(BATCH):
        for i in range(1, nodes):
            free = [j for j in range(i) if (parent[b] == j).sum() < width]
            up = free[int(torch.randint(len(free), (), generator=g))]
            parent[b, i], depth[b, i] = up, depth[b, up] + 1
    tokens = torch.randint(0, VOCAB, (BATCH, nodes), generator=g)
    if ids is not None:
        tokens = torch.tensor(ids)[torch.randint(0, len(ids), (BATCH, nodes), generator=g)]
    valid = torch.rand(BATCH, nodes, generator=g) < 0.8
    valid[:, 0] = True
    return TokenTree(tokens, parent, depth, valid, int(depth.max()), False)


def with_proposal(tree: TokenTree, seed: int, ids: tuple[int, ...] | None) -> TokenTree:
    """Rows of q for inner nodes only, in an order of their own; half of the nodes drawn, whatever their tokens."""
    g = torch.Generator().manual_seed(seed)
    columns = len(ids) if ids else VOCAB
    inner = [sorted({*tree.parent[b].tolist()} - {-1}) for b in range(BATCH)]
    row = torch.full_like(tree.parent, -1)
    for b, nodes in enumerate(inner):
        row[b, nodes] = torch.randperm(len(nodes), generator=g)
    q = torch.randn(BATCH, max(map(len, inner)), columns, generator=g).mul(2).softmax(-1)
    drawn = torch.rand(tree.tokens.shape, generator=g) < 0.6
    tree.proposal = Proposal(q, row, drawn, torch.tensor(ids) if ids else None, 4)
    return tree


def random_logits(tree: TokenTree, seed: int) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, (*tree.tokens.shape, VOCAB), generator=g) / 2  # exact ties


def draws_for(samplings: list[Sampling], tree: TokenTree) -> Draws:
    seen = torch.zeros(BATCH, VOCAB, dtype=torch.bool).scatter_(1, tree.tokens[:, :1], True)
    return make_draws(samplings, torch.arange(BATCH), torch.arange(BATCH) + 3, seen)


class Walk:
    """One sequence of a batch, step by step."""

    def __init__(self, tree: TokenTree, logits: Tensor, draws: Draws, b: int) -> None:
        self.tree, self.logits, self.draws, self.b = tree, logits, draws, b
        self.tokens, self.parent = tree.tokens[b].tolist(), tree.parent[b].tolist()

    def children(self, node: int) -> list[int]:
        return [i for i, up in enumerate(self.parent) if up == node and bool(self.tree.valid[self.b, i])]

    def above(self, node: int) -> list[int]:
        return [node, *(self.above(self.parent[node]) if node else [])]

    def uniform(self, node: int, number: int) -> float:
        return float(self.draws.uniform(len(self.above(node)), number)[self.b])

    def seen(self, node: int) -> Tensor | None:
        if self.draws.seen is None:
            return None
        seen = self.draws.seen[self.b].clone()
        seen[[self.tokens[i] for i in self.above(node)]] = True
        return seen

    def p(self, node: int) -> list[float]:
        seen = self.seen(node)
        row = self.logits[:, node : node + 1]  # the whole batch, since the parameters are a batch's
        return self.draws.probabilities(row, None if seen is None else seen)[self.b, 0].double().tolist()

    def draw(self, p: list[float], node: int) -> int:
        at, mass = self.uniform(node, TOKEN) * sum(p), 0.0
        for token, share in enumerate(p):
            mass += share
            if at < mass:
                return token
        return max(i for i, share in enumerate(p) if share > 0)

    def step(self, node: int) -> tuple[int | None, int]:
        """The accepted child, and the token to emit if there is none."""
        p = self.p(node)
        if self.tree.proposal is None:
            token = self.draw(p, node)
            return next((i for i in self.children(node) if self.tokens[i] == token), None), token
        q = self.q(self.tree.proposal, node)
        for rank, child in enumerate(self.children(node)):
            token, drawn = self.tokens[child], bool(self.tree.proposal.drawn[self.b, child])
            law = q if drawn else [float(i == token) for i in range(VOCAB)]
            if law[token] > 0 and self.uniform(node, ACCEPT + rank) < p[token] / law[token]:
                return child, -1
            left = [max(0.0, a - b) for a, b in zip(p, law, strict=True)]
            p = [x / sum(left) for x in left] if sum(left) > 1e-12 else p
            if drawn:
                rest = [0.0 if i == token else x for i, x in enumerate(q)]
                q = [x / sum(rest) for x in rest] if sum(rest) else rest
        return None, self.draw(p, node)

    def q(self, proposal: Proposal, node: int) -> list[float]:
        row = int(proposal.row[self.b, node])
        q = [0.0] * VOCAB
        for i, x in enumerate(proposal.q[self.b, row].double().tolist() if row >= 0 else []):
            q[i if proposal.ids is None else int(proposal.ids[i])] = x
        return q

    def run(self) -> tuple[list[int], int]:
        path = [0]
        while True:
            child, token = self.step(path[-1])
            if child is None:
                return path, token
            path.append(child)


def check_verdict(tree: TokenTree, verdict: Verdict, b: int, path: list[int], bonus: int) -> None:
    assert verdict.path.shape == (BATCH, tree.deepest + 1)
    assert int(verdict.n_accepted[b]) == len(path) - 1
    assert verdict.path[b].tolist() == path + [path[-1]] * (tree.deepest + 1 - len(path))
    assert int(verdict.bonus[b]) == bonus


# --- the exact laws ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_greedy_follows_the_largest_logits(seed: int) -> None:
    nodes = 1 + 5 * seed
    for tree in (random_tree(nodes, seed), chain(random_tree(nodes, seed).tokens)):
        logits = random_logits(tree, seed)
        verdict = verify(tree, logits, draws_for([GREEDY], tree))
        assert verdict.finite.all()
        for b in range(BATCH):
            path, walk = [0], Walk(tree, logits, draws_for([GREEDY], tree), b)
            while True:
                row = logits[b, path[-1]].tolist()
                token = row.index(max(row))
                child = next((i for i in walk.children(path[-1]) if walk.tokens[i] == token), None)
                if child is None:
                    break
                path.append(child)
            check_verdict(tree, verdict, b, path, token)


@pytest.mark.parametrize("seed", range(4))
def test_matching_one_draw_a_node(seed: int) -> None:
    tree = random_tree(2 + 5 * seed, seed)
    logits, draws = random_logits(tree, seed), draws_for(SAMPLINGS, tree)
    verdict = verify(tree, logits, draws)
    for b in range(BATCH):
        check_verdict(tree, verdict, b, *Walk(tree, logits, draws, b).run())
    if seed > 1:
        assert int(verdict.n_accepted.max()) > 1


@pytest.mark.parametrize("ids", [None, (0, 1, 3, 5)])
@pytest.mark.parametrize("seed", range(8))
def test_ratio_tests_down_the_ranks(seed: int, ids: tuple[int, ...] | None) -> None:
    tree = with_proposal(random_tree(2 + 4 * seed, seed, ids=ids), seed, ids)
    logits, draws = random_logits(tree, seed), draws_for(SAMPLINGS, tree)
    verdict = verify(tree, logits, draws)
    for b in range(BATCH):
        check_verdict(tree, verdict, b, *Walk(tree, logits, draws, b).run())
    if seed > 1:
        assert int(verdict.n_accepted.max()) > 1


def test_temperature_zero_among_sampled_sequences_is_greedy() -> None:
    tree = random_tree(14, 0)
    logits = random_logits(tree, 0)
    want = verify(tree, logits, draws_for([GREEDY], tree))
    samplings = [GREEDY, Sampling(1.0)]
    for proposal in (None, Proposal(torch.rand(BATCH, 1, VOCAB), torch.zeros_like(tree.parent),
                                    torch.zeros_like(tree.valid), None, 4)):  # fmt: skip
        tree.proposal = proposal
        got = verify(tree, logits, draws_for(samplings, tree))
        for field in ("path", "n_accepted", "bonus"):
            assert torch.equal(getattr(got, field)[::2], getattr(want, field)[::2])


def test_a_draft_vocabulary_of_another_width() -> None:
    """Columns are target ids; a draft model's may end earlier than the target's, or be padded beyond them."""
    tree = with_proposal(random_tree(12, 3), 3, None)
    logits, draws = random_logits(tree, 3), draws_for([Sampling(1.0)], tree)
    proposal = tree.proposal
    assert proposal is not None
    want = verify(tree, logits, draws)
    tree.proposal = dataclasses.replace(proposal, q=torch.nn.functional.pad(proposal.q, (0, 3)))
    got = verify(tree, logits, draws)
    assert torch.equal(got.path, want.path)
    assert torch.equal(got.bonus, want.bonus)
    short = random_tree(12, 3, ids=(0, 1, 2, 3))
    rows = torch.cat((proposal.q[..., :4], torch.zeros_like(proposal.q[..., 4:])), -1)
    rows = rows / rows.sum(-1, keepdim=True)
    short.proposal = dataclasses.replace(proposal, q=rows)
    want = verify(short, logits, draws)
    short.proposal = dataclasses.replace(proposal, q=rows[..., :4])
    got = verify(short, logits, draws)
    assert torch.equal(got.path, want.path)
    assert torch.equal(got.bonus, want.bonus)


# --- edges of the numbers ---------------------------------------------------------------------------------------------


def test_a_token_that_q_excludes_is_refused() -> None:
    zero, one = torch.zeros(1), torch.ones(1)
    assert not accepts(one, zero, zero).any()
    assert not accepts(zero, zero, zero).any()
    assert not accepts(zero, one, zero).any()
    assert accepts(one, one, one.double() - 2.0**-53).all()


def test_nothing_left_of_p_or_q() -> None:
    p = torch.tensor([[0.25, 0.75, 0.0], [0.5, 0.25, 0.25]])
    got = residual(p, torch.tensor([[0.25, 0.75, 0.0], [0.25, 0.5, 0.25]]))
    assert torch.equal(got, torch.tensor([[0.25, 0.75, 0.0], [1.0, 0.0, 0.0]]))
    rest = without(torch.tensor([[0.0, 1.0, 0.0], [0.5, 0.25, 0.25]]), torch.tensor([1, 0]))
    assert torch.equal(rest, torch.tensor([[0.0, 0.0, 0.0], [0.0, 0.5, 0.5]]))


def test_children_behind_an_exhausted_q_change_nothing() -> None:
    """The second drawn child cannot come from q any more: as if it weren't there."""
    tokens = torch.tensor([[5, 1, 2, 0]]).repeat(BATCH, 1)
    parent = torch.tensor([[-1, 0, 0, 1]]).repeat(BATCH, 1)
    depth = torch.tensor([[0, 1, 1, 2]]).repeat(BATCH, 1)
    tree = TokenTree(tokens, parent, depth, torch.ones_like(tokens, dtype=torch.bool), 2, False)
    q = torch.nn.functional.one_hot(torch.tensor([[1]] * BATCH), VOCAB).float()
    row = torch.tensor([[0, -1, -1, -1]]).repeat(BATCH, 1)
    tree.proposal = Proposal(q, row, torch.tensor([[False, True, True, False]]).repeat(BATCH, 1), None, 2)
    logits, draws = random_logits(tree, 0), draws_for([Sampling(1.5)], tree)
    got = verify(tree, logits, draws)
    assert not (got.path == 2).any()
    tree.valid = tokens != 2
    want = verify(tree, logits, draws)
    assert torch.equal(got.path, want.path)
    assert torch.equal(got.bonus, want.bonus)
    assert 0 < int(want.n_accepted.clamp(max=1).sum()) < BATCH


@pytest.mark.parametrize("samplings", [[GREEDY], [Sampling(1.0)]])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_broken_logits_of_nodes_that_count_are_reported(samplings: list[Sampling], value: float) -> None:
    tree = random_tree(8, 1)
    draws = draws_for(samplings, tree)
    logits = random_logits(tree, 1)
    logits[:, :, 2] = float("-inf")  # an excluded token is no fault
    assert verify(tree, logits, draws).finite.all()
    tree.valid[:, 5] = torch.arange(BATCH) % 2 == 0
    logits[7:11, 5, : VOCAB if value == float("-inf") else 1] = value
    got = verify(tree, logits, draws)
    assert got.finite.tolist() == [b not in (8, 10) for b in range(BATCH)]
    assert (got.bonus < VOCAB).all()  # a token still, so that what follows can be queued


@pytest.mark.parametrize("typical", [None, Typical()])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("samplings", [[GREEDY], SAMPLINGS])
def test_verification_never_waits_for_the_device(typical: Any, drawn: bool, samplings: list[Sampling]) -> None:
    tree = random_tree(9, 0, ids=(0, 2, 5))
    tree = with_proposal(tree, 0, (0, 2, 5)) if drawn else tree
    logits, draws = random_logits(tree, 0), draws_for(samplings, tree)
    with no_waiting():
        verify(tree, logits, draws, typical)


# --- typical acceptance -----------------------------------------------------------------------------------------------


def typical_walk(walk: Walk, typical: Typical) -> tuple[list[int], int]:
    """Medusa's rule path by path (algorithm in section 2.3.1 of the paper)."""
    best, paths = (0, 0.0, [0]), [[0]]
    for path in paths:
        p = walk.p(path[-1])
        entropy = -sum(x * math.log(x + 1e-5) for x in p)
        limit = min(typical.epsilon, typical.delta * math.exp(-entropy))
        paths += [[*path, i] for i in walk.children(path[-1]) if p[walk.tokens[i]] > limit]
        score = sum(math.log(walk.p(a)[walk.tokens[b]]) for a, b in itertools.pairwise(path))
        if (len(path) - 1, score) > (best[0], best[1] + 1e-6):
            best = (len(path) - 1, score, path)
    end = best[2][-1]
    seen = walk.seen(end)
    row = penalise(walk.logits[:, end : end + 1], walk.draws.warp, seen)[walk.b, 0].tolist()
    return best[2], row.index(max(row))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("typical", [Typical(), Typical(0.3, 0.9), Typical(0.02, 0.05)])
def test_typical_acceptance_takes_the_longest_likely_path(seed: int, typical: Typical) -> None:
    tree = random_tree(1 + 6 * seed, seed)
    g = torch.Generator().manual_seed(seed)
    logits, draws = torch.randn(*tree.tokens.shape, VOCAB, generator=g) * 2, draws_for(SAMPLINGS, tree)
    verdict = verify(tree, logits, draws, typical)
    for b in range(BATCH):
        check_verdict(tree, verdict, b, *typical_walk(Walk(tree, logits, draws, b), typical))


def test_typical_acceptance_of_greedy_sequences_is_exact() -> None:
    tree = random_tree(16, 2)
    logits = torch.randn(*tree.tokens.shape, VOCAB, generator=torch.Generator().manual_seed(2))
    want = verify(tree, logits, draws_for([GREEDY], tree))
    alone = verify(tree, logits, draws_for([GREEDY], tree), Typical())
    mixed = verify(tree, logits, draws_for([GREEDY, Sampling(1.0)], tree), Typical())
    for field in ("path", "n_accepted", "bonus"):
        assert torch.equal(getattr(alone, field), getattr(want, field))
    # a twin may stand for another: the longest path wins, not the first
    assert (mixed.n_accepted >= want.n_accepted)[::2].all()
    same = (mixed.n_accepted == want.n_accepted) & (torch.arange(BATCH) % 2 == 0)
    assert torch.equal(mixed.bonus[same], want.bonus[same])
    assert int(same.sum()) > BATCH // 4
