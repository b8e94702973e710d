"""The draft vocabulary: which target tokens the head can propose."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import DraftsmithError


@dataclass(frozen=True)
class DraftVocab:
    """A subset of the target's vocabulary in ascending id order.

    Attributes:
        target_ids: [Vd] int64, target id of each draft id, strictly ascending.
        vocab_size: V of the target.
    """

    target_ids: Tensor
    vocab_size: int

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.dtype != torch.int64 or ids.ndim != 1 or not len(ids):
            raise DraftsmithError(
                f"draft vocabulary must be a non-empty int64 vector, not {ids.dtype} {list(ids.shape)}"
            )
        if bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= self.vocab_size:
            raise DraftsmithError(
                f"draft vocabulary ids must ascend strictly within 0..{self.vocab_size - 1}, "
                f"found {int(ids.min())}..{int(ids.max())}"
            )

    def __len__(self) -> int:
        return len(self.target_ids)

    @property
    def sha256(self) -> str:
        """Hash of the ids: a head trained with one vocabulary never meets another's map."""
        raw = self.target_ids.cpu().numpy().astype("<i8").tobytes()
        return hashlib.sha256(raw + str(self.vocab_size).encode()).hexdigest()

    def d2t(self) -> Tensor:
        """Offsets as the engines store them: target = draft + d2t[draft]; int64 [Vd]."""
        return self.target_ids - torch.arange(len(self), device=self.target_ids.device)

    def to_draft(self) -> Tensor:
        """Draft id of every target id, -1 outside; int64 [V]."""
        table = torch.full((self.vocab_size,), -1, dtype=torch.int64, device=self.target_ids.device)
        table[self.target_ids] = torch.arange(len(self), device=table.device)
        return table


def build_vocab(counts: Tensor, size: int, always: list[int] | None = None) -> tuple[DraftVocab, float]:
    """Choose the `size` most frequent tokens of the supervised text.

    Args:
        counts: [V] int64, occurrences of each token among supervised labels.
        size: draft vocabulary size; clipped to V.
        always: ids that are in whatever their count (end-of-turn tokens).

    Returns:
        The vocabulary and its coverage: the share of counted tokens that it holds. Ties and unseen ids are filled in
        ascending id order, so equal counts give an equal vocabulary.

    Raises:
        DraftsmithError: nothing was counted; `always` holds ids outside 0..V-1, or more than `size`.
    """
    if counts.ndim != 1 or not int(counts.sum()):
        raise DraftsmithError("no supervised token was counted: the loss masks are empty, check the chat template")
    size, special = min(size, len(counts)), sorted(set(always or []))
    if special and not 0 <= special[0] <= special[-1] < len(counts):
        raise DraftsmithError(f"the end-of-turn tokens {special} are not all among the target's {len(counts)} tokens")
    if size < max(1, len(special)):
        raise DraftsmithError(
            f"a draft vocabulary of {size} tokens has no room for the end-of-turn tokens {special}: make "
            "head.draft_vocab_size larger"
        )
    ranked = counts.clone()
    ranked[special] = torch.iinfo(torch.int64).max
    order = torch.sort(ranked, descending=True, stable=True).indices[:size]
    vocab = DraftVocab(torch.sort(order).values, len(counts))
    return vocab, float(coverage(counts, vocab))


def coverage(counts: Tensor, vocab: DraftVocab) -> Tensor:
    """Share of counted tokens that the vocabulary holds, fp64 [...], of counts [..., V]; 1 where none was counted."""
    held, total = counts[..., vocab.target_ids].sum(-1), counts.sum(-1)
    return torch.where(total > 0, held.double() / total.clamp(min=1), 1.0)
