"""Choose the tree that an evaluation measures: on tuning prompts, never on those that are reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..heads.base import DraftHead
from ..progress import Progress
from .decoder.loop import Request
from .decoder.search import Chain, Shape
from .decoder.trees import refuse_deeper
from .measure import WARM_UPS, Bench, interleaved, measure_costs
from .metrics import Acceptance, acceptance, expected_tau, timings, tokens_per_second
from .schemes import read_tree
from .tune import PLAIN, Tuning, leaders, predict

LEADERS = 2
"""Trees that are timed, of those that promise most."""
ACCEPTANCE_SLOTS = 8
"""Sequences at once where only acceptance is asked for: it doesn't depend on the batch, and the passes are shared."""


def read_trees(head: DraftHead, trees: Sequence[str], checkpoint: Path | None) -> dict[str, Shape]:
    """The candidates by their text; raises DraftsmithError where the head can't draft one."""
    shapes = {text: read_tree(text, checkpoint) for text in trees}
    refuse_deeper(shapes, head.most_depth)
    return shapes


def choice_answers(prompts: int, timed: int, trees: Mapping[str, Shape]) -> int:
    """Answers that `choose` decodes: warm-ups, acceptance, then pass costs and leaders, each beside plain decoding."""
    timed = min(timed, prompts)
    return 2 * WARM_UPS + prompts * len(measured(trees)) + timed * (len(trees) + 1 + min(LEADERS, len(trees)) + 1)


def measured(trees: Mapping[str, Shape]) -> list[str]:
    """Trees that acceptance is measured with: of chains the deepest one alone, which holds that of all."""
    chains = {text: shape.depth for text, shape in trees.items() if isinstance(shape, Chain)}
    return [text for text in trees if text not in chains or text == max(chains, key=lambda t: chains[t])]


def choose(
    bench: Bench, trees: Sequence[str], requests: Sequence[Request], timed: int, timed_tokens: int, bar: Progress
) -> Tuning:
    """Measure acceptance and the cost of every pass, then time the two most promising trees.

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
    costs = measure_costs(bench, short, [PLAIN, *shapes], bar)
    taus = expected(shapes, shares)
    predicted = predict(costs, taus)
    best = leaders(predicted, LEADERS)
    results = interleaved(bench, short, [PLAIN, *best], bar)
    speeds = dict(zip([PLAIN, *best], [tokens_per_second(timings(r)) for r in results], strict=True))
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
    return Tuning(max(best, key=lambda text: speeds[text]), costs, shares, table, len(requests))


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
