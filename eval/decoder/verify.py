"""Verification: which drafted nodes the target would have produced itself, and the token that it puts behind them.

Two laws keep sampled answers distributed as in plain decoding. At an accepted node let p be the target's warped
distribution of the next token (repetition penalty over prompt, answer and the path down to the node).

Law 1, children that are point masses (chosen without looking at the random numbers of their position): draw y ~ p once;
follow the child equal to y, else emit y and stop. Exact: y is emitted in either case. It is the law of rejections one
child after the other ("accept x with probability p(x), else p[x] <- 0 and renormalise", as EAGLE-2 does; Li et al.
2024, arXiv 2406.16858), with a single draw for a node.

Law 2, children drawn from a known q (speculative sampling, Leviathan et al. 2023, arXiv 2211.17192, section 2.3 and
appendix A.1; Chen et al. 2023, arXiv 2302.01318, theorem 1; several children as in EAGLE, Li et al. 2024, arXiv
2401.15077, but drawn without replacement). With p_0 = p, q_0 = q, and children x_0, x_1, ... in draw order:

    accept x_r with probability min(1, p_r(x_r) / q_r(x_r)), else
    p_{r+1} = norm(max(0, p_r - q_r)),   q_{r+1} = norm(q_r with x_r zeroed);   all refused: draw from the last p.

Exact: x_r ~ q_r given what came before, so one round emits x with probability min(p_r, q_r)(x), and refuses with
probability 1 - sum min(p_r, q_r) = sum max(0, p_r - q_r), the mass by which p_{r+1} was normalised. If the later rounds
emit p_{r+1}, this one emits min(p_r, q_r) + max(0, p_r - q_r) = p_r; the last draw does; induction gives p_0.
A point mass x is the case in which q_r is all on x: accepted with probability p_r(x), refused p_r[x] <- 0. It may
depend on the siblings before it, and leaves the row that others are drawn from alone: both kinds may stand in one node.

Everything is vectorised over the batch and waits for the device nowhere. Where the Triton kernels run, a walk is one
launch; sampled ones then take the target's law of all nodes at once instead of a depth at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from . import kernels
from .sampling import ACCEPT, TOKEN, Draws, draw, largest
from .types import Proposal, TokenTree, Verdict
from .typical import Typical, accept_typical, seen_on_path

__all__ = ["Typical", "verify"]

TINY = torch.finfo(torch.float32).tiny
# Values that are warped at a time (1 GiB of fp32): sorting and masks take several times the room of what they work on.
_MOST_VALUES = 1 << 28

Choice = Callable[[int, Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]]
"""(depth, nodes [B], seen [B, V] or None) -> (token to emit if the walk ends here, child to go to, whether it does)."""


def verify(tree: TokenTree, logits: Tensor, draws: Draws, typical: Typical | None = None) -> Verdict:
    """Accept a path of every tree and choose the token behind it.

    Greedy sequences take the target's largest logit (of equals the lowest id), as in plain decoding. Sampled ones keep
    the law of plain decoding. Where nothing was drawn by the drafter (`tree.proposal` is None), they also read the same
    random number at the same position as plain decoding, which is this function on a root alone: sampled answers then
    equal plain ones token for token, as far as the target's logits do. Of valid children with equal tokens the first
    counts.

    Args:
        logits: [B, N, V] of the target at every node.
        typical: accept by likelihood instead, which changes what sampled sequences are distributed like; without
            effect where all are greedy.
    """
    fused, want = kernels.usable(logits.device), None
    if draws.greedy:
        best, want = largest(logits)
        accepted = _fused_greedy(tree, want) if fused else walk(tree, None, partial(_largest, tree, want))
    else:
        best = logits.amax(-1)
        if typical is not None:
            accepted = accept_typical(tree, logits, draws, typical)
        elif fused:
            accepted = _fused_sampled(tree, logits, draws)
        elif tree.proposal is None:
            accepted = walk(tree, draws.seen, partial(_match, tree, logits, draws))
        else:
            accepted = walk(tree, draws.seen, partial(_ratio, tree, tree.proposal, logits, draws))
    return Verdict(*accepted, finite=(best.isfinite() | ~tree.valid).all(1), choice=want)


def walk(tree: TokenTree, seen: Tensor | None, choose: Choice) -> tuple[Tensor, Tensor, Tensor]:
    """Go down from the roots as long as `choose` finds a child; `seen` [B, V] grows by the tokens of the path.

    Returns:
        The verdict's path, n_accepted and bonus.
    """
    node = torch.zeros_like(tree.tokens[:, 0])
    alive = torch.ones_like(node, dtype=torch.bool)
    accepted, bonus, path = node, node, [node]
    for depth in range(tree.deepest + 1):
        token, child, found = choose(depth, node, seen)
        bonus = torch.where(alive, token, bonus)
        if depth == tree.deepest:
            break
        alive = alive & found
        node = torch.where(alive, child, node)
        accepted = accepted + alive
        path.append(node)
        if seen is not None:
            seen = seen.scatter(1, pick(tree.tokens, node)[:, None], True)
    return torch.stack(path, 1), accepted, bonus


# --- the three ways to choose -----------------------------------------------------------------------------------------


def _largest(
    tree: TokenTree, want: Tensor, depth: int, node: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    token = pick(want, node)
    return (token, *follow(tree, node, token))


def _match(
    tree: TokenTree, logits: Tensor, draws: Draws, depth: int, node: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Law 1."""
    token = draw(target_law(logits, draws, node, seen), draws.uniform(depth + 1, TOKEN))
    return (token, *follow(tree, node, token))


