"""Choose the tree: predict every candidate from measured pass costs and acceptance, then time the two leaders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .metrics import Acceptance

PLAIN = "plain"
"""Name of plain decoding among the ways to decode; the others are named by their tree's text."""


@dataclass(frozen=True)
class StepCost:
    """Seconds of the pieces of a decoding step at batch 1: medians over prompts' means.

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
        """Take the medians of the mean seconds a step of each prompt."""
        self.ways[way] = StepCost(rows, statistics.median(target), statistics.median(draft), statistics.median(rest))

    def ceiling(self, tau: float) -> float:
        """The most that any speed-up can honestly be: tau x c(1) / min c(N)."""
        return tau * self.ways[PLAIN].target / min(cost.target for cost in self.ways.values())


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


def predict(costs: PassCosts, taus: Mapping[str, float]) -> dict[str, float]:
    """Tokens/s of each tree from its step's cost and the tau expected of it."""
    return {tree: tau / costs.ways[tree].step for tree, tau in taus.items()}


def leaders(predicted: Mapping[str, float], count: int = 2) -> list[str]:
    """The trees that promise most, best first; of equals the one that comes first."""
    return sorted(predicted, key=lambda tree: -predicted[tree])[:count]
