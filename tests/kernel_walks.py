"""What the kernels that verify and compact must give: walks in plain Python and fp64, and the PyTorch twins."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from sampling_checks import make_draws
from torch import Tensor

from draftsmith.eval.decoder.cache import TreeCache
from draftsmith.eval.decoder.kernels.compaction import compact
from draftsmith.eval.decoder.kernels.verification import verify_greedy, verify_sampled
from draftsmith.eval.decoder.sampling import ACCEPT, GREEDY, TOKEN, Draws, Sampling
from draftsmith.eval.decoder.types import Proposal, TokenTree, Verdict
from draftsmith.eval.decoder.verify import verify


def everywhere(x: Any, device: torch.device) -> Any:
    """Tensors of a dataclass (or one tensor) on the device."""
    if isinstance(x, Tensor):
        return x.to(device)
    if hasattr(x, "__dataclass_fields__"):
        return replace(x, **{k: everywhere(getattr(x, k), device) for k, f in x.__dataclass_fields__.items() if f.init})
    return x


# --- verification -----------------------------------------------------------------------------------------------------

SEQUENCES = 8
SAMPLINGS = [Sampling(1.0), Sampling(0.7, 3), GREEDY, Sampling(1.4, 0, 0.9, 0.1)]


def random_tree(nodes: int, tokens: list[int], seed: int, width: int = 4) -> TokenTree:
    """Any shape, with twins among siblings; a fifth of the nodes is never accepted."""
    g = torch.Generator().manual_seed(seed)
    parent, depth = torch.full((SEQUENCES, nodes), -1), torch.zeros(SEQUENCES, nodes, dtype=torch.int64)
    for b, i in itertools.product(range(SEQUENCES), range(1, nodes)):
        free = [j for j in range(i) if (parent[b] == j).sum() < width]
        up = free[int(torch.randint(len(free), (), generator=g))]
        parent[b, i], depth[b, i] = up, depth[b, up] + 1
    which = torch.randint(0, len(tokens), (SEQUENCES, nodes), generator=g)
    valid = torch.rand(SEQUENCES, nodes, generator=g) < 0.8
    valid[:, 0] = True
    deepest = int(torch.where(valid, depth, 0).max())
    return TokenTree(torch.tensor(tokens)[which], parent, depth, valid, deepest, False)


@dataclass
class Numbers:
    """What a walk reads besides the tree: p [B, N, V], random numbers [B, deepest + 1] and [B, deepest, width]."""

    p: Tensor
    u_token: Tensor
    u_accept: Tensor


def numbers(tree: TokenTree, logits: Tensor, draws: Draws, width: int) -> Numbers:
    depth = torch.arange(1, tree.deepest + 2).expand(SEQUENCES, -1)
    accept = [draws.uniform(depth[:, :-1], ACCEPT + rank) for rank in range(width)]
    return Numbers(draws.probabilities(logits), draws.uniform(depth, TOKEN), torch.stack(accept, -1))


def random_logits(tree: TokenTree, vocab: int, tokens: list[int], seed: int) -> Tensor:
    """Most of the mass on the tree's tokens; exact ties."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randint(-4, 5, (*tree.tokens.shape, vocab), generator=g) / 2
    logits[..., tokens] += math.log(vocab) + 1
    return logits


def with_proposal(tree: TokenTree, columns: int, ids: list[int] | None, likely: list[int], seed: int) -> TokenTree:
    """Rows for inner nodes only, in an order of their own, mass on the `likely` columns; 3 of 5 nodes drawn."""
    g = torch.Generator().manual_seed(seed)
    inner = [sorted({*tree.parent[b].tolist()} - {-1}) for b in range(SEQUENCES)]
    row = torch.full_like(tree.parent, -1)
    for b, nodes in enumerate(inner):
        row[b, nodes] = torch.randperm(len(nodes), generator=g)
    q = torch.randn(SEQUENCES, max(map(len, inner)), columns, generator=g).mul_(2)
    q[..., likely] += math.log(columns) + 1
    drawn = torch.rand(tree.tokens.shape, generator=g) < 0.6
    proposal = Proposal(q.softmax(-1), row, drawn, torch.tensor(ids) if ids else None, 4)
    return replace(tree, proposal=proposal)


