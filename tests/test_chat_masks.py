"""Which tokens of a rendered conversation are answers: known answers for every trap a template can have."""

from __future__ import annotations

from datetime import date

import pytest
from template_cases import CHATML_TOKENS, SYSTEM, TEMPLATES, TINY, TWO_TURNS, WEATHER, Case, said, tokenizer_of
from tiny import EOS, make_tiny_tokenizer

from draftsmith.data_recipes.chat import ChatFormat, Documents, document, render_prompt
from draftsmith.data_recipes.conversation import Conversation, Malformed
from draftsmith.errors import DraftsmithError


def chat_format(tokenizer, case):
    stops = tokenizer.convert_tokens_to_ids(list(case.stops))
    return ChatFormat(tokenizer, template_kwargs=case.kwargs, stop_ids=stops)


def shown(tokenizer, document):
    """Return a document's text with [[ ]] around what is trained on."""
    at, text = 0, ""
    for start, end in document.spans:
        text += f"{tokenizer.decode(document.tokens[at:start])}[[{tokenizer.decode(document.tokens[start:end])}]]"
        at = end
    return text + tokenizer.decode(document.tokens[at:])


def documents(case, messages=None, tools=None):
    tokenizer = tokenizer_of(case)
    conversation = Conversation(messages=messages or case.messages, tools=tools or case.tools)
    return tokenizer, chat_format(tokenizer, case).documents([conversation])[0]


@pytest.mark.parametrize("trap", TINY)
def test_known_answers(trap):
    case = TINY[trap]
    tokenizer, found = documents(case)
    assert isinstance(found, Documents), found
    assert [shown(tokenizer, row) for row in found.rows] == case.rows
    assert found.changes == case.changes


def test_every_tiny_template_has_a_case():
    refused = {"tools_as_text", "drops_tool_results", "empty_marks", "no_prompt", "no_system", "looks_into_texts"}
    assert {path.stem for path in TEMPLATES.glob("*.jinja")} == refused | {c.file[:-6] for c in TINY.values()}


SPELLED = [TWO_TURNS[0], {"role": "assistant", "content": "It ends with <|im_end|>"}]
LACKS = "the generation prompt opens a thought that the answer lacks"
REFUSED = [
    ("opens_thought.jinja", TWO_TURNS, LACKS),
    ("opens_thought.jinja", said(content="<think>\n\n</think>\n\nA1"), LACKS),
    ("chatml.jinja", WEATHER, "the chat template drops tool calls"),
    ("drops_tool_results.jinja", WEATHER, "the chat template drops tool results"),
    ("tools_as_text.jinja", WEATHER, r"the chat template refuses it: can only concatenate str \(not \"dict\"\)"),
    ("no_system.jinja", [SYSTEM, *TWO_TURNS], "the chat template refuses it: System role not supported"),
    ("chatml.jinja", SPELLED, r"text that spells the special token <\|im_end\|>"),
    ("chatml.jinja", TWO_TURNS[:1], "no token of it is an answer"),
    (
        "empty_thought.jinja",
        said(content="a</think>b</think>c"),
        "the chat template drops or rewrites the answer's text",
    ),
]


@pytest.mark.parametrize(("file", "messages", "reason"), REFUSED)
def test_refused_conversations_say_why(file, messages, reason):
    _, found = documents(Case(file, []), messages)
    assert isinstance(found, Malformed)
    with pytest.raises(Malformed, match=reason):
        raise found


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ("empty_marks.jinja", "no token of it is an answer"),
        ("no_prompt.jinja", "the answers begin with the first token"),
    ],
)
def test_a_template_without_a_sound_mask_is_an_error(file, reason):
    with pytest.raises(DraftsmithError, match=f"gives no loss mask, not even for .*: {reason}") as caught:
        documents(Case(file, []))
    assert "\n" not in str(caught.value)


def test_no_template_a_broken_one_and_a_slow_tokenizer_are_errors():
    with pytest.raises(DraftsmithError, match="has no chat template"):
        ChatFormat(make_tiny_tokenizer(chat_template=False))
    broken = make_tiny_tokenizer()
    broken.chat_template = "{% for m in messages %}"
    with pytest.raises(DraftsmithError, match="can't be read: Unexpected end of template"):
        ChatFormat(broken)
    slow = type("Slow", (), {"is_fast": False, "name_or_path": "slow", "__len__": lambda self: 3})()
    with pytest.raises(DraftsmithError, match="the tokenizer of slow has no fast implementation"):
        ChatFormat(slow)


def test_one_bad_conversation_leaves_the_others():
    tokenizer = tokenizer_of(Case("chatml.jinja", []))
    conversations = [Conversation(messages=m) for m in (TWO_TURNS, SPELLED, said(content="Yes"))]
    first, bad, last = ChatFormat(tokenizer).documents(conversations)
    assert isinstance(bad, Malformed)
    assert [len(found.rows[0].spans) for found in (first, last)] == [2, 1]


