"""A toy world in which the law of the next three tokens can be summed up exactly, and the chi-square test against it.

The target's and the drafter's logits are tables over the last two tokens. The expected law is plain Python in fp64 and
doesn't use the decoder's `warp`; the toy trees don't use its search.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.eval.decoder.sampling import DRAFT, Draws, Sampling, Warp, draw, uniform
from draftsmith.eval.decoder.search import Shape
from draftsmith.eval.decoder.types import Proposal, TokenTree, Verdict

VOCAB, PROMPT, WANTED = 7, (3, 5), 3
Verifier = Callable[[TokenTree, Tensor, Draws], Verdict]


@dataclass(frozen=True)
class Setting:
    """One corner of what can be asked for.

    Attributes:
        shape: plain | chain | static | dynamic | mixed, see `shape_tables`.
        ids: draft vocabulary; None = the target's.
        drafter: sampled (all nodes drawn from q), point (none), union (both kinds, also below one node).
    """

    sampling: Sampling
    shape: str
    drafter: str
    ids: tuple[int, ...] | None = None


class Toy:
    """Logits [VOCAB, VOCAB, VOCAB] of target and drafter: [token before the last, last token, next token]."""

    def __init__(self, seed: int = 0) -> None:
        g = torch.Generator().manual_seed(seed)
        self.target = 1.5 * torch.randn(VOCAB, VOCAB, VOCAB, generator=g)
        self.draft = 0.6 * self.target + torch.randn(VOCAB, VOCAB, VOCAB, generator=g)


# --- what is right ----------------------------------------------------------------------------------------------------


def plain_warp(logits: list[float], seen: set[int], s: Sampling) -> list[float]:
    """Probabilities of one row, in fp64, one token after the other."""
    x = [(v / s.repetition_penalty if v > 0 else v * s.repetition_penalty) if i in seen else v
         for i, v in enumerate(logits)]  # fmt: skip
    order = sorted(range(len(x)), key=lambda i: -x[i])
    if s.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    kept = order[: s.top_k or None]
    weight = {i: math.exp((x[i] - x[order[0]]) / s.temperature) for i in kept}
    total, mass, nucleus = sum(weight.values()), 0.0, []
    for i in kept:
        if mass < s.top_p * total:
            nucleus.append(i)
        mass += weight[i]
    nucleus = [i for i in nucleus if weight[i] >= s.min_p]
    total = sum(weight[i] for i in nucleus)
    return [weight[i] / total if i in nucleus else 0.0 for i in range(len(x))]


def exact_law(toy: Toy, s: Sampling) -> Tensor:
    """Probability [VOCAB] * WANTED of the tokens that plain decoding emits after the prompt."""
    law = torch.zeros([VOCAB] * WANTED, dtype=torch.float64)
    rows: dict[tuple[int, ...], list[float]] = {}
    for answer in itertools.product(range(VOCAB), repeat=WANTED):
        p = 1.0
        for n, token in enumerate(answer):
            text = (*PROMPT, *answer[:n])
            if text not in rows:
                rows[text] = plain_warp(toy.target[text[-2], text[-1]].tolist(), set(text), s)
            p *= rows[text][token]
        law[answer] = p
    return law


def chi_square(answers: Tensor, law: Tensor) -> float:
    """p-value of answers [count, WANTED] under a law; 0 where something impossible was emitted."""
    size = VOCAB**WANTED
    cell = sum(answers[:, n] * VOCAB ** (WANTED - 1 - n) for n in range(WANTED))
    seen = torch.bincount(cell, minlength=size).double()
    want = law.flatten() * len(answers)
    if (seen[want == 0] > 0).any():
        return 0.0
    rare = want < 10  # together in one cell, else chi-square is no chi-square
    seen = torch.cat((seen[~rare], seen[rare].sum()[None]))
    want = torch.cat((want[~rare], want[rare].sum()[None]))
    some = want > 0
    value = ((seen - want) ** 2 / want.clamp(min=1e-300))[some].sum()
    freedom = torch.tensor((int(some.sum()) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, value / 2)) if freedom > 0 else 1.0


# --- toy drafts -------------------------------------------------------------------------------------------------------

CHAIN = [-1, 0, 1]  # short enough for its bonus to be among the wanted tokens
STATIC = [-1, 0, 0, 0, 1, 1, 4]


def shape_tables(toy: Toy, shape: str) -> tuple[Tensor, Tensor]:
    """Parents and validity, [VOCAB * VOCAB, N], of the trees below each pair of last tokens.

    "dynamic" trees follow the drafter's confidence, "mixed" ones are static here and chains with padding there.
    """
    pairs = VOCAB * VOCAB
    if shape == "dynamic":
        parent = torch.tensor([_confident(toy.draft.log_softmax(-1), i // VOCAB, i % VOCAB) for i in range(pairs)])
        return parent, torch.ones_like(parent, dtype=torch.bool)
    of = {"plain": [-1], "chain": CHAIN, "static": STATIC, "mixed": STATIC}
    parent = torch.tensor([of[shape]] * pairs)
    valid = torch.ones_like(parent, dtype=torch.bool)
    if shape == "mixed":
        padding = [0] * (len(STATIC) - len(CHAIN))
        parent[1::2] = torch.tensor(CHAIN + padding)
        valid[1::2, len(CHAIN) :] = False
    return parent, valid


def _confident(log_q: Tensor, before: int, last: int, total: int = 7) -> list[int]:
    """Parents of the most confident nodes of a tree three deep, in breadth-first order."""
    nodes = [(0.0, -1, before, last)]  # score, parent, last two tokens
    level = [0]
    for width, children in ((1, 3), (2, 2), (1, 2)):
        found = []
        for at in sorted(level, key=lambda i: -nodes[i][0])[:width]:
            score, _, a, b = nodes[at]
            for token in log_q[a, b].topk(children).indices.tolist():
                found.append((score + float(log_q[a, b, token]), at, b, token))
        level = list(range(len(nodes), len(nodes) + len(found)))
        nodes += found
    kept = sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[:total])
    return [-1, *(kept.index(nodes[i][1]) for i in kept[1:])]


class ToyDrafter:
    """Drafts for many sequences at once.

    Args:
        independent: a mistake: every sibling is drawn from the whole row.
    """

    def __init__(self, toy: Toy, setting: Setting, independent: bool = False) -> None:
        self.kind, self.ids, self.independent = setting.drafter, setting.ids, independent
        self.parent, self.valid = shape_tables(toy, setting.shape)
        self.columns = torch.tensor(setting.ids or range(VOCAB))
        self.table = toy.draft.flatten(0, 1)[:, self.columns]
        self.order = self.table.argsort(1, descending=True)
        nodes = range(self.parent.shape[1])
        self.drawn = [i > 0 and (self.kind == "sampled" or (self.kind == "union" and i % 3 != 2)) for i in nodes]
        self.deepest = {"plain": 0, "chain": 2}.get(setting.shape, 3)
        self.width = max(1, *(row.count(i) for row in self.parent.tolist() for i in nodes))
        self.is_chain = setting.shape in ("plain", "chain")

    def propose(self, before: Tensor, roots: Tensor, draws: Draws) -> TokenTree:
        """Trees below roots [B] that stand behind tokens `before` [B]."""
        pair = before * VOCAB + roots
        parent, valid = self.parent[pair], self.valid[pair].clone()
        b, n = parent.shape
        at = torch.arange(b)
        tokens, depth = roots[:, None].repeat(1, n), torch.zeros_like(parent)
        pairs = pair[:, None].repeat(1, n)  # the last two tokens at each node
        seen = None if draws.seen is None else draws.seen[:, None].repeat(1, n, 1)
        q = torch.zeros(b, n, len(self.columns))  # in another order than the nodes
        where = draws.roots[:, None] + torch.arange(self.deepest + 1)
        u = torch.stack([uniform(draws.seeds, draws.keys, where, DRAFT + rank) for rank in range(self.width)])
        for i in range(n):
            if i:
                up = parent[:, i]
                depth[:, i] = depth[at, up] + 1
                older = parent[:, :i] == up[:, None]
                if self.drawn[i]:
                    left, rank = self._left(q[at, n - 1 - up], older, tokens)
                    tokens[:, i] = self.columns[draw(left, u[rank, at, depth[:, i]])]
                    valid[:, i] &= left.sum(1) > 0
                else:
                    tokens[:, i] = self.columns[self.order[pairs[at, up], older.sum(1)]]
                    if i % 2:  # a twin of a sibling may be left out or stay
                        valid[:, i] &= ~(older & (tokens[:, :i] == tokens[:, i, None])).any(1)
                pairs[:, i] = pairs[at, up] % VOCAB * VOCAB + tokens[:, i]
                if seen is not None:
                    seen[:, i] = seen[at, up].scatter(1, tokens[:, i, None], True)
            if any(self.drawn) and (self.parent == i).any():
                mine = None if seen is None else seen[:, i, None, self.columns]
                q[:, n - 1 - i] = draws.probabilities(self.table[pairs[:, i]][:, None], mine)[:, 0]
        return TokenTree(tokens, parent, depth, valid, self.deepest, self.is_chain, self._proposal(q))

    def _left(self, q: Tensor, older: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Rows q [B, Vq] without the drawn ones of the `older` siblings [B, i], and how many those are [B]."""
        drawn = older & torch.tensor(self.drawn[: older.shape[1]])
        if not self.independent:
            for j in range(older.shape[1]):
                q = q.masked_fill(drawn[:, j, None] & (self.columns == tokens[:, j, None]), 0.0)
        return q, drawn.sum(1)

    def _proposal(self, q: Tensor) -> Proposal | None:
        b, n, _ = q.shape
        if not any(self.drawn):
            return None
        row = torch.arange(n - 1, -1, -1).expand(b, n)
        return Proposal(
            q,
            row,
            torch.tensor(self.drawn).expand(b, n),
            None if self.ids is None else self.columns,
            self.width,
        )


