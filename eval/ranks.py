"""Which child of its parent each accepted node was: what a tree's acceptance is made of; and one tree to look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .decoder.sampling import Draws
from .decoder.types import Drafter, HostStep, TokenTree, Verdict


class _Step(NamedTuple):
    """References to what a tree consists of, its distributions left out, and what was accepted of it."""

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    valid: Tensor
    verdict: Verdict


class RankWatch(Drafter):
    """A drafter that notes the trees and what was accepted of them; it drafts what the one that it wraps does.

    During a step nothing but references is kept: the counting is done when it is asked for.

    Args:
        drafter: for one sequence at a time.
    """

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.needs, self.wants_choice, self.context = drafter.needs, drafter.wants_choice, drafter.context
        self.depth, self.rows = drafter.depth, drafter.rows
        self.noted: list[_Step] = []

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
        self.noted.append(_Step(tree.tokens, tree.parent, tree.depth, tree.valid, verdict))
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
        found = [
            rank for step in self.noted for rank in enumerate(sibling_ranks(step.parent[0].tolist(), _accepted(step)))
        ]
        deepest, widest = (max((place[i] for place in found), default=-1) + 1 for i in (0, 1))
        table = [[0] * widest for _ in range(deepest)]
        for depth, rank in found:
            table[depth][rank] += 1
        return table

    @torch.inference_mode()
    def drawn(self, tokenizer: Any, name: str = "") -> dict[str, Any] | None:
        """One tree with its accepted path: of the steps since `allocate` the first that accepted most.

        Args:
            tokenizer: decodes each node's token alone.
            name: of the answer.

        Returns:
            {"nodes": [{"token": text, "parent": index, "depth", "accepted": bool}], "bonus": text of the target's own
            token behind the path, "id": name, "step": number of the step, from 1}. Node 0 is the root (parent -1),
            which was emitted by the step before and counts as accepted; parents come first, siblings in draw order.
            None where no step drafted anything.
        """
        steps = [(_accepted(step), number, step) for number, step in enumerate(self.noted, 1)]
        steps = [found for found in steps if bool((found[2].valid & (found[2].depth > 0)).any())]
        if not steps:
            return None
        path, number, step = max(steps, key=lambda found: (len(found[0]), -found[1]))
        tokens, parents, depths, valid = (x[0].tolist() for x in step[:4])
        kept = [node for node, real in enumerate(valid) if real]
        place = {node: i for i, node in enumerate(kept)} | {-1: -1}
        nodes = [
            {
                "token": tokenizer.decode([tokens[node]]),
                "parent": place[parents[node]],
                "depth": depths[node],
                "accepted": node == 0 or node in path,
            }
            for node in kept
        ]
        bonus = tokenizer.decode([int(step.verdict.bonus[0])])
        return {"nodes": nodes, "bonus": bonus, "id": name, "step": number}


def _accepted(step: _Step) -> list[int]:
    """Accepted nodes below the root."""
    path: list[int] = step.verdict.path[0, 1 : int(step.verdict.n_accepted[0]) + 1].tolist()
    return path


def sibling_ranks(parents: Sequence[int], nodes: Sequence[int]) -> tuple[int, ...]:
    """Rank, from 0, of each of these nodes among its siblings, which stand in draw order.

    Args:
        parents: of every node of a tree.
    """
    return tuple(parents[:node].count(parents[node]) for node in nodes)
