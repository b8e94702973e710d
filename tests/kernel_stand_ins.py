"""PyTorch stand-ins of the Triton kernels: the decoder's path for a GPU runs with them on a CPU, at full speed.

They show what that path hands over and that it waits for nothing; the kernels themselves run in `test_kernels.py` and
in the dry run of `scripts/gpu_check.py`.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftsmith.eval.decoder import kernels
from draftsmith.eval.decoder.sampling import draw
from draftsmith.eval.decoder.types import TokenTree, unpack_ancestors
from draftsmith.eval.decoder.verify import accepts, draft_law, follow, pick, residual, walk, without

DRAFTERS = ["plain", "lookup", "lookahead", "head-static", "head-dynamic", "model-chain", "union-static"]
"""Of decoder_checks.NAMES: chains, trees, both laws, several passes a step, a network without and with states."""


def tree_attention(
    q: Tensor, key: Tensor, value: Tensor, lengths: Tensor, depth: Tensor, ancestors: Tensor | None, *,
    earlier: int, scale: float, window: int | None, softcap: float | None, sinks: Tensor | None,
) -> Tensor:  # fmt: skip
    """One dense softmax in fp64."""
    total = depth.shape[1]
    assert ancestors is None or ancestors.shape[1] == total - earlier == q.shape[2]
    slot = torch.arange(key.shape[2], device=q.device)
    behind = slot - lengths[:, None]
    row = behind.clamp(0, total - 1)
    if ancestors is None:
        seen = torch.ones(total, total, dtype=torch.bool, device=q.device).tril()[earlier:].expand(len(q), -1, -1)
    else:
        seen = unpack_ancestors(ancestors, total)
    seen = seen.gather(2, row[:, None].expand(-1, seen.shape[1], -1)) & ((behind >= 0) & (behind < total))[:, None]
    seen = seen | (behind < 0)[:, None]
    if window is not None:
        at = torch.where(behind < 0, slot, lengths[:, None] + depth.gather(1, row))
        seen = seen & ((lengths[:, None] + depth[:, earlier:])[..., None] - at[:, None] < window)
    k, v = (x.double().repeat_interleave(q.shape[1] // key.shape[1], 1) for x in (key, value))
    scores = q.double() @ k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None, None].expand(*scores.shape[:3], 1)), -1)
        v = torch.nn.functional.pad(v, (0, 0, 0, 1))
    return (torch.softmax(scores, -1) @ v).transpose(1, 2).to(q.dtype)


def verify_greedy(tree: TokenTree, want: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    def choose(depth: int, node: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        token = pick(want, node)
        return (token, *follow(tree, node, token))

    return walk(tree, None, choose)


def verify_sampled(
    tree: TokenTree, p: Tensor, u_token: Tensor, u_accept: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    proposal = tree.proposal
    assert p.shape[:2] == tree.tokens.shape
    assert u_token.shape == (len(p), tree.deepest + 1)
    assert (u_accept is None) == (proposal is None)

    def choose(depth: int, node: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        left = p[torch.arange(len(node), device=p.device), node]
        if proposal is None or u_accept is None:
            token = draw(left, u_token[:, depth])
            return (token, *follow(tree, node, token))
        assert u_accept.shape == (len(p), tree.deepest, proposal.width)
        q = draft_law(proposal, node, p.shape[-1])
        children = (tree.parent == node[:, None]) & tree.valid
        order = children.cumsum(1)
        taken, found = node, torch.zeros_like(node, dtype=torch.bool)
        for rank in range(proposal.width if depth < tree.deepest else 0):
            this = children & (order == rank + 1)
            child, is_open = this.int().argmax(1), this.any(1) & ~found
            token, drawn = pick(tree.tokens, child), pick(proposal.drawn, child)
            drafted = torch.where(drawn[:, None], q, torch.zeros_like(q).scatter(1, token[:, None], 1.0))
            accepted = accepts(pick(left, token), pick(drafted, token), u_accept[:, depth, rank]) & is_open
            refused = is_open & ~accepted
            taken, found = torch.where(accepted, child, taken), found | accepted
            left = torch.where(refused[:, None], residual(left, drafted), left)
            q = torch.where((refused & drawn)[:, None], without(q, token), q)
        return draw(left, u_token[:, depth]), taken, found

    return walk(tree, None, choose)


def compact(arenas: list[tuple[Tensor, Tensor]], lengths: Tensor, path: Tensor, n_rows: Tensor) -> None:
    index = torch.arange(len(path), device=path.device)[:, None]
    at = torch.arange(path.shape[1], device=path.device)
    kept = torch.where(at < n_rows[:, None], path, at)  # rows that are not kept stay where they are
    for arena in (x for pair in arenas for x in pair):
        arena[:, index, :, lengths[:, None] + at] = arena[:, index, :, lengths[:, None] + kept]


def install(patch: pytest.MonkeyPatch) -> None:
    """Make the decoder take its GPU path, with these instead of the kernels."""
    made: dict[str, Any] = {
        "tree_attention": SimpleNamespace(tree_attention=tree_attention),
        "verification": SimpleNamespace(verify_greedy=verify_greedy, verify_sampled=verify_sampled),
        "compaction": SimpleNamespace(compact=compact),
    }
    patch.setattr(kernels, "usable", lambda device: True)
    for name, module in made.items():
        patch.setitem(sys.modules, f"{kernels.__name__}.{name}", module)
