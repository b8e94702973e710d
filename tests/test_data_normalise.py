"""The rules of normalising, each against a conversation written by hand; and every record of real files."""

from __future__ import annotations

import collections
import datetime
import gzip
import json
import random

import pytest

from draftsmith.data_recipes import normalise as rules
from draftsmith.data_recipes.conversation import Conversation, Malformed
from draftsmith.data_recipes.normalise import NormaliseSettings, normalise
from draftsmith.data_recipes.shapes import parse_record

REFUSE, TEXT = NormaliseSettings(), NormaliseSettings(media="text")
ROLES = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}


def chat(*turns):
    """Messages of "u:Hi"; "c:" is the assistant's call of a tool."""
    read = []
    for turn in turns:
        role, _, text = turn.partition(":")
        read.append(
            {"role": ROLES.get(role, "assistant"), "content": text, **({"tool_calls": [CALL]} if role == "c" else {})}
        )
    return read


def reasoned(reasoning, text):
    return {"role": "assistant", "content": text, "reasoning_content": reasoning}


ORDER = {
    "nothing to do": (chat("s:S", "u:Hi", "a:Yo", "u:A", "a:B"), chat("s:S", "u:Hi", "a:Yo", "u:A", "a:B"), ()),
    "one turn": (chat("u:Hi"), chat("u:Hi"), ()),
    "systems merged": (
        chat("s:S", "s: ", "s:T", "u:Hi"),
        chat("s:S\n\nT", "u:Hi"),
        (rules.SYSTEM_EMPTY, rules.SYSTEM_MERGED),
    ),
    "empty system": (chat("s: \n", "u:Hi", "a:Yo"), chat("u:Hi", "a:Yo"), (rules.SYSTEM_EMPTY,)),
    "empty system later": (chat("u:Hi", "s:", "a:Yo"), chat("u:Hi", "a:Yo"), (rules.SYSTEM_EMPTY,)),
    "later system": (chat("u:Hi", "a:Yo", "s:S", "u:A", "a:B"), chat("u:Hi", "a:Yo"), (rules.SYSTEM_LATER,)),
    "leading assistant": (chat("a:Hello", "u:Hi", "a:Yo"), chat("u:Hi", "a:Yo"), (rules.LEADING,)),
    "leading assistant, then system": (chat("a:Hello", "s:S", "u:Hi"), chat("s:S", "u:Hi"), (rules.LEADING,)),
    "leading call and result": (chat("c:", "t:3", "u:Hi"), chat("u:Hi"), (rules.LEADING,)),
    "empty answer": (chat("u:Hi", "a:", "u:A", "a:B"), chat("u:Hi"), (rules.EMPTY,)),
    "invisible answer": (chat("u:Hi", "a: \u200b\n", "u:A", "a:B"), chat("u:Hi"), (rules.EMPTY,)),
    "empty user turn": (chat("u:Hi", "a:Yo", "u: ", "a:B"), chat("u:Hi", "a:Yo"), (rules.EMPTY,)),
    "reasoning alone is empty": ([*chat("u:Hi"), reasoned("hm", "")], chat("u:Hi"), (rules.EMPTY,)),
    "users merged": (chat("u:Hi", "u:there", "u:!", "a:Yo"), chat("u:Hi\n\nthere\n\n!", "a:Yo"), (rules.MERGED,)),
    "answers merged": (chat("u:Hi", "a:Yo", "a:Hey"), chat("u:Hi", "a:Yo\n\nHey"), (rules.MERGED,)),
    "answers merged, reasoning too": (
        [*chat("u:Hi"), reasoned("hm", "Yo"), reasoned("oh", "Hey")],
        [*chat("u:Hi"), reasoned("hm\n\noh", "Yo\n\nHey")],
        (rules.MERGED,),
    ),
    "calls stay apart": (
        chat("u:Hi", "a:Wait", "c:", "c:", "t:3", "t:4", "a:7"),
        chat("u:Hi", "a:Wait", "c:", "c:", "t:3", "t:4", "a:7"),
        (),
    ),
    "tool without call": (chat("u:Hi", "a:Yo", "t:3", "a:B"), chat("u:Hi", "a:Yo"), (rules.NO_CALL,)),
    "tool after the user": (
        chat("u:Hi", "c:", "t:3", "u:A", "t:4"),
        chat("u:Hi", "c:", "t:3", "u:A"),
        (rules.NO_CALL,),
    ),
    "control characters": (
        chat("u:a\x00b\tc\r\nd\x1b", "a:1\x0b2\x0c3\ufeff\x7f"),
        chat("u:ab\tc\r\nd", "a:1\n2\n3"),
        (rules.CONTROL,),
    ),
    "control characters alone": (chat("u:Hi", "a:\x00", "u:A"), chat("u:Hi"), (rules.CONTROL, rules.EMPTY)),
    "joined emoji, Persian": (chat("u:🤦\u200d♂️ می\u200cروم"), chat("u:🤦\u200d♂️ می\u200cروم"), ()),
}