def test_a_bad_row_of_several_takes_no_other_conversations_rows(monkeypatch):
    case = TINY["old thoughts taken out"]
    tokenizer = tokenizer_of(case)
    conversations = [Conversation(messages=m) for m in (case.messages, TWO_TURNS, said(content="Yes"))]
    chat = chat_format(tokenizer, case)
    two_rows, *others = chat.documents(conversations)
    assert len(two_rows.rows) == 2
    encode = chat._encoder.documents
    monkeypatch.setattr(chat._encoder, "documents", lambda rows: [Malformed("bad"), *encode(rows)[1:]])
    bad, *left = chat.documents(conversations)
    assert str(bad) == "bad"
    assert left == others


def test_templates_are_told_one_date():
    tokenizer = tokenizer_of(Case("chatml.jinja", []))
    plain = tokenizer.chat_template
    tokenizer.chat_template = "\n  {% if true %}\n {{ strftime_now('%d %b %Y') }}{% endif %}\n " + plain
    first, second = (ChatFormat(tokenizer, today=date(year, 2, 3)) for year in (2001, 2002))
    asked = TWO_TURNS[:1]
    told = [tokenizer.decode(chat.prompt(asked)) for chat in (first, second, first)]
    rest = render_prompt(tokenizer, asked)
    assert [text[:13] for text in told] == ["\n 03 Feb 2001", "\n 03 Feb 2002", "\n 03 Feb 2001"]
    assert tokenizer.decode(rest) == told[0].replace("03 Feb 2001", date.today().strftime("%d %b %Y"))
    assert ChatFormat(tokenizer).prompt(asked) == rest
    [row] = first.documents([Conversation(messages=TWO_TURNS)])[0].rows
    assert row.tokens[: row.spans[0][0]] == first.prompt(asked)


@pytest.mark.parametrize("file", ["wide_header.jinja", "chatml.jinja"])
def test_a_token_across_the_start_of_an_answer(file):
    """The header's line breaks and the answer's are one token in the row, and two where serving stops between them."""
    case = Case(file, [], specials=("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", *CHATML_TOKENS))
    if file == "wide_header.jinja":
        case = Case(file, [], specials=case.specials, stops=("<|eot_id|>",))
    tokenizer = tokenizer_of(case)
    tokenizer.add_tokens(["\n\n\n", "\n\n"])
    messages = [*said(content="\nA1"), *TWO_TURNS[2:]]
    found = chat_format(tokenizer, case).documents([Conversation(messages=messages)])[0]
    prompts = [render_prompt(tokenizer, messages[:i]) for i in (1, 3)]
    shared, apart = found.rows
    assert [row.tokens[: row.spans[0][0]] for row in (shared, apart)] == [prompts[1], prompts[0]]
    assert [len(row.spans) for row in (shared, apart)] == [1, 1]
    end = "<|eot_id|>" if case.stops else "<|im_end|>"
    assert tokenizer.decode(apart.tokens[apart.spans[0][0] :]) == f"\nA1{end}"


def test_end_tokens_that_take_in_the_space_behind_them():
    from tokenizers import AddedToken

    case = TINY["one more end token behind the answer's"]
    tokenizer = make_tiny_tokenizer(chat_template=False)
    tokenizer.add_tokens(
        [AddedToken(t, rstrip=True, special=True) for t in ("<|user|>", "<|assistant|>", "<|end|>")],
        special_tokens=True,
    )
    tokenizer.eos_token = "<|endoftext|>"
    tokenizer.chat_template = (TEMPLATES / case.file).read_text()
    found = chat_format(tokenizer, case).documents([Conversation(messages=[*said(content="\n A1"), *TWO_TURNS[2:]])])[0]
    assert [shown(tokenizer, row) for row in found.rows] == [
        "<|user|>Q1<|end|><|assistant|>[[A1<|end|>]]<|user|>Q2<|end|><|assistant|>[[A2<|end|>]]"
    ]


@pytest.mark.parametrize(
    "trap", ["no generation prompt, answers led by a space", "no special token at all", "tool calls"]
)
def test_offsets_without_leading_space(trap):
    from tokenizers.processors import ByteLevel

    case = TINY[trap]
    tokenizer = tokenizer_of(case)
    before = tokenizer.backend_tokenizer.post_processor
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=True)
    try:
        conversation = Conversation(messages=case.messages, tools=case.tools)
        found = chat_format(tokenizer, case).documents([conversation])[0]
    finally:
        tokenizer.backend_tokenizer.post_processor = before
    assert [shown(tokenizer, row) for row in found.rows] == case.rows


