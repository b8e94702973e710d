"""A drafter together with Prompt Lookup: the joined tree against a Python trie, its law, and the whole loop."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import make_truth, random_head, random_prompts
from device_guard import no_waiting
from ngram_checks import Toy, make_repetitive_target, toy_target
from sampling_checks import Setting, ToyDrafter, answer, chi_square, exact_law
from sampling_checks import Toy as ToyWorld
from torch import Tensor

from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.lookahead import LookaheadDrafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.drafters.union import UnionDrafter, join
from draftsmith.eval.decoder.loop import Request
from draftsmith.eval.decoder.sampling import Draws, Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Static
from draftsmith.eval.decoder.types import Drafter, Proposal, TokenTree, chain
from draftsmith.eval.decoder.verify import verify
from draftsmith.heads.base import Needs
from draftsmith.heads.target import Target

VOCAB = 4

# --- the joined tree --------------------------------------------------------------------------------------------------


def random_tree(rng: random.Random, b: int, n: int) -> TokenTree:
    """Any shape, distinct valid siblings, some invalid nodes."""
    lines = []
    for _ in range(b):
        line = [(rng.randrange(VOCAB), -1, 0, True)]
        for _ in range(n - 1):
            up = rng.randrange(len(line))
            taken = {t for t, p, _, valid in line if p == up and valid}
            token = rng.randrange(VOCAB)
            valid = line[up][3] and token not in taken and rng.random() < 0.8
            line.append((token, up, line[up][2] + 1, valid))
        lines.append(line)
    tokens, parent, depth, valid = torch.tensor(lines).unbind(-1)
    return TokenTree(tokens, parent, depth, valid.bool(), int(depth.max()), False)


def random_chains(rng: random.Random, b: int, length: int) -> tuple[Tensor, Tensor]:
    sizes = [rng.randrange(length + 1) for _ in range(b)]
    tokens = torch.tensor([[rng.randrange(VOCAB) for _ in range(length)] for _ in range(b)])
    return tokens, torch.arange(length) < torch.tensor(sizes)[:, None]


def valid_paths(tree: TokenTree, row: int) -> list[tuple[int, ...]]:
    """Token paths of the valid nodes whose ancestors are valid, the root's token left out."""
    found: list[tuple[int, ...]] = []
    paths: list[tuple[int, ...] | None] = []
    for token, up, valid in zip(*(x[row].tolist() for x in (tree.tokens, tree.parent, tree.valid)), strict=True):
        above = () if up < 0 else paths[up]
        paths.append(None if above is None or not valid else () if up < 0 else (*above, token))
        found += [paths[-1]] if paths[-1] else []
    return found


@pytest.mark.parametrize("n", [2, 5, 14])
@pytest.mark.parametrize("length", [1, 3, 6])
def test_the_joined_tree_is_a_trie(n: int, length: int) -> None:
    rng = random.Random(10 * n + length)
    shared = 0
    for _ in range(40):
        base = random_tree(rng, 3, n)
        tokens, valid = random_chains(rng, 3, length)
        with no_waiting():
            joined = join(base, tokens, valid)
        assert joined.tokens.shape == (3, n + length)
        for name in ("tokens", "parent", "depth", "valid"):
            assert torch.equal(getattr(joined, name)[:, :n], getattr(base, name)), f"{name} of the base's nodes changed"
        assert joined.deepest == max(base.deepest, length) >= int(joined.depth.max())
        assert (joined.depth[:, 1:] == joined.depth.gather(1, joined.parent[:, 1:]) + 1).all()
        assert (joined.parent < torch.arange(n + length)).all()
        for row in range(3):
            added = tokens[row][valid[row]].tolist()
            want = dict.fromkeys([*valid_paths(base, row), *(tuple(added[:k]) for k in range(1, len(added) + 1))])
            assert valid_paths(joined, row) == list(want)
            shared += len(valid_paths(base, row)) + len(added) - len(want)
    assert shared > 0


