"""An independent draft model: lossless in any tree, its cache true after every step, other tokenizers refused."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import Scripted, make_truth, random_prompts
from search_checks import WIDE, RecordedPaths
from tiny import make_tiny_target
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder import loop
from draftsmith.eval.decoder.drafters.draft_model import DraftModelDrafter, check_same_tokenizer
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.drafters.union import UnionDrafter
from draftsmith.eval.decoder.loop import Request
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.eval.decoder.types import Drafter, TokenTree
from draftsmith.heads.target import Target

SHAPES = {"chain": Chain(4), "static": Static(WIDE), "dynamic": Dynamic(3, 4, 14)}
LENGTHS = [1, 9, 14, 3]


def load(folder: Path, dtype: torch.dtype = torch.float32) -> Target:
    return Target.load(str(folder), dtype=dtype, device="cpu")


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A smaller model that says other things."""
    folder = tmp_path_factory.mktemp("draft") / "draft"
    return load(make_tiny_target(folder, layers=2, hidden=32, heads=2, kv_heads=1, seed=1))


@pytest.fixture(scope="module")
def twin(tiny_folder: Path) -> Target:
    """The target, loaded once more: everything it drafts is right."""
    return load(tiny_folder)


@pytest.fixture(scope="module")
def truth(tiny_target: Any) -> checks.Truth:
    shared = random_prompts(tiny_target, [10], seed=1)[0]  # prompts that begin alike are prefilled from each other
    prompts = random_prompts(tiny_target, LENGTHS)
    return make_truth(tiny_target, [p if i == 0 else shared + p for i, p in enumerate(prompts)], 20)


class ScriptedModel(Scripted, DraftModelDrafter):
    """The real drafter with some of its guesses made right."""

    def propose(self, roots: Tensor, draws: Any) -> TokenTree:
        tree = super().propose(roots, draws)
        for i in range(len(roots)):
            for node in range(1, tree.tokens.shape[1]):
                parent = tree.parent[i, node]
                if not (tree.parent[i, :node] == parent).any() and self.coin(self.right):
                    tree.tokens[i, node] = self.token(i, int(tree.depth[i, node]))
        return tree


def limits(i: int) -> int:
    return 11 - 2 * (i % 3)


# --- lossless ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_greedy_text_is_the_targets(
    tiny_target: Any, draft: Target, truth: checks.Truth, shape: Shape, slots: int
) -> None:
    drafter = ScriptedModel(tiny_target, draft, shape).script(truth, 0.7)
    results = checks.check_lossless(tiny_target, drafter, truth, slots, limits)
    assert max(step.accepted for r in results for step in r.steps) > 1


def test_the_target_as_its_own_draft_is_always_right(tiny_target: Any, twin: Target, truth: checks.Truth) -> None:
    for shape in (SHAPES["chain"], SHAPES["dynamic"]):
        results = checks.check_lossless(tiny_target, DraftModelDrafter(tiny_target, twin, shape), truth, 2, limits)
        steps = [step for r in results for step in r.steps]
        if isinstance(shape, Chain):
            assert all(step.accepted == shape.depth for step in steps)
        assert sum(step.accepted for step in steps) > len(steps)


# --- its own cache ----------------------------------------------------------------------------------------------------


@torch.inference_mode()
def check_draft_cache(drafter: DraftModelDrafter, slot: int, tokens: list[int]) -> None:
    """K/V of all tokens, the root's included, and the logits behind it."""
    draft = drafter.draft
    checks.check_target_cache(draft, drafter.cache, slot, tokens)
    with draft.attention():
        logits = draft.model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
    checks.close(drafter.logits[slot], logits, f"logits behind the root, slot {slot}")


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("lookup", [False, True])
def test_its_cache_is_a_fresh_prefill_after_every_step(
    tiny_target: Any, draft: Target, truth: checks.Truth, shape: Shape, lookup: bool
) -> None:
    own = ScriptedModel(tiny_target, draft, shape).script(truth, 0.6)
    drafter: Drafter = UnionDrafter(own, PromptLookupDrafter(2, 3)) if lookup else own
    requests = [Request(f"r{i}", list(p), 8 + 2 * (i % 2)) for i, p in enumerate(truth)]
    session = loop._Session(tiny_target, drafter, 3, 256)
    accepted, uneven = 0, False
    while requests or session.running:
        while requests and len(session.running) < 3:
            session.admit([requests.pop(0)])
        done = session.step() if session.running else []
        for slot, run in enumerate(session.running):
            check_draft_cache(own, slot, run.request.tokens + run.tokens)
        accepted += sum(s.accepted for r in done for s in r.steps)
        uneven = uneven or len({run.steps[-1].accepted for run in session.running if run.steps}) > 1
    assert accepted > 5
    assert uneven, "sequences of one pass must accept different numbers"


