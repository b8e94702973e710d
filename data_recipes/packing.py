"""Documents packed into batches of about equal numbers of tokens, by a plan that is a pure function."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from ..errors import DraftsmithError
from ..heads.base import Batch
from .store import FeatureStore

_OPEN = 16
"""Batches filled at the same time: enough that little room is left over, few enough that they stay random."""


def plan_batches(lengths: Sequence[int], token_budget: int, seed: int, epoch: int) -> list[list[int]]:
    """Return the batches of one epoch as document numbers.

    Every document appears exactly once, in an order drawn from (seed, epoch). A document goes to the first open batch
    that has room; a document longer than the budget is a batch of its own.

    Args:
        lengths: tokens of each document.
        token_budget: most tokens a batch may have.
        seed, epoch: what the order is drawn from.
    """
    if token_budget < 1:
        raise DraftsmithError(f"token_budget {token_budget} must be at least 1")
    draw = random.Random(f"draftsmith/{seed}/{epoch}")
    order = list(range(len(lengths)))
    draw.shuffle(order)
    batches: list[list[int]] = []
    filling: list[tuple[int, list[int]]] = []  # (tokens left, documents)
    for document in order:
        length = lengths[document]
        place = next((i for i, (left, _) in enumerate(filling) if length <= left), None)
        if place is None:
            filling.append((max(token_budget - length, 0), [document]))
        else:
            left, members = filling[place]
            filling[place] = (left - length, [*members, document])
        if len(filling) > _OPEN:
            fullest = min(range(len(filling)), key=lambda i: filling[i][0])
            batches.append(filling.pop(fullest)[1])
    batches += [members for _, members in filling]
    draw.shuffle(batches)  # else the emptiest batches of every epoch come last
    return batches


def make_batch(store: FeatureStore, indices: Sequence[int], max_length: int) -> Batch:
    """Pack documents into one batch, each cut to its first `max_length` tokens.

    The last row of each document has zero states: its token has no successor, so the row is never supervised and no
    supervised row needs it.

    Args:
        store: where the documents come from.
        indices: document numbers.
        max_length: most tokens of a document.

    Returns:
        A batch with T = the documents' tokens; states are bf16. With the target's likeliest tokens in place of `last`
        where the store holds those.
    """
    documents = [store.document(i, max_length) for i in indices]
    lengths = [len(d.tokens) for d in documents]
    hidden = store.meta.teacher == "hidden"
    topk = [d.topk for d in documents if d.topk is not None]
    return Batch(
        tokens=torch.cat([d.tokens for d in documents]),
        answer=torch.cat([d.answer for d in documents]),
        documents=torch.arange(len(indices)).repeat_interleave(torch.tensor(lengths)),
        positions=torch.cat([torch.arange(n) for n in lengths]),
        features=_packed([d.features for d in documents], lengths, torch.bfloat16),
        last=_packed([d.last for d in documents if d.last is not None], lengths, torch.bfloat16) if hidden else None,
        topk_ids=None if hidden else _packed([ids for ids, _ in topk], lengths, torch.int64),
        topk_logprobs=None if hidden else _packed([logs for _, logs in topk], lengths, torch.float32),
    )


def _packed(rows: Sequence[Tensor], lengths: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Put documents' rows one behind the other, with zeros for each one's last token."""
    packed = torch.zeros(sum(lengths), rows[0].shape[1], dtype=dtype)
    start = 0
    for x, n in zip(rows, lengths, strict=True):
        packed[start : start + n - 1] = x
        start += n
    return packed
