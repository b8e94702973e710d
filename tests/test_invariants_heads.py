"""Invariants 1, 2, 3 and the dense comparison of 6, for every registered family."""

from __future__ import annotations

from typing import Any

import head_checks as checks
import pytest
import reference
import torch
from families import CASES, FAMILIES, Case, first_case, first_variant, make_case, make_document, make_documents, pack

from draftsmith.heads.registry import family_names

every_case = pytest.mark.parametrize(("family", "variant"), CASES)
every_family = pytest.mark.parametrize("family", FAMILIES)


def test_every_registered_family_is_tested() -> None:
    assert set(FAMILIES) == set(family_names()), "add the family's builders and oracle to tests/families.py"


def test_alignment_of_an_arange_sequence() -> None:
    checks.check_arange_alignment()


def test_supervised_rows_of_the_eight_token_example() -> None:
    checks.check_supervised_example()


def test_supervised_rows_of_packed_chats() -> None:
    checks.check_supervised_brute_force()


@every_case
@pytest.mark.parametrize("seed", [0, 1])
def test_losses_equal_the_dense_reference(family: str, variant: str, seed: int) -> None:
    checks.check_losses_equal_reference(make_case(family, variant), seed)


@every_case
def test_gradients_equal_the_dense_reference(family: str, variant: str) -> None:
    checks.check_gradients_equal_reference(make_case(family, variant))


@every_case
def test_training_rows_equal_cached_draft_steps(family: str, variant: str) -> None:
    checks.check_train_equals_decode(make_case(family, variant))


@every_family
def test_chain_drafts_are_the_oracles(tiny_target: Any, family: str) -> None:
    checks.check_chain_drafts(tiny_target, family, [2, 7, 12], 9)


@every_family
def test_no_row_sees_what_decoding_would_not(family: str) -> None:
    checks.check_no_leak(first_case(family))


@every_family
def test_packed_documents_are_apart(family: str) -> None:
    checks.check_packed_apart(first_case(family))


@every_family
def test_vocabulary_maps(family: str) -> None:
    case = first_case(family)
    checks.check_vocab_maps(case.head.vocab)
    checks.check_head_guesses_target_ids(case)


@every_family
def test_rows_outside_the_draft_vocabulary_count_as_misses_only(family: str) -> None:
    case = first_case(family)
    outside = next(t for t in range(case.config.vocab_size) if t not in case.ids)
    doc = make_document(case, [False, False, *[True] * 6], 3)
    doc.tokens = [case.ids[0]] * len(doc.tokens)
    doc.tokens[4] = outside
    stats = case.head.losses(pack([doc]), case.parts, overlap=True)
    assert [int(s.rows) for s in stats] == [5, 4, 3, 2]  # rows 1.. whose labels are t[3+s] .. t[7]
    assert [int(s.den) for s in stats] == [4, 3, 3, 2]  # t[4] is the label of row 2 - s, supervised from row 1 on
    assert case.head.loss_counts(pack([doc])).tolist() == [4, 3, 3, 2]
    for s in range(2):
        with_it, without = checks.row_loss(case, doc, 2 - s, s), checks.row_loss(case, doc, 3 - s, s)
        assert float(with_it) == 0.0
        assert float(without) > 0.0
    assert all(0 <= float(s.overlap) <= int(s.rows) for s in stats)


@every_family
def test_a_batch_without_supervised_rows(family: str) -> None:
    case = first_case(family)
    batch = pack([make_document(case, [False] * 6), make_document(case, [False, True])])
    stats = case.head(batch, case.parts)
    assert all(int(s.rows) == int(s.den) == int(s.kept) == 0 and float(s.num.detach()) == 0.0 for s in stats)
    torch.stack([s.num for s in stats]).sum().backward()
    assert case.head.loss_counts(batch).tolist() == [0] * case.config.steps


@every_family
def test_the_full_vocabulary_is_a_draft_vocabulary(family: str) -> None:
    case = make_case(family, first_variant(family), full_vocab=True)
    docs = make_documents(case, 2)
    stats = case.head.losses(pack(docs), case.parts)
    want = reference.losses(case.reference, case.weights(), case.config, docs, case.parts, case.ids)
    for a, b in zip(stats, want, strict=True):
        assert int(a.den) == int(a.rows) == b.rows
        torch.testing.assert_close(a.num, b.num, **checks.NEAR)


@every_case
def test_single_precision_stays_near_double(family: str, variant: str) -> None:
    double, single = make_case(family, variant), make_case(family, variant, dtype=torch.float32)
    docs = make_documents(double)
    want = double.head.losses(pack(docs), double.parts)
    got = single.head.losses(pack(docs).to("cpu", torch.float32), single.parts)
    for a, b in zip(got, want, strict=True):
        assert a.num.dtype == torch.float32
        torch.testing.assert_close(a.num.double(), b.num, rtol=1e-5, atol=1e-5)


@every_family
@torch.no_grad()
def test_low_precision_keeps_rope_angles(family: str) -> None:
    """A head in bf16 at a far position drafts what the same weights do in fp32, as at a near one."""
    case = first_case(family)
    rounded = {n: w.bfloat16().double() for n, w in case.head.state_dict().items()}
    case.head.load_state_dict(rounded)
    doc = make_document(case, [True] * 8, 11)
    far = 1801  # bf16 holds no odd integer of this size
    error = {}
    for start in (0, far):
        out = []
        for dtype in (torch.float64, torch.bfloat16):
            head = make_case(family, first_variant(family)).head
            head.load_state_dict(rounded)
            out.append(drafts_from(head.to(dtype), case, doc, start, dtype))
        error[start] = float((out[0] - out[1]).abs().max() / out[0].abs().max())
    assert error[far] < 2 * error[0] + 0.02, f"relative errors by first position: {error}"


def drafts_from(head: Any, case: Case, doc: Any, start: int, dtype: torch.dtype) -> torch.Tensor:
    embed, tokens = case.parts.embed.to(dtype), torch.tensor(doc.tokens)
    parts = case.parts.to("cpu", dtype)
    head.attach(parts)
    cache = head.new_cache(1, 16, torch.device("cpu"), dtype)
    at = start + torch.arange(4)[None]
    inputs = head.inputs(doc.features[None, :4].to(dtype), doc.last[None, :4].to(dtype), parts)
    out = head.forward_step(cache, embed[tokens[None, 1:5]], inputs, at, torch.tensor([4]))
    logits = [out[0].double()]
    for s in (1, 2):
        out = head.forward_step(cache, embed[tokens[None, 4 + s : 5 + s]], out[1], at[:, -1:] + s, None, step=s)
        logits.append(out[0].double())
    return torch.stack(logits)
