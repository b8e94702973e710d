"""Choose the depth K: predict every candidate from measured pass costs and acceptance, then time the two leaders."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .metrics import Acceptance, expected_tau


@dataclass
class PassCosts:
    """Seconds of the pieces of a decoding step at batch 1, measured in this process: medians over prompts' means.

    Attributes:
        target: target pass by its number of rows N (1 = plain decoding, K + 1 = verification).
        draft: all head passes of one step, by depth K.
        rest: everything else of a step (search, verification, bookkeeping), by depth K; 0 = plain decoding.
    """

    target: dict[int, float] = field(default_factory=dict)
    draft: dict[int, float] = field(default_factory=dict)
    rest: dict[int, float] = field(default_factory=dict)

    def add(self, depth: int, target: Sequence[float], draft: Sequence[float], rest: Sequence[float]) -> None:
        """Take the medians of the mean seconds a step of each prompt decoded at `depth` (0 = plain)."""
        self.target[depth + 1] = statistics.median(target)
        self.rest[depth] = statistics.median(rest)
        if depth:
            self.draft[depth] = statistics.median(draft)

    def step(self, depth: int) -> float:
        """Seconds of one step at `depth`; 0 = plain."""
        return self.target[depth + 1] + self.draft.get(depth, 0.0) + self.rest[depth]

    def overhead(self, depth: int) -> float:
        """Share of a step outside the forward passes of target and head."""
        return self.rest[depth] / self.step(depth)

    def ceiling(self, tau: float) -> float:
        """The most that any speed-up can honestly be: tau x c(1) / min c(N)."""
        return tau * self.target[1] / min(self.target.values())


@dataclass
class Tuning:
    """How K was chosen.

    Attributes:
        depth: the chosen K.
        costs: of every pass that was timed.
        acceptance: on the tuning prompts, measured at the deepest candidate.
        table: one row a candidate: predicted and, for the leaders, measured tokens/s and speed-up.
        n_prompts: tuning prompts behind `acceptance`.
    """

    depth: int
    costs: PassCosts
    acceptance: Acceptance
    table: list[dict[str, Any]]
    n_prompts: int


def predict(costs: PassCosts, conditional: Sequence[float], depths: Sequence[int]) -> dict[int, float]:
    """Tokens/s of each depth from its step's cost and the acceptance measured at the deepest."""
    return {k: expected_tau(conditional, k) / costs.step(k) for k in depths}


def leaders(predicted: Mapping[int, float], count: int = 2) -> list[int]:
    """The depths that promise most, best first; of equals the shallower one."""
    return sorted(predicted, key=lambda k: (-predicted[k], k))[:count]
