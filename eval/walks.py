"""What trees would have accepted, from answers that are decoded once.

A draft that is a point mass is accepted where it equals the token that the target says there, greedily or drawn by law
1 of `decoder.verify`: that depends on the text alone. So the text is decoded plainly, the head drafts behind each token
of it, and a tree's steps are walked afterwards: accept the drafts that are the text, go on behind the token after them.

- Greedy, and for dynamic trees at any temperature (their answers read the random numbers of plain decoding), a walk
  gives the very steps of decoding with that tree, as far as passes of other row counts give equal logits. Only drafts
  beyond an answer's end, which decoding cuts off, are unknown: such a step counts as no deeper than the answer.
- Chains and fixed trees draw their tokens where there is a temperature, and the text depends on what they drew. They
  are decoded once, with the tree that holds them all. Siblings are drawn and tested one after the other, so behind the
  same tokens a smaller tree accepts that part of the accepted path which lies in it. But smaller steps also start at
  other places: their pooled figures are an estimate.

One growth serves many shapes. A node of a fixed tree depends on the ranks above it alone: the union of all holds each.
Of dynamic trees with k children a node, all nodes that the deepest one finds are kept with their scores: a tree of
depth D and N nodes is the N - 1 best of those no deeper than D. With another k other nodes are found: they grow by
themselves.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..heads.target import Target
from .decoder.drafters.network import NetworkDrafter
from .decoder.grow import Network
from .decoder.loop import Request, Result, StepLog, decode, rows_needed
from .decoder.sampling import Draws
from .decoder.search import Chain, Dynamic, Path, Shape, Static
from .decoder.types import Drafter, HostStep, TokenTree, Verdict, chain
from .ranks import sibling_ranks

T = TypeVar("T")


@dataclass(frozen=True)
class Foreseen:
    """What every tree accepts, or would accept, of the same answers.

    Attributes:
        steps: by tree, the steps of each answer in the order of the requests.
        exact: the trees whose steps are those of decoding; of the others they are estimates.
        answers: the target's tokens, in that order.
    """

    steps: dict[str, list[list[StepLog]]]
    exact: frozenset[str]
    answers: list[list[int]]


def foresee(
    target: Target,
    make: Callable[[Shape], Drafter],
    requests: Sequence[Request],
    trees: Mapping[str, Shape],
    slots: int,
    advance: Callable[[], None] = lambda: None,
) -> Foreseen:
    """Decode the requests once (twice where drafts are drawn and there are dynamic trees, too) and walk every tree.

    Args:
        make: gives a drafter with a network of its own for a shape.
        requests: all greedy, or all at one temperature; their ids differ.
        trees: by text.
        slots: sequences at once.
        advance: called for every answer.
    """
    sampled = requests[0].sampling.temperature > 0
    fixed = {text: shape for text, shape in trees.items() if isinstance(shape, Chain | Static)}
    dynamic = {text: shape for text, shape in trees.items() if isinstance(shape, Dynamic)}
    families: list[_Family] = [] if sampled or not fixed else [_Fixed(fixed)]
    for top_k in dict.fromkeys(shape.top_k for shape in dynamic.values()):
        families.append(_Beam({text: shape for text, shape in dynamic.items() if shape.top_k == top_k}))
    steps: dict[str, dict[str, list[StepLog]]] = {text: {r.id: [] for r in requests} for text in trees}
    answers: dict[str, list[int]] = {}
    if families:
        drafter = make(max((family.whole for family in families), key=lambda shape: shape.expanded))
        assert isinstance(drafter, NetworkDrafter)
        watch = TextWatch(drafter, families)
        for result, notes in _watched(target, watch, requests, slots, advance):
            answers[result.id] = result.tokens
            for number in range(len(families)):
                for text, found in walk([note[number] for note in notes], result.tokens).items():
                    steps[text][result.id] = found
    if sampled and fixed:
        paths = PathWatch(make(_union(fixed, sampled=True)))
        for result, ranks in _watched(target, paths, requests, slots, advance):
            answers.setdefault(result.id, result.tokens)
            for text, shape in fixed.items():
                steps[text][result.id] = _within(shape, result.steps, ranks)
    order = [request.id for request in requests]
    return Foreseen(
        {text: [found[name] for name in order] for text, found in steps.items()},
        frozenset(dynamic if sampled else trees),
        [answers[name] for name in order],
    )


def passes_over(trees: Mapping[str, Shape], temperature: float) -> int:
    """How often `foresee` decodes every request."""
    kinds = {isinstance(shape, Dynamic) for shape in trees.values()}
    return len(kinds) if temperature > 0 else 1


# --- what is noted while decoding -------------------------------------------------------------------------------------


class _Noting(Drafter, Generic[T]):
    """A drafter that notes something of every step; another one, which it wraps, follows the sequences.

    Attributes:
        answers: what was noted of each answer, in the order in which they end: that of the loop's results.
    """

    def __init__(self, base: Drafter) -> None:
        self.base = base
        self.needs, self.wants_choice, self.context = base.needs, base.wants_choice, base.context
        self.answers: list[list[T]] = []
        self._running: list[list[T]] = []

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.answers, self._running = [], [[] for _ in range(slots)]
        self.base.allocate(slots, capacity)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        self._running[slot] = []
        self.base.begin(slot, tokens, aux, last)

    def note(self, found: Sequence[T]) -> None:
        """Keep one thing for each sequence that runs."""
        for notes, one in zip(self._running, found, strict=False):
            notes.append(one)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        self.base.commit(tree, verdict, aux, last, step)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.answers.append(self._running[slot])
        self._running[slot] = self._running[last]
        self.base.release(slot, last)


class TextWatch(_Noting["list[_Draft]"]):
    """Drafts behind every token of an answer without having anything verified: the loop decodes plainly.

    Args:
        base: its shape expands at least as many rows as any family's.
        families: what is grown; of each token one draft a family is noted.
    """

    def __init__(self, base: NetworkDrafter, families: Sequence[_Family]) -> None:
        super().__init__(base)
        self.network, self.families = base, families

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter: the root alone."""
        grown = [family.grow(self.network, roots, draws) for family in self.families]
        self.note([list(drafts) for drafts in zip(*grown, strict=True)])
        return chain(roots[:, None])


