"""Prompt Lookup and Lookahead: against naive scans, transformers' own lookup, and the published algorithms' state."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import decoder_checks as checks
import pytest
import torch
from decoder_checks import make_truth, random_prompts
from ngram_checks import Choose, Toy, make_repetitive_target, paths_of, toy_target, words

from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters.lookahead import LookaheadDrafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import NgramIndex, PromptLookupDrafter
from draftsmith.eval.decoder.loop import Request
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.types import Drafter, TokenTree
from draftsmith.heads.target import Target

# --- Prompt Lookup ----------------------------------------------------------------------------------------------------


def naive_lookup(tokens: list[int], longest: int, count: int) -> list[int]:
    """All places, all lengths."""
    for n in range(longest, 0, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[len(tokens) - n :] and len(tokens) >= n:
                return tokens[start + n : start + n + count]
    return []


@pytest.mark.parametrize("longest", [1, 2, 3, 5])
def test_the_index_finds_what_a_scan_finds(longest: int) -> None:
    found = 0
    for seed in range(60):
        vocab = [2, 5, 30][seed % 3]
        text = words(seed, 1 + seed, vocab)
        cut = seed // 3
        index = NgramIndex(text[:cut], longest)
        while cut < len(text):  # extended by single tokens and by blocks, asked in between
            step = 1 + (seed + cut) % 4
            index.extend(text[cut : cut + step])
            cut += step
            count = 1 + cut % 7
            assert index.lookup(count) == naive_lookup(text[:cut], longest, count)
            found += bool(index.lookup(count))
    assert found > 100


def test_the_index_finds_what_transformers_finds() -> None:
    from transformers.generation.candidate_generator import PromptLookupCandidateGenerator

    for seed in range(40):
        text = words(seed, 2 + 3 * seed, [3, 12][seed % 2])
        own = NgramIndex(text, 3).lookup(10)
        theirs = PromptLookupCandidateGenerator(
            num_output_tokens=10, max_matching_ngram_size=3, max_length=len(text) + 100
        )
        ids, _ = theirs.get_candidates(torch.tensor([text]))
        assert own == ids[0, len(text) :].tolist()


def test_the_earliest_longest_match_wins_and_may_be_short() -> None:
    assert NgramIndex([1, 2, 9, 1, 2, 8, 1, 2], 3).lookup(4) == [9, 1, 2, 8]
    assert NgramIndex([5, 2, 7, 1, 2, 8, 1, 2], 3).lookup(2) == [8, 1]  # two tokens match later than one
    assert NgramIndex([4, 4], 3).lookup(10) == [4]  # nothing follows but the last token itself
    assert NgramIndex([1, 2, 3], 3).lookup(10) == []
    assert NgramIndex([1], 3).lookup(10) == []


def test_lookup_drafts_are_as_wide_as_the_longest_and_padding_is_invalid() -> None:
    toy = Toy(PromptLookupDrafter(max_ngram=2, tokens=3), lambda context: context[-1] + 1, 3)
    for prompt in ([1, 2, 3, 4, 1], [9], [3, 2]):  # 2 follows: 3 4 1; nothing; 3 follows: 2 3
        toy.begin(prompt)
    tree = toy.propose()
    assert tree.is_chain
    assert tree.tokens.tolist() == [[2, 3, 4, 1], [10, 0, 0, 0], [3, 2, 3, 0]]
    assert tree.valid.tolist() == [[True] * 4, [True] + [False] * 3, [True] * 3 + [False]]
    toy.release(0)
    toy.release(0)
    assert toy.propose().tokens.tolist() == [[10]]


@pytest.mark.parametrize(("order", "vocab"), [(1, 6), (2, 4), (3, 3)])
def test_lookup_follows_every_sequence_through_its_slots(order: int, vocab: int) -> None:
    toy = Toy(PromptLookupDrafter(max_ngram=3, tokens=4), toy_target(order, vocab, 0), 3)
    accepted = 0
    for number in range(9):
        while len(toy.texts) < 3:
            toy.begin(words(len(toy.texts) + number, 5 + number, vocab))
        for _ in range(4):
            tree = toy.propose()
            for row, text in enumerate(toy.texts):
                want = naive_lookup(text, 3, 4)
                assert tree.tokens[row, tree.valid[row]].tolist() == [text[-1], *want]
            accepted += sum(len(new) - 1 for new in toy.commit(tree))
        toy.release(number % 3)
    assert accepted > 50


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: PromptLookupDrafter(max_ngram=0), "max_ngram = 0 must be at least 1"),
        (lambda: PromptLookupDrafter(tokens=0), "tokens = 0 must be at least 1"),
        (lambda: LookaheadDrafter(window=0), "window = 0 must be at least 1"),
        (lambda: LookaheadDrafter(ngram=2), "ngram = 2 must be at least 3"),
        (lambda: LookaheadDrafter(guesses=0), "guesses = 0 must be at least 1"),
    ],
)
def test_sizes_that_mean_nothing_are_refused(make: Callable[[], Any], told: str) -> None:
    with pytest.raises(DraftsmithError, match=told):
        make()


# --- Lookahead --------------------------------------------------------------------------------------------------------


class Published:
    """The algorithm as published: level lists, the token map and the window's contexts by its mask, batch 1.

    `past[0]` leaves out column 0, which is the last emitted token. A row of level l and column i sees the prefix, the
    last token, the first i tokens of level 0, and column i of the levels 1..l.
    """

    def __init__(self, choose: Choose, text: list[int], start: list[int], w: int, n: int, g: int) -> None:
        self.choose, self.text, self.w, self.n, self.g = choose, list(text), w, n, g
        self.past: list[list[int] | None] = [start, *[None] * (n - 2)]
        self.fill = 0
        self.map: dict[int, list[tuple[int, ...]]] = {}

    def guesses(self) -> list[tuple[int, ...]]:
        return list(self.map.get(self.text[-1], [])) if self.past[-1] is not None else []

    def window(self) -> dict[tuple[int, int], list[int]]:
        """What row (level, column) sees of this step's own tokens, the last token first, itself last."""
        seen = {}
        for level in range(self.fill + 1):
            for i, _ in enumerate(self.past[level]):
                column = i + 1 if level == 0 else i
                above = [self.past[k][i] for k in range(1, level + 1)]
                seen[level, column] = [self.text[-1], *self.past[0][:column], *above]
        return seen

    def step(self) -> list[int]:
        window = self.window()
        results = [self.choose(self.text[:-1] + seen) for (level, _), seen in window.items() if level == self.fill]
        first = self.choose(self.text)
        hits = [first]
        for guess in self.guesses():
            right = [first] + [self.choose([*self.text, *guess[: i + 1]]) for i in range(self.n - 1)]
            matched = 0
            while matched < self.n - 1 and guess[matched] == right[matched]:
                matched += 1
            if matched > len(hits) - 1:
                hits = right[: matched + 1]
        if self.fill == 0:
            self.past[0] = self.past[0][1:]
            self.past[1] = results
            self.fill = 1
        elif self.past[self.n - 2] is None:
            for level in range(self.fill + 1):
                self.past[level] = self.past[level][1:]
            self.past[self.fill + 1] = results[1:]
            self.fill += 1
        else:
            assert len(results) == self.w
            for i in range(self.w):
                key = self.text[-1] if i == 0 else self.past[0][i - 1]
                new = (*(self.past[level][i] for level in range(1, self.n - 1)), results[i])
                known = self.map.setdefault(key, [])
                if new in known:
                    known.remove(new)
                known.append(new)
                self.map[key] = known[-self.g :]
            self.past[0] = self.past[1][1:]
            for level in range(1, self.n - 2):
                self.past[level] = self.past[level + 1]
            self.past[self.n - 2] = results
        self.text += hits
        return hits