@torch.inference_mode()
def test_a_prompt_is_not_taken_from_a_row_that_was_overwritten(tiny_target: Any, draft: Target) -> None:
    drafter = DraftModelDrafter(tiny_target, draft, Chain(2))
    drafter.allocate(2, 64)
    x, y = random_prompts(draft, [14, 12], seed=2)
    z = x[:10] + y[:3]
    for slot, text in ((1, y), (0, x)):
        drafter.begin(slot, torch.tensor(text), torch.empty(len(text) - 1, 0), None)
    drafter.release(0, 1)
    drafter.begin(1, torch.tensor(z), torch.empty(len(z) - 1, 0), None)
    check_draft_cache(drafter, 0, y)
    check_draft_cache(drafter, 1, z)


class Recorded(RecordedPaths, DraftModelDrafter):
    """Keeps what it drafted from."""


@torch.inference_mode()
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_drafts_in_a_tree_are_plain_forwards_of_their_paths(tiny_target: Any, draft: Target, shape: Shape) -> None:
    drafter = Recorded(tiny_target, draft, shape)
    drafter.allocate(3, 64)
    texts = random_prompts(draft, [7, 2, 11], seed=3)
    for slot, text in enumerate(texts):
        drafter.begin(slot, torch.tensor(text), torch.empty(len(text) - 1, 0), None)
    for _ in range(2):  # what the first tree computed is forgotten
        drafter.propose(torch.tensor([t[-1] for t in texts]), checks.greedy_draws([7, 2, 11], draft.vocab_size))
    for slot, text in enumerate(texts):
        assert len(drafter.made[slot]) == shape.expanded
        for path, logits in drafter.made[slot]:
            with draft.attention():
                want = draft.model(input_ids=torch.tensor([text + path]), use_cache=False).logits[0, -1]
            checks.close(logits, want, f"logits behind {path}, slot {slot}")


def test_drafts_at_the_end_of_cache_and_context(tiny_target: Any, draft: Target) -> None:
    """Far more rows are drafted than the tree keeps."""
    truth = make_truth(tiny_target, random_prompts(tiny_target, [490, 487]), 10)
    shape = Dynamic(10, 4, 8)
    assert shape.expanded > shape.rows
    checks.check_lossless(tiny_target, DraftModelDrafter(tiny_target, draft, shape), truth, 2, lambda _: 10)


def test_a_draft_model_with_learned_positions_drafts_up_to_its_last_one(tiny_target: Any, tmp_path: Path) -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=320, n_positions=48, n_embd=32, n_layer=2, n_head=2, bos_token_id=1, eos_token_id=2)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    tiny_target.tokenizer.save_pretrained(tmp_path)
    target = copy.copy(tiny_target)
    target.max_positions = 48
    truth = make_truth(target, random_prompts(target, [36, 38]), 12)
    drafter = DraftModelDrafter(target, load(tmp_path), Static(WIDE))
    checks.check_lossless(target, drafter, truth, 2, lambda i: 12 - 2 * i, capacity=61)


# --- sampled ----------------------------------------------------------------------------------------------------------


def sampled_requests(truth: checks.Truth, **values: Any) -> list[Request]:
    return [Request(f"r{i}", list(p), 9, Sampling(temperature=0.8, seed=i, **values)) for i, p in enumerate(truth)]


@pytest.mark.parametrize("shape", [Static(WIDE, sampled=False), Dynamic(4, 3, 12)], ids=["static", "dynamic"])
def test_point_masses_give_the_plainly_sampled_text(
    tiny_target: Any, twin: Target, truth: checks.Truth, shape: Shape
) -> None:
    """Drafts that look at no random number don't change which tokens are drawn."""
    requests = sampled_requests(truth, repetition_penalty=1.2)
    plain = checks.run_all(tiny_target, PlainDrafter(), requests, 2)
    results = checks.run_all(tiny_target, DraftModelDrafter(tiny_target, twin, shape), requests, 3)
    assert [r.tokens for r in results] == [r.tokens for r in plain]
    assert sum(s.accepted for r in results for s in r.steps) > 5


def test_drafts_drawn_from_the_targets_own_law_are_all_accepted(
    tiny_target: Any, twin: Target, truth: checks.Truth
) -> None:
    for values in ({}, {"top_k": 20, "top_p": 0.9}, {"repetition_penalty": 1.3, "min_p": 0.01}):
        requests = sampled_requests(truth, **values)
        results = checks.run_all(tiny_target, DraftModelDrafter(tiny_target, twin, Chain(4)), requests, 3)
        assert all(step.accepted == 4 for r in results for step in r.steps)


