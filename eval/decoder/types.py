"""The two things that a draft and its verification exchange: a token tree and a verdict."""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass

import torch
from torch import Tensor

from ...heads.base import Needs


@dataclass
class TokenTree:
    """Drafted tokens of B sequences, N nodes each, in an order in which parents come first.

    Node 0 is the root: the last emitted token, whose K/V is not cached yet.

    Attributes:
        tokens: [B, N] int64.
        parent: [B, N] int64, index of the parent node; -1 for the root.
        depth: [B, N] int64, 0 for the root.
        valid: [B, N] bool, False on padding nodes.
        deepest: largest depth over all sequences (host side).
        is_chain: node i is the child of node i-1 in every sequence, so accepted rows already lie in place.
    """

    tokens: Tensor
    parent: Tensor
    depth: Tensor
    valid: Tensor
    deepest: int
    is_chain: bool

    def ancestors(self) -> Tensor:
        """Bool [B, N, N]: which nodes each node sees among the tree's own, itself included."""
        b, n = self.tokens.shape
        if self.is_chain:
            return torch.ones(n, n, dtype=torch.bool, device=self.tokens.device).tril().expand(b, n, n)
        eye = torch.eye(n, dtype=torch.bool, device=self.tokens.device).expand(b, n, n)
        seen, at = eye.clone(), self.parent
        for _ in range(self.deepest):
            above = at.clamp(min=0)
            seen |= (torch.arange(n, device=at.device) == above[..., None]) & (at >= 0)[..., None]
            at = torch.where(at >= 0, self.parent.gather(1, above), at)
        return seen


def chain(tokens: Tensor) -> TokenTree:
    """Make the tree in which each of tokens [B, N] is the child of the one before; tokens[:, 0] are the roots."""
    b, n = tokens.shape
    depth = torch.arange(n, device=tokens.device).expand(b, n)
    return TokenTree(tokens, depth - 1, depth, torch.ones_like(tokens, dtype=torch.bool), n - 1, True)


@dataclass
class Verdict:
    """What the target accepted.

    Attributes:
        path: [B, P] int64, node indices from the root down; entries past n_accepted repeat the last accepted node.
        n_accepted: [B] int64, accepted nodes, root excluded.
        bonus: [B] int64, the target's own token after the last accepted node: the next root.
    """

    path: Tensor
    n_accepted: Tensor
    bonus: Tensor


class Drafter(abc.ABC):
    """Proposes token trees for the sequences that a loop runs; slots 0..B-1 are active, always densely.

    `seconds` counts the time inside the drafter's own network; anything else in `propose` and `commit` is overhead.
    """

    needs: Needs = Needs()
    depth: int = 0
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
    def propose(self, roots: Tensor) -> TokenTree:
        """Draft trees below roots [B]."""

    @abc.abstractmethod
    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, lengths: list[int]) -> None:
        """Take in what was accepted.

        Args:
            tree, verdict: of this step.
            aux: [B, N, A*H] states of all tree nodes; last: [B, N, H].
            lengths: cached rows of each sequence after this step (host side).
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