class PathWatch(_Noting[Path]):
    """Notes the ranks of the nodes that each step accepted, from the root down."""

    def __init__(self, base: Drafter) -> None:
        super().__init__(base)
        self.depth, self.rows = base.depth, base.rows

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        return self.base.propose(roots, draws)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        super().commit(tree, verdict, aux, last, step)
        rows = zip(tree.parent.tolist(), verdict.path.tolist(), verdict.n_accepted.tolist(), strict=True)
        self.note([sibling_ranks(parents, path[1 : count + 1]) for parents, path, count in rows])


def _watched(
    target: Target, watch: _Noting[T], requests: Sequence[Request], slots: int, advance: Callable[[], None]
) -> list[tuple[Result, list[T]]]:
    """Every answer with what was noted of it."""
    results = []
    for result in decode(target, watch, requests, slots=slots, capacity=rows_needed(requests, watch)):
        results.append(result)
        advance()
    return list(zip(results, watch.answers, strict=True))


# --- one growth for many shapes ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Draft:
    """The tree behind one token that holds those of several shapes.

    Attributes:
        tokens, parent, depth: [N] as in TokenTree.
        kept: by shape's text, bool [N], the nodes that it has; a node's parent is always among them.
    """

    tokens: NDArray[np.int64]
    parent: NDArray[np.int64]
    depth: NDArray[np.int64]
    kept: Mapping[str, NDArray[np.bool_]]

    def path(self, text: Sequence[int]) -> list[int]:
        """Nodes that are the text, from below the root as far as there are any."""
        node, found = 0, []
        for token in text:
            here = np.flatnonzero((self.parent == node) & (self.tokens == token))
            if not len(here):
                break
            node = int(here[0])
            found.append(node)
        return found


class _Family(Protocol):
    """Shapes that one growth serves."""

    whole: Shape
    """Grown in their place."""

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> list[_Draft]:
        """One draft a sequence."""


class _Fixed:
    """Chains and static trees: the union of their nodes."""

    def __init__(self, trees: Mapping[str, Chain | Static]) -> None:
        union = _union(trees, sampled=False)
        self.whole: Shape = union
        nodes = [(), *union.nodes()]
        sets = {text: {(), *shape.nodes()} for text, shape in trees.items()}
        self.kept = {text: np.array([path in has for path in nodes]) for text, has in sets.items()}

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> list[_Draft]:
        """See _Family."""
        tree = self.whole.grow(network, roots, draws)
        return [_Draft(t, p, d, self.kept) for t, p, d in zip(*_arrays(tree), strict=True)]


