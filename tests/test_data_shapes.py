"""Every shape that records are published in, against what it holds, written by hand; and what refuses a record."""

from __future__ import annotations

import json
import random

import pytest

from draftsmith.data_recipes.conversation import Conversation, Malformed
from draftsmith.data_recipes.normalise import NormaliseSettings, normalise
from draftsmith.data_recipes.shapes import parse_record


def said(*texts, system=None):
    """Messages whose speakers take turns, the user first."""
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    return [*([{"role": "system", "content": system}] if system else []), *turns]


HI, HI_YO = said("Hi"), said("Hi", "Yo")
SHARE = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2, "é"]}}}
ARGUMENTS = CALL["function"]["arguments"]
CALLED = [*HI, {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}]
TREE = {
    "text": "Hi",
    "role": "prompter",
    "replies": [
        {"text": "no rank", "role": "assistant", "rank": None},
        {"text": "deleted", "role": "assistant", "rank": 0, "deleted": True},
        {"text": "worse", "role": "assistant", "rank": 2},
        {"text": "Yo", "role": "assistant", "rank": 1, "replies": [{"text": "And?", "role": "prompter"}]},
    ],
}
MESSAGES = {
    "text": ("Hi", HI),
    "list of messages": (HI_YO, HI_YO),
    "messages": ({"messages": HI_YO}, HI_YO),
    "messages, the other list null": ({"conversations": None, "messages": HI_YO}, HI_YO),
    "conversations": ({"conversations": SHARE}, HI_YO),
    "conversation before prompt and response": ({"prompt": "x", "response": "y", "conversations": SHARE}, HI_YO),
    "conversation": ({"conversation": SHARE}, HI_YO),
    "roles": (
        [{"role": r, "content": r} for r in ("developer", "Human", "BING", "observation")],
        [
            {"role": r, "content": c}
            for r, c in (("system", "developer"), ("user", "Human"), ("assistant", "BING"), ("tool", "observation"))
        ],
    ),
    "pairs": (
        {"conversation": [{"human": "Hi", "assistant": "Yo"}, {"human": "A", "assistant": "B"}]},
        said("Hi", "Yo", "A", "B"),
    ),
    "pairs with system": (
        {"conversation": [{"system": "S", "input": "Hi", "output": "Yo"}]},
        said("Hi", "Yo", system="S"),
    ),
    "null content": ([*HI, {"role": "assistant", "content": None}], said("Hi", "")),
    "system beside": ({"system": "S", "messages": HI}, said("Hi", system="S")),
    "system beside and inside": ({"system": "S", "messages": said("Hi", system="S")}, said("Hi", system="S")),
    "another system beside": (
        {"system_prompt": "T", "messages": said("Hi", system="S")},
        [{"role": "system", "content": "T"}, *said("Hi", system="S")],
    ),
    "blank system beside": ({"system": " ", "messages": HI}, HI),
    "text parts": (
        [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "value": "b"}, "c"]}],
        said("a\nb\nc"),
    ),
    "image part": (
        [
            {
                "role": "user",
                "content": [{"type": "image_url", "image_url": {"url": "x"}}, {"type": "text", "text": "Hi"}],
            }
        ],
        [{"role": "user", "content": "Hi", "media": True}],
    ),
    "image beside": ({"image": "a.jpg", "conversations": SHARE}, [{**HI[0], "media": True}, HI_YO[1]]),
    "no image beside": ({"images": [], "conversations": SHARE}, HI_YO),
    "reasoning field": (
        [*HI, {"role": "assistant", "content": "Yo", "reasoning": "hm", "name": None}],
        [*HI, {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}],
    ),
    "reasoning part": (
        [
            *HI,
            {"role": "assistant", "content": [{"type": "thinking", "thinking": "hm"}, {"type": "text", "text": "Yo"}]},
        ],
        [*HI, {"role": "assistant", "content": "Yo", "reasoning_content": "hm"}],
    ),
    "calls, arguments as object": (
        [*HI, {"role": "assistant", "tool_calls": [CALL]}, {"role": "tool", "content": "3"}],
        CALLED,
    ),
    "calls, arguments as text": (
        [
            *HI,
            {"role": "assistant", "content": None, "tool_calls": [{"name": "add", "arguments": json.dumps(ARGUMENTS)}]},
            {"role": "tool", "content": "3", "name": "", "tool_call_id": None},
        ],
        CALLED,
    ),
    "calls, text of text": (
        [
            *HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": json.dumps(
                    [{"function": {"name": "add", "arguments": json.dumps(json.dumps(ARGUMENTS))}}]
                ),
            },
            {"role": "function", "content": "3"},
        ],
        CALLED,
    ),
    "calls with ids": (
        [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [{"id": "c1", **CALL}]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "add"},
        ],
        [
            *HI,
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "c1"}]},
            {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c1"},
        ],
    ),
    **{
        f"calls, arguments under {key}": (
            [
                *HI,
                {"role": "assistant", "content": "", "tool_calls": [{"name": "add", key: ARGUMENTS, "extra": 1}]},
                {"role": "tool", "content": "3"},
            ],
            CALLED,
        )
        for key in ("parameters", "input")
    },
    "old function_call field": (
        [*HI, {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": ""}}],
        [
            *HI,
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": {"name": "now", "arguments": {}}}],
            },
        ],
    ),
    "tool_call part": (
        [
            *HI,
            {"role": "assistant", "content": [{"type": "tool_call", "value": json.dumps(CALL["function"])}]},
            {"role": "tool", "content": "3"},
        ],
        CALLED,
    ),
    "ShareGPT calls": (
        {
            "conversations": [
                SHARE[0],
                {"from": "function_call", "value": json.dumps(CALL["function"])},
                {"from": "observation", "value": "3"},
            ]
        },
        CALLED,
    ),
    "Alpaca": ({"instruction": "Hi", "input": "", "output": "Yo"}, HI_YO),
    "Alpaca with input": ({"instruction": "Add", "input": "1, 2", "output": "3"}, said("Add\n\n1, 2", "3")),
    "Alpaca with history": (
        {"instruction": "Hi", "output": "Yo", "history": [["a", "b"]], "system": "S"},
        said("a", "b", "Hi", "Yo", system="S"),
    ),
    "Self-Instruct": (
        {"instruction": "Add", "instances": [{"input": "1, 2", "output": "3"}]},
        said("Add\n\n1, 2", "3"),
    ),
    "Dolly": (
        {"instruction": "Who?", "context": "Ann did.", "response": "Ann"},
        said("Who?\n\nAnn did.", "Ann"),
    ),
    "edit of code": (
        {"instruction": "Fix", "context": "ctx", "input": "code", "output": "fixed"},
        said("Fix\n\nctx\n\ncode", "fixed"),
    ),
    "prompt and completion": ({"prompt": "Hi", "completion": "Yo"}, HI_YO),
    "prompt and response": ({"prompt": "Hi", "response": "Yo"}, HI_YO),
    "prompt alone": ({"prompt": "Hi", "canonical_solution": "x"}, HI),
    "prompt and null": ({"prompt": "Hi", "completion": None}, HI),
    "a null before the answer": ({"question": "Hi", "response": None, "answer": "Yo"}, HI_YO),
    "Alpaca with its filled-in text": (
        {"instruction": "Add", "input": "1, 2", "output": "3", "prompt": "Below is ... ### Response:\n3"},
        said("Add\n\n1, 2", "3"),
    ),
    "nothing behind a prompt": ({"prompt": "Hi", "input": "x", "context": "y", "completion": "Yo"}, HI_YO),
    "data beside question and answer": ({"data": "a,b", "instruction": "Hi", "output": "Yo"}, HI_YO),
    "turns beside question and answer": ({"turns": ["x"], "question": "Hi", "answer": "Yo"}, HI_YO),
    "a number of turns": ({"turns": 2, "data": ["Hi", "Yo"]}, HI_YO),
    "prompt of messages": ({"prompt": HI, "completion": HI_YO[1:]}, HI_YO),
    "question and answer": ({"question": "Hi", "answer": "Yo"}, HI_YO),
    "OpenOrca": ({"system_prompt": "S", "question": "Hi", "response": "Yo"}, said("Hi", "Yo", system="S")),
    "query and response": ({"query": "Hi", "response": "Yo"}, HI_YO),
    "problem and solution": ({"problem": "Hi", "answer": "3", "solution": "Yo"}, HI_YO),
    "instruction and response": ({"instruction": "Hi", "response": "Yo"}, HI_YO),
    "inputs and targets": ({"inputs": "Hi", "targets": "Yo"}, HI_YO),
    "input and output": ({"input": "Hi", "output": "Yo"}, HI_YO),
    "text and code": ({"text": "Hi", "code": "Yo", "task_id": 1}, HI_YO),
    "chosen": ({"prompt": "x", "chosen": HI_YO, "rejected": said("Hi", "no")}, HI_YO),
    "chosen text": ({"question": "Hi", "chosen": "Yo", "rejected": "no"}, HI_YO),
    "chosen answer alone": ({"prompt": HI, "chosen": HI_YO[1:], "rejected": []}, HI_YO),
    "turns": ({"turns": ["Hi"]}, HI),
    "turns of messages": ({"turns": HI_YO}, HI_YO),
    "data text": ({"data": "Hi"}, HI),
    "data texts": ({"id": "1", "data": ["Hi", "Yo", "A"]}, said("Hi", "Yo", "A")),
    "data messages": ({"data": HI_YO}, HI_YO),
    "tree": ({"prompt": {"text": "Hi", "role": "prompter", "replies": []}}, HI),
}


