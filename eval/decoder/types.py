"""The things that a draft and its verification exchange: a token tree, a verdict, and what the host learns of it."""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import Needs
from .sampling import Draws

WORD = 64
"""Nodes a word of an ancestor mask."""


@dataclass
class Proposal:
    """The distributions that drafted tokens were drawn from.

    Attributes:
        q: [B, E, Vq] fp32, one row for each EXPANDED node, warped and normalised: what the first child was drawn
            from. Later children of a node are drawn without replacement from the same row, renormalised.
        row: [B, N] int64, the row of q that a node's children were drawn from; -1 where it has none.
        drawn: [B, N] bool: the node was drawn from its parent's row. The others are point masses: chosen without
            looking at any random number.
        ids: [Vq] target id of each column, None where columns are target ids.
        width: most drawn or chosen children of any node (host side).
    """

    q: Tensor
    row: Tensor
    drawn: Tensor
    ids: Tensor | None
    width: int


@dataclass
class TokenTree:
    """Drafted tokens of B sequences, N nodes each, in an order in which parents come first.

    Node 0 is the root: the last emitted token, whose K/V is not cached yet. Siblings stand in draw order.

    Attributes:
        tokens: [B, N] int64.
        parent: [B, N] int64, index of the parent node; -1 for the root.
        depth: [B, N] int64, 0 for the root.
        valid: [B, N] bool, False on nodes that are never accepted: padding, and extra rows that a drafter wants run.
        deepest: largest depth of a valid node over all sequences (host side).
        is_chain: node i is the child of node i-1 in every sequence, so accepted rows already lie in place.
        proposal: where tokens were drawn at random; None = every node is a point mass.
        deepest_row: largest depth of any node, where rows that are never accepted lie deeper than `deepest`.
        bits: what `ancestors` returns, where it is known beforehand.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    valid: Tensor
    deepest: int
    is_chain: bool
    proposal: Proposal | None = None
    deepest_row: int = 0
    bits: Tensor | None = None

    def ancestors(self) -> Tensor | None:
        """Packed masks: int64 [B, N, ceil(N/64)], bit j%64 of word j//64 = this node sees node j (itself included).

        None for chains, where every node sees all before it.
        """
        if self.is_chain or self.bits is not None:
            return self.bits
        return pack_ancestors(self.parent, max(self.deepest, self.deepest_row))


def pack_ancestors(parent: Tensor, deepest: int) -> Tensor:
    """Ancestor bits of nodes with parents [B, N] (-1 = none) that lie at most `deepest` below a root."""
    b, n = parent.shape
    at = torch.arange(n, device=parent.device)
    words = torch.arange(-(-n // WORD), device=parent.device)
    one = torch.ones((), dtype=torch.int64, device=parent.device)
    own = torch.where(at[:, None] // WORD == words, one << (at % WORD)[:, None], 0)
    above = parent.clamp(min=0)[..., None].expand(b, n, len(words))
    has = (parent >= 0)[..., None]
    bits = own.expand(b, n, len(words))
    for _ in range(deepest):
        bits = torch.where(has, own | bits.gather(1, above), own)
    return bits


def unpack_ancestors(bits: Tensor, count: int) -> Tensor:
    """Bool [B, N, count] of packed masks [B, N, W]."""
    at = torch.arange(count, device=bits.device)
    return ((bits[..., at // WORD] >> (at % WORD)) & 1).bool()


def pack_bits(seen: Tensor) -> Tensor:
    """Packed masks [B, M, ceil(n/64)] of bool [B, M, n], which n rows each row sees; `unpack_ancestors` undoes it."""
    words = torch.nn.functional.pad(seen, (0, -seen.shape[-1] % WORD)).unflatten(-1, (-1, WORD)).long()
    return (words << torch.arange(WORD, device=seen.device)).sum(-1)


def chain(tokens: Tensor, valid: Tensor | None = None) -> TokenTree:
    """Make the tree in which each of tokens [B, N] is the child of the one before; tokens[:, 0] are the roots."""
    b, n = tokens.shape
    depth = torch.arange(n, device=tokens.device).expand(b, n)
    every = torch.ones_like(tokens, dtype=torch.bool) if valid is None else valid
    return TokenTree(tokens, depth - 1, depth, every, n - 1, True)


@dataclass
class Verdict:
    """What the target accepted.

    Attributes:
        path: [B, P] int64, node indices from the root down; entries past n_accepted repeat the last accepted node.
        n_accepted: [B] int64, accepted nodes, root excluded.
        bonus: [B] int64, the target's own token after the last accepted node: the next root.
        finite: [B] bool, False where the target's logits of any row are NaN or infinite upwards.
        choice: [B, N] int64, the target's most likely token after every node, where verification needed it.
    """

    path: Tensor
    n_accepted: Tensor
    bonus: Tensor
    finite: Tensor
    choice: Tensor | None = None


@dataclass(frozen=True)
class HostStep:
    """What the host knows after a step, from its one synchronisation.

    Attributes:
        lengths: cached rows of each sequence after this step.
        emitted: accepted tokens and the bonus token of each sequence, before any cut.
        choice: [B][N] the target's most likely token after every node, for drafters with `wants_choice`.
    """

    lengths: list[int]
    emitted: list[list[int]]
    choice: list[list[int]] | None = None


class Drafter(abc.ABC):
    """Proposes token trees for the sequences that a loop runs; slots 0..B-1 are active, always densely.

    `propose` and `commit` must not wait for the device; what the host may know of a step comes in `HostStep`.
    `seconds` counts the time inside the drafter's own network; anything else in `propose` and `commit` is overhead.
    """

    needs: Needs = Needs()
    depth: int = 0
    """K: deepest drafted depth, root excluded."""
    rows: int = 1
    """N: most rows of a target pass for one sequence: root, drafts and extra rows."""
    context: int | None = None
    """Most tokens of a sequence that it can follow; None = as many as the target."""
    wants_choice: bool = False
    seconds: float = 0.0
    timed: bool = False
    """Set by a loop that was given a timer: clocks then wait for the device."""

    @abc.abstractmethod
    def allocate(self, slots: int, capacity: int) -> None:
        """Make room for `slots` sequences of at most `capacity` rows; called once by a loop before anything else."""

    @abc.abstractmethod
    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """Start a sequence: tokens [n+1] = prompt and first emitted token; aux [n, A*H], last [n, H] of the prompt."""

    @abc.abstractmethod
    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """Draft trees below roots [B]."""

    @abc.abstractmethod
    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """Take in what was accepted.

        Args:
            tree, verdict: of this step. Nodes may have been added behind those that this drafter proposed.
            aux: [B, N, A*H] states of all tree nodes; last: [B, N, H].
            step: what the host knows.
        """

    @abc.abstractmethod
    def release(self, slot: int, last: int) -> None:
        """Sequence `slot` is finished: the one in slot `last` moves there."""

    def recorded(self, slot: int, rows: int) -> Tensor | None:
        """States of a sequence's first `rows` rows, if this drafter records them: [rows, (A+1)*H] bf16 on the CPU."""
        return None


def clock(device: torch.device, timed: bool) -> float:
    """Seconds of a monotonic clock; where times are wanted, work queued on a CUDA device is waited for first."""
    if timed and device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
