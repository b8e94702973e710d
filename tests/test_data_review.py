"""A look at data before any work: the report says what the stage would do, samples show what is trained on."""

from __future__ import annotations

import json

import pytest
from rich.console import Console
from tiny import make_tiny_tokenizer

from draftsmith.data_recipes.layout import TargetInfo
from draftsmith.data_recipes.prepare import PrepareSettings, prepare
from draftsmith.data_recipes.recipe import recipe_of_source
from draftsmith.data_recipes.review import Reader, coloured, print_report, report, show
from draftsmith.errors import DraftsmithError

INFO = TargetInfo(fingerprint="f", tokenizer_sha256="t", max_positions=512)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def talk(*texts):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def printed(print_to, *args):
    console = Console(width=160, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    print_to(*args, console)
    return console.export_text()


def test_report_says_what_the_stage_would_do(tmp_path, tokenizer):
    records = [talk("Hi", "Yo"), talk("hi", "Yo"), talk("x", "y", "", "z"), {"no": 1}, talk("none")]
    source = recipe_of_source(write(tmp_path / "a.jsonl", records))
    settings = PrepareSettings(answers="dataset")
    found = report(source, settings, Reader(INFO, tokenizer))
    assert list(found["stops"]) == ["a"]
    assert "1 of 5 records are malformed" in found["stops"]["a"]
    patient = PrepareSettings(answers="dataset", malformed_cap=0.2)
    stage = prepare(patient, source, tmp_path / "data", INFO, lambda: tokenizer)
    observed = ("seconds", "peak_rss_bytes", "versions", "chunks")
    made = {k: v for k, v in stage.manifest["record"].items() if k not in observed}
    assert {k: v for k, v in found.items() if k not in ("recipe", "stops")} == made
    table = printed(print_report, found)
    for text in ("a.jsonl:2", "left out: duplicate", "left out: no answer", "malformed: nothing under", "would stop"):
        assert text in table
    assert "would run through" in printed(print_report, report(source, patient, Reader(INFO, tokenizer)))


def test_samples_are_coloured(tmp_path, tokenizer):
    tokens = tokenizer("héllo wörld").input_ids
    text = coloured(tokens, [[1, 2], [4, len(tokens)]], tokenizer)
    assert text.plain == "héllo wörld"
    assert [str(span.style) for span in text.spans] == ["dim", "green", "dim", "green"]
    source = recipe_of_source(write(tmp_path / "a.jsonl", [talk("Hi", "Yo"), talk("So", "No")]))

    def shown(count, **settings):
        return printed(show, source, PrepareSettings(**settings), Reader(INFO, tokenizer), count)

    screen = shown(3, answers="dataset")
    assert "1 of 2" in screen
    assert "2 of 2" in screen
    assert "Yo<|im_end|>" in screen
    assert "tokens supervised (" in screen
    assert "the target answers" in shown(1)
    empty = recipe_of_source(write(tmp_path / "b.jsonl", [talk("unanswered")]))
    with pytest.raises(DraftsmithError, match="no conversation can be shown: left out: 1 × no answer"):
        show(empty, PrepareSettings(answers="dataset"), Reader(INFO, tokenizer), 1, Console())