@pytest.mark.parametrize("shape", MESSAGES)
def test_messages_of_each_shape(shape):
    record, expected = MESSAGES[shape]
    before = json.dumps(record)
    assert parse_record(record) == Conversation(messages=expected)
    assert json.dumps(record) == before, "the record itself is left as it is"


CHANGED = {
    "other branches of the tree left aside": ({"prompt": TREE}, said("Hi", "Yo", "And?")),
    "user turns without answers left aside after the first": ({"turns": ["Hi", "And?"]}, HI),
    "instances of the task left aside after the first": (
        {"instruction": "Add", "instances": [{"input": "", "output": "3"}, {"input": "2", "output": "4"}]},
        said("Add", "3"),
    ),
}


@pytest.mark.parametrize("reason", CHANGED)
def test_what_is_left_aside_is_counted(reason):
    record, expected = CHANGED[reason]
    assert parse_record(record) == Conversation(messages=expected, changes=(reason,))


def test_a_deep_tree_is_no_trouble():
    tree = {"text": "last", "role": "prompter"}
    for i in range(3000):
        tree = {"text": "x", "role": ("assistant", "prompter")[i % 2], "replies": [tree]}
    assert len(parse_record({"prompt": tree}).messages) == 3001


def test_text_and_tokens():
    assert parse_record({"text": "Once"}) == Conversation(text="Once")
    kept = Conversation(tokens=[5, 6, 7], mask=[False, True, True])
    for record in (
        {"input_ids": [5, 6, 7], "loss_mask": [0, 1, 1]},
        {"input_ids": [5, 6, 7], "attention_mask": [1, 1, 1], "labels": [-100, 6, 7]},
        {"tokens": [5, 6, 7], "assistant_masks": [False, True, True]},
    ):
        assert parse_record(record) == kept