def plain_walk(tree: TokenTree, numbers: Numbers, b: int) -> tuple[list[int], int]:
    """The path and the token behind it, one decision after the other, in fp64."""
    tokens, parent = tree.tokens[b].tolist(), tree.parent[b].tolist()
    path = [0]
    while True:
        node, depth = path[-1], len(path) - 1
        children = [i for i, up in enumerate(parent) if up == node and tree.valid[b, i]]
        if depth == tree.deepest:
            children = []
        p, taken = numbers.p[b, node].double(), None
        if tree.proposal is not None:
            q = _draft_row(tree.proposal, b, node, len(p))
            for rank, child in enumerate(children[: tree.proposal.width]):
                x, drawn = tokens[child], bool(tree.proposal.drawn[b, child])
                law = q if drawn else torch.nn.functional.one_hot(torch.tensor(x), len(p)).double()
                if float(law[x]) > 0 and float(numbers.u_accept[b, depth, rank]) < float(p[x] / law[x]):
                    taken = child
                    break
                left = (p - law).clamp(min=0)
                p = left / left.sum() if left.sum() > 1e-12 else p
                if drawn:
                    q = q.clone()
                    q[x] = 0
                    q = q / q.sum() if q.sum() > 0 else q
        if taken is None:
            upto = p.cumsum(0)
            y = int(torch.searchsorted(upto, numbers.u_token[b, depth] * upto[-1], right=True))
            y = min(y, int(p.nonzero().max()))
            if tree.proposal is not None:
                return path, y
            taken = next((i for i in children if tokens[i] == y), None)
            if taken is None:
                return path, y
        path.append(taken)


def _draft_row(proposal: Proposal, b: int, node: int, vocab: int) -> Tensor:
    row = proposal.q[b, max(0, int(proposal.row[b, node]))].double()
    ids = torch.arange(len(row)) if proposal.ids is None else proposal.ids
    q = torch.zeros(max(vocab, len(row)), dtype=torch.float64)
    q[ids] = row
    return q[:vocab]


def check_walks(tree: TokenTree, numbers: Numbers, device: torch.device, twin: Verdict | None = None) -> Tensor:
    """The kernel's verdict is the plain walk's, and `verify`'s; returns n_accepted."""
    path, accepted, bonus = (
        x.cpu()
        for x in verify_sampled(
            everywhere(tree, device), *(x.to(device) for x in (numbers.p, numbers.u_token, numbers.u_accept))
        )
    )
    for b in range(SEQUENCES):
        want, token = plain_walk(tree, numbers, b)
        assert path[b].tolist() == want + [want[-1]] * (tree.deepest + 1 - len(want)), f"sequence {b}"
        assert (int(accepted[b]), int(bonus[b])) == (len(want) - 1, token), f"sequence {b}"
    if twin is not None:
        for mine, theirs in ((path, twin.path), (accepted, twin.n_accepted), (bonus, twin.bonus)):
            assert torch.equal(mine, theirs)
    return accepted


def toy_draws() -> Draws:
    seen = torch.zeros(SEQUENCES, 1, dtype=torch.bool)  # no penalties
    return make_draws(SAMPLINGS, torch.arange(SEQUENCES), torch.arange(SEQUENCES) + 3, seen)


def greedy_walks(device: torch.device) -> None:
    draws = toy_draws()
    greedy = replace(draws, greedy=True)
    for nodes in (1, 7, 65):
        tree = random_tree(nodes, [0, 3, 5], nodes)
        logits = random_logits(tree, 9, [0, 3, 5], nodes)
        twin = verify(tree, logits, greedy)
        got = verify_greedy(everywhere(tree, device), logits.argmax(-1).to(device))
        for mine, theirs in zip(got, (twin.path, twin.n_accepted, twin.bonus), strict=True):
            assert torch.equal(mine.cpu(), theirs)
        for b in range(SEQUENCES):
            node, path = 0, [0]
            while node is not None and len(path) <= tree.deepest:
                y = int(logits[b, node].argmax())
                fits = (tree.parent[b] == node) & (tree.tokens[b] == y) & tree.valid[b]
                node = int(fits.nonzero()[0]) if fits.any() else None
                path += [] if node is None else [node]
            assert got[0][b].tolist() == path + [path[-1]] * (tree.deepest + 1 - len(path))
    assert int(got[1].max()) > 1


