"""The teacher that knows the target's likeliest tokens alone, against the one that has the target's states."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from families import FAMILIES, VOCAB, Case, first_case, make_documents, pack

from draftsmith.data_recipes.forward import likeliest
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch, DraftHead
from draftsmith.heads.losses import HiddenTeacher, TopKTeacher


def reads_states(case: Case) -> bool:
    return case.config.last_state != "none" or type(case.head).feature_loss is not DraftHead.feature_loss


FREE = [name for name in FAMILIES if not reads_states(first_case(name))]
BOUND = [name for name in FAMILIES if reads_states(first_case(name))]


def with_topk(batch: Batch, case: Case, k: int) -> Batch:
    assert batch.last is not None
    ids, logprobs = likeliest(batch.last, case.parts, k)
    return dataclasses.replace(batch, last=None, topk_ids=ids, topk_logprobs=logprobs)


def gradients(case: Case, batch: Batch) -> tuple[list[Any], list[torch.Tensor]]:
    case.head.zero_grad()
    stats = case.head.losses(batch, case.parts, overlap=True)
    torch.stack([s.num for s in stats]).sum().backward()
    return stats, [p.grad.clone() for p in case.head.parameters() if p.grad is not None]


@pytest.mark.parametrize("family", FREE)
def test_all_tokens_teach_what_the_states_teach(family: str) -> None:
    case = first_case(family)
    batch = pack(make_documents(case))
    states, wanted = gradients(case, batch)
    topk, found = gradients(case, with_topk(batch, case, VOCAB))
    assert wanted
    for a, b in zip(topk, states, strict=True):
        torch.testing.assert_close(a.num, b.num, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(a.overlap, b.overlap, rtol=1e-5, atol=1e-5)  # both in fp32
        assert all(torch.equal(getattr(a, n), getattr(b, n)) for n in ("den", "rows", "hits", "reached", "kept"))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("family", FREE)
def test_fewer_tokens_give_a_lower_overlap(family: str) -> None:
    case = first_case(family)
    batch = pack(make_documents(case))
    overlaps = []
    for k in (1, 4, VOCAB):
        stats, _ = gradients(case, with_topk(batch, case, k))
        overlaps.append(sum(float(s.overlap) for s in stats))
    assert overlaps == sorted(overlaps)
    assert overlaps[0] < overlaps[2]


def test_likeliest_tokens_by_hand() -> None:
    case = first_case(FREE[0])
    last = torch.randn(7, case.config.hidden_size, dtype=torch.float64)
    ids, logprobs = likeliest(last, case.parts, 3)
    normed = last / (last.pow(2).mean(-1, keepdim=True) + case.parts.norm_eps).sqrt() * case.parts.norm_weight
    logits = normed @ case.parts.lm_head.t()
    for row in range(7):
        best = sorted(range(VOCAB), key=lambda v: -float(logits[row, v]))[:3]
        assert ids[row].tolist() == best
        total = math.log(sum(math.exp(x) for x in logits[row].tolist()))
        assert logprobs[row].tolist() == pytest.approx([float(logits[row, v]) - total for v in best])


def test_probabilities_and_overlap_by_hand() -> None:
    """V = 5, draft vocabulary {0, 2, 3}, k = 2."""
    draft_ids = torch.tensor([0, -1, 1, 2, -1])
    ids = torch.tensor([[2, 1], [3, 0], [4, 1]])
    logprobs = torch.log(torch.tensor([[0.5, 0.3], [0.6, 0.2], [0.9, 0.05]], dtype=torch.float64))
    teacher = TopKTeacher(ids, logprobs, draft_ids, 3)
    expected = torch.tensor([[0, 1, 0], [0.25, 0, 0.75], [0, 0, 0]], dtype=torch.float64)
    torch.testing.assert_close(teacher.probabilities(), expected)
    hidden = torch.log(torch.tensor([[0.1, 0.7, 0.2], [0.5, 0.1, 0.4]]))  # q of the rows, weight = identity
    found = teacher.overlap(hidden, torch.eye(3), torch.tensor([0, 1]))
    assert float(found) == pytest.approx(0.5 + (0.2 + 0.4))


def test_states_give_the_softmax_over_the_draft_vocabulary() -> None:
    states = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
    lm_head = torch.log(torch.tensor([[1.0, 1.0], [3.0, 1.0], [9.0, 9.0]]))
    found = HiddenTeacher(states, lm_head, torch.tensor([0, 1])).probabilities()
    torch.testing.assert_close(found, torch.tensor([[0.25, 0.75], [0.5, 0.5]]))


@pytest.mark.parametrize("family", BOUND)
def test_heads_that_read_the_states_refuse(family: str) -> None:
    case = first_case(family)
    with pytest.raises(DraftsmithError, match=rf"{family}.*top 64.*collect\.teacher = 'hidden'"):
        case.head.require_states("its top 64 tokens")
    batch = dataclasses.replace(pack(make_documents(case)), last=None)
    with pytest.raises(DraftsmithError, match=rf"{family}.*collect\.teacher"):
        case.head.losses(batch, case.parts)


@pytest.mark.parametrize("family", FREE)
def test_other_heads_need_one_of_both(family: str) -> None:
    case = first_case(family)
    case.head.require_states("its top 64 tokens")
    batch = dataclasses.replace(pack(make_documents(case)), last=None)
    with pytest.raises(ValueError, match="last states or its top-k"):
        case.head.losses(batch, case.parts)
