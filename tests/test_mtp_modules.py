"""MTP with a module for each step: the checks that every family's first variant meets, caches, trees, plans."""

from __future__ import annotations

import functools
import types
from typing import Any

import decoder_checks
import head_checks
import pytest
import torch
from decoder_checks import PartlyRight, make_truth, of_family, pieces, random_head, random_prompts
from device_guard import no_waiting
from families import make_case, make_document, make_documents, pack
from mistakes import Mistake, Patch
from mistakes_mtp import MTP_MODULES
from planning import SMALL, batch, kept_bytes, meta_head, parts
from reference import Document
from search_checks import WIDE
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter, network
from draftsmith.eval.decoder.search import Chain, Dynamic, Shape, Static
from draftsmith.heads import mtp
from draftsmith.heads.base import Needs
from draftsmith.heads.costs import head_costs, planned_head
from draftsmith.heads.mtp import ChainedMtp, MtpHead, mtp_config
from draftsmith.heads.target import Target
from draftsmith.heads.vocab import DraftVocab
from draftsmith.train import estimate

SHAPES = [Chain(4), Static(WIDE), Dynamic(3, 4, 14)]
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=["chain", "static", "dynamic"])


@pytest.fixture
def four_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads of the family that tests make without options have a module for each of four steps."""
    monkeypatch.setattr(mtp, "mtp_config", functools.partial(mtp_config, modules=4, steps=4))


# --- modules by step: what every family's first variant meets ---------------------------------------------------------

CHECKS: dict[str, Any] = {
    "losses": lambda _: head_checks.check_losses_equal_reference(make_case("mtp", "modules")),
    "gradients": lambda _: head_checks.check_gradients_equal_reference(make_case("mtp", "modules")),
    "train_decode": lambda _: head_checks.check_train_equals_decode(make_case("mtp", "modules")),
    "no_leak": lambda _: head_checks.check_no_leak(make_case("mtp", "modules")),
    "apart": lambda _: head_checks.check_packed_apart(make_case("mtp", "modules")),
    "drafts": lambda target: head_checks.check_chain_drafts(target, "mtp", [2, 7, 12], 4),
}
CONTROLS = [(mistake, name) for mistake, names in MTP_MODULES.items() for name in names]


@pytest.mark.usefixtures("four_modules")
@pytest.mark.parametrize("name", CHECKS)
def test_what_holds_for_modules_by_step(tiny_target: Target, name: str) -> None:
    CHECKS[name](tiny_target)


@pytest.mark.usefixtures("four_modules")
@pytest.mark.parametrize(("mistake", "name"), CONTROLS)
def test_a_mistake_with_modules_by_step_is_caught(tiny_target: Target, mistake: Mistake, name: str) -> None:
    with Patch.context() as patch:
        mistake(patch)
        with pytest.raises(AssertionError):
            CHECKS[name](tiny_target)


@torch.no_grad()
@pytest.mark.parametrize(("row", "s"), [(7, 0), (7, 1), (7, 2), (7, 3), (2, 3), (1, 3)])
def test_a_row_sees_the_rows_of_its_module_that_decoding_has(row: int, s: int) -> None:
    """Row i of module s reads t[i+1+s], and t[row+1] is the newest token where drafting starts."""
    case = make_case("mtp", "modules")
    doc = make_document(case, [True] * 13, 1)
    doc.tokens = [case.ids[t % len(case.ids)] for t in doc.tokens]
    there = [i for i in range(len(doc.tokens)) if i + 1 + s <= row + 1]
    assert attended_rows(case, doc, row, s) == [*there, *([row] if s > 0 else [])]


def attended_rows(case: Any, doc: Document, row: int, s: int) -> list[int]:
    """Rows of module s whose keys have a say in what `row` gives."""
    found: list[int] = []
    project = type(case.head.depths[s].layer).project
    before = head_checks.row_loss(case, doc, row, s)
    for k in range(len(doc.tokens)):

        def louder(self: Any, x: Any, positions: Any, k: int = k) -> Any:
            q, keys, values = project(self, x, positions)
            values = values.clone()
            values[k] += 1.0
            return q, keys, values

        layer = case.head.depths[s].layer
        layer.project = types.MethodType(louder, layer)
        try:
            if not torch.equal(head_checks.row_loss(case, doc, row, s), before):
                found.append(k)
        finally:
            del layer.project
    return found


def test_checkpointing_modules_by_step_gives_the_same_gradients() -> None:
    case = make_case("mtp", "modules")
    assert isinstance(case.head, ChainedMtp)
    found = []
    for checkpointing in (False, True):
        case.head.checkpointing = checkpointing
        case.head.zero_grad()
        docs = pack(make_documents(case, 1))
        kept = kept_bytes(case.head, docs, case.parts, torch.float32)
        torch.stack([x.num for x in case.head.losses(docs, case.parts)]).sum().backward()
        found.append((kept, {n: p.grad.clone() for n, p in case.head.named_parameters() if p.grad is not None}))
    (much, grads), (little, others) = found
    assert little < 0.7 * much
    assert len(grads) == len(list(case.head.parameters()))
    for name, grad in grads.items():
        torch.testing.assert_close(others[name], grad, rtol=1e-12, atol=1e-12)


# --- caches and trees ------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("four_modules")
@every_shape
def test_trees_of_modules_by_step_are_lossless_and_leave_the_cache_true(tiny_target: Target, shape: Shape) -> None:
    """More prompts than slots, of every length from one token on: slots are used again, batches are ragged."""
    truth = make_truth(tiny_target, random_prompts(tiny_target, [1, 9, 14, 5, 2]), 14)
    head = random_head(tiny_target, family="mtp")
    assert isinstance(head, ChainedMtp)
    drafter = of_family(PartlyRight, "mtp")(head, pieces(tiny_target), shape).script(truth, 0.7)
    results = decoder_checks.check_lossless(tiny_target, drafter, truth, 1, lambda i: 12 - 2 * i)
    assert max(step.accepted for r in results for step in r.steps) > 1
    drafter = of_family(PartlyRight, "mtp")(head, pieces(tiny_target), shape).script(truth, 0.6)
    assert decoder_checks.check_cache_truth(tiny_target, drafter, truth, 3, lambda i: 12 - 2 * i, head) > 5


@pytest.mark.usefixtures("four_modules")
def test_a_long_prompt_is_read_in_pieces(tiny_target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of three rows, shorter than there are modules, give what one piece gives."""
    head = random_head(tiny_target, family="mtp")
    tokens = torch.tensor(random_prompts(tiny_target, [12])[0])
    aux, last = tiny_target.states(tokens[None, :-1], Needs((), last=True))
    made = []
    for rows in (512, 3):
        monkeypatch.setattr(network, "_MOST_ROWS", rows)
        drafter: Any = make_drafter(head, pieces(tiny_target), Chain(4))
        drafter.allocate(1, 32)
        drafter.cache.pending.fill_(float("nan"))  # what an earlier sequence left
        drafter.begin(0, tokens, aux[0], last[0])
        made.append((drafter.cache.keys[:, :, :11], drafter.cache.values[:, :, :11], drafter.cache.pending))
    for one, many in zip(*made, strict=True):
        torch.testing.assert_close(one, many, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_neither_committing_nor_drafting_waits_for_the_device() -> None:
    case = make_case("mtp", "modules")
    head = head_checks.ready_to_draft(case)
    cache = head.new_cache(2, 8, torch.device("cpu"), torch.float64)
    rows, valid, at = torch.randn(2, 3, 16, dtype=torch.float64), torch.tensor([3, 2]), torch.arange(3).expand(2, -1)
    with no_waiting():
        _, state = head.forward_step(cache, rows, rows, at, valid)
        head.forward_step(cache, rows[:, :1], state, cache.lengths[:, None], None, step=1)
    assert cache.lengths.tolist() == [3, 2]


@pytest.mark.usefixtures("four_modules")
def test_states_of_a_released_slot_move_along(tiny_target: Target) -> None:
    head = random_head(tiny_target, family="mtp")
    drafter: Any = make_drafter(head, pieces(tiny_target), Chain(2))
    drafter.allocate(3, 16)
    drafter.cache.pending.copy_(torch.arange(3.0)[:, None, None].expand_as(drafter.cache.pending))
    drafter.release(0, 2)
    assert drafter.cache.pending[:, 0, 0].tolist() == [2.0, 1.0, 2.0]


@pytest.mark.usefixtures("four_modules")
def test_no_tree_is_deeper_than_there_are_modules(tiny_target: Target) -> None:
    head = random_head(tiny_target, family="mtp")
    assert (head.most_depth, head.steps_for(9)) == (4, 4)
    with pytest.raises(DraftsmithError, match="the head drafts 4 tokens, the tree is 5 deep"):
        make_drafter(head, pieces(tiny_target), Dynamic(2, 5, 9))


# --- plans ------------------------------------------------------------------------------------------------------------


def planned(draft_vocab: int = 256) -> Any:
    return planned_head(SMALL, "mtp", layer_ids=[], steps=3, draft_vocab_size=draft_vocab, options={"modules": 3})


def with_weights() -> Any:
    head = MtpHead(planned().config, DraftVocab(torch.arange(256), SMALL.vocab))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(0.0, 0.02, generator=generator)
    return head


def test_costs_of_one_module_and_of_three() -> None:
    h, q, kv, i = SMALL.hidden, SMALL.heads * SMALL.head_dim, SMALL.kv_heads * SMALL.head_dim, SMALL.intermediate
    entry, qkv, rest = 2 * h * h, h * (q + 2 * kv), q * h + 3 * h * i
    one, three = head_costs(meta_head("mtp", SMALL, 256)), head_costs(planned())
    assert (one.first, one.step, one.kv) == (0, entry + qkv + rest + 256 * h, 2 * kv)
    assert (one.train_all, one.train_rows) == (entry + qkv, 3 * (entry + qkv + rest) - entry - qkv)
    assert (three.step, three.kv) == (one.step, 3 * one.kv)
    assert three.first == 2 * (entry + qkv) + rest  # a committed row goes through the second, and half of the third
    assert (three.train_all, three.train_rows) == (3 * (entry + qkv) + 2 * rest, rest)
    assert three.params == 3 * one.params


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_of_modules_by_step_are_what_autograd_keeps(dtype: torch.dtype) -> None:
    head, width = with_weights(), 4 if dtype == torch.float32 else 2
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    supervised = int(head.supervised_rows(packed)[0].sum())
    found = estimate.activation_bytes(head, estimate.Rows(192, supervised), width)
    if width == 2:  # autocast's copies of the weights, which a plan counts as `weights`
        found += 2 * sum(p.numel() for p in head.parameters())
    assert found == pytest.approx(kept_bytes(head, packed, parts(SMALL), dtype), rel=0.2)


def test_training_operations_of_modules_by_step_are_what_torch_counts() -> None:
    head = with_weights()
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    supervised = int(head.supervised_rows(packed)[0].sum())
    with FlopCounterMode(display=False) as counter:
        torch.stack([s.num for s in head.losses(packed, parts(SMALL))]).sum().backward()
    assert head_costs(head).train_flops(supervised / 192, 32) * 192 == pytest.approx(
        counter.get_total_flops(), rel=0.15
    )