@pytest.mark.parametrize("rule", ORDER)
def test_rules(rule):
    messages, expected, changes = ORDER[rule]
    before = json.dumps(messages)
    assert normalise(Conversation(messages=messages), REFUSE) == Conversation(messages=expected, changes=changes)
    assert json.dumps(messages) == before, "what is given is left as it is"


def test_three_hundred_turns():
    turns = chat(*(f"{'ua'[i % 2]}:{i}" for i in range(300)))
    assert normalise(Conversation(messages=turns), REFUSE).messages == turns


def test_the_changes_of_parsing_stay():
    known = Conversation(messages=chat("u:Hi", "u:A"), changes=("other branches of the tree left aside",))
    assert normalise(known, REFUSE).changes == ("other branches of the tree left aside", rules.MERGED)


MALFORMED = {
    "no user turn": chat("s:S", "a:Yo"),
    "the first user turn is empty": chat("a:Yo", "u: \n", "a:Yo", "u:Hi"),
    "text that is not valid Unicode (half of a surrogate pair)": chat("u:Hi", "a:\ud83d"),
    "images, audio or video": [{"role": "user", "content": "Who?", "media": True}],
}


@pytest.mark.parametrize("reason", MALFORMED)
def test_refused(reason):
    with pytest.raises(Malformed) as caught:
        normalise(Conversation(messages=MALFORMED[reason]), REFUSE)
    assert str(caught.value) == reason


