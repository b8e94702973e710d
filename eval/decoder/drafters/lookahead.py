"""Lookahead: the target itself makes n-grams by Jacobi iteration in extra rows of its passes, and drafts from them."""

from __future__ import annotations

import random

from torch import Tensor

from ....errors import DraftsmithError
from ..sampling import Draws
from ..transfer import upload
from ..types import Drafter, HostStep, TokenTree, Verdict

# One node on the host: token, parent, depth, whether it may be accepted (0 or 1).
_Node = tuple[int, int, int, int]


class Lookahead:
    """Window and pool of one sequence; tokens only.

    Attributes:
        root: the last emitted token.
        levels: the window, oldest level first; of level 0 all columns but the first, which is the root.
        pool: token -> the (N-1)-tuples that followed it in the window, latest last.
        last_level: tree nodes of the youngest level in the tree that `tree` gave last.
    """

    def __init__(self, prompt: list[int], root: int, window: int, ngram: int, guesses: int) -> None:
        # keyed by the prompt: a sequence has the same window alone and in a batch
        chosen = random.Random(repr(prompt)).choices(prompt, k=window + ngram - 3)
        self.root, self.ngram, self.guesses = root, ngram, guesses
        self.levels: list[list[int]] = [chosen]
        self.pool: dict[int, list[tuple[int, ...]]] = {}
        self.last_level: list[int] = []

    def tree(self) -> list[_Node]:
        """Root, the pool's guesses below it as a trie, then the window level by level."""
        nodes: list[_Node] = [(self.root, -1, 0, 1)]
        self._add_guesses(nodes)
        row = [0]  # nodes of one level by column; the root is column 0 of level 0
        for column, token in enumerate(self.levels[0], 1):
            nodes.append((token, row[-1], column, 0))
            row.append(len(nodes) - 1)
        self.last_level = row[1:]
        for number, level in enumerate(self.levels[1:], 1):
            start = len(nodes)
            nodes += [(token, row[column], number + column, 0) for column, token in enumerate(level)]
            self.last_level = row = list(range(start, len(nodes)))
        return nodes

    def _add_guesses(self, nodes: list[_Node]) -> None:
        children: dict[tuple[int, int], int] = {}
        for guess in self.pool.get(self.root, []):
            node = 0
            for depth, token in enumerate(guess, 1):
                if (node, token) not in children:
                    children[node, token] = len(nodes)
                    nodes.append((token, node, depth, 1))
                node = children[node, token]

    def advance(self, choice: list[int], root: int) -> None:
        """Move the window on by one step.

        Args:
            choice: the target's most likely token after every node of the latest tree.
            root: the new one.
        """
        new = [choice[node] for node in self.last_level]
        filled = len(self.levels)
        if filled < self.ngram - 1:
            # one position on: the first column of each level now lies where the new root stands, or before it
            self.levels = [level[1:] for level in self.levels] + [new if filled == 1 else new[1:]]
        else:
            for first, *rest in zip([self.root, *self.levels[0]], *self.levels[1:], new, strict=True):
                self._remember(first, tuple(rest))
            self.levels = [self.levels[1][1:], *self.levels[2:], new]
        self.root = root

    def _remember(self, first: int, rest: tuple[int, ...]) -> None:
        """Put an n-gram into the pool; the one of its first token that was not seen for longest gives way."""
        entries = self.pool.setdefault(first, [])
        if rest in entries:
            entries.remove(rest)
        elif len(entries) == self.guesses:
            entries.pop(0)
        entries.append(rest)


class LookaheadDrafter(Drafter):
    """Lookahead decoding (Fu, Bailis, Stoica, Zhang 2024) with W columns, n-grams of N tokens and G guesses.

    Each pass of the target checks guesses and, in extra rows, takes one Jacobi step on a window of N-1 levels x W
    columns. As a tree (which gives exactly the published mask and positions):

        level 0, column 0    the root
        level 0, column i    child of level 0, column i-1
        level l, column i    child of level l-1, column i

    Window nodes are never accepted. What the target finds most likely after the last level is the next level, while
    level 0 is dropped, whatever was accepted; read down a column, (level 0, ..., level N-2, new) is an n-gram, kept in
    a pool under its first token. The (at most G) latest n-grams of the root token are the guesses: a trie of depth N-1
    below the root, in front of the window. The window starts with tokens drawn from the prompt and grows a level a
    step, so the first N-2 steps have no new n-grams.

    Guesses are point masses, in sampling, too: the window always takes the most likely tokens.

    Args:
        window: W, ngram: N, guesses: G.

    Raises:
        DraftsmithError: a value that is too small.
    """

    wants_choice = True

    def __init__(self, window: int = 5, ngram: int = 4, guesses: int = 5) -> None:
        for name, value, least in (("window", window, 1), ("ngram", ngram, 3), ("guesses", guesses, 1)):
            if value < least:
                raise DraftsmithError(f"lookahead: {name} = {value} must be at least {least}")
        self.window, self.ngram, self.guesses = window, ngram, guesses
        self.depth = ngram - 1
        # while it fills, the window is wider: column i is used up as the levels below it appear
        filling = max((level + 1) * (window + ngram - 2 - level) for level in range(ngram - 2))
        self.rows = max((ngram - 1) * (window + guesses), filling)
        self.sequences: dict[int, Lookahead] = {}

    def allocate(self, slots: int, capacity: int) -> None:
        """See Drafter."""
        self.sequences = {}

    def begin(self, slot: int, tokens: Tensor, aux: Tensor, last: Tensor | None) -> None:
        """See Drafter."""
        *prompt, root = tokens.tolist()
        self.sequences[slot] = Lookahead(prompt, root, self.window, self.ngram, self.guesses)

    def propose(self, roots: Tensor, draws: Draws) -> TokenTree:
        """See Drafter."""
        trees = [self.sequences[slot].tree() for slot in range(len(roots))]
        width = max(map(len, trees))
        padding: _Node = (0, 0, 1, 0)
        padded = ((*tree, *[padding] * (width - len(tree))) for tree in trees)
        flat = [x for tree in padded for node in tree for x in node]  # a flat list converts many times faster
        nodes = upload(flat, roots.device).view(len(trees), width, len(padding))
        tokens, parent, depth, valid = nodes.unbind(-1)
        deepest = max(node[2] for tree in trees for node in tree if node[3])
        lowest = max(node[2] for tree in trees for node in tree)
        return TokenTree(tokens, parent, depth, valid.bool(), deepest, False, deepest_row=lowest)

    def commit(self, tree: TokenTree, verdict: Verdict, aux: Tensor, last: Tensor | None, step: HostStep) -> None:
        """See Drafter."""
        assert step.choice is not None
        for slot, (tokens, choice) in enumerate(zip(step.emitted, step.choice, strict=True)):
            self.sequences[slot].advance(choice, tokens[-1])

    def release(self, slot: int, last: int) -> None:
        """See Drafter."""
        self.sequences[slot] = self.sequences[last]
        del self.sequences[last]
