"""Sampled answers against their exact law, and mistakes that this check must see."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from sampling_checks import (
    VOCAB,
    WANTED,
    SearchDrafter,
    Setting,
    Toy,
    ToyDrafter,
    Verifier,
    answer,
    chi_square,
    exact_law,
    make_draws,
    target_logits,
)
from torch import Tensor

from draftsmith.eval.decoder import verify as verify_module
from draftsmith.eval.decoder.sampling import DRAFT, GREEDY, TOKEN, Draws, Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.eval.decoder.types import TokenTree, Verdict
from draftsmith.eval.decoder.verify import Typical, verify

COUNT = 200_000
ENOUGH = 50_000  # for a mistake to show
LIMIT = 1e-6

# --- sampled answers against the exact law ----------------------------------------------------------------------------

SUBSET = (0, 2, 3, 5, 6)
# temperature, top-k, top-p, min-p, penalty, tree, draft vocabulary, drafter: every pair of values is somewhere
COVER = [
    (1.0, 0, 0.8, 0.0, 1.0, "dynamic", None, "sampled"),
    (0.5, 3, 0.8, 0.1, 1.3, "static", SUBSET, "union"),
    (1.7, 0, 1.0, 0.1, 1.3, "chain", None, "point"),
    (1.7, 3, 1.0, 0.1, 1.0, "mixed", SUBSET, "sampled"),
    (0.5, 3, 1.0, 0.0, 1.0, "dynamic", SUBSET, "point"),
    (0.5, 0, 1.0, 0.0, 1.3, "mixed", None, "union"),
    (1.0, 3, 0.8, 0.0, 1.0, "chain", SUBSET, "union"),
    (1.0, 0, 1.0, 0.1, 1.3, "static", None, "point"),
    (1.7, 0, 0.8, 0.0, 1.0, "static", SUBSET, "sampled"),
    (1.7, 0, 0.8, 0.1, 1.3, "dynamic", None, "union"),
    (0.5, 3, 0.8, 0.1, 1.3, "chain", None, "sampled"),
    (1.0, 0, 0.8, 0.0, 1.0, "mixed", None, "point"),
    # nothing cut off, so that all of the law is looked at
    (1.0, 0, 1.0, 0.0, 1.3, "static", SUBSET, "union"),
]


def setting_of(row: tuple[Any, ...]) -> Setting:
    return Setting(Sampling(*row[:5]), row[5], row[7], row[6])


@pytest.fixture(scope="module")
def toy() -> Toy:
    return Toy()


def test_the_settings_cover_all_pairs() -> None:
    values = [(0.5, 1.0, 1.7), (0, 3), (1.0, 0.8), (0.0, 0.1), (1.0, 1.3), ("chain", "static", "dynamic", "mixed"),
              (None, SUBSET), ("sampled", "point", "union")]  # fmt: skip
    assert len(COVER) <= 24
    for i, j in itertools.combinations(range(len(values)), 2):
        assert {(row[i], row[j]) for row in COVER} == set(itertools.product(values[i], values[j])), (i, j)


@pytest.mark.parametrize("row", COVER, ids=lambda row: "-".join(str(v) for v in row if v is not SUBSET))
def test_sampled_answers_follow_the_targets_law(toy: Toy, row: tuple[Any, ...]) -> None:
    setting = setting_of(row)
    accepted = [0, 0]

    def counted(tree: TokenTree, logits: Tensor, draws: Draws) -> Verdict:
        verdict = verify(tree, logits, draws)
        assert verdict.finite.all()
        accepted[0] += int(verdict.n_accepted.sum())
        accepted[1] += len(verdict.n_accepted)
        return verdict

    answers = answer(toy, ToyDrafter(toy, setting), counted, [setting.sampling], COUNT)
    assert accepted[0] / accepted[1] > 0.3, "too little was accepted for this to show anything"
    assert chi_square(answers, exact_law(toy, setting.sampling)) > LIMIT


def test_greedy_and_sampled_sequences_share_a_batch(toy: Toy) -> None:
    samplings = [GREEDY, Sampling(1.0, 0, 0.8), Sampling(0.0, repetition_penalty=1.3)]
    answers = answer(toy, ToyDrafter(toy, Setting(GREEDY, "static", "union")), verify, samplings, COUNT)
    for i, s in enumerate(samplings):
        assert chi_square(answers[i::3], exact_law(toy, s)) > LIMIT
    for i in (0, 2):
        assert len(answers[i::3].unique(dim=0)) == 1


@pytest.mark.parametrize(
    "shape",
    ["chain", "static", "dynamic", "mixed", Chain(3, sampled=False), Dynamic(3, 3, 9)],
    ids=lambda shape: shape if isinstance(shape, str) else type(shape).__name__,
)
def test_with_chosen_drafts_sampled_answers_equal_plain_ones(toy: Toy, shape: str | Shape) -> None:
    samplings = [GREEDY, Sampling(1.0), Sampling(0.7, 4, 0.9, 0.02, 1.2, seed=5), Sampling(1.7, seed=1)]
    plain = answer(toy, ToyDrafter(toy, Setting(GREEDY, "plain", "point")), verify, samplings, 4000)
    if isinstance(shape, str):
        drafter: ToyDrafter | SearchDrafter = ToyDrafter(toy, Setting(GREEDY, shape, "point"))
    else:
        drafter = SearchDrafter(toy, shape)
    assert torch.equal(answer(toy, drafter, verify, samplings, 4000), plain)
    assert len(plain[1::4].unique(dim=0)) > 50


@pytest.mark.parametrize("drafter", ["point", "sampled", "union"])
def test_a_sequence_is_the_same_alone_and_in_a_batch(toy: Toy, drafter: str) -> None:
    samplings = [GREEDY, Sampling(1.0, 0, 0.9), Sampling(0.8, 4, repetition_penalty=1.4), Sampling(1.7, min_p=0.1)]
    toys = ToyDrafter(toy, Setting(GREEDY, "mixed", drafter))
    before, roots = torch.randint(0, VOCAB, (2, 24), generator=torch.Generator().manual_seed(0))
    keys, at = torch.arange(24), torch.arange(24) % 5
    seen = torch.zeros(24, VOCAB, dtype=torch.bool).scatter_(1, torch.stack((before, roots), 1), True)

    def run(rows: slice, of: list[Sampling]) -> tuple[Tensor, ...]:
        draws = make_draws(of, keys[rows], at[rows], seen[rows])
        tree = toys.propose(before[rows], roots[rows], draws)
        verdict = verify(tree, target_logits(toy, tree, before[rows]), draws)
        return tree.tokens, verdict.path, verdict.n_accepted, verdict.bonus

    together = run(slice(None), samplings)
    for i in range(24):
        for got, want in zip(run(slice(i, i + 1), [samplings[i % 4]]), together, strict=True):
            same = want[i] if got.ndim == 1 else want[i, : got.shape[1]]  # neighbours may have deeper trees
            assert torch.equal(got[0], same)


TREE = ((0,), (1,), (2,), (0, 0), (0, 1), (0, 0, 0))


@pytest.mark.parametrize(
    ("shape", "ids", "samplings"),
    [
        (Chain(2), SUBSET, [Sampling(1.0, 0, 0.8), GREEDY]),
        (Static(TREE), None, [Sampling(1.0)]),
        (Static(TREE), SUBSET, [Sampling(1.7, 3, repetition_penalty=1.3), GREEDY]),
        (Dynamic(3, 3, 7), SUBSET, [Sampling(1.0, min_p=0.1)]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_decoders_own_trees_keep_the_law(
    toy: Toy, shape: Shape, ids: tuple[int, ...] | None, samplings: list[Sampling]
) -> None:
    answers = answer(toy, SearchDrafter(toy, shape, ids), verify, samplings, COUNT)
    for i, s in enumerate(samplings):
        assert chi_square(answers[i :: len(samplings)], exact_law(toy, s)) > LIMIT


# --- mistakes that the check must see ---------------------------------------------------------------------------------

PLAIN_LAW = verify_module.target_law


def raw_bonus(tree: TokenTree, logits: Tensor, draws: Draws, node: Tensor, seen: Tensor | None) -> Tensor:
    """Behind leaves the unwarped law, as EAGLE-1 and its descendants had it."""
    inner = ((tree.parent == node[:, None]) & tree.valid).any(1)
    raw = logits[torch.arange(len(node)), node].softmax(-1)
    return torch.where(inner[:, None], PLAIN_LAW(logits, draws, node, seen), raw)


def path_unseen(tree: TokenTree, logits: Tensor, draws: Draws, node: Tensor, seen: Tensor | None) -> Tensor:
    """A repetition penalty that knows the prompt and answer, but not the drafted path."""
    return PLAIN_LAW(logits, draws, node, draws.seen)


def with_target_law(law: Callable[..., Tensor], patch: pytest.MonkeyPatch) -> Verifier:
    def mistaken(tree: TokenTree, logits: Tensor, draws: Draws) -> Verdict:
        patch.setattr(verify_module, "target_law", partial(law, tree))
        return verify(tree, logits, draws)

    return mistaken


MISTAKES: dict[str, tuple[str, Any]] = {
    "q not renormalised after a refusal": ("without", lambda q, token: q.scatter(1, token[:, None], 0.0)),
    "q keeps what was refused": ("without", lambda q, token: q),
    "target and draft swapped in the ratio": ("accepts", lambda p, q, u: u * p < q),
    "a refusal leaves p as it was": ("residual", lambda p, q: p),
    "the accept test reads the number that drew the token": ("ACCEPT", DRAFT),
    "the residual reads the number of the accept test": ("ACCEPT", TOKEN),
    "the draft vocabulary's columns taken for target ids": (
        "draft_law",
        lambda proposal, node, size, right=verify_module.draft_law: right(
            type(proposal)(proposal.q, proposal.row, proposal.drawn, None, proposal.width), node, size
        ),
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_check_sees_a_mistaken_part(toy: Toy, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Setting(Sampling(1.0), "static", "sampled", SUBSET)
    monkeypatch.setattr(verify_module, *MISTAKES[name])
    answers = answer(toy, ToyDrafter(toy, setting), verify, [setting.sampling], ENOUGH)
    assert chi_square(answers, exact_law(toy, setting.sampling)) < LIMIT


@pytest.mark.parametrize("drafter", ["point", "sampled"])
@pytest.mark.parametrize(("law", "s"), [(raw_bonus, Sampling(0.7)), (path_unseen, Sampling(1.0, 0, 1.0, 0.0, 1.3))])
def test_the_check_sees_a_mistaken_target_law(
    toy: Toy, drafter: str, law: Callable[..., Tensor], s: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting = Setting(s, "static", drafter)
    mistaken = with_target_law(law, monkeypatch)
    answers = answer(toy, ToyDrafter(toy, setting), mistaken, [s], ENOUGH)
    assert chi_square(answers, exact_law(toy, s)) < LIMIT


def test_the_check_sees_independent_siblings(toy: Toy) -> None:
    setting = Setting(Sampling(1.0), "static", "sampled")
    answers = answer(toy, ToyDrafter(toy, setting, independent=True), verify, [setting.sampling], ENOUGH)
    assert chi_square(answers, exact_law(toy, setting.sampling)) < LIMIT


def test_the_check_sees_that_typical_acceptance_is_lossy(toy: Toy) -> None:
    setting = Setting(Sampling(1.0), "static", "point")
    answers = answer(toy, ToyDrafter(toy, setting), partial(verify, typical=Typical()), [setting.sampling], ENOUGH)
    assert answers.shape == (ENOUGH, WANTED)
    assert chi_square(answers, exact_law(toy, setting.sampling)) < LIMIT