def one_draw_a_node(device: torch.device) -> None:
    """Law 1; the last vocabulary is read in several blocks."""
    draws = toy_draws()
    for nodes, vocab, tokens in ((1, 6, [0, 2, 3]), (30, 300, [0, 2, 3]), (14, 20_000, [1, 9000, 19_999])):
        tree = random_tree(nodes, tokens, 4)
        logits = random_logits(tree, vocab, tokens, 4)
        accepted = check_walks(tree, numbers(tree, logits, draws, 1), device, verify(tree, logits, draws))
    assert int(accepted.max()) > 1


def ratio_tests(device: torch.device) -> None:
    """Law 2: columns are target ids; fewer of them, or more, than the target has."""
    draws = toy_draws()
    for seed, columns in enumerate((6, 4, 9)):
        tree = with_proposal(random_tree(2 + 7 * seed, [0, 2, 3], seed), columns, None, [0, 2, 3], seed)
        logits = random_logits(tree, 6, [0, 2, 3], seed)
        n = numbers(tree, logits, draws, 4)
        accepted = check_walks(tree, n, device, verify(tree, logits, draws))
    assert int(accepted.max()) > 1


def ratio_tests_of_a_draft_vocabulary(device: torch.device) -> None:
    ids = [5, 0, 3, 2]
    for seed in range(2):
        tree = with_proposal(random_tree(9 + 8 * seed, [0, 2, 3], seed), 4, ids, [1, 3], seed)
        logits, draws = random_logits(tree, 6, [0, 2, 3], seed), toy_draws()
        n = numbers(tree, logits, draws, 4)
        check_walks(tree, n, device, verify(tree, logits, draws))


def ratio_tests_in_blocks(device: torch.device) -> None:
    """Residuals that lie in several blocks, with and without a draft vocabulary."""
    tokens = [1, 9000, 19_999]
    for nodes, ids, likely in ((8, None, tokens), (16, [19_999, 7, 9000, 1, *range(10_000, 10_500)], [0, 2, 3])):
        columns = len(ids) if ids else 20_000
        tree = with_proposal(random_tree(nodes, tokens, 2), columns, ids, likely, 2)
        logits, draws = random_logits(tree, 20_000, tokens, 2), toy_draws()
        n = numbers(tree, logits, draws, 4)
        assert int(check_walks(tree, n, device, verify(tree, logits, draws)).max()) > 1


