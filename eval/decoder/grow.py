"""How a tree of a shape (`search.py`) grows below the last emitted token with any drafting network.

Nothing here waits for the device: a shape fixes the sizes of all tensors, what depends on the tokens stays in them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from .sampling import DRAFT, Draws, draw, penalise
from .types import Proposal, TokenTree


class Network(Protocol):
    """What drafts: rows of it run behind the committed ones of B sequences, and forget each other at the next step."""

    columns: Tensor | None
    """[Vq] target ids of the logits' columns; None where columns are target ids."""

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """Begin a step: logits [B, Vq] behind the roots and the recycled state [B, 1, H] (None: it keeps its own)."""

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Run M drafted nodes behind the D that were expanded in this step.

        Args:
            tokens: [B, M] target ids.
            states: [B, M, H] recycled state of the node above each.
            depth: of all of them, 1 = first drafted.
            seen: bool [B, M, D+M], which of the rows expanded in this step each new row sees, itself included;
                None = all before it.

        Returns:
            logits [B, M, Vq] behind each node and its recycled state [B, M, H]. Logits [B, 1, Vq] stand for all M,
            where the network guesses the same below every node of a depth; it then does so at every depth.
        """


@dataclass(frozen=True)
class Level:
    """One depth of a tree that is known beforehand. Indices are None where they would name everything in order.

    Attributes:
        width: most children of any expanded node above.
        slot, rank: [n] which expanded node above each of this level's nodes hangs below, and as which child.
        inner: which of the n nodes have children: they are expanded next.
        above: [M] which expanded node above each of those hangs below.
        count: M.
        seen: bool [M, D+M], see Network.expand.
    """

    width: int
    slot: Tensor
    rank: Tensor
    inner: Tensor | None
    above: Tensor | None
    count: int
    seen: Tensor | None


@dataclass(frozen=True)
class Layout:
    """A tree whose shape is known beforehand, as tensors on a device.

    Attributes:
        parent, depth: [N] as in TokenTree.
        row: [N] number of each node among the expanded ones (the root is number 0), -1 for leaves.
        levels: of depth 1, 2, ...
        is_chain: every node but the last has one child.
        bits: [N, W] packed ancestors as in TokenTree; None for chains.
    """

    parent: Tensor
    depth: Tensor
    row: Tensor
    levels: list[Level]
    is_chain: bool
    bits: Tensor | None


def grow_layout(layout: Layout, sampled: bool, network: Network, roots: Tensor, draws: Draws) -> TokenTree:
    """Fill a known shape with tokens; see `search.Shape`.

    Children are drawn from the warped q without replacement, in the order of their ranks, or (greedy sequences, or
    `sampled` unset) are the most likely tokens. Nodes of one depth share their random numbers: at most one of the
    nodes above them is accepted, so that only its children's numbers are ever looked at.
    """
    b, above = len(roots), 1
    sampled = sampled and not draws.greedy
    logits, states = network.first(b)
    logits = logits[:, None]
    known = _known_columns(network.columns, draws, logits.shape[-1])
    tokens, valid = [roots[:, None]], [torch.ones_like(roots[:, None], dtype=torch.bool)]
    rows: list[Tensor] = []
    numbers = _numbers(layout, roots, draws) if sampled else []
    alive = valid[0]  # of the expanded nodes above
    for depth, level in enumerate(layout.levels, 1):
        if sampled:
            chances = [number[:, depth - 1] for number in numbers[: level.width]]
            children, possible, q = _draw_children(logits, chances, known, draws)
            rows.append(q)
            valid.append(possible.expand(b, above, -1)[:, level.slot, level.rank] & alive[:, level.slot])
        else:
            children = _top(penalise(logits, draws.warp, known), level.width)
            valid.append(torch.ones_like(alive[:, level.slot]))
        chosen = children.expand(b, above, -1)[:, level.slot, level.rank]
        tokens.append(chosen if network.columns is None else network.columns[chosen])
        if not level.count:
            break
        inner = _take(chosen, level.inner)
        if known is not None:
            known = _take(known, level.above).scatter(2, inner[..., None], True)
        alive = _take(valid[-1], level.inner)
        if states is not None:
            states = _take(states, level.above)
        seen = None if level.seen is None else level.seen.expand(b, -1, -1)
        logits, states = network.expand(_take(tokens[-1], level.inner), states, depth, seen)
        above = level.count
    n = len(layout.parent)
    tree = TokenTree(
        torch.cat(tokens, 1), layout.parent.expand(b, n), layout.depth.expand(b, n), torch.cat(valid, 1),
        len(layout.levels), layout.is_chain, bits=None if layout.bits is None else layout.bits.expand(b, n, -1),
    )  # fmt: skip
    if sampled:
        drawn = (draws.warp.temperature > 0)[:, None] & (layout.depth > 0)
        # where all nodes of each depth share a row, rows are numbered by depth
        shared = all(q.shape[1] == 1 for q in rows)
        row = torch.where(layout.row < 0, -1, layout.depth) if shared else layout.row
        tree.proposal = Proposal(torch.cat(rows, 1), row.expand(b, n), drawn, network.columns, len(numbers))
    return tree


def _numbers(layout: Layout, roots: Tensor, draws: Draws) -> list[Tensor]:
    """Uniform numbers [B, K] of the children of each rank at depths 1..K; one list entry for each rank there is."""
    depths = torch.arange(1, len(layout.levels) + 1, device=roots.device).expand(len(roots), -1)
    widest = max(level.width for level in layout.levels)
    return [draws.uniform(depths, DRAFT + rank) for rank in range(widest)]


def _draw_children(
    logits: Tensor, numbers: list[Tensor], known: Tensor | None, draws: Draws
) -> tuple[Tensor, Tensor, Tensor]:
    """Draw children of the nodes whose logits [B, M or 1, Vq] these are, one for each of `numbers` [B].

    Returns:
        columns [B, M, width], whether q had anything left for each, and q [B, M, Vq]; one row for all where logits have
        one and `known` doesn't tell the nodes apart.
    """
    q = draws.probabilities(logits, known)
    left = q
    columns: list[Tensor] = []
    possible: list[Tensor] = []
    for number in numbers:
        if columns:
            left = left.scatter(2, columns[-1], 0.0)
        column = draw(left, number[:, None].expand(q.shape[:2]))[..., None]
        columns.append(column)
        possible.append(left.gather(2, column) > 0)
    children, possibly = torch.cat(columns, 2), torch.cat(possible, 2)
    if draws.mixed or draws.seen is not None:  # some sequences may be greedy: their first child would exhaust q
        greedy = (draws.warp.temperature <= 0)[:, None, None]
        children = torch.where(greedy, _top(penalise(logits, draws.warp, known), len(numbers)), children)
        possibly = possibly | greedy
    return children, possibly, q


def grow_dynamic(top_k: int, deepest: int, total: int, network: Network, roots: Tensor, draws: Draws) -> TokenTree:
    """EAGLE-2's tree (arXiv 2406.16858, section 4) of `total` nodes; see `search.Dynamic`.

    A node's score is the sum of log q along its path, at temperature 1 whatever the answer's. Nodes count as in order
    of discovery: level by level, and by their parents within a level. A score never exceeds the parent's, but can
    equal it; ties go to the node discovered first, so that the best nodes always hold each other's parents.
    """
    b, k = len(roots), top_k
    logits, states = network.first(b)
    known = _known_columns(network.columns, draws, logits.shape[-1])
    gains, picked = _best_tokens(logits[:, None], k, known, draws)
    scores, columns, parents = [gains[:, 0]], [picked[:, 0]], [torch.full_like(picked[:, 0], -1)]
    # the k nodes to expand next: their places in the latest level, and which expanded node each hangs below
    place, start = torch.arange(k, device=roots.device).expand(b, k), 0
    above = torch.zeros_like(place)
    own = torch.eye(k, dtype=torch.bool, device=roots.device).expand(b, k, k)
    seen = own[:, :, :0]
    for depth in range(1, deepest):
        column = columns[-1].gather(1, place)
        states = None if states is None else _rows(states, above)
        known = None if known is None else _rows(known, above).scatter(2, column[..., None], True)
        seen = torch.cat((_rows(seen, above), own), 2)
        tokens = column if network.columns is None else network.columns[column]
        logits, states = network.expand(tokens, states, depth, None if k == 1 else seen)
        gains, picked = _best_tokens(logits, k, known, draws)
        level = (scores[-1].gather(1, place)[..., None] + gains).flatten(1)
        parents.append((start + place)[..., None].expand(-1, -1, k).flatten(1))
        start += scores[-1].shape[1]
        scores.append(level)
        columns.append(picked.expand(b, k, k).flatten(1))
        place = _first_best(level, k)
        above = place // k
    return _best_tree(scores, columns, parents, total, k == 1, network.columns, roots)


def _best_tree(
    scores: list[Tensor], columns: list[Tensor], parents: list[Tensor], total: int, is_chain: bool,
    ids: Tensor | None, roots: Tensor,
) -> TokenTree:  # fmt: skip
    """The root and the total-1 best of all nodes [B, n] by level, in the order of their discovery."""
    b, device = len(roots), roots.device
    kept = _first_best(torch.cat(scores, 1), total - 1).sort(1).values
    column, parent = torch.cat(columns, 1).gather(1, kept), torch.cat(parents, 1).gather(1, kept)
    numbers = torch.arange(1, total, device=device).expand(b, -1)
    number = torch.zeros_like(torch.cat(parents, 1)).scatter_(1, kept, numbers)  # in the tree, of each kept node
    parent = torch.where(parent < 0, 0, number.gather(1, parent.clamp(min=0)))
    levels = torch.cat([torch.full_like(x[0], d) for d, x in enumerate(columns, 1)])
    top = torch.zeros_like(roots[:, None])
    tokens = torch.cat((roots[:, None], column if ids is None else ids[column]), 1)
    return TokenTree(
        tokens, torch.cat((top - 1, parent), 1), torch.cat((top, levels[kept]), 1),
        torch.ones_like(tokens, dtype=torch.bool), len(columns), is_chain,
    )  # fmt: skip


def _best_tokens(logits: Tensor, k: int, known: Tensor | None, draws: Draws) -> tuple[Tensor, Tensor]:
    """Log q and columns [B, M or 1, k] of the k most likely tokens; a broken network's NaN counts as impossible."""
    log_q = torch.log_softmax(penalise(logits, draws.warp, known), -1)
    best, columns = log_q.nan_to_num(nan=float("-inf"), neginf=float("-inf")).topk(k, -1)
    return best, columns


def _top(logits: Tensor, width: int) -> Tensor:
    """Columns [B, M, width] of the largest logits."""
    return logits.argmax(-1, keepdim=True) if width == 1 else logits.topk(width, -1).indices


def _first_best(scores: Tensor, count: int) -> Tensor:
    """Indices [B, count] of the largest scores, of equals the first ones (topk promises no order of equals)."""
    return scores.sort(dim=1, descending=True, stable=True).indices[:, :count]


def _known_columns(ids: Tensor | None, draws: Draws, width: int) -> Tensor | None:
    """Bool [B, 1, Vq]: columns whose tokens are penalised as repetitions; None where nothing is."""
    if draws.seen is None:
        return None
    return (draws.seen[:, :width] if ids is None else draws.seen[:, ids])[:, None]


def _take(x: Tensor, index: Tensor | None) -> Tensor:
    return x if index is None else x[:, index]


def _rows(x: Tensor, index: Tensor) -> Tensor:
    """Rows [B, M, ...] of x [B, n, ...] by index [B, M]."""
    return x.gather(1, index[..., None].expand(-1, -1, x.shape[-1]))
