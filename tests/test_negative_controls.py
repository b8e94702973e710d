"""Each classic mistake, made on purpose, breaks a named check (invariant 9)."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import decoder_checks
import head_checks
import mistakes
import pytest
import torch
from decoder_models import save_model
from families import FAMILIES, first_case
from mistakes import Mistake, Patch

from draftsmith.eval.decoder.cache import StepContext, TreeCache
from draftsmith.eval.decoder.drafters import network
from draftsmith.eval.decoder.drafters.network import HeadDrafter
from draftsmith.eval.decoder.types import TokenTree, Verdict
from draftsmith.heads import target
from draftsmith.heads.target import Target
from draftsmith.heads.vocab import DraftVocab


def must_fail(check: Callable[[], Any], mistake: Mistake) -> None:
    """The check passes, and raises AssertionError once the mistake is made."""
    check()
    with Patch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            check()


# --- heads ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (mistakes.shifted_labels, head_checks.check_arange_alignment),
        (mistakes.shifted_inputs, head_checks.check_arange_alignment),
        (mistakes.shifted_teacher, head_checks.check_arange_alignment),
        (mistakes.unshifted_mask, head_checks.check_supervised_example),
        (mistakes.unshifted_mask, head_checks.check_supervised_brute_force),
        (mistakes.one_shift_mask, head_checks.check_supervised_example),
    ],
)
def test_a_mistake_in_the_alignment_is_caught(mistake: Mistake, check: Callable[[], None]) -> None:
    must_fail(check, mistake)


CHECKS: dict[str, Callable[[Any, str], None]] = {
    "losses": lambda _, family: head_checks.check_losses_equal_reference(first_case(family)),
    "gradients": lambda _, family: head_checks.check_gradients_equal_reference(first_case(family)),
    "train_decode": lambda _, family: head_checks.check_train_equals_decode(first_case(family)),
    "no_leak": lambda _, family: head_checks.check_no_leak(first_case(family)),
    "apart": lambda _, family: head_checks.check_packed_apart(first_case(family)),
    "drafts": lambda target, family: head_checks.check_chain_drafts(target, family, [2, 7, 12], 6),
}
"""Checks of a family by the names that its `mistakes` in families.py use."""

CONTROLS = [
    (family, mistake, name)
    for family, tests in FAMILIES.items()
    for mistake, names in tests.mistakes.items()
    for name in names
]


@functools.cache
def run_unpatched(target: Any, family: str, name: str) -> None:
    CHECKS[name](target, family)


@pytest.mark.parametrize(("family", "mistake", "name"), CONTROLS)
def test_a_mistake_in_a_head_is_caught(tiny_target: Any, family: str, mistake: Mistake, name: str) -> None:
    run_unpatched(tiny_target, family, name)
    with Patch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            CHECKS[name](tiny_target, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_shows_that_its_checks_can_fail(family: str) -> None:
    shown = {name for names in FAMILIES[family].mistakes.values() for name in names}
    assert shown >= {"losses", "train_decode", "drafts"}, "add mistakes that these checks must catch to families.py"


def test_an_absolute_d2t_is_caught() -> None:
    def mistake(patch: Patch) -> None:
        patch.setattr(DraftVocab, "d2t", lambda self: self.target_ids)

    vocab = first_case("eagle3").head.vocab
    must_fail(lambda: head_checks.check_vocab_maps(vocab), mistake)


# --- target -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-1, 1])
def test_aux_states_of_the_next_layer_are_caught(tiny_target: Any, by: int) -> None:
    def mistake(patch: Patch) -> None:
        layers = list(tiny_target.layers)
        patch.setattr(tiny_target, "layers", layers[:1] + layers[:-1] if by < 0 else layers[1:] + layers[-1:])

    must_fail(lambda: head_checks.check_layer_states(tiny_target, (2, 3, 5)), mistake)


def test_aux_states_in_another_order_are_caught(tiny_target: Any) -> None:
    def mistake(patch: Patch) -> None:
        join = target.join_states
        patch.setattr(
            target, "join_states", lambda s, needs, n: (join(s, needs, n)[0].roll(64, -1), join(s, needs, n)[1])
        )

    must_fail(lambda: head_checks.check_layer_states(tiny_target, (2, 3, 5)), mistake)


def test_a_last_state_after_the_norm_is_caught(tiny_target: Any) -> None:
    def mistake(patch: Patch) -> None:
        states = Target.states

        def normed(self: Any, *args: Any) -> Any:
            aux, last = states(self, *args)
            return aux, self.final_norm(last)

        patch.setattr(Target, "states", normed)

    must_fail(lambda: head_checks.check_layer_states(tiny_target, (2, 3, 5)), mistake)


def test_a_teacher_without_the_final_norm_is_caught(tiny_target: Any) -> None:
    must_fail(lambda: head_checks.check_layer_states(tiny_target, (2, 3, 5)), mistakes.lost_final_norm)


# --- decoder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tiny_target: Any) -> decoder_checks.Truth:
    prompts = decoder_checks.random_prompts(tiny_target, [5, 12, 9])
    return decoder_checks.make_truth(tiny_target, prompts, 24)


def visible_siblings(patch: Patch) -> None:
    patch.setattr(TokenTree, "ancestors", lambda self: None)


def uncompacted_rows(patch: Patch) -> None:
    keep = TreeCache.keep
    patch.setattr(TreeCache, "keep", lambda self, count, path, *rest: keep(self, count, None, *rest))


def positions_by_node(patch: Patch) -> None:
    """Nodes stand at their index instead of their depth."""
    step = TreeCache.step

    def flat(self: Any, first: int, count: int, depth: torch.Tensor, *rest: Any) -> Any:
        return step(self, first, count, torch.arange(depth.shape[1]).expand_as(depth), *rest)

    patch.setattr(TreeCache, "step", flat)


@pytest.mark.parametrize("mistake", [visible_siblings, uncompacted_rows, positions_by_node])
def test_a_mistake_with_trees_is_caught(tiny_target: Any, truth: decoder_checks.Truth, mistake: Mistake) -> None:
    def cache_truth() -> None:
        drafter = decoder_checks.RandomTreeDrafter(truth, 9)
        decoder_checks.check_cache_truth(tiny_target, drafter, truth, 2, lambda _: 10)

    def lossless() -> None:
        drafter = decoder_checks.RandomTreeDrafter(truth, 9)
        decoder_checks.check_lossless(tiny_target, drafter, truth, 2, lambda _: 12)

    must_fail(cache_truth, mistake)
    must_fail(lossless, mistake)


def test_a_lost_window_is_caught(tmp_path: Any) -> None:
    def mistake(patch: Patch) -> None:
        blocks = StepContext.blocks
        patch.setattr(StepContext, "blocks", lambda self, window, *rest: blocks(self, None, *rest))

    mistral = Target.load(str(save_model("mistral", tmp_path)), dtype=torch.float32, device="cpu")
    texts = decoder_checks.make_truth(mistral, decoder_checks.random_prompts(mistral, [14]), 20)

    def lossless() -> None:
        drafter = decoder_checks.RandomTreeDrafter(texts, 6)
        decoder_checks.check_lossless(mistral, drafter, texts, 1, lambda _: 10)

    must_fail(lossless, mistake)


def lost_bonus(patch: Patch) -> None:
    commit = HeadDrafter.commit

    def forgetful(self: Any, tree: TokenTree, verdict: Verdict, *rest: Any) -> None:
        commit(self, tree, dataclasses.replace(verdict, bonus=tree.tokens[:, 0]), *rest)

    patch.setattr(HeadDrafter, "commit", forgetful)


def kept_drafts(patch: Patch) -> None:
    """The head's rows of drafted tokens stay in its cache as if their features were the target's."""
    propose = HeadDrafter.propose

    def keeping(self: Any, roots: torch.Tensor, draws: Any) -> TokenTree:
        tree = propose(self, roots, draws)
        self.cache.keys[: len(roots), :, 2] += 0.1
        return tree

    patch.setattr(HeadDrafter, "propose", keeping)


def features_in_the_trees_order(patch: Patch) -> None:
    """Accepted rows read the features of the first nodes instead of those of the accepted path."""
    patch.setattr(network, "_accepted", lambda states, tree, verdict: states[:, : verdict.path.shape[1]])


OF_THE_HEADS_CACHE: list[tuple[str, Mistake]] = [
    ("eagle3", lost_bonus),
    ("eagle3", kept_drafts),
    *((family, features_in_the_trees_order) for family in FAMILIES),
]


@pytest.mark.parametrize(("family", "mistake"), OF_THE_HEADS_CACHE)
def test_a_mistake_with_the_heads_cache_is_caught(
    tiny_target: Any, truth: decoder_checks.Truth, family: str, mistake: Mistake
) -> None:
    head, parts = decoder_checks.random_head(tiny_target, family=family), decoder_checks.pieces(tiny_target)
    kind = decoder_checks.of_family(decoder_checks.PartlyRight, family)

    def check() -> None:
        drafter = kind(head, parts, decoder_checks.SHAPES["static"]).script(truth, 0.7)
        decoder_checks.check_cache_truth(tiny_target, drafter, truth, 2, lambda _: 8, head)

    must_fail(check, mistake)
