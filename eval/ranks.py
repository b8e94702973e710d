"""Which child of its parent each accepted node was: what the acceptance of a tree is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from .decoder.sampling import Draws
from .decoder.types import Drafter, HostStep, TokenTree, Verdict


class RankWatch(Drafter):
    """A drafter that notes the ranks of accepted nodes; it drafts what the one that it wraps does.

    During a step nothing but references is kept: the counting is done when it is asked for.

    Args:
        drafter: for one sequence at a time.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs, self.wants_choice, self.context = drafter.needs, drafter.wants_choice, drafter.context
        self.depth, self.rows = drafter.depth, drafter.rows
        self.noted: list[tuple[Tensor, Verdict]] = []

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Of the drafter."""
        return self.drafter.seconds

    @property
    def timed(self) -> bool:
        """Of the drafter."""
        return self.drafter.timed

    @timed.setter
    def timed(self, value: bool) -> None:
        self.drafter.timed = value

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter; forgets what was noted."""
        assert slots == 1, "ranks are noted of one sequence at a time"
        self.noted = []
        self.drafter.allocate(slots, capacity)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        self.drafter.begin(slot, tokens, aux, last)

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        return self.drafter.propose(roots, draws)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        self.noted.append((tree.parent, verdict))
        self.drafter.commit(tree, verdict, aux, last, step)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.drafter.release(slot, last)

    def recorded(self, slot: int, rows: int) -> Tensor | None:
        """See Drafter."""
        return self.drafter.recorded(slot, rows)

    @torch.inference_mode()
    def counts(self) -> list[list[int]]:
        """How many steps since `allocate` accepted a child of each rank, by depth: [D][R], both as far as any did."""
        found = [rank for parent, verdict in self.noted for rank in _ranks(parent, verdict)]
        deepest, widest = (max((place[i] for place in found), default=-1) + 1 for i in (0, 1))
        table = [[0] * widest for _ in range(deepest)]
        for depth, rank in found:
            table[depth][rank] += 1
        return table


def _ranks(parent: Tensor, verdict: Verdict) -> list[tuple[int, int]]:
    """(depth from 0, rank among its siblings) of the accepted nodes of a step; siblings stand in draw order."""
    parents = parent[0].tolist()
    path = verdict.path[0, 1 : int(verdict.n_accepted[0]) + 1].tolist()
    return [(depth, parents[:node].count(parents[node])) for depth, node in enumerate(path)]
