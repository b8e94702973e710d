"""Figures of parts of an evaluation on hand-made answers, worked out on paper."""

from __future__ import annotations

import pytest

from draftsmith.eval import breakdown
from draftsmith.eval.benchmarks import About
from draftsmith.eval.breakdown import Pair, by_context, context_lengths, context_name, figures
from draftsmith.eval.decoder.loop import Request, Result, StepLog
from draftsmith.eval.metrics import percentiles
from draftsmith.eval.report import terminal


def result(name, steps, seconds=1.0, prompt=10):
    tokens = [1] * (1 + sum(emitted for *_, emitted in steps))
    return Result(name, [1] * prompt, tokens, "length", [StepLog(*step) for step in steps], seconds)


def pair(question, steps, *, turn=1, category="a", language="en", prompt=10, plain_s=1.0, fast_s=1.0, benchmark="own"):
    """Plain decoding of as many tokens, one a step."""
    name = f"{question}/{turn}"
    emitted = sum(step[2] for step in steps)
    plain = result(name, [(0, 0, 1)] * emitted, plain_s, prompt)
    about = About(question, turn, category, language, prompt)
    fast = result(name, steps, fast_s, prompt)
    request = Request(name, [1] * prompt, 99)
    return Pair(benchmark, about, "say", request, plain, fast, [], {"plain": 1.0, "speculative": 2.0}, {})


def test_figures_of_a_group():
    found = figures([pair("q", [(2, 2, 3), (2, 0, 1)], fast_s=0.5), pair("r", [(2, 1, 2)], fast_s=1.5)], True)
    assert found["n_prompts"] == 2
    assert found["tau"] == 6 / 3
    assert found["alpha"] == 3 / (3 + 2)
    assert found["acceptance_conditional"] == [2 / 3, 1 / 2]
    assert found["speedup"] == pytest.approx((6 / 2.0) / (6 / 2.0))
    # resampling two questions: both are q (4 tokens of 2 steps), both r (2 of 1), or one each
    assert found["tau_ci"] == [2.0, 2.0]
    assert found["speedup_ci"] == [pytest.approx(1 / 1.5), pytest.approx(2.0)]


def test_without_a_passed_check_there_is_no_speedup():
    found = figures([pair("q", [(1, 1, 2)])], False)
    assert (found["tau"], found["speedup"], found["speedup_ci"]) == (2.0, None, None)


def test_one_question_has_figures_and_no_interval():
    """Its turns make it no more: an interval of one question would be a point, as if it were certain."""
    found = figures([pair("q", [(1, 1, 2)], fast_s=0.5, turn=turn) for turn in (1, 2)], True)
    assert (found["tau"], found["tau_ci"]) == (2.0, None)
    assert found["speedup"] == pytest.approx(2.0)
    assert found["speedup_ci"] is None
    rows = breakdown.breakdown([pair("q", [(1, 1, 2)]), pair("r", [(1, 1, 2)], category="other")], True)
    assert [row["tau_ci"] for row in rows["category"]] == [None, None]
    assert rows["turn"][0]["tau_ci"] == [2.0, 2.0]
    assert "[" not in "".join(terminal._group_row({**rows["category"][0], "name": "c"}))


def test_the_turns_of_a_question_are_resampled_as_one():
    """Two turns that make up for each other leave no spread, as two questions they do."""
    steps = [[(1, 1, 2)], [(1, 0, 1)]]
    together = [pair(q, s, turn=t) for q in "qr" for t, s in enumerate(steps, 1)]
    apart = [pair(f"{q}{t}", s) for q in "qr" for t, s in enumerate(steps, 1)]
    assert figures(together, True)["tau_ci"] == [1.5, 1.5]
    low, high = figures(apart, True)["tau_ci"]
    assert low == 1.0
    assert high == 2.0


def test_groups_stand_in_the_order_of_the_prompts():
    pairs = [
        pair("q", [(1, 1, 2)], category="z", language="de"),
        pair("r", [(1, 0, 1)], category="a"),
        pair("q", [(1, 0, 1)], turn=2, category="z", language="de"),
    ]
    found = breakdown.breakdown(pairs, True)
    assert set(found) == {"category", "language", "turn", "context"}
    assert [(row["name"], row["n_prompts"], row["tau"]) for row in found["category"]] == [("z", 2, 1.5), ("a", 1, 1.0)]
    assert [(row["name"], row["tau"]) for row in found["language"]] == [("de", 1.5), ("en", 1.0)]
    assert [(row["name"], row["tau"]) for row in found["turn"]] == [("1", 1.5), ("2", 1.0)]


def test_steps_belong_to_the_length_that_they_begin_at():
    """253 prompt tokens and the prefill's make 254: two tokens later a step stands behind 256."""
    long = pair("q", [(1, 1, 2), (1, 0, 1), (1, 1, 2)], prompt=253)
    assert context_lengths(long.fast) == [254, 256, 257]
    short = pair("r", [(1, 0, 1)], prompt=10)
    rows = by_context([long, short])
    assert [(row["name"], row["n_prompts"], row["tau"]) for row in rows] == [("<256", 2, 1.5), ("<512", 1, 1.5)]
    assert {row["speedup"] for row in rows} == {None}
    assert [context_name(i) for i in (0, 2, 9, 10)] == ["<256", "<1k", "<128k", "≥128k"]


def test_percentiles():
    assert percentiles([1.0, 2.0, 3.0]) == {"p50": 2.0, "p95": pytest.approx(2.9)}
    assert percentiles([]) == {"p50": 0.0, "p95": 0.0}
