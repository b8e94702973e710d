"""Choose the tree that an evaluation measures: on tuning prompts, never on those that are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..errors import DraftsmithError
from ..heads.base import DraftHead
from ..progress import Progress
from .decoder.loop import Request
from .decoder.search import Chain, Shape
from .decoder.trees import refuse_deeper
from .lockstep import Runner, pass_costs, side_by_side
from .measure import WARM_UPS, Bench
from .metrics import Acceptance, acceptance, expected_tau, timings, tokens_per_second
from .schemes import read_tree
from .tune import PLAIN, Tuning, chunks, leaders, predict

TIMED_STEPS = 16
"""Steps of each tree from which its passes' costs are taken."""
NEAR, LEAST, LEADERS = 0.9, 2, 5
"""Trees that promise so much of the best one's speed are really decoded: so many at least, and so many at most."""
EQUAL = 0.97
"""Of trees that reach so much of the fastest one's speed the smallest is taken: clocks can't tell them apart, and the
same evaluation should choose the same tree the next time."""
ACCEPTANCE_SLOTS = 8
"""Sequences at once where only acceptance is asked for: it doesn't depend on the batch, and the passes are shared."""


def read_trees(head: DraftHead, trees: Sequence[str], checkpoint: Path | None) -> dict[str, Shape]:
    """The candidates by their text; raises DraftsmithError where the head can't draft one."""
    shapes = {text: read_tree(text, checkpoint) for text in trees}
    refuse_deeper(shapes, head.most_depth)
    return shapes


def choice_answers(prompts: int, timed: int, trees: Mapping[str, Shape]) -> int:
    """Answers that `choose` decodes at most: warm-ups, acceptance, leaders, and one for each way that is timed."""
    leading = min(timed, prompts) * (1 + min(LEADERS, len(trees)))
    return 2 * WARM_UPS + prompts * len(measured(trees)) + _passes(trees) + leading


def _passes(trees: Mapping[str, Shape]) -> int:
    """Ways whose passes are timed, plain decoding as often as it is."""
    return sum(1 + len(chunk) for chunk in chunks(list(trees)))


def measured(trees: Mapping[str, Shape]) -> list[str]:
    """Trees that acceptance is measured with: of chains the deepest one alone, which holds that of all."""
    chains = {text: shape.depth for text, shape in trees.items() if isinstance(shape, Chain)}
    return [text for text in trees if text not in chains or text == max(chains, key=lambda t: chains[t])]


def choose(
    bench: Bench, trees: Sequence[str], requests: Sequence[Request], timed: int, timed_tokens: int, bar: Progress
) -> Tuning:
    """Measure acceptance and the cost of every pass, then time the most promising trees, step by step in turns.

    Args:
        trees: texts of the candidates.
        requests: tuning prompts; passes and leaders are timed on the first `timed`, `timed_tokens` each.
    """
    shapes = {text: bench.trees[text] for text in trees}
    short = [dataclasses.replace(r, max_new_tokens=timed_tokens) for r in requests[:timed]]
    bench.warm_up(short[0], measured(shapes)[-1])
    bar.advance(2 * WARM_UPS)
    shares = {}
    for text in measured(shapes):
        logs = []
        for result in bench.decode_all(requests, text, ACCEPTANCE_SLOTS):
            logs.append(result.steps)
            bar.advance()
        shares[text] = acceptance(logs)
    costs = pass_costs(lambda ways: _runners(bench, short, ways), shapes, TIMED_STEPS, done=bar.advance)
    if not costs.ways.keys() >= {PLAIN, *shapes}:
        raise DraftsmithError("every tuning answer ended with its first token: there is no step to time")
    taus = expected(shapes, shares)
    predicted = predict(costs, taus)
    best = near(predicted)
    results = side_by_side(_runners(bench, short, [PLAIN, *best]), bar.advance)
    bar.advance(len(short) * (min(LEADERS, len(shapes)) - len(best)))  # fewer were worth it than were counted on
    speeds = {way: tokens_per_second(timings(found)) for way, found in results.items()}
    table = [
        {
            "tree": text,
            "depth": shape.depth,
            "nodes": shape.rows,
            "expected_tau": taus[text],
            "predicted_tokens_per_s": predicted[text],
            "measured_tokens_per_s": speeds.get(text),
            "predicted_speedup": predicted[text] * costs.ways[PLAIN].step,
            "measured_speedup": speeds[text] / speeds[PLAIN] if text in speeds and speeds[PLAIN] else None,
        }
        for text, shape in shapes.items()
    ]
    chosen = smallest({text: speeds[text] for text in best}, shapes)
    return Tuning(chosen, costs, shares, table, len(requests))


def near(predicted: Mapping[str, float]) -> list[str]:
    """The trees to decode, best first; see `NEAR`."""
    first = leaders(predicted, LEADERS)
    return [text for i, text in enumerate(first) if i < LEAST or predicted[text] >= NEAR * predicted[first[0]]]


def smallest(speeds: Mapping[str, float], trees: Mapping[str, Shape]) -> str:
    """Of the fastest trees the one with the fewest rows; see `EQUAL`."""
    fast = [text for text in speeds if speeds[text] >= EQUAL * max(speeds.values())]
    return min(fast, key=lambda text: trees[text].rows)


def _runners(bench: Bench, requests: Sequence[Request], ways: Sequence[str]) -> dict[str, Runner]:
    return {way: Runner(bench.target, bench.drafter(way), requests, 1) for way in ways}


def expected(trees: Mapping[str, Shape], shares: Mapping[str, Acceptance]) -> dict[str, float]:
    """Tau of each tree before cutting: its own mal, or for chains that of the deepest one up to their depth.

    Answers of tuning prompts are short: cut at their ends, deep trees would look worse than the chains beside them.
    """
    taus = {}
    chains = next((shares[text] for text in measured(trees) if isinstance(trees[text], Chain)), None)
    for text, shape in trees.items():
        if isinstance(shape, Chain):
            assert chains is not None
            taus[text] = expected_tau(chains.conditional, shape.depth)
        else:
            taus[text] = shares[text].mal
    return taus