def _ratio(
    tree: TokenTree, proposal: Proposal, logits: Tensor, draws: Draws, depth: int, node: Tensor, seen: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Law 2."""
    p = target_law(logits, draws, node, seen)
    q = draft_law(proposal, node, p.shape[-1])
    children = (tree.parent == node[:, None]) & tree.valid
    order = children.cumsum(1)
    taken, found = node, torch.zeros_like(node, dtype=torch.bool)
    for rank in range(proposal.width if depth < tree.deepest else 0):
        this = children & (order == rank + 1)
        child, open_ = this.int().argmax(1), this.any(1) & ~found
        token, drawn = pick(tree.tokens, child), pick(proposal.drawn, child)
        drafted = torch.where(drawn[:, None], q, torch.zeros_like(q).scatter(1, token[:, None], 1.0))
        accepted = accepts(pick(p, token), pick(drafted, token), draws.uniform(depth + 1, ACCEPT + rank)) & open_
        refused = open_ & ~accepted
        taken, found = torch.where(accepted, child, taken), found | accepted
        p = torch.where(refused[:, None], residual(p, drafted), p)
        q = torch.where((refused & drawn)[:, None], without(q, token), q)
    return draw(p, draws.uniform(depth + 1, TOKEN)), taken, found


# --- the same by the kernels ------------------------------------------------------------------------------------------


def _fused_greedy(tree: TokenTree, want: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from .kernels.verification import verify_greedy  # Triton isn't everywhere

    return verify_greedy(tree, want)


def _fused_sampled(tree: TokenTree, logits: Tensor, draws: Draws) -> tuple[Tensor, Tensor, Tensor]:
    """Law 1 or 2."""
    from .kernels.verification import verify_sampled

    depths = torch.arange(1, tree.deepest + 2, device=logits.device).expand(len(logits), -1)
    u_accept = None
    if tree.proposal is not None:
        ranks = torch.arange(tree.proposal.width, device=logits.device)
        u_accept = draws.uniform(depths[:, :-1, None], ACCEPT + ranks)
    return verify_sampled(tree, law_of_all(tree, logits, draws), draws.uniform(depths, TOKEN), u_accept)


def law_of_all(tree: TokenTree, logits: Tensor, draws: Draws) -> Tensor:
    """The target's warped probabilities behind every node, fp32 [B, N, V]."""
    b, n, vocab = logits.shape
    seen = None if draws.seen is None else seen_on_path(tree, draws.seen)
    p = torch.empty(b, n, vocab, dtype=torch.float32, device=logits.device)
    step = max(1, _MOST_VALUES // (b * vocab))
    for at in range(0, n, step):
        rows = slice(at, at + step)
        p[:, rows] = draws.probabilities(logits[:, rows], None if seen is None else seen[:, rows])
    return p


# --- their parts ------------------------------------------------------------------------------------------------------


def target_law(logits: Tensor, draws: Draws, node: Tensor, seen: Tensor | None) -> Tensor:
    """The target's warped probabilities [B, V] behind nodes [B]; `seen` [B, V] includes the nodes' own tokens."""
    row = logits[torch.arange(len(node), device=node.device), node]
    return draws.probabilities(row[:, None], None if seen is None else seen[:, None])[:, 0]


def draft_law(proposal: Proposal, node: Tensor, vocab_size: int) -> Tensor:
    """What the first drawn child of nodes [B] was drawn from: [B, V] over target ids; any row where no child was."""
    row = pick(proposal.row, node).clamp(min=0)
    q = proposal.q[torch.arange(len(node), device=node.device), row]
    if proposal.ids is not None:
        return q.new_zeros(len(q), vocab_size).index_copy(1, proposal.ids, q)
    return torch.nn.functional.pad(q, (0, vocab_size - q.shape[-1]))


def follow(tree: TokenTree, node: Tensor, token: Tensor) -> tuple[Tensor, Tensor]:
    """The first valid child of nodes [B] that carries token [B], and whether there is one."""
    child = (tree.parent == node[:, None]) & (tree.tokens == token[:, None]) & tree.valid
    return child.int().argmax(1), child.any(1)


def accepts(p: Tensor, q: Tensor, u: Tensor) -> Tensor:
    """Whether u in [0, 1) falls below p / q; never where the draft cannot have been drawn (q = 0)."""
    return (u * q < p) & (q > 0)


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm(max(0, p - q)) of [B, V]; p itself where rounding leaves nothing of it (then p = q, never to be refused)."""
    left = (p - q).clamp(min=0)
    total = left.sum(-1, keepdim=True)
    return torch.where(total > 0, left / total, p)


def without(q: Tensor, token: Tensor) -> Tensor:
    """Rows q [B, V] without token [B], renormalised; all 0 where nothing else was left."""
    left = q.scatter(1, token[:, None], 0.0)
    return left / left.sum(-1, keepdim=True).clamp(min=TINY)


def pick(x: Tensor, index: Tensor) -> Tensor:
    """x[b, index[b]] of x [B, N]."""
    return x.gather(1, index[:, None])[:, 0]
