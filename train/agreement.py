"""Whether tau_walk and decoded tau say the same, and what is likely to be wrong where they don't.

tau_walk (`validate.py`) walks over stored text. Where a decoded answer is that text, both are the same walk and must
agree; so they are compared over the beginning that the stored answer and the decoded one share, whoever wrote the
former. A difference there is a difference between training and decoding; one on the rest is a difference of texts.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..eval.decoder.loop import Result
from ..eval.metrics import Interval, bootstrap
from .validate import walked_steps

TOLERANCE = 0.03
"""Relative difference of the two taus that rounding may make: training reads stored states, decoding fresh ones."""
MIN_SHARED = 64
"""Tokens of shared text below which the two taus aren't compared."""


@dataclass(frozen=True)
class Compared:
    """One prompt's decoded answer beside the walk over its document.

    Attributes:
        tokens, steps: decoded. walk_tokens, walk_steps: of the walk over as much of the stored answer.
        shared: tokens behind the first one that both answers begin with.
        shared_steps, shared_walk_steps: the steps that begin there; shared_first, shared_walk_first: those of them
            whose first draft is accepted.
        same: the decoded answer is the stored one.
    """

    tokens: int
    steps: int
    walk_tokens: int
    walk_steps: int
    shared: int
    shared_steps: int
    shared_walk_steps: int
    shared_first: int
    shared_walk_first: int
    same: bool


def compare(result: Result, answer: Sequence[int], right: Tensor, supervised: Tensor, depth: int) -> Compared:
    """Lay a decoded answer beside the walk over the stored one.

    Args:
        result: of decoding with a chain of `depth`, at most as many tokens as `answer` has.
        answer: stored tokens.
        right, supervised: as for `validate.walk`, of the document up to the end of `answer`.
    """
    pairs = zip(result.tokens, answer, strict=False)
    common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(result.tokens), len(answer)))
    rows = supervised.nonzero().flatten()[: max(common - 1, 0)]
    begun = torch.zeros_like(supervised)
    begun[rows] = True
    walked = walked_steps(right, begun, depth)
    decoded, emitted = [], 1  # the prefill gives the first token
    for s in result.steps:
        if emitted >= common:
            break
        decoded.append(s.accepted)
        emitted += s.emitted
    return Compared(
        tokens=sum(s.emitted for s in result.steps),
        steps=len(result.steps),
        walk_tokens=int(supervised.sum()),
        walk_steps=len(walked_steps(right, supervised, depth)),
        shared=len(rows),
        shared_steps=len(decoded),
        shared_walk_steps=len(walked),
        shared_first=sum(n > 0 for n in decoded),
        shared_walk_first=sum(n > 0 for n in walked),
        same=result.tokens == list(answer),
    )


def disagreement(found: Sequence[Compared]) -> str | None:
    """What a user should know where tau_walk and decoded tau differ by more than the noise; None where they don't.

    The noise is a bootstrap over documents, and `TOLERANCE`.
    """
    shared = sum(c.shared for c in found)
    if shared >= MIN_SHARED:
        gap = _gap([(c.shared, c.shared_walk_steps, c.shared, c.shared_steps) for c in found])
        if gap.is_real:
            firsts = [(c.shared_walk_first, c.shared_walk_steps, c.shared_first, c.shared_steps) for c in found]
            return f"{gap.text} over the same {shared} tokens: training and decoding differ. {_suspects(_gap(firsts))}"
    others = [c for c in found if not c.same]
    gap = _gap([(c.walk_tokens, c.walk_steps, c.tokens, c.steps) for c in found])
    if not others or not gap.is_real:
        return None
    part = statistics.median(c.shared + 1 for c in others)
    return (
        f"{gap.text} on the same prompts: {len(others)} of {len(found)} answers in the data are not what the target "
        f"says itself, they part after {part:.0f} tokens. That is expected of a dataset's answers and of sampled ones: "
        "the decoded tau is the one to believe"
    )


@dataclass(frozen=True)
class _Gap:
    walk: float
    decoded: float
    interval: Interval

    @property
    def is_real(self) -> bool:
        limit = TOLERANCE * self.decoded
        return self.interval[0] > limit or self.interval[1] < -limit

    @property
    def text(self) -> str:
        low, high = self.interval
        return (
            f"tau_walk is {self.walk:.3f} and decoded tau {self.decoded:.3f} (their difference {low:.3f} to {high:.3f})"
        )


def _gap(rows: Sequence[tuple[int, int, int, int]]) -> _Gap:
    """Of two pooled ratios, from (top, bottom) of the walk and of decoding by document."""
    table = np.array(rows, dtype=np.float64).reshape(-1, 4)

    def ratios(total: Any) -> Any:
        return total[:, 0] / np.maximum(total[:, 1], 1), total[:, 2] / np.maximum(total[:, 3], 1)

    def difference(total: Any) -> Any:
        walk, decoded = ratios(total)
        return walk - decoded

    walk, decoded = ratios(table.sum(0, keepdims=True))
    return _Gap(float(walk[0]), float(decoded[0]), bootstrap(table, difference))


def _suspects(first: _Gap) -> str:
    if first.is_real:
        return (
            f"Their first drafts differ already ({first.walk:.0%} and {first.decoded:.0%} right): look at alignment, "
            "mask, norm, rope and layer ids, in this order"
        )
    return (
        "Their first drafts agree, those behind them don't: look at what a draft step reads: its alignment, the mask "
        "among drafted rows, the norm of the recycled state, and its rope position, in this order"
    )