def test_a_chain_below_a_root_alone_is_a_chain() -> None:
    tokens, valid = torch.tensor([[1, 2], [3, 0]]), torch.tensor([[True, True], [True, False]])
    joined = join(chain(torch.tensor([[7], [8]])), tokens, valid)
    assert joined.is_chain
    assert joined.tokens.tolist() == [[7, 1, 2], [8, 3, 0]]
    assert joined.valid.tolist() == [[True] * 3, [True, True, False]]
    assert joined.deepest == 2


def test_added_nodes_are_point_masses() -> None:
    base = random_tree(random.Random(1), 2, 5)
    q = torch.full((2, 3, VOCAB), 0.25)
    rows = torch.tensor([[0, 1, -1, 2, -1]] * 2)
    base.proposal = Proposal(q, rows, base.depth > 0, None, 2)
    joined = join(base, *random_chains(random.Random(2), 2, 3))
    assert joined.proposal is not None
    assert joined.proposal.q is q
    assert torch.equal(joined.proposal.row[:, :5], rows)
    assert (joined.proposal.row[:, 5:] == -1).all()
    assert not joined.proposal.drawn[:, 5:].any()
    assert joined.proposal.width == 3
    assert base.proposal.width == 2


# --- its law ----------------------------------------------------------------------------------------------------------


class WithCandidates:
    """Toy trees drawn from q, with candidates of the target's own top tokens joined to them, often twins of drawn ones.

    Args:
        spoil: is given the joined trees.
    """

    def __init__(self, toy: ToyWorld, spoil: Callable[[TokenTree], None]) -> None:
        self.toy, self.spoil = toy, spoil
        self.base = ToyDrafter(toy, Setting(Sampling(1.0), "static", "sampled"))

    def propose(self, before: Tensor, roots: Tensor, draws: Draws) -> TokenTree:
        ranked = self.toy.target.argsort(-1, descending=True)
        first = ranked[before, roots, 0]
        tokens = torch.stack((first, ranked[roots, first, 1], roots), 1)
        size = 1 + (draws.keys + draws.roots) % 3
        joined = join(self.base.propose(before, roots, draws), tokens, torch.arange(3) < size[:, None])
        self.spoil(joined)
        return joined


def marked_as_drawn(tree: TokenTree) -> None:
    assert tree.proposal is not None
    tree.proposal.drawn = tree.proposal.drawn | (torch.arange(tree.tokens.shape[1]) >= tree.tokens.shape[1] - 3)


def twins_in_front(tree: TokenTree) -> None:
    """The first child of each root takes the looked-up token, as if it had been drawn."""
    tree.tokens[:, 1] = tree.tokens[:, -3]


@pytest.mark.parametrize("sampling", [Sampling(1.0), Sampling(1.4, top_p=0.9, repetition_penalty=1.3)])
def test_sampled_answers_keep_the_targets_law(sampling: Sampling) -> None:
    toy = ToyWorld()
    drafter = WithCandidates(toy, lambda tree: None)
    assert chi_square(answer(toy, drafter, verify, [sampling], 60_000), exact_law(toy, sampling)) > 1e-6


@pytest.mark.parametrize("spoil", [marked_as_drawn, twins_in_front])
def test_the_law_notices_a_wrong_join(spoil: Callable[[TokenTree], None]) -> None:
    toy, sampling = ToyWorld(), Sampling(1.0)
    answers = answer(toy, WithCandidates(toy, spoil), verify, [sampling], 60_000)
    assert chi_square(answers, exact_law(toy, sampling)) < 1e-6


# --- step by step, and through the loop -------------------------------------------------------------------------------


class Watched(LookaheadDrafter):
    """Checks that its own nodes stay where they were."""

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        self.latest = super().propose(roots, draws)
        return self.latest

    def commit(self, tree: TokenTree, *rest: Any) -> None:
        n = self.latest.tokens.shape[1]
        assert torch.equal(tree.tokens[:, :n], self.latest.tokens)
        super().commit(tree, *rest)