FUNCTION = {"name": "add", "parameters": {"type": "object"}}
WRAPPED = {"type": "function", "function": FUNCTION}


@pytest.mark.parametrize(
    "beside",
    [
        {"tools": [WRAPPED]},
        {"tools": json.dumps([FUNCTION])},
        {"functions": [FUNCTION]},
        {"tools": [{"type": "function", **FUNCTION}]},
        {"tools": FUNCTION},
    ],
)
def test_tools_have_one_form(beside):
    assert parse_record({"messages": HI, **beside}).tools == [WRAPPED]


@pytest.mark.parametrize("none", [None, [], "[]", ""])
def test_no_tools(none):
    assert parse_record({"messages": HI, "tools": none}).tools is None


def test_categories():
    assert parse_record({"turns": ["Hi"], "category": "qa"}).category == "qa"
    assert parse_record({"class": " Vicuna ", "data": "Hi"}).category == "Vicuna"
    assert parse_record({"prompt": "Hi", "category": 3}).category is None
    assert parse_record({"prompt": "Hi", "category": " "}).category is None


def assistant(**fields):
    return [*HI, {"role": "assistant", "content": "", **fields}]


MALFORMED = {
    "a int instead of a conversation": 3,
    "a NoneType instead of a conversation": None,
    "a conversation without messages": {"messages": []},
    "a message that is not an object": {"messages": ["Hi"]},
    "a message without role or from": [{"content": "Hi"}],
    "unknown role 'alien'": [{"role": "alien", "content": "Hi"}],
    "a message whose content is not text": [{"role": "user", "content": 3}],
    "a content part that is not an object": [{"role": "user", "content": [3]}],
    "a content part of unknown type 'hologram'": [{"role": "user", "content": [{"type": "hologram"}]}],
    "a content part without its text": [{"role": "user", "content": [{"type": "text"}]}],
    "a tool call that is not JSON": [*HI, {"from": "function_call", "value": "{'name': 'add'}"}],
    "a tool call without a name": assistant(tool_calls=[{"function": {"arguments": {}}}]),
    "a tool call whose arguments are not under arguments, parameters, input": assistant(
        tool_calls=[{"name": "add", "args": {"a": 1}, "arguments": None}]
    ),
    "tool call arguments that are not JSON": assistant(tool_calls=[{"name": "add", "arguments": "{'a': 1}"}]),
    "tool call arguments that are not an object": assistant(tool_calls=[{"name": "add", "arguments": "[1]"}]),
    "a tool call that is not the assistant's": [{"role": "user", "content": "Hi", "tool_calls": [CALL]}],
    "a tool without a name": {"messages": HI, "tools": [{"type": "function", "function": "add"}]},
    "tools that are not JSON": {"messages": HI, "tools": "add"},
    "'prompt' is a int, not text or messages": {"prompt": 3},
    "'answer' is a dict, not text or messages": {"question": "Hi", "answer": {"text": "Yo"}},
    "'system' is a list, not text": {"system": [], "messages": HI},
    "'history' is not a list of pairs": {"instruction": "Hi", "history": [["a"]]},
    "'chosen' without what was asked": {"chosen": "Yo", "rejected": "no"},
    "a tree whose first message is deleted": {"prompt": {**TREE, "deleted": True}},
    "'data' is not text or a list of texts": {"data": ["Hi", 3]},
    "'turns' is not a list with a first turn": {"turns": []},
    "images, audio or video beside plain text": {"text": "a cat", "image": "cat.jpg"},
    "token ids that are not whole numbers": {"input_ids": [1, True], "loss_mask": [0, 1]},
    "token ids without a mask (loss_mask, assistant_masks, labels)": {"input_ids": [1], "attention_mask": [1]},
    "token ids and loss_mask of different lengths": {"input_ids": [1, 2], "loss_mask": [1]},
    "loss_mask with other values than 0 and 1": {"input_ids": [1, 2], "loss_mask": [0, 2]},
    "labels that are not the token ids at their own places": {"input_ids": [1, 2, 3], "labels": [2, 3, -100]},
    "a mask that leaves nothing to learn": {"input_ids": [1, 2], "labels": [-100, -100]},
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_malformed_records_say_why(reason):
    with pytest.raises(Malformed) as caught:
        parse_record(MALFORMED[reason])
    assert str(caught.value) == reason


JUNK = [None, True, 3, -1.5, "", "x", "[1]", '{"a": 1}', "\ud800", [], [3], [[]], ["x"], {}, {"name": "x"}, {"text": 1}]


def spoilt(value, rng):
    """The value with one thing in it, at any depth, replaced by junk."""
    if isinstance(value, list | dict) and value and rng.random() < 0.8:
        read = dict(enumerate(value)) if isinstance(value, list) else dict(value)
        key = rng.choice(list(read))
        read[key] = spoilt(read[key], rng)
        return list(read.values()) if isinstance(value, list) else read
    return rng.choice(JUNK)


def test_whatever_is_wrong_in_a_record_it_is_read_or_refused():
    rng, refused = random.Random(0), 0
    records = [record for table in (MESSAGES, CHANGED) for record, _ in table.values()]
    records += [{"input_ids": [5, 6], "loss_mask": [0, 1]}, {"text": "Once"}, {"messages": CALLED, "tools": [WRAPPED]}]
    for _ in range(60):
        for record in records:
            try:
                read = normalise(parse_record(spoilt(record, rng)), NormaliseSettings())
                json.dumps(read.__dict__, ensure_ascii=False, allow_nan=False).encode()
            except Malformed:
                refused += 1
    assert 500 < refused < 60 * len(records) - 500


def test_an_unknown_record_is_told_what_is_known_and_what_it_has():
    with pytest.raises(
        Malformed,
        match=r"known key \(.*messages.*turns.*text\), only under: 'aaaaaaaaaaaaaaaaaaaa', 'b', 'c', 'd', 'e'$",
    ):
        parse_record({**dict.fromkeys("gfedcb"), "a" * 99: 1})