def test_invalid_unicode_is_found_in_calls_and_tools():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": ["\udc00"]}}}
    called = [*chat("u:Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    for conversation in (
        Conversation(messages=called),
        Conversation(messages=chat("u:Hi"), tools=[{"name": "\ud800"}]),
    ):
        with pytest.raises(Malformed, match="not valid Unicode"):
            normalise(conversation, REFUSE)


def test_values_that_json_has_not_are_refused():
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": b"x"}}}
    called = [*chat("u:Hi"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(Malformed, match=r"^tool calls with values that JSON doesn't have$"):
        normalise(Conversation(messages=called), REFUSE)
    tools = [{"name": "add", "default": datetime.date(2001, 2, 3)}]
    with pytest.raises(Malformed, match=r"^tools with values that JSON doesn't have$"):
        normalise(Conversation(messages=chat("u:Hi"), tools=tools), REFUSE)


def test_media_may_be_left_out():
    messages = [{"role": "user", "content": "<image>\nWho?", "media": True}, *chat("a:Ann", "u:<image>", "a:Bob")]
    expected = Conversation(messages=chat("u:Who?", "a:Ann"), changes=(rules.MEDIA_REMOVED, rules.EMPTY))
    assert normalise(Conversation(messages=messages), TEXT) == expected
    about = Conversation(messages=chat("u:What does <image> do?"))
    assert normalise(about, TEXT) == about


def test_text_and_tokens():
    tokens = Conversation(tokens=[1, 2], mask=[False, True])
    assert normalise(tokens, REFUSE) == tokens
    assert normalise(Conversation(text="a\x00<p>b</p>"), REFUSE) == Conversation(
        text="a<p>b</p>", changes=(rules.CONTROL,)
    )
    with pytest.raises(Malformed, match="an empty text"):
        normalise(Conversation(text=" \u200b"), REFUSE)


PAGE_BLOCK = (
    '<pre><div class="bg-black"><div class="flex"><span>python</span><button class="x"><svg stroke="a">'
    '<path d="M1"></path></svg>Copy code</button></div><div class="p-4"><code class="hljs language-python">'
    '<span class="k">if</span> a &lt; b:'
    "\n\n\n    f()\n</code></div></div></pre>"
)
ANSWERS = {  # what the user asked, the answer of the page, its text
    "page element": ("Hi", '<div class="markdown prose w-full"><p>Yo &amp; hey</p></div>', "Yo & hey"),
    "page element about HTML": (
        "Explain <b> in HTML",
        '<div class="markdown prose"><p>Use <code>&lt;b&gt;</code>:</p></div>',
        "Use `<b>`:",
    ),
    "code of a page": (
        "Code",
        f'<div class="markdown prose"><p>So:</p>{PAGE_BLOCK}<p>Done</p></div>',
        "So:\n\n```python\nif a < b:\n\n\n    f()\n```\n\nDone",
    ),
    "counter": ("Hi", '<div class="markdown"><p>Yo</p></div><div class="flex"><span>1 / 2</span></div>', "Yo"),
    "paragraphs": (
        "Hi",
        "<p>One <strong>two</strong> <em>three</em></p>\n<p>four<br>five</p>",
        "One **two** *three*\n\nfour\nfive",
    ),
    "lists": (
        "Hi",
        '<p>So:</p><ol start="3"><li><p>a</p><ul><li>b</li><li>c</li></ul></li><li>d</li></ol>',
        "So:\n\n3. a\n   - b\n   - c\n4. d",
    ),
    "table": (
        "Hi",
        "<table><thead><tr><th>x</th><th>y</th></tr></thead><tbody><tr><td>1</td><td>2</td></tr></tbody></table>",
        "| x | y |\n|---|---|\n| 1 | 2 |",
    ),
    "heading, quote, link": (
        "Hi",
        '<h2>T</h2><blockquote><p>q</p></blockquote><p><a href="https://a.b/" rel="x">l</a></p><hr><pre>raw</pre>',
        "## T\n\n> q\n\n[l](https://a.b/)\n\n---\n\n```\nraw\n```",
    ),
    "escaped": ("Hi", "I&#39;m &lt;b&gt; &amp; don&#x27;t", "I'm <b> & don't"),
    "escaped quotation": ("Hi", "Say &quot;yo&quot;!\n```\n&quot;x&quot;\n```", 'Say "yo"!\n```\n&quot;x&quot;\n```'),
    "button": ("Hi", "So:\n\npython\nCopy code\nimport os", "So:\n\npython\nimport os"),
    "button in a fence": ("Hi", "```bash\nCopy code\nls\n```", "```bash\nls\n```"),
    "button glued": ("Hi", "pythonCopy code\nimport os", "python\nimport os"),
}


@pytest.mark.parametrize("case", ANSWERS)
def test_what_a_page_has_left_is_removed(case):
    asked, page, text = ANSWERS[case]
    read = normalise(Conversation(messages=chat(f"u:{asked}", f"a:{page}")), REFUSE)
    assert read == Conversation(messages=chat(f"u:{asked}", f"a:{text}"), changes=(rules.PAGE,))
    assert normalise(read, REFUSE) == read


SUBJECT = {
    "asked for HTML": ("Give me HTML of a greeting", "<p>Yo</p>"),
    "asked with tags": ("Translate <b>x</b>", "<p>Yo</p>"),
    "in a fence": ("Hi", "```html\n<p>Yo</p>\n```"),
    "beside text": ("Hi", "<p>Yo</p> is it"),
    "text before": ("Hi", "So <p>Yo</p>"),
    "classes": ("Hi", '<p class="lead">Yo</p>'),
    "unknown element": ("Hi", "<p>Yo <custom>x</custom></p>"),
    "not balanced": ("Hi", "<p>Yo <b>x</p></b>"),
    "not closed": ("Hi", "<p>Yo"),
    "tags that never close": ("Hi", "<p>" + "<a " * 50_000),
    "a tag without an end": ("Hi", "<p " + "a " * 50_000 + "></p>"),
    "too deep": ("Hi", "<p>" * 50_000 + "</p>" * 50_000),
    "XML": ("Hi", "<p>Yo</p><![CDATA[x]]>"),
    "PHP": ("Hi", "<p>Yo</p><?php f() ?>"),
    "comment": ("Hi", "<p>Yo</p><!-- x -->"),
    "document": ("Hi", "<!DOCTYPE html><p>Yo</p>"),
    "parser's own trouble": ("Hi", "<p>a<![x</p>"),
    "escaped tags in elements": ("Hi", "<p>&lt;p&gt;x&lt;/p&gt;</p>"),
    "escapes asked for": ("How do I escape an apostrophe?", "I&#39;m"),
    "escapes beside tags": ("Hi", "I&#39;m <b>"),
    "escapes twice": ("Hi", "I&amp;#39;m"),
    "one escape": ("Hi", "a &amp; b"),
    "generic types": ("Hi", "<T> is a type"),
    "a fraction": ("Hi", "The result:\n1 / 2"),
    "button's label": ("Hi", "Press\nCopy code\nthen"),
}


@pytest.mark.parametrize("case", SUBJECT)
def test_markup_that_is_the_subject_stays(case):
    conversation = Conversation(messages=chat(*(f"{r}:{t}" for r, t in zip("ua", SUBJECT[case], strict=True))))
    assert normalise(conversation, REFUSE) == conversation


def test_a_users_markup_stays_unless_it_is_the_pages_own():
    pasted = Conversation(messages=chat("u:<p>Hi</p>", "a:Yo"))
    assert normalise(pasted, REFUSE) == pasted
    scraped = Conversation(messages=chat('u:<div class="whitespace-pre-wrap">Hi</div>', "a:Yo"))
    assert normalise(scraped, REFUSE).messages == chat("u:Hi", "a:Yo")


def test_a_turn_that_was_markup_alone_is_empty():
    messages = chat("u:Hi", 'a:<div class="markdown prose"></div>', "u:A", "a:B")
    assert normalise(Conversation(messages=messages), REFUSE) == Conversation(
        messages=chat("u:Hi"), changes=(rules.PAGE, rules.EMPTY)
    )


PIECES = ["Hi", "", " ", "\u200b", "<p>Yo</p>", "I&#39;m", "&amp;#39;", "HTML", "python\nCopy code\n", "<b>", "a\x0bb"]
PIECES += ['<div class="markdown"><p>&lt;p&gt;</p></div>', "<p>I&amp;#39;m</p>", "```\n<p>x</p>\n```", "</p>", "1 / 2"]


def test_normalising_twice_changes_nothing_more():
    rng, kept = random.Random(0), 0
    for _ in range(3000):
        turns = [
            f"{rng.choice('suuaaact')}:{''.join(rng.choices(PIECES, k=rng.randint(1, 3)))}"
            for _ in range(rng.randint(1, 8))
        ]
        try:
            once = normalise(Conversation(messages=chat(*turns)), REFUSE)
        except Malformed:
            continue
        kept += 1
        assert normalise(once, REFUSE) == once, turns
        roles = [m["role"] for m in once.messages if "tool_calls" not in m]
        assert "system" not in roles[1:], turns
        assert all(m["content"].strip() or "tool_calls" in m for m in once.messages), turns
    assert kept > 500


FILES = {  # how many records are kept, and what was changed or why they were refused
    "conversations/axolotl_missing_turns_1.json": (1, {rules.EMPTY: 1}),
    "conversations/fastchat_dummy_conversation.json": (500, {}),
    "conversations/lf_v1_multimodal_24.jsonl": (0, {rules.MEDIA: 24}),
    "conversations/nvidia_modelopt_synthetic_1k.jsonl": (1000, {}),
    # Two answers hold a line "Copy code" behind "python".
    "conversations/oasst_en_100_tree.jsonl": (100, {"other branches of the tree left aside": 100, rules.PAGE: 2}),
    # Five answers are a lone zero-width space; three questions hold a 0x0b, a 0x02 and a byte-order mark.
    "conversations/sharegpt_gpt4_256.jsonl": (256, {rules.EMPTY: 5, rules.CONTROL: 3}),
    "conversations/sharegpt_gpt4_qwen3_regenerated_256.jsonl": (256, {rules.EMPTY: 36, rules.CONTROL: 1}),
    "conversations/sharegpt_long_50.json": (50, {}),
    # Record 47 is one answer; record 20's first user turn has no text, as record 84's second (where two follow).
    "conversations/sharegpt_messy_180.json": (
        178,
        {rules.LEADING: 74, rules.EMPTY: 3, "no user turn": 1, "the first user turn is empty": 1},
    ),
    "conversations/sharegpt_mnbvc_pairs_5.jsonl": (5, {}),
    "conversations/xtuner_bare_list_128.jsonl": (128, {}),
    "tools_reasoning/bespoke_reasoning_5.think.jsonl": (5, {}),
    "tools_reasoning/glaive_toolcall_en_300.json": (300, {}),
    "tools_reasoning/lf_reason_tool_use_50.think.jsonl": (50, {}),
    "prompts/gsm8k_train.jsonl": (7473, {}),
    "prompts/mbpp.jsonl": (974, {}),
    "prompts/oasst_en_100_prompts.jsonl": (100, {}),
    "prompts/octopack_oasst_commit.jsonl": (1178, {}),
    "prompts/self_instruct_seed_tasks.jsonl": (175, {}),
    "prompts/ultrachat_ultra_eval.json": (385, {}),
    "eval/HumanEval.jsonl.gz": (164, {}),
    "eval/edit_eval_code_194.jsonl": (194, {}),
    "eval/mt_bench.jsonl": (80, {"user turns without answers left aside after the first": 80}),
    "eval/spec_bench.jsonl": (480, {"user turns without answers left aside after the first": 80}),
    "eval/vicuna_bench.jsonl": (80, {}),
    **{f"eval/eagle_{name}.jsonl": (80, {}) for name in ("alpaca", "gsm8k", "humaneval", "qa", "sum")},
}


def records(path):
    raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    if path.name.endswith(".json") and raw.lstrip()[:1] == b"[":
        return json.loads(raw)
    if path.name == "axolotl_missing_turns_1.json":
        return [json.loads(raw)]
    return [json.loads(line) for line in raw.split(b"\n") if line.strip()]


@pytest.mark.parametrize("name", FILES)
def test_every_record_of_real_files(test_data, name):
    kept, counts = 0, collections.Counter()
    for record in records(test_data / name):
        try:
            once = normalise(parse_record(record), REFUSE)
        except Malformed as reason:
            counts[str(reason)] += 1
            continue
        kept += 1
        counts.update(once.changes)
        assert normalise(once, REFUSE) == once
    assert (kept, dict(counts)) == FILES[name]


def test_images_of_real_files_may_be_left_out(test_data):
    path = test_data / "conversations" / "lf_v1_multimodal_24.jsonl"
    read = [normalise(parse_record(record), TEXT) for record in records(path)]
    assert [c.changes for c in read] == [(rules.MEDIA_REMOVED,)] * 24
    assert read[0].messages == chat(
        "u:Who are they?",
        "a:They're Kane and Gretzka from Bayern Munich.",
        "u:What are they doing?",
        "a:They are celebrating on the soccer field.",
    )


def test_tool_calls_of_real_files(test_data):
    read = [parse_record(r) for r in records(test_data / "tools_reasoning" / "glaive_toolcall_en_300.json")]
    called = [m for c in read for m in c.messages if "tool_calls" in m]
    assert len(called) == sum(m["role"] == "tool" for c in read for m in c.messages) == 211
    assert called[0]["tool_calls"] == [
        {
            "type": "function",
            "function": {"name": "search_recipes", "arguments": {"ingredients": ["chicken", "bell peppers", "rice"]}},
        }
    ]
    assert all(isinstance(call["function"]["arguments"], dict) for m in called for call in m["tool_calls"])
