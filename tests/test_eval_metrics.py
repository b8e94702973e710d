"""Figures on hand-made step logs, worked out on paper."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from draftsmith.eval import metrics
from draftsmith.eval.metrics import Timing
from draftsmith.eval.report.charts import figure, ticks
from draftsmith.eval.tune import PassCosts, leaders, predict


def log(*steps):
    return [SimpleNamespace(drafted=d, accepted=a, emitted=e) for d, a, e in steps]


def test_pooled_figures():
    # the last step drafted 2 only and was cut by the limit: 2 accepted, bonus lost, 1 token emitted
    prompts = [log((3, 0, 1), (3, 3, 4)), log((3, 1, 2), (2, 2, 1))]
    found = metrics.acceptance(prompts)
    assert (found.steps, found.tokens) == (4, 8)
    assert found.tau == 8 / 4
    assert found.mal == 1 + 6 / 4
    assert found.alpha == 6 / (6 + 2)
    # reached depth 1: 3 of 4; depth 2: 2 of 4; depth 3: 1 of the 3 steps that drafted so deep
    assert found.cumulative == [3 / 4, 2 / 4, 1 / 3]
    # depth 3: one of the one deep step that had reached depth 2
    assert found.conditional == [3 / 4, 2 / 3, 1 / 1]


def test_plain_steps_draft_nothing():
    found = metrics.acceptance([log((0, 0, 1), (0, 0, 1))])
    assert (found.tau, found.mal, found.alpha) == (1.0, 1.0, 0.0)
    assert found.cumulative == found.conditional == []


def test_nothing_decoded_is_zero_not_an_error():
    found = metrics.acceptance([[], []])
    assert (found.tau, found.steps) == (0.0, 0)
    assert metrics.tokens_per_second([]) == 0.0
    assert metrics.speedup([], []) == (0.0, (0.0, 0.0))


def test_interval_covers_the_spread_and_repeats():
    prompts = [log(*[(4, n % 4, n % 4 + 1)] * 10) for n in range(20)]
    low, high = metrics.tau_interval(prompts)
    assert low < metrics.acceptance(prompts).tau < high
    assert (low, high) == metrics.tau_interval(prompts)
    assert metrics.tau_interval([log((4, 1, 2))] * 5) == (2.0, 2.0)


def test_speedup_pools_and_pairs():
    plain = [Timing(10, 1.0), Timing(30, 3.0)]
    fast = [Timing(10, 0.5), Timing(30, 2.5)]
    ratio, (low, high) = metrics.speedup(plain, fast)
    assert ratio == pytest.approx((40 / 3.0) / (40 / 4.0))
    assert (low, high) == (pytest.approx(1.2), pytest.approx(2.0))  # both picks the second, both the first
    with pytest.raises(ValueError, match="zip"):
        metrics.speedup(plain, fast[:1])


def test_expected_tau_is_the_chain_sum():
    assert metrics.expected_tau([0.5, 0.4, 0.9], 1) == 1.5
    assert metrics.expected_tau([0.5, 0.4, 0.9], 2) == pytest.approx(1.7)
    assert metrics.expected_tau([0.5, 0.4, 0.9], 3) == pytest.approx(1.88)


def test_acceptance_by_rank_adds_up_to_the_cumulative_one():
    prompts = [log((2, 0, 1), (2, 2, 3)), log((2, 1, 2), (1, 1, 2))]
    # accepted at depth 1: a first child twice, a third one once; at depth 2: a second child
    found = metrics.acceptance_by_rank(prompts, [[[1], [0, 1]], [[1, 0, 1]]])
    assert found == [[2 / 4, 0, 1 / 4], [0, 1 / 3, 0]]
    assert [sum(row) for row in found] == metrics.acceptance(prompts).cumulative
    assert metrics.acceptance_by_rank([log((0, 0, 1))], [[]]) == []


def test_the_tree_is_chosen_by_tokens_per_second():
    costs = PassCosts()
    costs.add("plain", 1, [0.040, 0.041, 0.090], [0.0], [0.001])  # one disturbed prompt doesn't move the median
    costs.add("chain:1", 2, [0.040], [0.002], [0.001])
    costs.add("chain:2", 3, [0.041], [0.004], [0.001])
    costs.add("dynamic:2x2x4", 4, [0.043], [0.020], [0.001])
    assert costs.ways["plain"].target == 0.041
    assert costs.ways["plain"].step == pytest.approx(0.042)
    assert costs.ways["chain:1"].overhead == pytest.approx(1 / 43)
    assert costs.ceiling(1.5) == pytest.approx(1.5 * 0.041 / 0.040)
    predicted = predict(costs, {"chain:1": 1.5, "chain:2": 1.7, "dynamic:2x2x4": 1.9})
    assert predicted["chain:1"] == pytest.approx(1.5 / 0.043)
    assert leaders(predicted, 2) == ["chain:2", "chain:1"]
    assert leaders({"b": 5.0, "a": 5.0, "c": 4.0}, 2) == ["b", "a"]


def test_ticks_and_figures_are_round():
    assert ticks(0.0, 0.47) == [0.0, 0.1, 0.2, 0.3, 0.4, 0.5]
    assert ticks(3.0, 3.0)[0] <= 3.0 < ticks(3.0, 3.0)[-1]
    shown = {0: "0", 0.1234: "0.123", 41.06: "41.1", 1234.5: "1,234", 2.0: "2", 0.00123: "0.00123"}
    assert [figure(v) for v in shown] == list(shown.values())
