"""A drafting network that is a table, and tree search over it in plain Python."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from draftsmith.eval.decoder.drafters.network import NetworkDrafter
from draftsmith.eval.decoder.sampling import Draws, Sampling, SlotSampling
from draftsmith.eval.decoder.types import TokenTree

VOCAB, TABLE = 16, 97
COLUMNS = [1, 2, 4, 5, 7, 8, 10, 11, 13, 15]  # a draft vocabulary
WIDE = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [0, 1, 0], [2, 0, 0], [2, 0, 1], [2, 0, 0, 0]]
Path = tuple[int, ...]


class Toy:
    """A network whose logits depend on the sequence and on all drafted tokens above: a table by their hash.

    Checks that what it is given as states, depths and visible rows belongs to one path.
    """

    def __init__(self, table: Tensor, columns: list[int] | None = None) -> None:
        self.table = table
        self.columns = None if columns is None else torch.tensor(columns)

    def code(self, sequence: int, path: Path) -> int:
        value = 7 * sequence
        for token in path:
            value = (31 * value + token + 1) % len(self.table)
        return value % len(self.table)

    def logits(self, sequence: int, path: Path) -> Tensor:
        return self.table[self.code(sequence, path)]

    def first(self, b: int) -> tuple[Tensor, Tensor]:
        self.rows: list[list[tuple[int, int]]] = [[] for _ in range(b)]  # (token, depth) of what was expanded
        state = torch.tensor([[[float(self.code(i, ()))]] for i in range(b)])
        return torch.stack([self.logits(i, ()) for i in range(b)]), state

    def expand(self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        b, m = tokens.shape
        assert states is not None
        assert states.shape == (b, m, 1)
        before = len(self.rows[0])
        assert seen is None or seen.shape == (b, m, before + m)
        logits = torch.empty(b, m, self.table.shape[1])
        new = torch.empty(b, m, 1)
        for i in range(b):
            self.rows[i] += [(token, depth) for token in tokens[i].tolist()]
            for j in range(m):
                visible = range(before + j + 1) if seen is None else seen[i, j].nonzero().flatten().tolist()
                rows = [self.rows[i][k] for k in visible]
                assert [d for _, d in rows] == list(range(1, depth + 1)), "not a path"
                path = tuple(token for token, _ in rows)
                assert path[-1] == int(tokens[i, j])
                assert float(states[i, j, 0]) == self.code(i, path[:-1]), "another node's state"
                logits[i, j], new[i, j] = self.logits(i, path), self.code(i, path)
        return logits, new


def table(seed: int, width: int, rows: int = TABLE, scale: float = 2.0) -> Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed)) * scale


def make_draws(settings: list[Sampling], *, first: int = 0, known: tuple[int, ...] = (4, 5)) -> Draws:
    slots = SlotSampling(len(settings), VOCAB, torch.device("cpu"))
    for i, setting in enumerate(settings):
        slots.begin(i, f"r{i + first}", setting, torch.tensor(known))
    return slots.draws(0, len(settings), 20 + first + torch.arange(len(settings)))


def paths_of(tree: TokenTree, row: int) -> list[Path]:
    """Drafted tokens from the root to every node."""
    paths: list[Path] = [()]
    for node in range(1, tree.tokens.shape[1]):
        parent = int(tree.parent[row, node])
        assert 0 <= parent < node, "parents come first"
        assert int(tree.depth[row, node]) == int(tree.depth[row, parent]) + 1
        paths.append((*paths[parent], int(tree.tokens[row, node])))
    assert int(tree.parent[row, 0]) == -1
    assert int(tree.depth[row, 0]) == 0
    return paths


def penalised(toy: Toy, sequence: int, path: Path, setting: Sampling, known: tuple[int, ...]) -> list[float]:
    """Logits of each column after the repetition penalty, by hand."""
    out = toy.logits(sequence, path).tolist()
    ids = range(VOCAB) if toy.columns is None else toy.columns.tolist()
    for column, token in enumerate(ids):
        if token in known or token in path:
            x = out[column]
            out[column] = x / setting.repetition_penalty if x > 0 else x * setting.repetition_penalty
    return out


def best_columns(logits: list[float], count: int) -> list[int]:
    return sorted(range(len(logits)), key=lambda c: -logits[c])[:count]


def children_by_rank(toy: Toy, paths: list[list[int]], sequence: int, setting: Sampling) -> dict[Path, Path]:
    """Tokens of every node of a static tree, greedily: rank path -> token path."""
    found: dict[Path, Path] = {(): ()}
    for ranks in sorted(map(tuple, paths), key=len):
        above = found[ranks[:-1]]
        column = best_columns(penalised(toy, sequence, above, setting, (4, 5)), ranks[-1] + 1)[-1]
        found[ranks] = (*above, column if toy.columns is None else int(toy.columns[column]))
    return found


class RecordedPaths(NetworkDrafter):
    """Mixed into a drafter: keeps, by sequence, the path (as the visible rows say) and logits of what it expanded."""

    def first(self, b: int) -> tuple[Tensor, Tensor | None]:
        self.read: list[list[int]] = [[] for _ in range(b)]
        self.made: list[list[tuple[list[int], Tensor]]] = [[] for _ in range(b)]
        return super().first(b)

    def expand(self, tokens: Tensor, states: Tensor | None, depth: int, seen: Tensor | None) -> Any:
        out = super().expand(tokens, states, depth, seen)  # type: ignore[safe-super]
        for i, new in enumerate(tokens.tolist()):
            before = len(self.read[i])
            self.read[i] += new
            for j in range(len(new)):
                visible = range(before + j + 1) if seen is None else seen[i, j].nonzero().flatten().tolist()
                path = [self.read[i][k] for k in visible]
                assert len(path) == depth
                self.made[i].append((path, out[0][i, j]))
        return out
