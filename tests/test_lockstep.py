"""Ways that take turns step by step: the answers of decoding alone, equal progress, what a slow machine changes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from decoder_checks import random_head, random_prompts

from draftsmith.eval import lockstep
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.network import prepare_head
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, decode, decode_steps, rows_needed
from draftsmith.eval.decoder.search import parse_shape
from draftsmith.eval.lockstep import Runner, side_by_side, timed_steps
from draftsmith.eval.tune import PLAIN

TREES = ("chain:3", "dynamic:2x3x5")


def requests(target: Any) -> list[Request]:
    limits = (12, 9, 1, 14)
    prompts = random_prompts(target, [5, 9, 7, 4])
    return [Request(f"r{i}", p, n, stop=frozenset()) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]


@pytest.fixture
def drafters(tiny_target: Any) -> dict[str, Any]:
    """Plain decoding and two trees of one head, whose prepared weights they share."""
    head, parts = random_head(tiny_target), tiny_target.parts()
    ready = prepare_head(head, parts)
    return {PLAIN: PlainDrafter(), **{t: make_drafter(head, parts, parse_shape(t), ready) for t in TREES}}


@pytest.mark.parametrize("batch", [1, 3, 6])
def test_every_way_answers_as_if_alone(tiny_target: Any, drafters: dict[str, Any], batch: int) -> None:
    asked = requests(tiny_target)
    runners = {way: Runner(tiny_target, drafter, asked, batch) for way, drafter in drafters.items()}
    new: list[int] = []
    found = side_by_side(runners, new.append)
    assert (list(found), sum(new)) == (list(drafters), len(drafters) * len(asked))
    for way, drafter in drafters.items():
        alone = decode(tiny_target, drafter, asked, slots=2, capacity=rows_needed(asked, drafter))
        expected = {r.id: (r.tokens, r.steps) for r in alone}
        assert {r.id: (r.tokens, r.steps) for r in found[way]} == expected
        assert [r.id for r in found[way]] == [r.id for r in asked]


def test_no_slot_is_ever_free(tiny_target: Any, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    for drafter in drafters.values():
        propose = drafter.propose
        monkeypatch.setattr(drafter, "propose", lambda r, d, propose=propose: (seen.append(len(r)), propose(r, d))[1])
    runners = {way: Runner(tiny_target, drafter, requests(tiny_target)[:2], 4) for way, drafter in drafters.items()}
    side_by_side(runners)
    assert set(seen) == {4}  # with two prompts


def test_all_get_on_equally_far(tiny_target: Any, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked, step, steps = requests(tiny_target)[:2], Runner.step, Counter[str]()
    runners = {way: Runner(tiny_target, drafter, asked, 1) for way, drafter in drafters.items()}
    names = {runner: way for way, runner in runners.items()}

    def watched(self: Runner) -> Any:
        cost = step(self)
        steps[names[self]] += 1
        others = [runner.emitted for runner in runners.values() if runner is not self and not runner.is_done]
        if others and min(others) > 0:  # all have begun
            assert self.emitted <= min(others) + self.drafter.depth + 2
        return cost

    monkeypatch.setattr(Runner, "step", watched)
    side_by_side(runners)
    assert steps.keys() == drafters.keys()


def test_timed_steps_are_in_turns(tiny_target: Any, drafters: dict[str, Any]) -> None:
    asked = requests(tiny_target)[:1]  # shorter than what is timed: it comes again
    runners = {way: Runner(tiny_target, drafter, asked, 1) for way, drafter in drafters.items()}
    found = list(timed_steps(runners, 20))
    assert [way for way, _ in found] == [PLAIN, *TREES] * 20 + [PLAIN]
    for way, cost in found:
        assert cost.rows == drafters[way].rows
        assert cost.target > 0 <= cost.draft
        assert cost.rest > 0
        assert (cost.draft > 0) == (way != PLAIN)
    assert not tiny_target.layers[2]._forward_pre_hooks  # nothing is left behind


def test_a_runner_says_when_its_last_answer_was_a_single_token(tiny_target: Any, drafters: dict[str, Any]) -> None:
    short = [Request("r", [5, 6, 7], 1, stop=frozenset())]
    runner = Runner(tiny_target, drafters["chain:3"], short, 1)
    assert [runner.step(), runner.step()] == [None, None]  # also when nothing is left to wait for
    assert runner.is_done
    runner.close()
    (answer,) = side_by_side({"x": Runner(tiny_target, drafters["chain:3"], short, 1)})["x"]
    assert (len(answer.tokens), answer.steps) == (1, [])


def test_hooks_are_gone_after_an_interrupt(
    tiny_target: Any, drafters: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runners = {way: Runner(tiny_target, drafter, requests(tiny_target), 2) for way, drafter in drafters.items()}
    monkeypatch.setattr(lockstep.Runner, "is_done", property(lambda _: (_ for _ in ()).throw(KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        side_by_side(runners)
    assert not tiny_target.layers[2]._forward_pre_hooks


def test_a_caller_who_stops_early_leaves_nothing_behind(tiny_target: Any, drafters: dict[str, Any]) -> None:
    asked, drafter = requests(tiny_target), drafters["chain:3"]
    going = decode(tiny_target, drafter, asked, slots=2, capacity=rows_needed(asked, drafter))
    next(going)
    assert tiny_target.layers[2]._forward_pre_hooks
    going.close()
    assert not tiny_target.layers[2]._forward_pre_hooks


def test_steps_come_one_by_one(tiny_target: Any, drafters: dict[str, Any]) -> None:
    asked = requests(tiny_target)
    drafter = drafters["chain:3"]
    parts = list(decode_steps(tiny_target, drafter, asked, slots=4, capacity=rows_needed(asked, drafter)))
    assert [r.id for r in parts[0]] == ["r2"]  # one token: its prompt was enough
    assert sorted(r.id for part in parts for r in part) == ["r0", "r1", "r2", "r3"]
    assert sum(not part for part in parts) > 1
