"""How each token of an answer came, and the tree that is drawn: against answers known by hand and really decoded."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from decoder_checks import random_head
from page_reader import Page
from tiny import make_tiny_tokenizer

from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.loop import Request, Result, StepLog, decode, rows_needed
from draftsmith.eval.decoder.search import parse_shape
from draftsmith.eval.harness import EvalSettings, evaluate
from draftsmith.eval.ranks import RankWatch
from draftsmith.eval.report.page import write_page
from draftsmith.eval.samples import KINDS, origins, pieces, step_origins


@pytest.mark.parametrize(
    ("step", "told"),
    [
        ((3, 3, 4), ["drafted 1", "drafted 2", "drafted 3", "bonus 4"]),
        ((3, 1, 2), ["drafted 1", "corrected 2"]),
        ((3, 0, 1), ["corrected 1"]),
        ((0, 0, 1), ["plain 1"]),
        ((3, 3, 2), ["drafted 1", "drafted 2"]),  # cut within the accepted drafts
        ((3, 2, 2), ["drafted 1", "drafted 2"]),  # cut before the target's own token
    ],
)
def test_a_steps_tokens_by_how_they_came(step, told):
    assert [f"{kind} {place}" for kind, place in step_origins(*step)] == told


def answer(tokens: list[int], *steps: tuple[int, int, int]) -> Result:
    return Result("a", [1], tokens, "length", [StepLog(*step) for step in steps], 1.0)


def test_pieces_join_to_the_answer_and_characters_belong_to_the_token_that_completes_them():
    tokenizer = make_tiny_tokenizer()
    text = "the fox 🦊 über"
    tokens = tokenizer.encode(text)
    emoji = tokenizer.encode("🦊")
    assert len(emoji) == 4, "a byte a token"
    first = next(i for i in range(len(tokens)) if tokens[i : i + 4] == emoji)
    result = answer(tokens, *[(2, 2, 3)] * 3, *[(1, 0, 1)] * (len(tokens) - 10))
    found = pieces(tokenizer, result)
    assert "".join(piece["text"] for piece in found) == text
    assert {piece["kind"] for piece in found} <= set(KINDS)
    (fox,) = [piece for piece in found if "🦊" in piece["text"]]
    assert (fox["kind"], fox["depth"]) == origins(result)[first + 3]
    assert found[0] == {"text": tokenizer.decode(tokens[:1]), "kind": "plain", "depth": 0}


def test_special_tokens_and_unfinished_characters_at_the_end():
    tokenizer = make_tiny_tokenizer()
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    word = tokenizer.encode(" fox")
    found = pieces(tokenizer, answer([word[0], end], (1, 1, 1)))
    assert [piece["kind"] for piece in found] == ["plain"], "the end of the turn shows no text"
    cut = tokenizer.encode("🦊")[:2]
    found = pieces(tokenizer, answer(cut, (1, 1, 1)))
    assert "".join(piece["text"] for piece in found) == tokenizer.decode(cut)
    assert pieces(tokenizer, answer([])) == []


WIDE = "static:" + ",".join(map(str, range(90))) + ",0.0,0.1,3.0"  # an untrained head needs many guesses
SHAPES = [WIDE, "dynamic:4x3x12", "chain:3"]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_drawn_tree_is_what_was_emitted(tiny_target: Any, shape: str):
    tokenizer = tiny_target.tokenizer
    watch = RankWatch(make_drafter(random_head(tiny_target), tiny_target.parts(), parse_shape(shape)))
    prompt = tokenizer.encode("the quick brown fox jumps over")
    request = Request("a", prompt, 40)
    (result,) = decode(tiny_target, watch, [request], slots=1, capacity=rows_needed([request], watch))
    drawn = watch.drawn(tokenizer, "a")
    assert drawn is not None
    nodes = drawn["nodes"]
    most = max(step.accepted for step in result.steps)
    path = [node for node in nodes if node["accepted"]]
    assert len(path) == most + 1
    assert most > 0 or shape != WIDE
    assert [step.accepted for step in result.steps].index(most) == drawn["step"] - 1
    for node in nodes[1:]:
        above = nodes[node["parent"]]
        assert node["depth"] == above["depth"] + 1
        assert not node["accepted"] or above["accepted"]
    assert (nodes[0]["parent"], nodes[0]["depth"], nodes[0]["accepted"]) == (-1, 0, True)
    before = sum(step.emitted for step in result.steps[: drawn["step"] - 1])  # behind the prefill's token
    emitted = result.tokens[before : before + most + 2]
    told = [*(node["token"] for node in path), drawn["bonus"]][: len(emitted)]
    assert told == [tokenizer.decode([token]) for token in emitted]


def test_nothing_is_drawn_where_nothing_was_drafted(tiny_target: Any):
    watch = RankWatch(make_drafter(random_head(tiny_target), tiny_target.parts(), parse_shape("chain:2")))
    watch.allocate(1, 8)
    assert watch.drawn(tiny_target.tokenizer) is None
    assert watch.counts() == []


def test_a_measured_tree_fills_the_page(tiny_target: Any, tmp_path: Path):
    settings = EvalSettings(
        prompts=2, max_new_tokens=10, tuning_prompts=2, tuning_new_tokens=6, timed_prompts=1, timed_new_tokens=6,
        trees=[WIDE], temperatures=[0.0, 0.8],
    )  # fmt: skip
    head = random_head(tiny_target)
    head.config = dataclasses.replace(head.config, target_fingerprint=tiny_target.fingerprint)
    report = evaluate(tiny_target, head, settings)
    write_page(tmp_path / "report.html", report, [], {})
    page = Page((tmp_path / "report.html").read_text("utf-8"))
    titles = [drawing.get("aria-label") or "" for drawing in page.drawings]
    assert any(title.startswith("A tree of ") for title in titles)
    assert {"τ by category", "τ by temperature", "Where the time of a step goes"} <= set(titles)
    spans = [span for span in page.of("span") if "title" in span]
    assert len(spans) == sum(len(sample["pieces"]) for sample in report["samples"]) > 0
