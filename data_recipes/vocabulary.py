"""The draft vocabulary of a feature store: a seconds-long step, no state is read for it."""

from __future__ import annotations

from collections.abc import Sequence

from ..heads.vocab import DraftVocab, build_vocab
from .store import FeatureStore


def choose_vocab(store: FeatureStore, size: int, always: Sequence[int]) -> tuple[DraftVocab, float]:
    """Choose the `size` tokens that are most often the label of a supervised training row.

    Args:
        store: the collected documents.
        size: draft vocabulary size; clipped to the target's.
        always: ids that are in whatever their count: the target's end-of-turn tokens.

    Returns:
        The vocabulary and its coverage of the counted labels, 0..1.
    """
    return build_vocab(store.label_counts("train"), size, list(always))
