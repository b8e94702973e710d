"""Choose the tree: predict every candidate from measured pass costs and acceptance, then time the leaders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .decoder.search import Chain, Dynamic, Shape
from .metrics import Acceptance

PLAIN = "plain"
"""Name of plain decoding among the ways to decode; the others are named by their tree's text."""
NO_STEP = "every answer ends with its first token: there is no step to measure; give other prompts with --bench"


@dataclass(frozen=True)
class StepCost:
    """Seconds of the pieces of a decoding step of a whole batch.

    Attributes:
        rows: N, rows of the target's pass.
        target: that pass.
        draft: all passes of the head.
        rest: everything else: search, verification, bookkeeping.
    """

    rows: int
    target: float
    draft: float
    rest: float

    @property
    def step(self) -> float:
        """The whole step."""
        return self.target + self.draft + self.rest

    @property
    def overhead(self) -> float:
        """Share of the step outside the forward passes of target and head."""
        return self.rest / self.step


@dataclass
class PassCosts:
    """What a step costs, by way to decode: PLAIN or a tree's text. All were measured in one process, in turns."""

    ways: dict[str, StepCost] = field(default_factory=dict)

    def add(self, way: str, rows: int, target: Sequence[float], draft: Sequence[float], rest: Sequence[float]) -> None:
        """Take the medians of the seconds of several steps."""
        self.ways[way] = StepCost(rows, statistics.median(target), statistics.median(draft), statistics.median(rest))

    def ceiling(self, tau: float) -> float:
        """The most that any speed-up can honestly be: tau x c(1) / min c(N)."""
        return tau * self.ways[PLAIN].target / min(cost.target for cost in self.ways.values())

    def doubt(self, tau: float, interval: Sequence[float]) -> str | None:
        """Why a speed-up can't be believed, from the interval that it has; None where it can."""
        if interval[0] <= (most := self.ceiling(tau)):
            return None
        return f"the speed-up's lower bound {interval[0]:.2f} is above τ·c(1)/min c(N) = {most:.2f}"


@dataclass
class Tuning:
    """How the tree was chosen.

    Attributes:
        tree: text of the chosen one.
        costs: of every pass that was timed.
        acceptance: on the tuning prompts, by tree; chains share that of the deepest one.
        table: one row a candidate: its tree, depth K, nodes N, expected tau (before cutting), predicted and, for the
            leaders, measured tokens/s and speed-up.
        n_prompts: tuning prompts behind `acceptance`.
    """

    tree: str
    costs: PassCosts
    acceptance: dict[str, Acceptance]
    table: list[dict[str, Any]]
    n_prompts: int


def predict(costs: PassCosts, taus: Mapping[str, float], batch: int = 1) -> dict[str, float]:
    """Tokens/s of each tree from its step's cost and the tau expected of it, of `batch` sequences together."""
    return {tree: batch * tau / costs.ways[tree].step for tree, tau in taus.items()}


def leaders(predicted: Mapping[str, float], count: int) -> list[str]:
    """The trees that promise most, best first; of equals the one that comes first."""
    return sorted(predicted, key=lambda tree: -predicted[tree])[:count]


# --- every setting that may be wanted, and what its passes have in common ---------------------------------------------

CHAINS, TOP_KS, DEPTHS, TOTALS = range(1, 9), (4, 8), (3, 4, 6), (8, 16, 32, 60)
"""Depths of chains; k, depths and nodes of dynamic trees."""


def grid(most_depth: int | None, vocabulary: int) -> list[str]:
    """Chains and dynamic trees of all sizes that a head can draft, narrow ones first.

    Args:
        most_depth: of the head, see DraftHead. vocabulary: tokens that it can propose.
    """
    most = max(*CHAINS, *DEPTHS) if most_depth is None else most_depth
    chains = [f"chain:{depth}" for depth in CHAINS if depth <= most]
    dynamic = [
        f"dynamic:{k}x{depth}x{total}"
        for k in TOP_KS
        if k <= vocabulary
        for depth in DEPTHS
        if depth <= most
        for total in TOTALS
        if depth < total <= 1 + k + (depth - 1) * k * k
    ]
    return chains + dynamic