def space_tokenizer():
    """Return a tokenizer that writes a space before each word, the first word of a text too, as SentencePiece does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Metaspace(prepend_scheme="always")
    alphabet = [chr(code) for code in range(32, 127)] + ["\n"]
    trainer = trainers.BpeTrainer(
        vocab_size=120, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["yes no yes no"] * 9, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>")


def test_answers_that_begin_within_a_word_of_the_row():
    """ "ASSISTANT: yes" has the token "▁yes"; serving ends the prompt with "▁", so that the answer is "yes"."""
    tokenizer = space_tokenizer()
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'USER: ' if m.role == 'user' else 'ASSISTANT: ' }}{{ m.content }}"
        "{{ ' ' if m.role == 'user' else eos_token }}{% endfor %}{% if add_generation_prompt %}ASSISTANT: {% endif %}"
    )
    messages = [{"role": "user", "content": "no"}, {"role": "assistant", "content": "yes"}]
    row = ChatFormat(tokenizer).documents([Conversation(messages=messages)])[0].rows[0]
    start = row.spans[0][0]
    assert row.tokens[:start] == render_prompt(tokenizer, messages[:1])
    assert "".join(tokenizer.convert_ids_to_tokens(row.tokens[start:])) == "yes</s>"
    assert row.spans == [(start, len(row.tokens))]


def test_prompt_ends_where_the_assistant_speaks():
    tokenizer = make_tiny_tokenizer()
    messages = [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi"}]
    text = tokenizer.decode(render_prompt(tokenizer, messages))
    assert text == f"<|im_start|>system\nBe brief{EOS}\n<|im_start|>user\nHi{EOS}\n<|im_start|>assistant\n"


def test_mask_on_eight_tokens():
    """S S S R0 R1 R2 EOS: the answer is supervised, its end-of-turn token included."""
    tokens, answer = document([10, 11, 12], [20, 21, 22, 2])
    assert tokens == [10, 11, 12, 20, 21, 22, 2]
    assert [int(a) for a in answer] == [0, 0, 0, 1, 1, 1, 1]


def test_a_template_that_refuses_says_why():
    strict = make_tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('no system') }}"
    with pytest.raises(Malformed, match="the chat template refuses it: no system"):
        render_prompt(strict, [{"role": "user", "content": "Hi"}])


def test_prompts_are_those_of_serving():
    case = TINY["serving closes the thought, the record has none"]
    tokenizer = tokenizer_of(case)
    chat = chat_format(tokenizer, case)
    expected = tokenizer.apply_chat_template(
        TWO_TURNS[:1], add_generation_prompt=True, return_dict=False, enable_thinking=False
    )
    assert chat.prompt(TWO_TURNS[:1]) == expected
    tokenised = Conversation(tokens=[1, 2], mask=[False, True])
    prompts = chat.prompts([Conversation(messages=TWO_TURNS), Conversation(messages=SPELLED[:1]), tokenised])
    assert prompts == [expected, expected, []]
    spelled = chat.prompts([Conversation(messages=[{"role": "user", "content": "<|im_start|>"}])])[0]
    assert str(spelled) == "text that spells the special token <|im_start|>"


def test_tokenised_records():
    chat = ChatFormat(make_tiny_tokenizer())
    records = {
        (5, 6, 7, 8, 9): [False, True, True, False, True],
        (5, 6): [True, True],
        (5, 7): [False, False],
        (5, 320): [False, True],
        (5, 8): [False],
    }
    found = chat.documents([Conversation(tokens=list(tokens), mask=mask) for tokens, mask in records.items()])
    assert found[0].rows[0].spans == [(1, 3), (4, 5)]
    assert [str(reason) for reason in found[1:]] == [
        "the answers begin with the first token, before any prompt",
        "no token of it is an answer",
        "token 320 is outside the tokenizer's 320",
        "tokens without a mask of the same length",
    ]
    assert str(chat.documents([Conversation(text="Once")])[0]) == "plain text, which the chat template has no place for"


def test_plain_text_is_a_choice():
    tokenizer = make_tiny_tokenizer(chat_template=False)
    chat = ChatFormat(tokenizer, plain_text=True)
    talk, text, tools = chat.documents(
        [Conversation(messages=TWO_TURNS), Conversation(text="a story"), Conversation(messages=WEATHER)]
    )
    assert [shown(tokenizer, row) for row in talk.rows] == ["Q1\n\n[[A1]]\n\nQ2\n\n[[A2<|im_end|>]]"]
    assert text.rows[0].spans == [(1, len(text.rows[0].tokens))]
    assert tokenizer.decode(text.rows[0].tokens) == "a story"
    assert str(tools) == "tools, for which plain text has no form"
    assert tokenizer.decode(chat.prompt([SYSTEM, *TWO_TURNS[:1]])) == "S\n\nQ1\n\n"
    assert chat.prompts([Conversation(messages=TWO_TURNS)])[0] == talk.rows[0].tokens[: talk.rows[0].spans[0][0]]


def test_plain_text_begins_as_the_tokenizer_begins_it():
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tiny_tokenizer(chat_template=False)
    begin = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", begin)]
    )
    chat = ChatFormat(tokenizer, plain_text=True)
    talk, text = chat.documents([Conversation(messages=TWO_TURNS), Conversation(text="a story")])
    assert [shown(tokenizer, row) for row in talk.rows] == ["<|im_start|>Q1\n\n[[A1]]\n\nQ2\n\n[[A2<|im_end|>]]"]
    assert text.rows[0].tokens == tokenizer("a story").input_ids
    assert text.rows[0].spans == [(1, len(text.rows[0].tokens))]
    assert chat.prompt(TWO_TURNS[:1])[0] == begin
    assert str(ChatFormat(make_tiny_tokenizer(), plain_text=True).documents([Conversation(text="a")])[0]) == (
        "a text of one token"
    )
