"""Search: chains, fixed trees, and trees that grow where the draft is sure. How they grow: `grow.py`."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ...errors import DraftsmithError
from .grow import Layout, Level, Network, grow_dynamic, grow_layout
from .sampling import Draws
from .transfer import upload
from .types import TokenTree, pack_ancestors

Path = tuple[int, ...]
"""Ranks of a node and of those above it among their siblings, from depth 1 down."""


MOST_DEPTH = 256


class Shape(Protocol):
    """What a drafted tree looks like."""

    @property
    def depth(self) -> int:
        """K: deepest drafted depth, root excluded."""

    @property
    def rows(self) -> int:
        """N: nodes of the tree, root included."""

    @property
    def expanded(self) -> int:
        """Rows that the network runs for one tree of one sequence."""

    def check(self, vocabulary: int) -> None:
        """Refuse a network with fewer tokens than the shape asks for; raises DraftsmithError."""

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> TokenTree:
        """Draft a tree below each of roots [B]; never waits for the device."""


class _Known(abc.ABC):
    """A shape that is known before any token is."""

    sampled: bool

    @abc.abstractmethod
    def nodes(self) -> tuple[Path, ...]:
        """Paths of all nodes but the root, by length, then by ranks."""

    @property
    def rows(self) -> int:
        """N."""
        return len(self.nodes()) + 1

    @property
    def expanded(self) -> int:
        """Nodes with children; the root's row is a committed one."""
        return len({path[:-1] for path in self.nodes()} - {()})

    def check(self, vocabulary: int) -> None:
        """See Shape."""
        most = max(path[-1] for path in self.nodes()) + 1
        if most > vocabulary:
            raise DraftsmithError(
                f"a node of the tree has {most} children, the draft vocabulary only {vocabulary} tokens: "
                "take a narrower tree"
            )

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> TokenTree:
        """See Shape."""
        return grow_layout(_layout(self.nodes(), roots.device), self.sampled, network, roots, draws)


@dataclass(frozen=True)
class Chain(_Known):
    """One token below the other.

    Attributes:
        depth: K >= 1.
        sampled: sequences with a temperature draw the tokens from q; else they are the most likely ones.

    Raises:
        DraftsmithError: a depth below 1.
    """

    depth: int
    sampled: bool = True

    def __post_init__(self) -> None:
        _check_depth(self.depth)

    def nodes(self) -> tuple[Path, ...]:
        """One at each depth."""
        return tuple((0,) * d for d in range(1, self.depth + 1))


@dataclass(frozen=True)
class Static(_Known):
    """A fixed tree, as Medusa's and EAGLE-1's.

    Attributes:
        paths: one for each node below the root, in any order: [0] is the first child of the root, [0, 2] the third
            child of that one. Every node's parent and earlier siblings are nodes, too: children are drawn without
            replacement in that order.
        sampled: sequences with a temperature draw children from q; else they are the most likely tokens.

    Raises:
        DraftsmithError: names the path that breaks a rule.
    """

    paths: Sequence[Sequence[int]]
    sampled: bool = True

    def __post_init__(self) -> None:
        given = [tuple(path) for path in self.paths]
        known = set(given)
        if not given:
            raise DraftsmithError("a static tree needs at least one path, for example [0]")
        for path in given:
            if not path or any(not isinstance(rank, int) or rank < 0 for rank in path):
                raise DraftsmithError(f"the path {list(path)} must hold ranks of children: whole numbers from 0")
            if given.count(path) > 1:
                raise DraftsmithError(f"the path {list(path)} is there {given.count(path)} times; a node is named once")
            if len(path) > 1 and path[:-1] not in known:
                raise DraftsmithError(f"the path {list(path)} hangs below no node: {list(path[:-1])} is missing")
            before = (*path[:-1], path[-1] - 1)
            if path[-1] and before not in known:
                raise DraftsmithError(
                    f"the path {list(path)} is a later child, but its sibling {list(before)} is missing"
                )
        object.__setattr__(self, "paths", tuple(sorted(given, key=lambda path: (len(path), path))))

    def nodes(self) -> tuple[Path, ...]:
        """The paths in order."""
        return tuple(map(tuple, self.paths))

    @property
    def depth(self) -> int:
        """K: the longest path."""
        return len(self.paths[-1])