def compare_tree(tree: TokenTree, row: int, own: Published) -> None:
    """The tree's paths are the published rows: guesses merged by common beginnings, window in the published order."""
    paths = paths_of(tree, row)
    real = [node for node in range(1, len(paths)) if tree.valid[row, node]]
    guesses = own.guesses()
    beginnings = dict.fromkeys(g[:k] for g in guesses for k in range(1, own.n))
    assert [tuple(paths[node][1:]) for node in real] == list(beginnings)
    assert real == list(range(1, 1 + len(real)))
    window = own.window()
    after = range(1 + len(real), 1 + len(real) + len(window))
    assert [paths[node] for node in after] == list(window.values())
    for node, (level, column) in zip(after, window, strict=True):
        assert int(tree.depth[row, node]) == level + column
    assert not tree.valid[row, 1 + len(real) :].any()


SIZES = [(5, 4, 5), (3, 3, 2), (1, 5, 1), (7, 6, 3), (2, 8, 4)]


@pytest.mark.parametrize(("w", "n", "g"), SIZES)
@pytest.mark.parametrize(("order", "vocab"), [(1, 8), (2, 3), (7, 5)])
def test_lookahead_is_the_published_algorithm(w: int, n: int, g: int, order: int, vocab: int) -> None:
    """Sequences at different fill levels, slots that move: rows, guesses and emitted tokens of every step."""
    choose = toy_target(order, vocab, seed=w)
    drafter = LookaheadDrafter(w, n, g)
    toy = Toy(drafter, choose, 3)
    references: list[Published] = []
    accepted = 0
    for number in range(6):
        while len(toy.texts) < min(3, number + 1):
            toy.begin(words(10 * number + len(toy.texts), 4 + number, vocab))
            start = list(drafter.sequences[len(toy.texts) - 1].levels[0])
            assert len(start) == w + n - 3
            assert set(start) <= set(toy.texts[-1][:-1])
            references.append(Published(choose, toy.texts[-1], start, w, n, g))
        for _ in range(n + 3 * number):
            tree = toy.propose()
            for row, own in enumerate(references):
                compare_tree(tree, row, own)
            emitted = toy.commit(tree)
            assert emitted == [own.step() for own in references]
            accepted += sum(len(new) - 1 for new in emitted)
        if len(toy.texts) == 3:
            toy.release(number % 3)
            references[number % 3] = references[-1]
            references.pop()
    assert accepted > 0 or order > 2