def edges_of_the_numbers(device: torch.device) -> None:
    """Exhausted drafts, p = q, the least and the largest random number, tokens without probability."""
    parent = torch.tensor([[-1, 0, 0, 0, 1]]).repeat(SEQUENCES, 1)
    tokens = torch.tensor([[5, 1, 2, 1, 0]]).repeat(SEQUENCES, 1)
    depth = torch.tensor([[0, 1, 1, 1, 2]]).repeat(SEQUENCES, 1)
    tree = TokenTree(tokens, parent, depth, torch.ones_like(tokens, dtype=torch.bool), 2, False)
    ps = torch.tensor([[0, 0, 1, 0, 0, 0], [0, 0.25, 0.25, 0.5, 0, 0], [0, 1, 0, 0, 0, 0], [0.5, 0, 0, 0.5, 0, 0]])
    qs = torch.tensor([[0, 1, 0, 0, 0, 0], [0, 0.25, 0.25, 0.5, 0, 0]])
    ends = (0.0, 1 - 2.0**-53)
    settings = list(itertools.product(ps, qs, (*ends, 0.5), ends))
    for some in (settings[i : i + SEQUENCES] for i in range(0, len(settings), SEQUENCES)):
        p, q = (torch.stack([x[i] for x in some])[:, None] for i in (0, 1))
        u, v = (torch.tensor([x[i] for x in some], dtype=torch.float64) for i in (2, 3))
        n = Numbers(p.expand(-1, 5, -1), v[:, None].expand(-1, 3), u[:, None, None].expand(-1, 2, 3))
        row = torch.tensor([[0, -1, -1, -1, -1]]).repeat(SEQUENCES, 1)
        drawn = torch.tensor([[False, True, False, True, True], [False, True, True, True, True]])
        drawn = drawn.repeat(SEQUENCES // 2, 1)
        check_walks(replace(tree, proposal=Proposal(q, row, drawn, None, 3)), n, device)
    pairs = list(itertools.product(ps, ends))
    p, v = torch.stack([x for x, _ in pairs])[:, None], torch.tensor([[x] for _, x in pairs], dtype=torch.float64)
    check_walks(tree, Numbers(p.expand(-1, 5, -1), v.expand(-1, 3), v[:, :, None].expand(-1, 2, 3)), device)


def numbers_that_are_none_end_the_walk(device: torch.device) -> None:
    """Where p is NaN, what is accepted means nothing; it must be a path of the tree and a token all the same."""
    tree = random_tree(12, [0, 2, 3], 0)
    logits = random_logits(tree, 6, [0, 2, 3], 0)
    for t in (tree, with_proposal(tree, 6, None, [0, 2, 3], 0)):
        n = numbers(t, logits, toy_draws(), 4)
        n.p[::2] = torch.nan
        path, accepted, bonus = verify_sampled(
            everywhere(t, device), *(x.to(device) for x in (n.p, n.u_token, n.u_accept))
        )
        assert ((path >= 0) & (path < 12)).all()
        assert ((accepted >= 0) & (accepted <= tree.deepest)).all()
        assert ((bonus >= 0) & (bonus < 6)).all()


# --- compaction -------------------------------------------------------------------------------------------------------


def compaction(device: torch.device) -> None:
    """Kept rows lie in place, nothing else has changed; as `TreeCache.keep` leaves them."""
    g = torch.Generator().manual_seed(0)
    shapes = [(2, 64, 64), (3, 80, 48), (2, 64, 64)]
    for b, n, p, dtype in ((1, 5, 3, torch.float32), (4, 40, 9, torch.bfloat16), (3, 4, 1, torch.float32)):
        cache = TreeCache(shapes, b + 1, 100, device, dtype)
        cache.kernels = False
        for pair in cache.arenas:
            for arena in pair:
                arena.copy_(torch.randn(arena.shape, generator=g))
        lengths = torch.randint(0, 60, (b + 1,), generator=g)
        lengths[0] = 0
        cache.lengths.copy_(lengths)
        paths = [[0, *sorted((1 + torch.randperm(n - 1, generator=g)[: p - 1]).tolist())] for _ in range(b)]
        path = torch.tensor(paths)
        n_rows = torch.randint(1, p + 1, (b,), generator=g)
        before = [tuple(x.clone() for x in pair) for pair in cache.arenas]
        mine = [tuple(x.clone() for x in pair) for pair in cache.arenas]
        compact(mine, cache.lengths[:b], path.to(device), n_rows.to(device))
        cache.keep(b, path.to(device), n_rows.to(device), [0] * b)
        for old, new, kept in zip(before, mine, cache.arenas, strict=True):
            for x, y, z in zip(old, new, kept, strict=True):
                want = x.clone()
                for i, length in enumerate(lengths[:b].tolist()):
                    rows = int(n_rows[i])
                    want[:, i, :, length : length + rows] = x[:, i, :, length + path[i, :rows].to(device)]
                    assert torch.equal(y[:, i, :, : length + rows], z[:, i, :, : length + rows])
                assert torch.equal(y, want)


WALKS = (
    greedy_walks,
    one_draw_a_node,
    ratio_tests,
    ratio_tests_of_a_draft_vocabulary,
    ratio_tests_in_blocks,
    edges_of_the_numbers,
    numbers_that_are_none_end_the_walk,
    compaction,
)
