"""The templates of published models, and that conversations read by their shape give what turn by turn gives."""

from __future__ import annotations

import json

import pytest
from template_cases import SYSTEM, TEMPLATES, TINY, TWO_TURNS, WEATHER, WEATHER_TOOL, Case, said, tokenizer_of
from template_cases_real import REAL

from draftsmith.data_recipes.chat import ChatFormat
from draftsmith.data_recipes.chat_shapes import ShapeReader
from draftsmith.data_recipes.chat_template import Template
from draftsmith.data_recipes.chat_turns import TurnReader, chain
from draftsmith.data_recipes.conversation import Conversation, Malformed

EDGES = [
    {"role": "user", "content": "  lead and trail \n"},
    {"role": "assistant", "content": "\n\n two\n\nparagraphs \n"},
    {"role": "user", "content": "Zürich 日本 🙂"},
    {"role": "assistant", "content": "🙂 ja\t{% raw %} \\n <b>"},
    {"role": "user", "content": "continue"},
    {"role": "assistant", "content": "{}"},
]
MADE = [TWO_TURNS, EDGES, [SYSTEM, *EDGES[:4]]]


@pytest.fixture(params=REAL, ids=lambda case: case.file.removesuffix(".jinja"))
def real(request, test_data):
    return request.param, tokenizer_of(request.param, test_data / "chat_templates")


def chat_format(case, tokenizer):
    return ChatFormat(tokenizer, stop_ids=tokenizer.convert_tokens_to_ids(list(case.stops)))


def answers(tokenizer, row):
    return [tokenizer.decode(row.tokens[start:end]) for start, end in row.spans]


def readers(case, tokenizer):
    template = Template(tokenizer, case.kwargs)
    specials = [token.content for token in tokenizer.added_tokens_decoder.values()]
    turns = TurnReader(template, [tokenizer.eos_token, *case.stops], specials)
    return turns, ShapeReader(template, turns)


def test_every_template_of_the_test_data_has_a_case(test_data):
    assert {path.name for path in (test_data / "chat_templates").glob("*.jinja")} == {case.file for case in REAL}


def test_answers_of_published_templates(real):
    case, tokenizer = real
    found = chat_format(case, tokenizer).documents([Conversation(messages=TWO_TURNS)])[0]
    assert [answers(tokenizer, row) for row in found.rows] == case.rows
    assert found.changes == ()


def test_prompts_of_published_templates_are_those_of_serving(real):
    """Before each answer stand the very tokens that serving gives the model there, and the answer is all of it."""
    case, tokenizer = real
    for messages, found in zip(
        MADE, chat_format(case, tokenizer).documents([Conversation(messages=m) for m in MADE]), strict=True
    ):
        prompts = {
            tuple(tokenizer.apply_chat_template(messages[:i], add_generation_prompt=True, return_dict=False)): m
            for i, m in enumerate(messages)
            if m["role"] == "assistant"
        }
        seen = [
            (prompts[tuple(row.tokens[:start])]["content"], text)
            for row in found.rows
            for (start, _), text in zip(row.spans, answers(tokenizer, row), strict=True)
        ]
        assert len(seen) == len({content for content, _ in seen}) == len(prompts)
        assert all(content.strip() in text for content, text in seen)


def test_tool_calls_of_published_templates(real):
    case, tokenizer = real
    found = chat_format(case, tokenizer).documents([Conversation(messages=WEATHER)])[0]
    if not case.called:
        assert isinstance(found, Malformed)
        assert case.call in str(found)
        return
    texts = [text for row in found.rows for text in answers(tokenizer, row)]
    assert len(texts) == 2
    assert "weather" in texts[0]
    assert case.call in texts[0]
    assert "A1" in texts[1]


def test_text_beside_a_call_that_the_template_drops(test_data):
    case = next(case for case in REAL if case.file == "trl__llama3_1.jinja")
    tokenizer = tokenizer_of(case, test_data / "chat_templates")
    messages = [WEATHER[0], {**WEATHER[1], "content": "Let me see."}, *WEATHER[2:]]
    found = chat_format(case, tokenizer).documents([Conversation(messages=messages, tools=WEATHER_TOOL)])[0]
    assert found.changes == ("text beside tool calls is not rendered by the template",)


def test_marks_are_those_of_transformers(test_data):
    """But for the line break behind the end token, which the template marks and no serving produces."""
    case = next(case for case in REAL if case.file == "trl__qwen3_training.jinja")
    tokenizer = tokenizer_of(case, test_data / "chat_templates")
    expected = tokenizer.apply_chat_template(TWO_TURNS, return_dict=True, return_assistant_tokens_mask=True)
    row = chat_format(case, tokenizer).documents([Conversation(messages=TWO_TURNS)])[0].rows[0]
    learnt = {at for start, end in row.spans for at in range(start, end)}
    marked = {at for at, mark in enumerate(expected["assistant_masks"]) if mark}
    assert row.tokens == expected["input_ids"][: len(row.tokens)]
    assert tokenizer.decode([expected["input_ids"][at] for at in sorted(marked - learnt)]) == "\n\n"
    assert learnt <= marked


