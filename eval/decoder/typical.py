"""Medusa's typical acceptance: a LOSSY way to verify, which accepts whatever the target finds likely enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .sampling import Draws, penalise
from .types import TokenTree, pack_ancestors, unpack_ancestors


@dataclass(frozen=True)
class Typical:
    """Accept a drafted token x if p(x) > min(epsilon, delta * exp(-H(p))), p warped, H the entropy of p in nats.

    LOSSY: answers are more likely ones than the target's own law gives. Cai et al. 2024 (Medusa), arXiv 2401.10774,
    section 2.3.1; the defaults are its code's.

    Attributes:
        epsilon: probability that is always enough.
        delta: the higher the entropy, the less is enough: this share of exp(-H).
    """

    epsilon: float = 0.09
    delta: float = 0.3


def accept_typical(tree: TokenTree, logits: Tensor, draws: Draws, typical: Typical) -> tuple[Tensor, Tensor, Tensor]:
    """The longest path of accepted nodes, of equals the likeliest; behind it stands the largest penalised logit.

    As in Medusa, nothing is drawn. At temperature 0 p is all on the largest logit: what is accepted is greedy decoding.

    Args:
        logits: [B, N, V] of the target at every node.

    Returns:
        The verdict's path, n_accepted and bonus.
    """
    seen = None if draws.seen is None else seen_on_path(tree, draws.seen)
    p = draws.probabilities(logits, seen)
    entropy = -(p * torch.log(p + 1e-5)).sum(-1)
    enough = torch.clamp(typical.delta * torch.exp(-entropy), max=typical.epsilon)
    above = tree.parent.clamp(min=0)
    likely = p[torch.arange(len(p), device=p.device)[:, None], above, tree.tokens]
    root = tree.parent < 0
    fits = root | (tree.valid & (likely > enough.gather(1, above)))
    own = torch.where(root, 0.0, likely.log())
    accepted, score = fits, own
    for _ in range(tree.deepest):  # after d rounds, nodes down to depth d know all that lies above them
        accepted = fits & (root | accepted.gather(1, above))
        score = torch.where(root, 0.0, own + score.gather(1, above))
    depth = torch.where(accepted, tree.depth, -1)
    count = depth.amax(1)
    last = torch.where(depth == count[:, None], score, float("-inf")).argmax(1)
    bonus = penalise(logits, draws.warp, seen).argmax(-1).gather(1, last[:, None])[:, 0]
    return _path(tree, above, last, count), count, bonus


def _path(tree: TokenTree, above: Tensor, last: Tensor, count: Tensor) -> Tensor:
    """Nodes [B, deepest + 1] from the root down to `last` [B] at depth `count` [B], which is repeated."""
    up = [last[:, None]]
    for _ in range(tree.deepest):
        up.append(above.gather(1, up[-1]))
    steps = count[:, None] - torch.arange(tree.deepest + 1, device=last.device)
    return torch.cat(up, 1).gather(1, steps.clamp(min=0))


def seen_on_path(tree: TokenTree, seen: Tensor) -> Tensor:
    """Bool [B, N, V]: tokens seen [B, V] and those of each node and its ancestors."""
    mine = unpack_ancestors(pack_ancestors(tree.parent, tree.deepest), tree.tokens.shape[1])
    tokens = torch.where(mine, tree.tokens[:, None], tree.tokens[:, :1, None])  # the root's is seen anyway
    return seen[:, None].expand(-1, tokens.shape[1], -1).scatter(2, tokens, True)
