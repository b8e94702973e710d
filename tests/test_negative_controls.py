"""Each classic mistake, made on purpose, breaks a named check (invariant 9)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import decoder_checks
import head_checks
import pytest
import reference_eagle3
import torch
from decoder_models import save_model
from families import make_case

from draftsmith.eval.decoder.cache import StepContext, TreeCache
from draftsmith.eval.decoder.drafters.eagle3 import Eagle3Drafter
from draftsmith.eval.decoder.search import Chain
from draftsmith.eval.decoder.types import TokenTree, Verdict
from draftsmith.heads import alignment, eagle3, target
from draftsmith.heads.base import DraftHead, TargetParts
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.heads.target import Target
from draftsmith.heads.vocab import DraftVocab

Patch = pytest.MonkeyPatch
Mistake = Callable[[Patch], None]


def must_fail(check: Callable[[], Any], mistake: Mistake) -> None:
    """The check passes, and raises AssertionError once the mistake is made."""
    check()
    with Patch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            check()


# --- heads ------------------------------------------------------------------------------------------------------------


def losses() -> None:
    head_checks.check_losses_equal_reference(make_case("eagle3", "gqa"))


def gradients() -> None:
    head_checks.check_gradients_equal_reference(make_case("eagle3", "gqa"))


def train_decode() -> None:
    head_checks.check_train_equals_decode(make_case("eagle3", "gqa"))


def no_leak() -> None:
    head_checks.check_no_leak(make_case("eagle3", "gqa"))


def apart() -> None:
    head_checks.check_packed_apart(make_case("eagle3", "gqa"))


def shifted_labels(patch: Patch) -> None:
    patch.setattr(alignment, "label_index", lambda rows, step: rows + 1 + step)


def shifted_inputs(patch: Patch) -> None:
    patch.setattr(alignment, "input_index", lambda rows, step: rows + step)


def shifted_teacher(patch: Patch) -> None:
    patch.setattr(alignment, "teacher_index", lambda rows, step: rows + 2 + step)


def unshifted_mask(patch: Patch) -> None:
    """What EAGLE-3's trainer does: the mask of row j + s alone."""

    def supervised(answer: torch.Tensor, documents: torch.Tensor, steps: int) -> list[torch.Tensor]:
        return [alignment.shift_left(answer, s, False) & (documents >= 0) for s in range(steps)]

    patch.setattr(alignment, "supervised", supervised)


def one_shift_mask(patch: Patch) -> None:
    """The mask of the label alone: trains drafts of first answer tokens, which serving never asks for."""

    def supervised(answer: torch.Tensor, documents: torch.Tensor, steps: int) -> list[torch.Tensor]:
        return [alignment._follows(answer, documents, 2 + s) for s in range(steps)]

    patch.setattr(alignment, "supervised", supervised)


def rope_in_training(patch: Patch) -> None:
    """Positions j + 2s: the step counted twice."""
    unroll, qkv = Eagle3Head._unroll, Eagle3Head._qkv
    calls = [0]

    def counted(self: Any, *args: Any) -> Any:
        calls[0] = 0
        return unroll(self, *args)

    def late(self: Any, embeds: Any, hidden: Any, positions: Any) -> Any:
        calls[0] += 1
        return qkv(self, embeds, hidden, positions + calls[0] - 1)

    patch.setattr(Eagle3Head, "_unroll", counted)
    patch.setattr(Eagle3Head, "_qkv", late)


def rope_in_drafting(patch: Patch) -> None:
    step = Eagle3Head.forward_step

    def late(self: Any, cache: Any, embeds: Any, hidden: Any, positions: Any, valid: Any, *seen: Any) -> Any:
        return step(self, cache, embeds, hidden, positions + (valid is None), valid, *seen)

    patch.setattr(Eagle3Head, "forward_step", late)


def swapped_norms(patch: Patch) -> None:
    qkv = Eagle3Head._qkv

    def swapped(self: Any, *args: Any) -> Any:
        a, b = self.input_layernorm, self.hidden_norm
        self._parameters.update(input_layernorm=b, hidden_norm=a)
        try:
            return qkv(self, *args)
        finally:
            self._parameters.update(input_layernorm=a, hidden_norm=b)

    patch.setattr(Eagle3Head, "_qkv", swapped)


def lost_final_norm(patch: Patch) -> None:
    patch.setattr(TargetParts, "normed", lambda self, last: last)


def lost_diagonal(patch: Patch) -> None:
    """Rows don't see their own keys of later steps."""
    attend = eagle3.attend
    patch.setattr(eagle3, "attend", lambda q, k, v, own_k, own_v, layout: attend(q, k, v, [], [], layout))


def detached_steps(patch: Patch) -> None:
    """Gradients stop between unrolled steps."""
    finish = Eagle3Head._finish
    patch.setattr(Eagle3Head, "_finish", lambda self, hidden, x: finish(self, hidden.detach(), x))


def later_keys(patch: Patch) -> None:
    layout = eagle3.lay_out

    def open_mask(batch: Any, rows: Any) -> Any:
        made = layout(batch, rows)
        made.bias.zero_()
        return made

    patch.setattr(eagle3, "lay_out", open_mask)