class _Beam:
    """Dynamic trees with the same k: all nodes that the deepest one finds, by their scores."""

    def __init__(self, trees: Mapping[str, Dynamic]) -> None:
        self.trees = trees
        self.top_k = next(iter(trees.values())).top_k
        deepest = max(shape.depth for shape in trees.values())
        self.sizes = [self.top_k, *[self.top_k**2] * (deepest - 1)]  # of each depth
        self.whole: Shape = Dynamic(self.top_k, deepest, 1 + sum(self.sizes))

    def grow(self, network: Network, roots: Tensor, draws: Draws) -> list[_Draft]:
        """See _Family."""
        recorded = _Recorded(network)
        tree = self.whole.grow(recorded, roots, draws)
        places = self._places(tree, recorded.logits)
        kept = {text: self._kept(tree, places, shape).cpu().numpy() for text, shape in self.trees.items()}
        rows = enumerate(zip(*_arrays(tree), strict=True))
        return [_Draft(t, p, d, {text: mask[row] for text, mask in kept.items()}) for row, (t, p, d) in rows]

    def _places(self, tree: TokenTree, logits: Sequence[Tensor]) -> dict[int, Tensor]:
        """By depth D, where each node [B, N] no deeper than D stands among those when sorted by score, root first.

        Scores and their order are those of `grow.grow_dynamic`; all nodes are there, in the order of their discovery.
        """
        scores = torch.zeros(len(tree.tokens), 1, device=tree.tokens.device)
        places, end = {}, 1
        for depth, size in enumerate(self.sizes, 1):
            log_q = torch.log_softmax(logits[depth - 1].float(), -1).nan_to_num(nan=float("-inf"), neginf=float("-inf"))
            gains = log_q.topk(self.top_k, -1).values.expand(-1, size // self.top_k, -1).flatten(1)
            above = scores.gather(1, tree.parent[:, end : end + size])
            scores = torch.cat((scores, above + gains), 1)
            end += size
            order = scores[:, 1:].sort(dim=1, descending=True, stable=True).indices
            places[depth] = torch.zeros_like(tree.parent[:, :end])
            places[depth][:, 1:].scatter_(1, order, torch.arange(1, end, device=order.device).expand_as(order))
        return places

    @staticmethod
    def _kept(tree: TokenTree, places: Mapping[int, Tensor], shape: Dynamic) -> Tensor:
        kept = torch.zeros_like(tree.valid)
        found = places[shape.depth]
        kept[:, : found.shape[1]] = found < shape.total
        return kept


class _Recorded:
    """A network whose logits are kept: [B, M or 1, Vq] of each depth."""

    def __init__(self, network: Network) -> None:
        self.network, self.columns = network, network.columns
        self.logits: list[Tensor] = []

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        """See Network."""
        logits, states = self.network.first(b)
        self.logits = [logits[:, None]]
        return logits, states

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See Network."""
        logits, states = self.network.expand(tokens, states, depth, seen)
        self.logits.append(logits)
        return logits, states


def _union(trees: Mapping[str, Chain | Static], sampled: bool) -> Static:
    """The tree that holds all of them."""
    return Static(list(dict.fromkeys(path for shape in trees.values() for path in shape.nodes())), sampled)


def _arrays(tree: TokenTree) -> list[NDArray[Any]]:
    return [x.cpu().numpy() for x in (tree.tokens, tree.parent, tree.depth)]


# --- walking ----------------------------------------------------------------------------------------------------------


def walk(drafts: Sequence[_Draft], tokens: Sequence[int]) -> dict[str, list[StepLog]]:
    """The steps in which each shape of the drafts would have decoded an answer.

    Args:
        drafts: behind each of the answer's tokens but the last.
        tokens: the answer; its first token is the prefill's.
    """
    paths = [draft.path(tokens[at + 1 :]) for at, draft in enumerate(drafts)]
    trees = drafts[0].kept if drafts else {}
    return {text: _steps(text, drafts, paths) for text in trees}


def _steps(text: str, drafts: Sequence[_Draft], paths: Sequence[Sequence[int]]) -> list[StepLog]:
    steps, at = [], 0
    while at < len(drafts):
        draft, left = drafts[at], len(drafts) - at
        kept = draft.kept[text]
        accepted = _leading(bool(kept[node]) for node in paths[at])
        drafted = int(draft.depth[kept].max())
        steps.append(StepLog(accepted if accepted == left else drafted, accepted, min(accepted + 1, left)))
        at += steps[-1].emitted
    return steps


def _within(shape: Chain | Static, steps: Sequence[StepLog], ranks: Sequence[Path]) -> list[StepLog]:
    """The part of each step that a smaller tree has; what decoding cut off an answer's end stays cut off."""
    nodes = set(shape.nodes())
    found = []
    for step, path in zip(steps, ranks, strict=True):
        accepted = _leading(path[:end] in nodes for end in range(1, len(path) + 1))
        found.append(StepLog(shape.depth, accepted, min(accepted + 1, step.emitted)))
    return found


def _leading(flags: Iterable[bool]) -> int:
    """How many are set before the first that isn't."""
    return sum(1 for _ in itertools.takewhile(bool, flags))