def passes(tree: str, shape: Shape) -> tuple[str, str]:
    """Which pass of the target and which drafting a step with a tree is made of; equal names cost the same.

    The target's pass depends on the rows, and whether they are a chain. Drafting, search included, depends on what is
    expanded: of dynamic trees with the same k and depth that is the same, however many nodes are kept.
    """
    target = f"{shape.rows} rows, {'chain' if isinstance(shape, Chain) else 'tree'}"
    return target, f"dynamic:{shape.top_k}x{shape.depth}" if isinstance(shape, Dynamic) else tree


def covering(trees: Mapping[str, Shape]) -> list[str]:
    """The trees to be timed: every pass that any tree's step has is in one of theirs."""
    known: set[str] = set()
    chosen = []
    for tree, shape in trees.items():
        if not known.issuperset(passes(tree, shape)):
            chosen.append(tree)
            known.update(passes(tree, shape))
    return chosen


PLAIN_EVERY = 3
"""Plain decoding takes its turn between so many others: how fast the machine is at the moment."""


def chunks(trees: Sequence[str]) -> list[Sequence[str]]:
    """Who is timed together, beside plain decoding, which is timed alone first."""
    return [[], *(trees[at : at + PLAIN_EVERY] for at in range(0, len(trees), PLAIN_EVERY))]


def without_drift(runs: Sequence[tuple[str, StepCost]]) -> PassCosts:
    """Costs of each way from its timed steps, as if the machine had always been as fast as in the median plain one.

    Each step is scaled by the plain steps before and behind it; then medians are taken.

    Args:
        runs: in the order in which they were timed, a plain one first.
    """
    plain = [cost.step for way, cost in runs if way == PLAIN]
    typical, seen = statistics.median(plain), 0
    scaled: dict[str, list[StepCost]] = {}
    for way, cost in runs:
        seen += way == PLAIN
        by = 1.0 if way == PLAIN else typical / statistics.mean(plain[seen - 1 : seen + 1])
        scaled.setdefault(way, []).append(StepCost(cost.rows, by * cost.target, by * cost.draft, by * cost.rest))
    costs = PassCosts()
    for way, found in scaled.items():
        parts = ([getattr(cost, part) for cost in found] for part in ("target", "draft", "rest"))
        costs.add(way, found[0].rows, *parts)
    return costs


FEW_ROWS = 16
"""Trees with no more rows than that are always timed."""


def may_pay(rows: int, timed: PassCosts, tau: float) -> bool:
    """Whether a tree of so many rows may beat plain decoding: not where a smaller pass takes too long already.

    Args:
        timed: what was timed so far, plain decoding at least.
        tau: the most that any tree emits a step.
    """
    smaller = [cost.target for cost in timed.ways.values() if cost.rows < rows]
    return rows <= FEW_ROWS or max(smaller) < tau * timed.ways[PLAIN].step


def compose(timed: PassCosts, trees: Mapping[str, Shape]) -> PassCosts:
    """What a step costs of every tree whose passes were timed, with it or others; plain decoding is taken over.

    Where several timed trees share a pass its cost is their median. What is neither pass goes with the drafting, whose
    search is the larger part of it.
    """
    target: dict[str, list[float]] = {}
    draft: dict[str, list[StepCost]] = {}
    for tree in set(timed.ways) & set(trees):
        of_target, of_draft = passes(tree, trees[tree])
        target.setdefault(of_target, []).append(timed.ways[tree].target)
        draft.setdefault(of_draft, []).append(timed.ways[tree])
    costs = PassCosts({PLAIN: timed.ways[PLAIN]})
    for tree, shape in trees.items():
        of_target, of_draft = passes(tree, shape)
        drafts = draft.get(of_draft, [])
        if of_target in target and drafts:
            costs.add(
                tree, shape.rows, target[of_target], [cost.draft for cost in drafts], [cost.rest for cost in drafts]
            )
    return costs