def test_the_window_starts_the_same_alone_and_in_a_batch() -> None:
    prompts = [words(seed, 30, 50) for seed in (1, 2)]
    starts = []
    for order in ((0, 1), (1, 0)):
        toy = Toy(LookaheadDrafter(), lambda context: 0, 2)
        for i in order:
            toy.begin(prompts[i])
        starts.append([toy.drafter.sequences[slot].levels for slot in (0, 1)])  # type: ignore[attr-defined]
    assert starts[0] == starts[1][::-1]
    assert starts[0][0] != starts[0][1]


# --- through the loop -------------------------------------------------------------------------------------------------

NEW = 40
SAMPLINGS = [Sampling(), Sampling(0.3), Sampling(1.0, top_k=2, seed=3), Sampling(0.3, repetition_penalty=1.02)]
DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "lookup": lambda: PromptLookupDrafter(max_ngram=2, tokens=5),
    "lookahead": lambda: LookaheadDrafter(window=6, ngram=4, guesses=4),
}


@pytest.fixture(scope="module")
def repetitive(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = make_repetitive_target(tmp_path_factory.mktemp("repetitive"))
    return Target.load(str(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def truth(repetitive: Target) -> checks.Truth:
    """Prompts that hold the answer to their own beginning, and begin again."""
    asked = make_truth(repetitive, random_prompts(repetitive, [6, 11, 3, 17]), NEW)
    return make_truth(repetitive, [[*p, *answer, *p] for p, answer in asked.items()], NEW)


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_greedy_answers_are_plain_ones(repetitive: Target, truth: checks.Truth, name: str, slots: int) -> None:
    results = checks.check_lossless(repetitive, DRAFTERS[name](), truth, slots, lambda i: NEW - 5 * (i % 3))
    assert sum(step.accepted for r in results for step in r.steps) > 10


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_sampled_answers_are_plain_ones(repetitive: Target, truth: checks.Truth, name: str, slots: int) -> None:
    """Every draft is a point mass: the same random numbers give the same tokens."""
    requests = [Request(f"r{i}", list(p), NEW - 5 * (i % 3), SAMPLINGS[i % 4]) for i, p in enumerate(truth)]
    plain = checks.run_all(repetitive, PlainDrafter(), requests, 2)
    drafted = checks.run_all(repetitive, DRAFTERS[name](), requests, slots)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    assert sum(step.accepted for r in drafted[1:] for step in r.steps) > 5