def test_sampled_text_does_not_depend_on_the_batch(tiny_target: Any, draft: Target, truth: checks.Truth) -> None:
    requests = sampled_requests(truth)
    found = [
        [
            r.tokens
            for r in checks.run_all(tiny_target, DraftModelDrafter(tiny_target, draft, Static(WIDE)), requests, n)
        ]
        for n in (1, 4)
    ]
    assert found[0] == found[1]


# --- refusals ---------------------------------------------------------------------------------------------------------


def other_tokenizer(target: Target, change: Any) -> Target:
    """The same model, with a tokenizer whose JSON was changed."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    other = copy.copy(target)
    text = change(target.tokenizer.backend_tokenizer.to_str())
    other.tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(text),
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
    )
    return other


def test_another_vocabulary_is_refused(tiny_target: Any, tmp_path: Path) -> None:
    other = load(make_tiny_target(tmp_path / "other", layers=2, vocab=310))
    with pytest.raises(
        DraftsmithError, match=r"differ in 10 tokens: '.+' is missing to the draft model, id 310 to the"
    ):
        DraftModelDrafter(tiny_target, other, Chain(2))
    with pytest.raises(
        DraftsmithError, match=r"differ in 10 tokens: '.+' is id 310 to the draft model, missing to the"
    ):
        DraftModelDrafter(other, tiny_target, Chain(2))


def test_tokens_that_changed_places_are_refused(tiny_target: Any) -> None:
    vocab = tiny_target.tokenizer.get_vocab()
    a, b = (next(t for t, i in vocab.items() if i == n) for n in (40, 50))

    def swap(text: str) -> str:
        return text.replace(f'"{a}":40', f'"{a}":50').replace(f'"{b}":50', f'"{b}":40')

    with pytest.raises(
        DraftsmithError, match=r"differ in 2 tokens: .* is id 50 to the draft model, id 40 to the target"
    ):
        check_same_tokenizer(tiny_target, other_tokenizer(tiny_target, swap))


def test_another_end_of_text_is_refused(tiny_target: Any) -> None:
    other = other_tokenizer(tiny_target, str)
    check_same_tokenizer(tiny_target, other)
    other.tokenizer.eos_token = "<|endoftext|>"
    check_same_tokenizer(tiny_target, other)  # ids mean the same: a base model may draft for an instruct model


def test_another_split_of_the_same_text_is_refused(tiny_target: Any) -> None:
    def prefixed(text: str) -> str:
        return text.replace('"add_prefix_space":false', '"add_prefix_space":true')

    with pytest.raises(DraftsmithError, match="split the same text differently: token 0 of 'The quick"):
        check_same_tokenizer(tiny_target, other_tokenizer(tiny_target, prefixed))


def test_another_dtype_is_refused(tiny_target: Any, tiny_folder: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"has dtype torch.bfloat16, the target torch.float32: load it"):
        DraftModelDrafter(tiny_target, load(tiny_folder, torch.bfloat16), Chain(2))


def test_a_shorter_context_serves_the_requests_that_fit_it(tiny_target: Any, twin: Target) -> None:
    short = copy.copy(twin)
    short.max_positions = 40
    drafter = DraftModelDrafter(tiny_target, short, Chain(2))
    prompts = random_prompts(tiny_target, [30, 9])
    truth = make_truth(tiny_target, prompts, 10)
    checks.check_lossless(tiny_target, drafter, truth, 2, lambda _: 10)
    message = (
        "prompt 31 . new 10 tokens exceed the draft model's context of 40: with 10 new tokens a prompt may have 30"
    )
    with pytest.raises(DraftsmithError, match=message):
        checks.run_all(tiny_target, drafter, [Request("r", [5] * 31, 10)], 1)


@pytest.mark.parametrize("size", [328, 316])
def test_vocabularies_may_be_padded_differently(
    tiny_target: Any, tiny_folder: Path, tmp_path: Path, truth: checks.Truth, size: int
) -> None:
    """What the target lacks is never proposed, however likely; what the draft model lacks is the target's alone."""
    from transformers import AutoModelForCausalLM

    folder = tmp_path / "padded"
    shutil.copytree(tiny_folder, folder)
    model = AutoModelForCausalLM.from_pretrained(tiny_folder, dtype=torch.float32)
    model.resize_token_embeddings(size, mean_resizing=False)
    with torch.no_grad():
        model.lm_head.weight[320:] *= 100
    model.save_pretrained(folder)
    drafter = DraftModelDrafter(tiny_target, load(folder), Static(WIDE))
    assert drafter.vocabulary == min(size, 320)
    prompts = {p: text for p, text in truth.items() if max(*p, *text) < 316}
    assert prompts
    results = checks.check_lossless(tiny_target, drafter, prompts, 2, limits)
    steps = [step for r in results for step in r.steps]
    assert sum(step.accepted for step in steps) > len(steps)
