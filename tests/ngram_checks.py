"""A toy target on the host that runs drafters step by step, and a tiny real one that repeats itself."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from pathlib import Path

import torch
from tiny import make_tiny_target

from draftsmith.eval.decoder.sampling import SlotSampling
from draftsmith.eval.decoder.types import Drafter, HostStep, TokenTree, Verdict

Choose = Callable[[list[int]], int]


def toy_target(order: int, vocab: int, seed: int) -> Choose:
    """The next token as a random function of the last `order` ones."""

    @functools.cache
    def table(last: tuple[int, ...]) -> int:
        return random.Random(f"{seed} {last}").randrange(vocab)

    return lambda context: table(tuple(context[-order:]))


def paths_of(tree: TokenTree, row: int) -> list[list[int]]:
    """Tokens from the root to each node; checks that parents come first and depths are those of the paths."""
    paths: list[list[int]] = []
    lines = zip(tree.tokens[row].tolist(), tree.parent[row].tolist(), tree.depth[row].tolist(), strict=True)
    for token, parent, depth in lines:
        assert parent in range(len(paths)) if paths else parent == -1
        paths.append([*(paths[parent] if parent >= 0 else []), token])
        assert len(paths[-1]) == depth + 1
    return paths


class Toy:
    """Runs a drafter greedily against a toy target, one step at a time, with slots like the loop's."""

    def __init__(self, drafter: Drafter, choose: Choose, slots: int) -> None:
        self.drafter, self.choose = drafter, choose
        self.texts: list[list[int]] = []
        self.sampling = SlotSampling(slots, 64, torch.device("cpu"))
        drafter.allocate(slots, 1000)

    def begin(self, prompt: list[int]) -> None:
        self.texts.append([*prompt, self.choose(prompt)])
        tokens = torch.tensor(self.texts[-1])
        self.drafter.begin(len(self.texts) - 1, tokens, torch.zeros(len(prompt), 0), None)

    def propose(self) -> TokenTree:
        roots = torch.tensor([text[-1] for text in self.texts])
        tree = self.drafter.propose(roots, self.sampling.draws(0, len(roots), torch.zeros_like(roots)))
        assert tree.tokens[:, 0].tolist() == roots.tolist()
        assert tree.tokens.shape[1] <= self.drafter.rows
        assert int((tree.depth * tree.valid).max()) == tree.deepest
        assert int(tree.depth.max()) == max(tree.deepest, tree.deepest_row)
        assert int((tree.depth * tree.valid).max()) <= self.drafter.depth
        return tree

    def commit(self, tree: TokenTree) -> list[list[int]]:
        """Verify; returns what each sequence emits."""
        choice, emitted, paths = [], [], []
        for row, text in enumerate(self.texts):
            choice.append([self.choose(text[:-1] + path) for path in paths_of(tree, row)])
            tokens, parent = tree.tokens[row].tolist(), tree.parent[row].tolist()
            real = [node for node, valid in enumerate(tree.valid[row].tolist()) if valid]
            path = [0]
            while True:
                want = choice[row][path[-1]]
                right = [node for node in real if parent[node] == path[-1] and tokens[node] == want]
                if not right:
                    break
                path.append(right[0])
            paths.append(path)
            emitted.append([*(tokens[node] for node in path[1:]), want])
            text += emitted[-1]
        deepest = max(map(len, paths))
        path = torch.tensor([p + p[-1:] * (deepest - len(p)) for p in paths])
        bonus = torch.tensor([e[-1] for e in emitted])
        count = torch.tensor([len(p) - 1 for p in paths])
        verdict = Verdict(path, count, bonus, torch.ones(len(paths), dtype=torch.bool))
        step = HostStep([len(t) - 1 for t in self.texts], emitted, choice if self.drafter.wants_choice else None)
        self.drafter.commit(tree, verdict, torch.zeros(*tree.tokens.shape, 0), None, step)
        return emitted

    def release(self, slot: int) -> None:
        self.drafter.release(slot, len(self.texts) - 1)
        self.texts[slot] = self.texts[-1]
        self.texts.pop()


def words(seed: int, length: int, vocab: int) -> list[int]:
    return random.Random(seed).choices(range(vocab), k=length)


def make_repetitive_target(folder: Path) -> Path:
    """A tiny target whose layers say little: its text depends on the last token most of all, so that it comes again."""
    from transformers import AutoModelForCausalLM

    make_tiny_target(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight *= 0.05
    model.save_pretrained(folder)
    return folder
