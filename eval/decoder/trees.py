"""Static trees made from measured accuracies (Medusa, arXiv 2401.10774, 2.3.3 and appendix), kept beside a head.

Let a[s][i] be how often the text's token is a draft's i-th guess at step s, all drafts above being right. If that does
not depend on how they came to be right, a node is accepted with probability prod_s a[s][rank_s] along its path, and a
tree emits 1 + the sum of its nodes' products a step. Medusa's heads and the paper make that assumption outright.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path as FilePath

from ...errors import DraftsmithError
from ...heads.checkpoint import load_tree
from .search import Path, Shape, Static, parse_shape


def best_paths(accuracies: Sequence[Sequence[float]], count: int) -> list[Path]:
    """Choose nodes greedily: always the likeliest one whose parent and earlier sibling are there.

    Of equals the shallower one comes first, then the one with the lower ranks. Where no later rank of a step is more
    accurate than an earlier one, the first n nodes are the best tree of n nodes for every n; measured accuracies of
    rare ranks may break that by their noise.

    Args:
        accuracies: a[s][i]; a path has at most one rank from each.
        count: of nodes, the root left out.

    Returns:
        Paths in the order of their choice; fewer than `count` where there are no more.
    """
    chosen: list[Path] = []
    # (-product, length, path, product of the parent)
    open_: list[tuple[float, int, Path, float]] = [(-accuracies[0][0], 1, (0,), 1.0)]
    while open_ and len(chosen) < count:
        negative, length, path, above = heapq.heappop(open_)
        chosen.append(path)
        rank = path[-1] + 1
        if rank < len(accuracies[length - 1]):
            heapq.heappush(open_, (-above * accuracies[length - 1][rank], length, (*path[:-1], rank), above))
        if length < len(accuracies):
            heapq.heappush(open_, (negative * accuracies[length][0], length + 1, (*path, 0), -negative))
    return chosen


OWN_FORM = "own:32 (nodes of the tree that was measured for the head)"
"""How a user writes an `OwnTree`, for errors that list the forms."""


@dataclass(frozen=True)
class OwnTree:
    """What "own:N" asks for: the first N nodes, root included, of the tree that was measured for a head."""

    nodes: int

    @classmethod
    def parse(cls, text: str) -> OwnTree | None:
        """None where the text asks for another kind of tree.

        Raises:
            DraftsmithError: no number of nodes, or one below 2.
        """
        name, _, number = text.partition(":")
        if name != "own":
            return None
        if not number.isdecimal() or int(number) < 2:
            raise DraftsmithError(
                f"the tree {text!r} can't be read; write own:32 for the first 32 nodes, root included, of the tree "
                "that was measured for the head (at least 2)"
            )
        return cls(int(number))

    def shape(self, checkpoint: FilePath) -> Static:
        """The first nodes of the tree in a head's folder; raises DraftsmithError where it has none, or fewer."""
        tree = load_tree(checkpoint)
        if self.nodes > len(tree.paths) + 1:
            raise DraftsmithError(
                f"the tree that was measured for {checkpoint} has {len(tree.paths) + 1} nodes with its root: "
                f"own:{self.nodes} asks for more"
            )
        return Static(tree.paths[: self.nodes - 1])


def shape_for(text: str, checkpoint: FilePath) -> Shape:
    """Read a shape for a head: "own:N", or whatever `parse_shape` reads.

    Args:
        checkpoint: the head's folder, where its measured tree lies.

    Raises:
        DraftsmithError: the text can't be read, or the head has no such tree.
    """
    own = OwnTree.parse(text)
    return parse_shape(text, OWN_FORM) if own is None else own.shape(checkpoint)


def check_text(text: str) -> None:
    """Refuse a text that no tree can be read from, whatever the head; raises DraftsmithError."""
    if OwnTree.parse(text) is None:
        parse_shape(text, OWN_FORM)


def written(texts: Sequence[str]) -> dict[str, Shape]:
    """Those of the shapes whose texts say all of them, by text; trees that are measured for a head are left out."""
    return {text: parse_shape(text) for text in texts if OwnTree.parse(text) is None}


def deeper(trees: Mapping[str, Shape], most: int | None) -> list[str]:
    """The trees that are deeper than a head drafts: `most` is its `most_depth`."""
    return [text for text, shape in trees.items() if most is not None and shape.depth > most]


def refuse_deeper(trees: Mapping[str, Shape], most: int | None) -> None:
    """Refuse trees that a head can't draft; raises DraftsmithError that names the first."""
    for text in deeper(trees, most):
        raise DraftsmithError(
            f"eval.trees: {text} is {trees[text].depth} deep, the head drafts {most} tokens: give shallower trees, "
            f"e.g. eval.trees=[chain:{most}]"
        )
