"""Verification: which drafted nodes the target would have produced itself."""

from __future__ import annotations

import torch
from torch import Tensor

from .types import TokenTree, Verdict


def verify_greedy(tree: TokenTree, logits: Tensor) -> Verdict:
    """Accept the path along which every token is the target's argmax; the bonus is the argmax after its end.

    Args:
        logits: [B, N, V] of the target at every node.

    Ties in a row go to the lowest token id (argmax), as in plain decoding.
    """
    want = logits.argmax(-1)
    node = torch.zeros(len(want), dtype=torch.int64, device=want.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    accepted = torch.zeros_like(node)
    path = [node]
    for _ in range(tree.deepest):
        next_token = want.gather(1, node[:, None])
        child = (tree.parent == node[:, None]) & (tree.tokens == next_token) & tree.valid & alive[:, None]
        alive = child.any(1)
        node = torch.where(alive, child.int().argmax(1), node)
        accepted = accepted + alive
        path.append(node)
    return Verdict(torch.stack(path, 1), accepted, want.gather(1, node[:, None])[:, 0])