def same_both_ways(case, tokenizer, conversations):
    """Return how many conversations were read by their shape, each with what turn by turn gives."""
    turns, shapes = readers(case, tokenizer)
    read = 0
    for messages in conversations:
        fast = shapes.read(messages)
        if fast is not None:
            found, changes = turns.read(messages, None)
            assert fast == (chain(found), changes)
            read += 1
    return read


@pytest.mark.parametrize("trap", TINY)
def test_shapes_give_what_turns_give(trap):
    case = TINY[trap]
    read = same_both_ways(case, tokenizer_of(case), [TWO_TURNS, EDGES, said(content="A1"), *[case.messages]])
    opens = case.file in {"opens_thought.jinja", "indented.jinja", "plain_words.jinja"} or "thinking" in case.kwargs
    assert read == 0 if opens else read >= 2


def test_shapes_give_what_turns_give_on_real_conversations(real, test_data):
    case, tokenizer = real
    roles = {"human": "user", "gpt": "assistant", "system": "system"}
    conversations = []
    with open(test_data / "conversations" / "sharegpt_gpt4_256.jsonl", encoding="utf-8") as lines:
        for line, _ in zip(lines, range(24), strict=False):
            turns = json.loads(line)["conversations"][:8]
            conversations.append([{"role": roles[t["from"]], "content": t["value"]} for t in turns])
    talks = [m for m in conversations if m[0]["role"] == "user" and m[-1]["role"] == "assistant"]
    assert len(talks) >= 15
    read = same_both_ways(case, tokenizer, [*talks, *([SYSTEM, *m] for m in talks[:5])])
    turn_by_turn = {"community__", "llamacpp__Qwen-QwQ", "llamacpp__deepseek-ai-DeepSeek-R1"}
    assert read == 0 if any(case.file.startswith(name) for name in turn_by_turn) else read >= 0.6 * len(talks)


def test_a_template_that_looks_into_texts():
    """The second prompt of three depends on what the user says; neither C_3 nor P_3 shows it."""
    case = Case("looks_into_texts.jinja", [])
    tokenizer = tokenizer_of(case)
    turns, shapes = readers(case, tokenizer)
    messages = [*TWO_TURNS[:2], {"role": "user", "content": "/quick: Q2"}, *TWO_TURNS[3:], *said(content="A3")]
    assert shapes.read(messages) is None
    assert shapes.read(TWO_TURNS) is not None
    rows = chain(turns.read(messages, None)[0])
    assert [len(row.answers) for row in rows] == [2, 1]
    assert rows[0].text.endswith("<think>\n\n</think>\n\nA2<|im_end|>")


@pytest.mark.parametrize(
    "change",
    [
        {"content": " "},
        {"content": "<think>R</think>A1"},
        {"content": "A1", "reasoning_content": "R"},
        {"content": "A1", "tool_calls": WEATHER[1]["tool_calls"]},
        {"role": "tool"},
    ],
)
def test_what_is_read_turn_by_turn(change):
    case = Case("chatml.jinja", [])
    _, shapes = readers(case, tokenizer_of(case))
    assert shapes.read(TWO_TURNS) is not None
    assert shapes.read([TWO_TURNS[0], {**TWO_TURNS[1], **change}]) is None


def test_long_conversations_are_read_turn_by_turn():
    case = Case("chatml.jinja", [])
    _, shapes = readers(case, tokenizer_of(case))
    assert shapes.read(TWO_TURNS * 12) is not None
    assert shapes.read(TWO_TURNS * 13) is None


def test_a_last_prompt_that_depends_on_more_than_texts():
    case = Case("chatml.jinja", [])
    tokenizer = tokenizer_of(case)
    source = (TEMPLATES / case.file).read_text()
    changed = source.replace("'<|im_start|>assistant\\n'", "'<|im_start|>assistant\\n' + ('!' if n > 9 else '')")
    tokenizer.chat_template = "{%- set n = messages[-1].content | length -%}" + changed
    turns, shapes = readers(case, tokenizer)
    long = [*TWO_TURNS[:2], {"role": "user", "content": "a longer question"}, TWO_TURNS[3]]
    assert shapes.read(TWO_TURNS) is not None
    assert shapes.read(long) is None
    row = chain(turns.read(long, None)[0])[0]
    assert [row.text[answer.start - 1] for answer in row.answers] == ["\n", "!"]


def test_equal_messages_where_a_template_compares_them():
    case = Case("chatml.jinja", [])
    tokenizer = tokenizer_of(case)
    source = (TEMPLATES / case.file).read_text()
    again = [*TWO_TURNS[:2], *TWO_TURNS[:2]]
    assert readers(case, tokenizer)[1].read(again) is not None
    tokenizer.chat_template = source.replace("m.content +", "('*' if m == messages[-1] else '') + m.content +")
    assert readers(case, tokenizer)[1].read(again) is None
