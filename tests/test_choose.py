"""The choice of the tree: who is decoded, and that clocks which differ a little choose alike."""

from __future__ import annotations

import pytest

from draftsmith.eval.choose import near, smallest
from draftsmith.eval.decoder.search import parse_shape

TREES = {text: parse_shape(text) for text in ("chain:1", "chain:2", "chain:3", "dynamic:4x3x8", "dynamic:4x3x16")}


def test_all_that_promise_nearly_as_much_are_decoded() -> None:
    assert near({"a": 10.0, "b": 9.1, "c": 8.9, "d": 9.0}) == ["a", "b", "d"]
    assert near({"a": 10.0, "b": 5.0, "c": 4.0}) == ["a", "b"]
    assert near({"a": 1.0}) == ["a"]
    assert near({name: 10.0 - i / 10 for i, name in enumerate("abcdefg")}) == list("abcde")


@pytest.mark.parametrize(
    ("speeds", "chosen"),
    [
        ({"chain:2": 20.0, "chain:3": 20.5}, "chain:2"),
        ({"chain:3": 19.5, "chain:2": 20.0}, "chain:2"),
        ({"chain:2": 19.0, "chain:3": 20.0}, "chain:3"),
        ({"dynamic:4x3x16": 20.0, "dynamic:4x3x8": 19.7, "chain:3": 19.0}, "dynamic:4x3x8"),
    ],
)
def test_of_equally_fast_trees_the_smallest_is_taken(speeds: dict[str, float], chosen: str) -> None:
    assert smallest(speeds, TREES) == chosen