def test_the_bases_nodes_stay_and_nothing_is_added_where_nothing_is_found() -> None:
    toy = Toy(UnionDrafter(Watched(4, 4, 3), PromptLookupDrafter(2, 4)), toy_target(2, 40, 0), 1)
    toy.begin([*range(12)])
    unchanged = 0
    for _ in range(60):
        tree = toy.propose()
        unchanged += tree is toy.drafter.base.latest  # type: ignore[attr-defined]
        toy.commit(tree)
    assert 0 < unchanged < 60


def test_a_union_has_the_numbers_of_both(tiny_target: Target) -> None:
    base = make_drafter(random_head(tiny_target), tiny_target.parts(), Chain(3))
    union = UnionDrafter(base, PromptLookupDrafter(tokens=7))
    assert (union.depth, union.rows, union.needs, union.wants_choice) == (7, 11, base.needs, False)
    union.timed = True
    assert base.timed
    base.seconds = 2.5
    assert union.seconds == 2.5
    assert UnionDrafter(LookaheadDrafter(), PromptLookupDrafter(tokens=2)).depth == 3


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_repetitive_target(tmp_path_factory.mktemp("repetitive"))
    return Target.load(str(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def truth(repetitive: Target) -> checks.Truth:
    """Prompts that hold the answer to their own beginning, and begin again."""
    asked = make_truth(repetitive, random_prompts(repetitive, [6, 11, 3]), 24)
    return make_truth(repetitive, [[*p, *answer, *p] for p, answer in asked.items()], 24)


def bases(target: Target) -> dict[str, Drafter]:
    head = random_head(target)
    return {
        "plain": PlainDrafter(record=Needs((1, 3), last=True)),
        "lookahead": LookaheadDrafter(),
        "chain": make_drafter(head, target.parts(), Chain(3)),
        "static": make_drafter(head, target.parts(), Static([[0], [1], [0, 0], [0, 1]])),
        "dynamic": make_drafter(head, target.parts(), Dynamic(3, 3, 9)),
    }


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", ["plain", "lookahead", "chain", "static", "dynamic"])
def test_greedy_answers_are_plain_ones(repetitive: Target, truth: checks.Truth, name: str, slots: int) -> None:
    union = UnionDrafter(bases(repetitive)[name], PromptLookupDrafter(max_ngram=2, tokens=4))
    results = checks.check_lossless(repetitive, union, truth, slots, lambda i: 24 - 3 * i)
    assert max(step.accepted for r in results for step in r.steps) > 1


@pytest.mark.parametrize("name", ["lookahead", "dynamic"])
def test_sampled_answers_of_point_masses_are_plain_ones(repetitive: Target, truth: checks.Truth, name: str) -> None:
    settings = [Sampling(0.3), Sampling(1.0, top_k=2, seed=3), Sampling(0.3, repetition_penalty=1.02)]
    requests = [Request(f"r{i}", list(p), 20, settings[i]) for i, p in enumerate(truth)]
    plain = checks.run_all(repetitive, PlainDrafter(), requests, 2)
    union = UnionDrafter(bases(repetitive)[name], PromptLookupDrafter(max_ngram=2, tokens=4))
    drafted = checks.run_all(repetitive, union, requests, 2)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(step.accepted for r in drafted for step in r.steps) > 2


@pytest.mark.parametrize("slots", [1, 3])
def test_states_are_recorded_along_accepted_paths(repetitive: Target, truth: checks.Truth, slots: int) -> None:
    needs = Needs((1, 3), last=True)
    union = UnionDrafter(PlainDrafter(record=needs), PromptLookupDrafter(max_ngram=2, tokens=4))
    requests = [Request(f"r{i}", list(p), 24 - 3 * i) for i, p in enumerate(truth)]
    for result in checks.run_all(repetitive, union, requests, slots):
        assert any(step.accepted for step in result.steps)
        assert result.states is not None
        tokens = result.prompt + result.tokens[:-1]
        aux, last = repetitive.states(torch.tensor([tokens]), needs)
        want = torch.cat((aux, last), -1)[0]
        # rounding to bf16 is half a unit of 2^-8; noise of fp32 may tip it over
        assert ((result.states.float() - want).abs() <= 2**-8 * want.abs() + 1e-4).all()