@dataclass(frozen=True)
class ToyNetwork:
    """The drafter's table as a network; the recycled state of a node is its token."""

    table: Tensor
    columns: Tensor | None
    before: Tensor
    roots: Tensor

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        return self._logits(self.before, self.roots), self.roots[:, None, None]

    def expand(
        self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert states is not None
        return self._logits(states[..., 0], tokens), tokens[..., None]

    def _logits(self, before: Tensor, last: Tensor) -> Tensor:
        table = self.table.flatten(0, 1)
        return (table if self.columns is None else table[:, self.columns])[before * VOCAB + last]


@dataclass(frozen=True)
class SearchDrafter:
    """The decoder's own trees."""

    toy: Toy
    shape: Shape
    ids: tuple[int, ...] | None = None

    def propose(self, before: Tensor, roots: Tensor, draws: Draws) -> TokenTree:
        columns = None if self.ids is None else torch.tensor(self.ids)
        return self.shape.grow(ToyNetwork(self.toy.draft, columns, before, roots), roots, draws)


# --- decoding it ------------------------------------------------------------------------------------------------------


def make_draws(samplings: list[Sampling], keys: Tensor, roots: Tensor, seen: Tensor) -> Draws:
    """Draws of sequences with these keys; sequence k has the parameters samplings[k % len(samplings)]."""
    which = keys % len(samplings)

    def each(name: str) -> Tensor:
        return torch.tensor([getattr(s, name) for s in samplings])[which]

    w = Warp(
        each("temperature"), each("top_k"), each("top_p"), each("min_p"), each("repetition_penalty"),
        most_k=max(s.top_k for s in samplings) if all(s.top_k for s in samplings) else 0,
        uses_k=any(s.top_k for s in samplings),
        uses_p=any(s.top_p < 1 for s in samplings),
        uses_min_p=any(s.min_p > 0 for s in samplings),
        uses_penalty=any(s.repetition_penalty != 1 for s in samplings),
    )  # fmt: skip
    sampled = [s.temperature > 0 for s in samplings]
    greedy = not any(sampled) and not w.uses_penalty
    mixed = any(sampled) and not all(sampled)
    return Draws(w, each("seed"), keys, roots, seen if w.uses_penalty else None, greedy, mixed)


def target_logits(toy: Toy, tree: TokenTree, before: Tensor) -> Tensor:
    """Logits [B, N, VOCAB] of the target at every node."""
    above = tree.tokens.gather(1, tree.parent.clamp(min=0))
    above[:, 0] = before
    return toy.target.flatten(0, 1)[above * VOCAB + tree.tokens]


def answer(
    toy: Toy, drafter: ToyDrafter | SearchDrafter, verify: Verifier, samplings: list[Sampling], count: int
) -> Tensor:
    """The first WANTED tokens [count, WANTED] of many sequences, decoded in as many steps as it takes."""
    start, end = len(PROMPT), len(PROMPT) + WANTED
    text = torch.zeros(count, end + len(STATIC), dtype=torch.int64)
    text[:, :start] = torch.tensor(PROMPT)
    length = torch.full((count,), start)
    keys = torch.arange(count)
    while len(keys):
        mine, n = text[keys], length[keys]
        before, roots = (mine.gather(1, n[:, None] - back)[:, 0] for back in (2, 1))
        written = torch.where(torch.arange(mine.shape[1]) < n[:, None], mine, PROMPT[0])
        seen = torch.zeros(len(keys), VOCAB, dtype=torch.bool).scatter_(1, written, True)
        draws = make_draws(samplings, keys, n - 1, seen)
        tree = drafter.propose(before, roots, draws)
        verdict = verify(tree, target_logits(toy, tree, before), draws)
        new = torch.cat((tree.tokens.gather(1, verdict.path)[:, 1:], verdict.bonus[:, None]), 1)
        new.scatter_(1, verdict.n_accepted[:, None], verdict.bonus[:, None])
        text[keys] = mine.scatter(1, n[:, None] + torch.arange(new.shape[1]), new)
        length[keys] = n + verdict.n_accepted + 1
        keys = (length < end).nonzero()[:, 0]
    return text[:, start:end]
