"""Acceptance, tokens a step and speed-up from raw step logs.

A step log is (drafted, accepted, emitted) of one draft + one target pass: depth of the chain or tree, drafted tokens
accepted before cutting at EOS or the length limit, tokens emitted after cutting (bonus included). Prefill and the
token it yields belong to no step. Everything is pooled over all steps; intervals come from resampling whole prompts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Interval = tuple[float, float]
RESAMPLES = 2000
SEED = 20261
LEVEL = 0.95


class Step(Protocol):
    """The raw counts of one step."""

    @property
    def drafted(self) -> int:
        """Deepest drafted depth, root excluded."""

    @property
    def accepted(self) -> int:
        """Accepted drafts before cutting."""

    @property
    def emitted(self) -> int:
        """Tokens emitted after cutting, the bonus token included."""


class Answer(Protocol):
    """A decoded prompt: its steps, and the seconds that they took."""

    @property
    def steps(self) -> Sequence[Step]:
        """In their order; the prefill is none of them."""

    @property
    def seconds(self) -> float:
        """Wall time of the steps."""


@dataclass(frozen=True)
class Acceptance:
    """Figures of one set of decoded prompts.

    Attributes:
        tau: tokens emitted by steps / steps.
        mal: 1 + accepted / steps that drafted, before cutting.
        alpha: accepted / (accepted + first refusals), the geometric estimate.
        cumulative: by depth, steps whose accepted path reaches it / steps that drafted so deep.
        conditional: by depth, cumulative of this depth / of the one before, over the same steps.
        steps: number of steps.
        tokens: tokens emitted by steps.
    """

    tau: float
    mal: float
    alpha: float
    cumulative: list[float]
    conditional: list[float]
    steps: int
    tokens: int


def acceptance(prompts: Sequence[Sequence[Step]]) -> Acceptance:
    """Pool the steps of all prompts; a ratio without a denominator is 0."""
    steps = [step for prompt in prompts for step in prompt]
    drafted = np.array([s.drafted for s in steps], dtype=np.int64)
    accepted = np.array([s.accepted for s in steps], dtype=np.int64)
    tokens = sum(s.emitted for s in steps)
    total = int(accepted.sum())
    refused = int((accepted < drafted).sum())
    cumulative, conditional = [], []
    for depth in range(int(drafted.max(initial=0))):
        there = drafted > depth
        reached, before = int((there & (accepted > depth)).sum()), int((there & (accepted >= depth)).sum())
        cumulative.append(_ratio(reached, int(there.sum())))
        conditional.append(_ratio(reached, before))
    return Acceptance(
        tau=_ratio(tokens, len(steps)),
        mal=1 + _ratio(total, int((drafted > 0).sum())),
        alpha=_ratio(total, total + refused),
        cumulative=cumulative,
        conditional=conditional,
        steps=len(steps),
        tokens=tokens,
    )


def acceptance_by_rank(
    prompts: Sequence[Sequence[Step]], counts: Sequence[Sequence[Sequence[int]]]
) -> list[list[float]]:
    """Share of the steps that drafted so deep whose accepted path goes through a parent's r-th child.

    Args:
        counts: [P][D][R] of each prompt: how many steps accepted a child of rank r at depth d+1.

    Returns:
        [D][R], index 0 = first drafted token and first child. Each depth's shares add up to the cumulative acceptance.
    """
    drafted = np.array([s.drafted for prompt in prompts for s in prompt], dtype=np.int64)
    shape = [max((len(d) for d in counts), default=0), max((len(r) for d in counts for r in d), default=0)]
    total = np.zeros(shape, dtype=np.int64)
    for prompt in counts:
        for depth, ranks in enumerate(prompt):
            total[depth, : len(ranks)] += np.array(ranks, dtype=np.int64)
    return [[_ratio(int(n), int((drafted > depth).sum())) for n in row] for depth, row in enumerate(total)]


def tau_interval(prompts: Sequence[Sequence[Step]]) -> Interval:
    """Return the 95 % bootstrap interval of tau over prompts."""
    counts = np.array([[sum(s.emitted for s in prompt), len(prompt)] for prompt in prompts], dtype=np.float64)
    return bootstrap(counts.reshape(-1, 2), lambda total: total[:, 0] / np.maximum(total[:, 1], 1))


@dataclass(frozen=True)
class Timing:
    """Decoding steps of one prompt: tokens they emitted and the seconds they took (prefill excluded)."""

    tokens: int
    seconds: float


def timings(answers: Sequence[Answer]) -> list[Timing]:
    """Tokens and seconds of the decoding steps of each answer."""
    return [Timing(sum(s.emitted for s in answer.steps), answer.seconds) for answer in answers]


def tokens_per_second(timings: Sequence[Timing]) -> float:
    """Pooled tokens / seconds; 0 where nothing was timed."""
    return _ratio(sum(t.tokens for t in timings), sum(t.seconds for t in timings))


def speedup(plain: Sequence[Timing], speculative: Sequence[Timing]) -> tuple[float, Interval]:
    """Ratio of pooled tokens/s on the same prompts, in the same order, and its 95 % interval over prompts.

    Each prompt's two times are resampled together, so that a long or awkward prompt counts on both sides.
    """
    pairs = np.array(
        [[p.tokens, p.seconds, s.tokens, s.seconds] for p, s in zip(plain, speculative, strict=True)], dtype=np.float64
    ).reshape(-1, 4)

    def ratio(total: NDArray[np.float64]) -> NDArray[np.float64]:
        top, bottom = total[:, 2] * total[:, 1], total[:, 3] * total[:, 0]
        return np.divide(top, bottom, out=np.zeros_like(top), where=bottom > 0)

    return float(ratio(pairs.sum(0, keepdims=True))[0]), bootstrap(pairs, ratio)


def bootstrap(rows: NDArray[np.float64], statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]]) -> Interval:
    """Percentile interval of a statistic of sums, resampling rows with a fixed seed.

    Args:
        rows: [P, F], one row of additive figures a prompt.
        statistic: maps column sums [R, F] of R resamples to [R].
    """
    if not len(rows):
        return (0.0, 0.0)
    rng = np.random.default_rng(SEED)
    picks = rng.integers(0, len(rows), (RESAMPLES, len(rows)))
    low, high = np.quantile(statistic(rows[picks].sum(1)), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return (float(low), float(high))


def expected_tau(conditional: Sequence[float], depth: int) -> float:
    """Tau, before cutting, of a chain of `depth` drafts, from acceptance measured with a chain at least as deep."""
    tau = reach = 1.0
    for share in conditional[:depth]:
        reach *= share
        tau += reach
    return tau


def percentiles(seconds: Sequence[float]) -> dict[str, float]:
    """Median and 95th percentile, between neighbours by the straight line; zeros where nothing was timed."""
    if not len(seconds):
        return {"p50": 0.0, "p95": 0.0}
    low, high = np.quantile(np.asarray(seconds, dtype=np.float64), [0.5, 0.95])
    return {"p50": float(low), "p95": float(high)}


def _ratio(top: float, bottom: float) -> float:
    return top / bottom if bottom else 0.0