@dataclass(frozen=True)
class Dynamic:
    """EAGLE-2's tree: grows below the nodes that the draft thinks likeliest, and keeps the likeliest of all.

    The k most likely tokens follow the root. At each further depth the k nodes with the largest product of q along
    their path get their k most likely children. Of all nodes found, the `total` - 1 with the largest products stay.
    Every node is a point mass: its choice looks at no random number.

    Attributes:
        top_k: k; depth: K; total: N, nodes of the tree, root included.

    Raises:
        DraftsmithError: names the value and its range.
    """

    top_k: int
    depth: int
    total: int

    def __post_init__(self) -> None:
        _at_least_one("top_k", self.top_k)
        _check_depth(self.depth)
        most = 1 + self.top_k + (self.depth - 1) * self.top_k**2
        if self.total < self.depth + 1:
            raise DraftsmithError(
                f"a tree of depth {self.depth} is deeper than its budget of {self.total} nodes: "
                f"give it at least {self.depth + 1}, or less depth"
            )
        if self.total > most:
            raise DraftsmithError(
                f"top_k {self.top_k} and depth {self.depth} find at most {most} nodes, not {self.total}: "
                "lower the total, or raise one of them"
            )

    @property
    def rows(self) -> int:
        """N."""
        return self.total

    @property
    def expanded(self) -> int:
        """k nodes at every depth but the last."""
        return self.top_k * (self.depth - 1)

    def check(self, vocabulary: int) -> None:
        """See Shape."""
        if self.top_k > vocabulary:
            raise DraftsmithError(f"top_k {self.top_k} must be at most the draft vocabulary's {vocabulary} tokens")

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> TokenTree:
        """See Shape."""
        return grow_dynamic(self.top_k, self.depth, self.total, network, roots, draws)


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise DraftsmithError(f"the draft's {name} {value} must be at least 1")


def _check_depth(depth: int) -> None:
    _at_least_one("depth", depth)
    if depth > MOST_DEPTH:
        raise DraftsmithError(f"the draft's depth {depth} must be at most {MOST_DEPTH}")


# --- text -------------------------------------------------------------------------------------------------------------


def _parse_static(text: str) -> Static:
    return Static([[int(rank) for rank in path.split(".")] for path in text.split(",")])


_PARSERS: dict[str, tuple[Callable[[str], Shape], str]] = {
    "chain": (lambda text: Chain(int(text)), "chain:4 (depth)"),
    "static": (_parse_static, "static:0,1,0.0,0.1 (paths of child ranks)"),
    "dynamic": (lambda text: Dynamic(*map(int, text.split("x", 2))), "dynamic:10x6x60 (top-k x depth x nodes)"),
}


def parse_shape(text: str, *more: str) -> Shape:
    """Read a shape as a user writes it: "chain:4", "static:0,1,0.0,0.1" or "dynamic:10x6x60".

    Args:
        more: forms that only the caller reads, to be named with these in the error.

    Raises:
        DraftsmithError: names the text and the forms there are, or the value that is out of range.
    """
    name, _, values = text.partition(":")
    try:
        parse, _example = _PARSERS[name]
        return parse(values)
    except (KeyError, ValueError, TypeError) as error:
        forms = "; ".join([*(example for _parse, example in _PARSERS.values()), *more])
        raise DraftsmithError(f"the tree {text!r} can't be read; write {forms}") from error


# --- known trees on a device ------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # the tensors outlive the mode they are first asked for in
def _layout(paths: tuple[Path, ...], device: torch.device) -> Layout:
    """Lay out a tree's nodes, sorted by length and ranks, once for each device."""

    put = functools.partial(upload, device=device)
    nodes: list[Path] = [(), *paths]
    parents = {path[:-1] for path in paths}
    expanded = [path for path in nodes if path in parents]
    is_chain = len(paths[-1]) == len(paths)
    levels = []
    for depth in range(1, len(paths[-1]) + 1):
        new = [path for path in paths if len(path) == depth]
        above = [path for path in expanded if len(path) == depth - 1]
        inner = [path for path in new if path in parents]
        before = [path for path in expanded[1:] if len(path) <= depth]
        levels.append(
            Level(
                width=max(path[-1] for path in new) + 1,
                slot=put([above.index(path[:-1]) for path in new]),
                rank=put([path[-1] for path in new]),
                inner=None if inner == new else put([new.index(path) for path in inner]),
                above=None if [path[:-1] for path in inner] == above else put([above.index(p[:-1]) for p in inner]),
                count=len(inner),
                seen=None if is_chain else put([[p[: len(x)] == x for x in before] for p in inner]).bool(),
            )
        )
    parent = put([-1, *(nodes.index(path[:-1]) for path in paths)])
    return Layout(
        parent,
        put([len(path) for path in nodes]),
        put([expanded.index(path) if path in parents else -1 for path in nodes]),
        levels,
        is_chain,
        None if is_chain else pack_ancestors(parent[None], len(levels))[0],
    )
