"""Several ways to decode, a step of each in turn: whatever else the machine does meanwhile slows all of them alike."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing

from ..heads.target import Target
from .decoder.loop import Request, Result, StepTimer, decode_steps, rows_needed
from .decoder.search import Shape
from .decoder.types import Drafter
from .tune import PLAIN, PassCosts, StepCost, chunks, without_drift


class Runner:
    """One way to decode, with `batch` sequences running at any time, a step at a time.

    The requests come again and again, so that no step has fewer; answers that are begun and not wanted are left.

    Attributes:
        found: the first answer to each request.
        emitted: tokens of all its sequences so far.
    """

    def __init__(self, target: Target, drafter: Drafter, requests: Sequence[Request], batch: int) -> None:
        self.found: dict[str, Result] = {}
        self.emitted = 0
        self.drafter, self._requests, self._timer = drafter, requests, StepTimer()
        self._going = decode_steps(
            target, drafter, itertools.cycle(requests), slots=batch, capacity=rows_needed(requests, drafter),
            timer=self._timer, on_token=self._count,
        )  # fmt: skip

    @property
    def is_done(self) -> bool:
        """Whether every request was answered."""
        return len(self.found) == len(self._requests)

    @property
    def results(self) -> list[Result]:
        """The answers, in the requests' order."""
        return [self.found[request.id] for request in self._requests]

    def step(self) -> StepCost | None:
        """Decode one step, and read prompts where slots are free.

        None where the last wanted answer ended before one, or answer after answer ends with its first token.
        """
        before, left, ended = dataclasses.replace(self._timer), not self.is_done, 0
        while self._timer.steps == before.steps:
            if (left and self.is_done) or ended > len(self._requests):
                return None
            finished = next(self._going)
            ended += len(finished)
            for result in finished:
                self.found.setdefault(result.id, result)
        target, draft = self._timer.target - before.target, self._timer.draft - before.draft
        return StepCost(self.drafter.rows, target, draft, self._timer.step - before.step - target - draft)

    def close(self) -> None:
        """Give the target's cache and hooks back."""
        self._going.close()

    def _count(self, _name: str, new: Sequence[int]) -> None:
        self.emitted += len(new)


def timed_steps(runners: Mapping[str, Runner], rounds: int) -> Iterator[tuple[str, StepCost]]:
    """Time so many steps of each, in turns; plain decoding goes first, and once more at the end.

    The first round isn't given: a cache's first step allocates.
    """
    with _closing(runners):
        for number in range(rounds + 1):
            for way, runner in runners.items():
                if (cost := runner.step()) is not None and number > 0:
                    yield way, cost
        if PLAIN in runners and (cost := runners[PLAIN].step()) is not None:
            yield PLAIN, cost


def pass_costs(
    runners: Callable[[Sequence[str]], Mapping[str, Runner]],
    trees: Mapping[str, Shape],
    rounds: int,
    pays: Callable[[str, PassCosts], bool] = lambda _tree, _timed: True,
    done: Callable[[int], None] = lambda _ways: None,
) -> PassCosts:
    """Time the steps of trees, a few at a time in turns with plain decoding.

    Args:
        runners: makes the ways of these names, PLAIN or a tree's.
        rounds: steps of each.
        pays: whether a tree is worth timing after what was timed before it.
        done: told how many ways have been timed, after every few.

    Returns:
        Costs of PLAIN and of every tree that took a step.
    """
    steps: list[tuple[str, StepCost]] = []
    for chunk in chunks(list(trees)):
        known = without_drift(steps) if steps else None
        wanted = [tree for tree in chunk if known is None or pays(tree, known)]
        steps += timed_steps(runners([PLAIN, *wanted]), rounds)
        done(1 + len(chunk))
    return without_drift(steps) if steps else PassCosts()


def side_by_side(
    runners: Mapping[str, Runner], done: Callable[[int], None] = lambda _answers: None
) -> dict[str, list[Result]]:
    """Decode until every way has answered every request, and give the answers of each.

    The one that has emitted least goes next, so that all get to the end together, however many steps they need.

    Args:
        done: told how many wanted answers are new, whenever some are.
    """
    with _closing(runners):
        while left := [runner for runner in runners.values() if not runner.is_done]:
            runner = min(left, key=lambda runner: runner.emitted)
            before = len(runner.found)
            runner.step()
            if new := len(runner.found) - before:
                done(new)
            if runner.is_done:
                runner.close()
    return {way: runner.results for way, runner in runners.items()}


def _closing(runners: Mapping[str, Runner]) -> ExitStack:
    stack = ExitStack()
    for runner in runners.values():
        stack.enter_context(closing(runner))
    return stack