def one_document(patch: Patch) -> None:
    """The pack is attended as if it were a single text."""
    layout = eagle3.lay_out

    def joined(batch: Any, rows: Any) -> Any:
        n = len(batch.tokens)
        merged = vars(batch) | {"documents": torch.zeros(n, dtype=torch.int64), "positions": torch.arange(n)}
        return layout(type(batch)(**merged), rows)

    patch.setattr(eagle3, "lay_out", joined)


def misses_left_out(patch: Patch) -> None:
    """Rows outside the draft vocabulary vanish from the denominator of acceptance."""
    rows = DraftHead.supervised_rows

    def fewer(self: Any, batch: Any) -> list[torch.Tensor]:
        known = self.draft_ids[batch.tokens] >= 0
        return [r & alignment.shift_left(known, 2 + s, False) for s, r in enumerate(rows(self, batch))]

    patch.setattr(Eagle3Head, "supervised_rows", fewer)


@pytest.mark.parametrize(
    ("mistake", "check"),
    [
        (shifted_labels, head_checks.check_arange_alignment),
        (shifted_labels, losses),
        (shifted_inputs, head_checks.check_arange_alignment),
        (shifted_inputs, losses),
        (shifted_inputs, train_decode),
        (shifted_teacher, head_checks.check_arange_alignment),
        (shifted_teacher, losses),
        (shifted_teacher, no_leak),
        (unshifted_mask, head_checks.check_supervised_example),
        (unshifted_mask, head_checks.check_supervised_brute_force),
        (one_shift_mask, head_checks.check_supervised_example),
        (one_shift_mask, losses),
        (rope_in_training, losses),
        (rope_in_training, train_decode),
        (rope_in_drafting, train_decode),
        (swapped_norms, losses),
        (swapped_norms, gradients),
        (swapped_norms, train_decode),
        (lost_final_norm, losses),
        (lost_final_norm, gradients),
        (lost_diagonal, losses),
        (lost_diagonal, train_decode),
        (detached_steps, gradients),
        (later_keys, no_leak),
        (one_document, apart),
        (misses_left_out, losses),
    ],
)
def test_a_mistake_in_the_head_is_caught(mistake: Mistake, check: Callable[[], None]) -> None:
    must_fail(check, mistake)


def test_an_absolute_d2t_is_caught() -> None:
    def mistake(patch: Patch) -> None:
        patch.setattr(DraftVocab, "d2t", lambda self: self.target_ids)

    vocab = make_case("eagle3", "gqa").head.vocab
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
    must_fail(lambda: head_checks.check_layer_states(tiny_target, (2, 3, 5)), lost_final_norm)


# --- decoder ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def truth(tiny_target: Any) -> decoder_checks.Truth:
    prompts = decoder_checks.random_prompts(tiny_target, [5, 12, 9])
    return decoder_checks.make_truth(tiny_target, prompts, 24)


@pytest.fixture(scope="module")
def head(tiny_target: Any) -> Any:
    return decoder_checks.random_head(tiny_target)


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
    commit = Eagle3Drafter.commit

    def forgetful(self: Any, tree: TokenTree, verdict: Verdict, *rest: Any) -> None:
        commit(self, tree, dataclasses.replace(verdict, bonus=tree.tokens[:, 0]), *rest)

    patch.setattr(Eagle3Drafter, "commit", forgetful)


def kept_drafts(patch: Patch) -> None:
    """The head's rows of drafted tokens stay in its cache as if their features were the target's."""
    propose = Eagle3Drafter.propose

    def keeping(self: Any, roots: torch.Tensor, draws: Any) -> TokenTree:
        tree = propose(self, roots, draws)
        self.cache.keys[: len(roots), :, 2] += 0.1
        return tree

    patch.setattr(Eagle3Drafter, "propose", keeping)


@pytest.mark.parametrize("mistake", [lost_bonus, kept_drafts])
def test_a_mistake_with_the_heads_cache_is_caught(
    tiny_target: Any, truth: decoder_checks.Truth, head: Any, mistake: Mistake
) -> None:
    def check() -> None:
        drafter = decoder_checks.ScriptedEagle3(head, tiny_target.embed, Chain(3)).script(truth, 0.7)
        decoder_checks.check_cache_truth(tiny_target, drafter, truth, 2, lambda _: 8, head)

    must_fail(check, mistake)


def absolute_ids(patch: Patch) -> None:
    """d2t is read as offsets although it holds ids: column i stands for id i + ids[i]."""
    start = Eagle3Drafter.__init__

    def added(self: Any, head: Any, embed: Any, shape: Any) -> None:
        start(self, head, embed, shape)
        self.columns = (self.columns + torch.arange(len(self.columns))) % len(embed)

    patch.setattr(Eagle3Drafter, "__init__", added)


@pytest.mark.parametrize("mistake", [rope_in_drafting, swapped_norms, absolute_ids])
def test_a_mistake_in_drafting_is_caught(tiny_target: Any, head: Any, mistake: Mistake) -> None:
    must_fail(lambda: decoder_checks.check_chain_drafts(tiny_target, head, reference_eagle3, [2, 7, 12], 6), mistake)
