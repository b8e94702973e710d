"""The model card: its metadata as the Hub reads it, and its figures as they were measured."""

from __future__ import annotations

import re

import pytest
import yaml
from card_rules import card_problems
from shipped import facts, head, report

from draftsmith import card, card_facts
from draftsmith.errors import DraftsmithError


def block(text):
    return yaml.safe_load(re.match(r"---\n(.*?)\n---\n", text, re.DOTALL)[1])


def test_the_metadata_is_what_the_hub_takes():
    text = card.write(facts())
    assert card_problems(text) == []
    assert block(text) == {
        "license": "other",
        "base_model": "Qwen/Qwen3-8B",
        "base_model_relation": "adapter",
        "library_name": "draftsmith",
        "pipeline_tag": "text-generation",
        "language": ["en", "zh"],
        "tags": ["speculative-decoding", "draft-head", "eagle3", "vllm"],
        "datasets": ["Aeala/ShareGPT_Vicuna_unfiltered"],
        "model-index": [
            {
                "name": "Head",
                "results": [
                    {
                        "task": {"type": "text-generation"},
                        "dataset": {"type": "builtin", "name": "builtin, 8 prompts"},
                        "metrics": [{"type": "tau", "value": 2.25, "name": "tokens a step (τ), greedy, tree chain:2"}],
                    }
                ],
            }
        ],
    }


def test_what_is_not_known_is_not_said():
    text = card.write(facts(report=None, training=None, data=None, head=head(target_id="tiny-0a1b2c3d")))
    assert card_problems(text) == []
    assert sorted(block(text)) == ["library_name", "license", "pipeline_tag", "tags"]
    assert "nothing is claimed" in text
    assert "## Training" not in text
    assert "None" not in text


@pytest.mark.parametrize(
    "line",
    [
        "| tokens a step, τ | 2.25 (2.10–2.40) |",
        "| τ of `chain:4` | 2.50 (2.30–2.70) |",
        "| speed-up over plain decoding | 1.50× (1.40–1.60) |",
        "| tokens a second | 30.0, plain 20.0 |",
        "| first token, p50 | 0.123 s, plain 0.100 s |",
        "| outputs | identical |",
        "| drafted token | 1 | 2 | 3 | 4 |",
        "| `chain:4`, of all steps | 0.70 | 0.42 | 0.21 | 0.08 |",
        "| `chain:2`, if the one before is accepted | 0.70 | 0.60 | – | – |",
        "| kind of prompt | answers | τ | α | speed-up |",
        "| code | 4 | 2.60 (2.40–2.80) | 0.50 | 1.70× (1.60–1.80) |",
        "| a\\|b | 4 | 1.90 (1.70–2.10) | 0.50 | 1.30× (1.20–1.40) |",
        "| tokens before the step | answers | τ | α |",
        "| 1 | 8 | 1.90 (1.70–2.10) | 0.50 | – |",
        "| its revision | `b968826d9c46dd6066d109eabc6255188de91218` |",
        "| draft vocabulary | 32,000 of the target's 151,936 tokens |",
        "| trained on documents of | at most 2,048 tokens |",
        "| reads | the states behind layers 2, 18, 33 |",
        "| answers | the target's own, sampled at temperature 0, 0.8 (0: greedy) |",
        "| tokens | 500,000, 300,000 of them answers |",
        "| the draft vocabulary covers | 98.76% of the answers' tokens |",
        "- chains alone.",
        "### Other engines",
        "- TGI: it has no EAGLE-3.",
        "draftsmith eval --model Qwen3-8B --head ./Head",
    ],
)
def test_figures_and_circumstances_are_on_the_card(line):
    assert line in card.write(facts()).splitlines()


def test_a_category_of_two_lines_stays_in_its_cell():
    found = report()
    found["by"]["category"][1]["name"] = "two\nlines"
    text = card.write(facts(report=found))
    assert "| two lines | 4 | 1.90 (1.70–2.10) | 0.50 | 1.30× (1.20–1.40) |" in text.splitlines()


@pytest.mark.parametrize(
    ("setting", "shapes", "most", "expected"),
    [
        ({"kind": "chain", "tree": "chain:2", "depth": 2}, ("chain",), None, {"depth": 2}),
        ({"kind": "own", "tree": "own:8", "depth": 3}, ("chain",), None, {"depth": 4}),
        ({"kind": "static", "tree": "static:0,1", "depth": 1}, ("chain", "tree"), 3, {"depth": 3}),
        ({"kind": "dynamic", "tree": "dynamic:2x4x8", "depth": 4}, ("chain",), 1, {"depth": 1}),
        (
            {"kind": "dynamic", "tree": "dynamic:2x4x8", "depth": 4},
            ("chain", "tree"),
            None,
            {"depth": 4, "topk": 2, "nodes": 8},
        ),
    ],
)
def test_the_commands_draft_the_best_chain_where_the_engine_takes_no_such_tree(setting, shapes, most, expected):
    found = report()
    found["summary"]["setting"] = setting
    assert card_facts._shape(found, shapes, most) == expected


def test_without_a_chain_the_commands_draft_three_or_what_the_head_can():
    found = report(tuning={"table": []})
    found["summary"]["setting"]["kind"] = "static"
    for known in (None, found):
        assert [card_facts._shape(known, ("chain",), most) for most in (None, 1, 5)] == [
            {"depth": 3}, {"depth": 1}, {"depth": 3},
        ]  # fmt: skip


def test_a_table_with_one_row_is_left_out():
    text = card.write(facts())
    assert "### By kind of prompt" in text
    assert "### By turn" not in text


def test_no_speed_up_without_equal_outputs():
    found = report()
    found["summary"] |= {"speedup": None, "speedup_ci": None, "output_check": "3 of 8 answers differ"}
    text = card.write(facts(report=found))
    assert "| speed-up over plain decoding | not given |" in text.splitlines()
    assert "3 of 8 answers differ" in text


def test_a_doubtful_speed_up_is_flagged():
    found = report()
    found["summary"]["flag"] = "above what is possible"
    assert "Take the speed-up with care: above what is possible." in card.write(facts(report=found))


@pytest.mark.parametrize("name", ["Apache 2.0", "", "MIT", "-x"])
def test_licences_that_are_none(name):
    with pytest.raises(DraftsmithError, match=r"--license .*apache-2.0"):
        facts(license=name)


def test_a_licence_is_named():
    text = card.write(facts(license="apache-2.0"))
    assert block(text)["license"] == "apache-2.0"
    assert "No licence was named" not in text


def test_the_last_line_says_that_the_card_may_be_written_anew():
    assert card.write(facts()).splitlines()[-1] == card.OWN_LINE
