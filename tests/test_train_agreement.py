"""Decoded tau beside tau_walk, by hand: what is compared, and what a difference is taken for."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from draftsmith.eval.decoder.loop import Result, StepLog
from draftsmith.train.agreement import MIN_SHARED, Compared, compare, disagreement


def test_the_shared_beginning_is_compared() -> None:
    # the stored answer has tokens 0..9; row j + 1 of the text stands before answer token j + 1
    right = torch.zeros(2, 12, dtype=torch.bool)
    right[0, [1, 2, 5, 6]] = True  # first drafts
    right[1, [1, 5]] = True
    supervised = torch.zeros(12, dtype=torch.bool)
    supervised[1:10] = True
    # walked, K = 2: row 1 accepts 2, row 4 none, row 5 accepts 2, rows 8 and 9 none
    steps = [StepLog(2, 2, 3), StepLog(2, 0, 1), StepLog(2, 1, 2), StepLog(2, 0, 1), StepLog(2, 2, 2)]
    stored = list(range(10))

    def decoded(tokens: list[int], steps: list[StepLog]) -> Result:
        return Result("a", [0], tokens, "length", steps, 0.0)

    found = compare(decoded(stored, steps), stored, right, supervised, 2)
    assert found == Compared(9, 5, 9, 5, 9, 5, 5, 3, 2, True)
    # the decoded answer leaves the stored one at token 5: four tokens are shared behind the first, rows 1..4
    other = [*range(5), 99, 98, 97, 96, 95]
    assert compare(decoded(other, steps), stored, right, supervised, 2) == Compared(9, 5, 9, 5, 4, 2, 2, 1, 1, False)
    # already the first token differs, or an answer ends at once: nothing is shared
    assert compare(decoded([99, 98], [StepLog(2, 0, 1)]), stored, right, supervised, 2).shared == 0
    ended = compare(decoded([0], []), stored, right, supervised, 2)
    assert (ended.tokens, ended.shared, ended.shared_steps, ended.shared_walk_steps) == (0, 0, 0, 0)


def answers(count: int, walk_steps: int, steps: int, firsts: tuple[int, int], **other: Any) -> list[Compared]:
    """As many documents, all shared: 40 tokens each."""
    one = Compared(40, steps, 40, walk_steps, 40, steps, walk_steps, *firsts, True)
    return [dataclasses.replace(one, **other)] * count


def test_a_difference_on_the_same_text_is_a_mistake() -> None:
    assert disagreement(answers(8, 25, 25, (10, 10))) is None
    # one document of eight with one step less is noise
    assert disagreement([*answers(7, 25, 25, (10, 10)), *answers(1, 24, 25, (10, 10))]) is None
    first = disagreement(answers(8, 20, 40, (0, 15)))
    assert first is not None
    assert "tau_walk is 2.000 and decoded tau 1.000" in first
    assert "same 320 tokens: training and decoding differ" in first
    assert "first drafts differ already (75% and 0% right): look at alignment, mask, norm, rope and layer ids" in first
    # half of the first drafts are right in both
    assert "first drafts agree, those behind them don't" in (disagreement(answers(8, 20, 30, (15, 10))) or "")
    assert "training and decoding differ" in (disagreement(answers(8, 40, 20, (15, 0))) or ""), "either way"


def test_a_difference_of_texts_is_expected() -> None:
    apart = {"same": False, "shared": 4, "shared_steps": 3, "shared_walk_steps": 3}
    found = disagreement(answers(8, 20, 32, (1, 1), **apart))
    assert found is not None
    assert "8 of 8 answers in the data are not what the target says itself, they part after 5 tokens" in found
    assert "expected of a dataset's answers" in found
    assert disagreement(answers(8, 32, 32, (1, 1), **apart)) is None
    # too little is shared to judge a difference there
    few = {"shared": 4, "shared_steps": 4, "shared_walk_steps": 2}
    assert sum(c.shared for c in answers(8, 1, 1, (1, 1), **few)) < MIN_SHARED
    assert disagreement(answers(8, 25, 25, (1, 1), **few)) is None
