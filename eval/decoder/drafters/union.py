"""Any drafter together with Prompt Lookup: one tree holds the drafts of both."""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import Tensor

from ..sampling import Draws
from ..types import Drafter, HostStep, Proposal, TokenTree, Verdict
from .prompt_lookup import PromptLookupDrafter, chain_below


class UnionDrafter(Drafter):
    """Adds the chain that Prompt Lookup finds to the trees of another drafter.

    See `join` for how, and why sampling stays exact.

    Args:
        base: keeps its node numbers; it is told of nodes behind its own in `commit`.
        lookup: finds the chain.
    """

    def __init__(self, base: Drafter, lookup: PromptLookupDrafter) -> None:
        self.base, self.lookup = base, lookup
        self.needs, self.wants_choice, self.context = base.needs, base.wants_choice, base.context
        self.depth = max(base.depth, lookup.depth)
        self.rows = base.rows + lookup.rows - 1

    @property
    def seconds(self) -> float:  # type: ignore[override]
        """Of the base: looking up runs no network."""
        return self.base.seconds

    @property
    def timed(self) -> bool:
        """Of the base."""
        return self.base.timed

    @timed.setter
    def timed(self, value: bool) -> None:
        self.base.timed = value

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.base.allocate(slots, capacity)
        self.lookup.allocate(slots, capacity)

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        self.base.begin(slot, tokens, aux, last)
        self.lookup.begin(slot, tokens, aux, last)

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter; where nothing is found the base's tree stays as it is."""
        found = self.lookup.continuations(len(roots), roots.device)
        tree = self.base.propose(roots, draws)
        return tree if found is None else join(tree, *found)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        self.base.commit(tree, verdict, aux, last, step)
        self.lookup.commit(tree, verdict, aux, last, step)

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.base.release(slot, last)
        self.lookup.release(slot, last)

    def recorded(self, slot: int, rows: int) -> Tensor | None:
        """See Drafter."""
        return self.base.recorded(slot, rows)


def join(tree: TokenTree, tokens: Tensor, valid: Tensor) -> TokenTree:
    """Merge one chain a sequence into a tree, as in a trie.

    From the root on, the chain follows valid children of the tree that carry its tokens; from where there is none it
    continues in L new nodes behind the tree's own, whose numbers don't change. New nodes that a merged (or invalid)
    token would have taken are padding: invalid children of the root.

    New nodes are point masses, and stand last among their siblings. A token that equals one of these siblings is
    dropped, although the sibling may have been drawn at random. The law stays exact: verification comes to the new
    node with the residual p' that is left when all drawn siblings were refused, and a point mass y, accepted with
    probability p'(y) or else struck out of p', gives p' whatever y is, as long as its choice doesn't look at the
    numbers that decide acceptance; it may look at which siblings were drawn. And dropping loses nothing: a drawn x
    is refused only where q(x) > p(x), so that (p - q)+ leaves no mass on it, and its twin could never be accepted.

    Args:
        tree: N nodes.
        tokens, valid: [B, L] the chains, L >= 1; valid nodes come first.
    """
    count = tree.tokens.shape[1]
    if count == 1:
        return chain_below(tree.tokens[:, 0], tokens, valid)
    b, length = tokens.shape
    node = torch.zeros(b, dtype=torch.int64, device=tokens.device)
    parents, depths, added = [], [], []
    for i in range(length):
        same = (tree.parent == node[:, None]) & (tree.tokens == tokens[:, i : i + 1]) & tree.valid
        new = valid[:, i] & ~same.any(1)
        parents.append(torch.where(new, node, 0))
        depths.append(torch.where(new, i + 1, 1))
        added.append(new)
        node = torch.where(new, count + i, same.int().argmax(1))
    return TokenTree(
        torch.cat((tree.tokens, tokens), 1),
        torch.cat((tree.parent, torch.stack(parents, 1)), 1),
        torch.cat((tree.depth, torch.stack(depths, 1)), 1),
        torch.cat((tree.valid, torch.stack(added, 1)), 1),
        max(tree.deepest, length),
        False,
        _widen(tree.proposal, length),
        tree.deepest_row,
    )


def _widen(proposal: Proposal | None, more: int) -> Proposal | None:
    """The proposal of a tree with `more` point masses behind it, no two of which have the same parent."""
    if proposal is None:
        return None
    return dataclasses.replace(
        proposal,
        row=F.pad(proposal.row, (0, more), value=-1),
        drawn=F.pad(proposal.drawn, (0, more), value=False),
        width=proposal.width + 1,
    )
