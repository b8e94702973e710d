"""Benchmarks: where they are found, what is read of their records, and the requests that they become."""

from __future__ import annotations

import gzip
import json
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny import EOS, make_tiny_tokenizer

from draftsmith.data_recipes import sources
from draftsmith.data_recipes.builtin import builtin_prompts
from draftsmith.data_recipes.chat import render_prompt
from draftsmith.data_recipes.records import SUFFIXES
from draftsmith.data_recipes.sources import HubDataset
from draftsmith.errors import DraftsmithError
from draftsmith.eval.benchmark_sources import BENCH_DIR, benchmark_names, registry
from draftsmith.eval.benchmarks import About, builtin_set, load_benchmark, prompt_set
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import decode, rows_needed
from draftsmith.eval.questions import Question, language_of
from draftsmith.files import sha256_json

USER, ASSISTANT = "<|im_start|>user\n{}<|im_end|>\n", "<|im_start|>assistant\n{}<|im_end|>\n"


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture(autouse=True)
def no_folder(monkeypatch):
    monkeypatch.delenv(BENCH_DIR, raising=False)


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr(sources, "_hub_answers", lambda: False)


def write(path: Path, records: list) -> str:
    """Write JSON lines; a text that starts with "!" is written as it stands behind it."""
    lines = [r[1:] if isinstance(r, str) and r.startswith("!") else json.dumps(r) for r in records]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return str(path)


def turns(path: str) -> list[list[str]]:
    return [question.turns for question in load_benchmark(path).questions]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_every_entry_can_be_had_somehow():
    names = {"builtin", "mt-bench", "humaneval", "gsm8k", "alpaca", "cnn-dm", "natural-questions"}
    assert names | {"spec-bench", "vicuna-bench", "code-edit"} == set(benchmark_names())
    for name, entry in registry().items():
        assert entry.about, name
        assert entry.licence, name
        assert entry.split or entry.files, name
        assert all(file.endswith(SUFFIXES) for file in entry.files), name
        assert bool(entry.files) == bool(entry.origin), name
        assert all(re.search(r"\{\w+\}", part) for part in entry.form.ask), name
        if entry.hub is not None:  # what the source says is what the hub is asked for
            read = HubDataset.parse(entry.hub.source, None, None)
            assert (read.name, read.config, read.split) == (entry.hub.dataset, entry.hub.config, entry.hub.split)
    files = [file for entry in registry().values() for file in entry.files]
    assert not [file for file, times in Counter(files).items() if times > 1]


def test_the_documented_table_is_the_registry():
    page = (Path(__file__).parents[1] / "docs" / "evaluation.md").read_text("utf-8")
    rows = {line.split("`")[1]: line for line in page.splitlines() if line.startswith("| `")}
    for name, entry in registry().items():
        row = rows[name]
        named = re.findall("`([^`]+)`", row)[1:]
        assert named == [*entry.files, *([entry.hub.dataset] if entry.hub else [])], name
        assert entry.licence.split(";")[0] in row, name
        assert ("first 1000" in row) == bool(entry.hub and entry.hub.rows), name


@pytest.mark.parametrize(
    ("name", "file", "count", "categories", "two_turns"),
    [
        ("mt-bench", "mt_bench.jsonl", 80, 8, 80),
        ("MT_Bench", "eagle_mt_bench.jsonl", 80, 8, 80),
        ("humaneval", "eagle_humaneval.jsonl", 80, 1, 0),
        ("HumanEval", "HumanEval.jsonl.gz", 164, 1, 0),
        ("gsm8k", "eagle_gsm8k.jsonl", 80, 1, 0),
        ("alpaca", "eagle_alpaca.jsonl", 80, 1, 0),
        ("CNN/DM", "eagle_sum.jsonl", 80, 1, 0),
        ("natural questions", "eagle_qa.jsonl", 80, 1, 0),
        ("spec-bench", "spec_bench.jsonl", 480, 13, 80),
        ("vicuna-bench", "vicuna_bench.jsonl", 80, 9, 0),
        ("code-edit", "edit_eval_code_194.jsonl", 194, 1, 0),
    ],
)
def test_published_files_are_read_whole(test_data, tmp_path, name, file, count, categories, two_turns):
    path = test_data / "eval" / file
    (tmp_path / file).symlink_to(path)
    found = load_benchmark(name, bench_dir=tmp_path)
    assert found.problems == []
    assert found.source == file
    assert found.licence == registry()[found.name].licence
    assert len(found.questions) == len({q.id for q in found.questions}) == count
    assert len({q.category for q in found.questions}) == categories
    assert sum(len(q.turns) == 2 for q in found.questions) == two_turns
    text = gzip.decompress(path.read_bytes()) if file.endswith(".gz") else path.read_bytes()
    records = [json.loads(line) for line in text.splitlines()]
    said = {"\n".join(q.turns) for q in found.questions}
    if "turns" in records[0]:  # every text as it stands in the file
        assert said == {"\n".join(record["turns"]) for record in records}
    else:
        used = [key for key in ("prompt", "instruction", "input", "context") if key in records[0]]
        assert all(any(all(r.get(key, "") in t for key in used) for t in said) for r in records)


def test_code_is_code_and_the_rest_is_english(test_data, tmp_path):
    folder = test_data / "eval"
    languages = {name: {q.language for q in load_benchmark(name, bench_dir=folder).questions} for name in registry()}
    assert languages.pop("humaneval") == languages.pop("code-edit") == {"code"}
    assert set().union(*languages.values()) == {"en"}


# --- the order --------------------------------------------------------------------------------------------------------


def test_a_limit_takes_the_categories_in_turn(test_data):
    whole = load_benchmark("spec-bench", bench_dir=test_data / "eval")
    small = load_benchmark("spec-bench", limit=26, bench_dir=test_data / "eval")
    assert Counter(q.category for q in small.questions) == dict.fromkeys((q.category for q in whole.questions), 2)
    assert small.questions == whole.questions[:26]
    assert [q.id for q in small.questions[:2]] == ["spec-bench-81", "spec-bench-91"]  # first of writing, of roleplay
    assert small.sha256 != whole.sha256


def test_the_order_within_a_category_is_the_files(tmp_path):
    path = write(
        tmp_path / "mine.jsonl",
        [{"prompt": f"{c}{n}", "category": c} for c, n in [("b", 1), ("b", 2), ("a", 1), ("b", 3), ("a", 2)]],
    )
    assert turns(path) == [["b1"], ["a1"], ["b2"], ["a2"], ["b3"]]


@pytest.mark.parametrize(("split", "limit"), [("heldout", 80), ("heldout", 13), ("tuning", 20)])
def test_built_in_prompts_keep_order_and_hash(tokenizer, split, limit):
    prompts = builtin_prompts(split)[:limit]
    made = builtin_set(split, tokenizer, limit=limit, max_new_tokens=8, room=10_000)
    rendered = [render_prompt(tokenizer, [{"role": "user", "content": p.text}]) for p in prompts]
    assert made.name == f"builtin-{split}"
    assert [r.id for r in made.requests] == [p.id for p in prompts]
    assert [r.tokens for r in made.requests] == rendered
    assert made.sha256 == sha256_json([[p.id, t, 8] for p, t in zip(prompts, rendered, strict=True)])
    if split == "heldout":
        same = prompt_set(load_benchmark("builtin", limit), tokenizer, max_new_tokens=8, room=10_000)
        assert (same.sha256, same.about) == (made.sha256, made.about)


# --- a user's own file ------------------------------------------------------------------------------------------------

SHAPES = [
    ("hello", ["hello"]),
    ({"prompt": "hello", "completion": "answer"}, ["hello"]),
    ({"question": "hello", "answer": "yes"}, ["hello"]),
    ({"text": "hello"}, ["hello"]),
    ({"instruction": "do", "input": "this", "output": "done"}, ["do\n\nthis"]),
    ({"turns": ["one", "two", "three"]}, ["one", "two", "three"]),
    ({"prompt": ["one", "two"]}, ["one", "two"]),
    ({"messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "1"}]}, ["one"]),
    ([{"role": "user", "content": "bare"}], ["bare"]),
    (
        {"conversations": [{"from": w, "value": v} for w, v in [("human", "a"), ("gpt", "b"), ("human", "c")]]},
        ["a", "c"],
    ),
]


@pytest.mark.parametrize(("record", "asked"), SHAPES)
def test_shapes(tmp_path, record, asked):
    assert turns(write(tmp_path / "mine.jsonl", [record])) == [asked]


def test_a_json_list_a_gzip_and_a_folder_are_read_alike(tmp_path):
    records = [record for record, _ in SHAPES[:6]]
    asked = [asked for _, asked in SHAPES[:6]]
    (tmp_path / "list.json").write_text(json.dumps(records))
    write(tmp_path / "lines.jsonl", records)
    (tmp_path / "lines.jsonl.gz").write_bytes(gzip.compress((tmp_path / "lines.jsonl").read_bytes()))
    for name in ("list.json", "lines.jsonl", "lines.jsonl.gz"):
        assert turns(str(tmp_path / name)) == asked
    folder = load_benchmark(str(tmp_path))
    assert [q.turns for q in folder.questions] == asked * 3
    assert len({q.id for q in folder.questions}) == 18


def test_what_a_record_says_of_itself_is_kept(tmp_path):
    path = write(
        tmp_path / "mine.v1.jsonl",
        [
            {"id": "a/b", "turns": ["one", "two"], "system": "Be short.", "category": " maths ", "language": "DE"},
            {"task_id": 7, "messages": [{"role": "system", "content": "Rhyme."}, {"role": "user", "content": "Hi"}]},
            {"prompt": "привет, как дела"},
        ],
    )
    found = load_benchmark(path)
    assert (found.name, found.source, found.licence, found.problems) == ("mine", path, None, [])
    assert sorted(found.questions, key=lambda q: q.id) == [
        Question("mine-7", ["Hi"], "Rhyme.", "mine", "en"),
        Question("mine-a%2Fb", ["one", "two"], "Be short.", "maths", "de"),
        Question("mine-row3", ["привет, как дела"], None, "mine", "ru"),
    ]


def test_ids_that_are_made_collide_with_none_of_the_files_own(tmp_path):
    records = [
        {"id": 2, "prompt": "one"},
        {"prompt": "two"},
        {"id": "a/b", "prompt": "3"},
        {"id": "a-b", "prompt": "4"},
    ]
    found = load_benchmark(write(tmp_path / "mine.jsonl", records))
    assert sorted(q.id for q in found.questions) == ["mine-2", "mine-a%2Fb", "mine-a-b", "mine-row2"]
    assert found.problems == []


@pytest.mark.parametrize("name", ["~nosuchuser/x.jsonl", "x" * 300 + ".jsonl"])
def test_paths_that_can_not_be_are_named(tmp_path, name):
    with pytest.raises(DraftsmithError, match=name[:12]):
        load_benchmark(name, bench_dir=tmp_path)
    with pytest.raises(DraftsmithError, match="BENCH_DIR"):
        load_benchmark("gsm8k", bench_dir=Path(name))


def test_broken_records_are_named_and_the_rest_goes_on(tmp_path):
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"id": 1, "prompt": "good"},
            '!{"prompt": "cut o',
            {"id": 1, "prompt": "again"},
            {"turns": ["  ", "behind nothing"]},
            {"turns": []},
            {"turns": ["first", "", "never"]},
            {"turns": ["first", 2]},
            {"prompt": ""},
            {"something": "else"},
            {"prompt": "half of a pair: \ud83d"},
            [{"role": r, "content": c} for r, c in [("user", "one"), ("assistant", "1"), ("user", "2")]],
            {"messages": [{"role": "user", "content": "weather?"}, call, {"role": "tool", "content": "rain"}]},
            {"input_ids": [1, 2], "labels": [-100, 2]},
            17,
        ],
    )  # fmt: skip
    found = load_benchmark(path)
    assert [q.turns for q in found.questions] == [["good"], ["first"], ["one", "2"], ["weather?"]]
    lines = "\n".join(found.problems)
    for expected in (
        "malformed: 3 × the first user turn is empty (mine.jsonl:4, mine.jsonl:5, mine.jsonl:8)",
        "malformed: 1 × a line that is not JSON (mine.jsonl:2)",
        "malformed: 1 × a turn that is a int, not text (mine.jsonl:7)",
        "malformed: 1 × nothing under a known key",
        "(mine.jsonl:9)",
        "malformed: 1 × text that is not valid Unicode (half of a surrogate pair) (mine.jsonl:10)",
        "malformed: 1 × token ids, which a chat template has no place for (mine.jsonl:13)",
        "malformed: 1 × a int instead of a conversation (mine.jsonl:14)",
        "left out: 1 × an id that came before (mine.jsonl:3)",
        "changed: 1 × ends before an empty turn (mine.jsonl:6)",
        "changed: 1 × answers between the user's turns left out: the model gives its own (mine.jsonl:11)",
        "changed: 1 × ends before the assistant calls a tool (mine.jsonl:12)",
    ):
        assert expected in lines
    assert len(found.problems) == 11


def test_nothing_to_ask_is_an_error(tmp_path):
    path = write(tmp_path / "mine.jsonl", ["!{", {"turns": [""]}])
    with pytest.raises(
        DraftsmithError, match=r"mine\.jsonl: nothing of it can be asked: malformed: 1 × .*mine\.jsonl:1"
    ):
        load_benchmark(path)
    with pytest.raises(DraftsmithError, match="it holds no record"):
        load_benchmark(write(tmp_path / "none.jsonl", []))
    with pytest.raises(DraftsmithError, match="0 questions of builtin: at least one"):
        load_benchmark("builtin", 0)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("What is the capital of France?", "en"),
        ("Wie heißt die Hauptstadt?", "en"),
        ("北京在哪里?", "zh"),
        ("请用 Python 写一个 function", "zh"),
        ("Translate 'hello' for me, and explain when one would rather say 你好 to a friend", "en"),
        ("東京の人口は何人ですか", "ja"),
        ("한국의 수도는 어디입니까?", "ko"),
        ("Какая столица России?", "ru"),
        ("ما هي عاصمة مصر؟", "ar"),
        ("भारत की राजधानी क्या है?", "hi"),
        ("Let α and β be angles of a triangle; what is sin(α + β)?", "en"),
        ("தமிழ்நாடு எங்கே உள்ளது?", "other"),
        ("1 + 1 = ?", "other"),
    ],
)
def test_language_by_script(text, language):
    assert language_of(text) == language


def test_languages_of_a_mixed_file(test_data):
    found = load_benchmark(str(test_data / "conversations" / "sharegpt_gpt4_256.jsonl"))
    counts = Counter(q.language for q in found.questions)
    assert counts["en"] > counts["zh"] > 0
    assert {"ja", "ko"} <= set(counts)
    assert any(len(q.turns) > 1 for q in found.questions)


# --- where it is ------------------------------------------------------------------------------------------------------


def test_the_environment_names_the_folder_and_the_first_file_wins(tmp_path, monkeypatch):
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "question.jsonl", [{"question_id": 5, "turns": ["of EAGLE"]}])
    write(tmp_path / "gsm8k.jsonl", [{"question": "of OpenAI", "answer": "#### 1"}])
    monkeypatch.setenv(BENCH_DIR, str(tmp_path))
    found = load_benchmark("gsm8k")
    assert found.source == "gsm8k/question.jsonl"
    assert found.questions == [Question("gsm8k-5", ["of EAGLE"], None, "math", "en")]
    assert turns("gsm8k.jsonl") == [["of OpenAI"]]  # a path, also below BENCH_DIR
    other = tmp_path / "other"
    other.mkdir()
    write(other / "gsm8k.jsonl", [{"question": "elsewhere"}])
    assert load_benchmark("gsm8k", bench_dir=other).questions[0].turns == ["elsewhere"]


def test_a_folder_called_like_a_benchmark_needs_a_path(tmp_path, monkeypatch, offline):
    (tmp_path / "gsm8k").mkdir()
    write(tmp_path / "gsm8k" / "a.jsonl", ["mine"])
    monkeypatch.chdir(tmp_path)
    assert turns("./gsm8k") == [["mine"]]
    with pytest.raises(DraftsmithError, match="the benchmark gsm8k can't be had here"):
        load_benchmark("gsm8k")


def test_what_cannot_be_had_is_one_line_with_the_way_out(tmp_path, offline):
    with pytest.raises(DraftsmithError) as caught:
        load_benchmark("gsm8k", bench_dir=tmp_path)
    text = str(caught.value)
    assert "\n" not in text
    for part in (
        "gsm8k/question.jsonl",
        f"BENCH_DIR ({tmp_path})",
        "hf:openai/gsm8k:main:test",
        "(no answer)",
        "EAGLE",
    ):
        assert part in text
    with pytest.raises(
        DraftsmithError, match=r"spec-bench can't be had here: none of spec_bench.* \(which is not set\): p"
    ):
        load_benchmark("spec-bench")
    with pytest.raises(DraftsmithError, match=r"no benchmark 'gsm9k': give one of builtin, mt-bench, .*\.jsonl"):
        load_benchmark("gsm9k")
    with pytest.raises(DraftsmithError, match=r"BENCH_DIR .*nowhere is no folder"):
        load_benchmark("gsm8k", bench_dir=tmp_path / "nowhere")
    with pytest.raises(DraftsmithError, match="hf:me/Set can't be read from the hub"):
        load_benchmark("hf:me/Set")


@pytest.fixture
def hub(monkeypatch):
    """A hub with one dataset: rows that are asked for are counted."""
    import huggingface_hub

    seen = SimpleNamespace(asked=None, read=0, rows=[])

    def rows():
        for row in seen.rows:
            seen.read += 1
            yield row

    def load_dataset(name, config, **options):
        seen.asked = (name, config, options)
        return rows()

    monkeypatch.setattr(sources, "_hub_answers", lambda: True)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, revision=None: SimpleNamespace(sha="c0ffee")
    )
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return seen


@pytest.mark.parametrize(
    ("name", "row", "asked", "category"),
    [
        ("mt-bench", {"prompt": ["one", "two"], "prompt_id": 9, "category": "stem"}, ["one", "two"], "stem"),
        ("gsm8k", {"question": "how many?", "answer": "#### 4"}, ["how many?"], "math"),
        ("alpaca", {"instruction": "sum up", "input": "", "output": "o", "text": "t"}, ["sum up"], "instruction"),
        ("alpaca", {"instruction": "sum up", "input": "it", "output": "o"}, ["sum up\n\nit"], "instruction"),
        ("cnn-dm", {"article": "News.", "highlights": "h", "id": "a1"}, ["Summarize: News."], "summarization"),
        ("natural-questions", {"question": "who sang it", "answer": ["x"]}, ["who sang it?"], "qa"),
        (
            "humaneval",
            {"task_id": "HumanEval/0", "prompt": "def f():\n", "canonical_solution": "    pass"},
            ["Complete this Python function.\n\n```python\ndef f():\n\n```"],
            "code",
        ),
    ],
)
def test_rows_of_the_hub(hub, name, row, asked, category):
    hub.rows = [row]
    found = load_benchmark(name)
    (question,) = found.questions
    assert (question.turns, question.category) == (asked, category)
    dataset = registry()[name].hub
    assert hub.asked == (
        dataset.dataset,
        dataset.config,
        {"split": dataset.split, "revision": "c0ffee", "streaming": True},
    )
    assert "@c0ffee" in found.source


def test_no_more_rows_of_the_hub_are_read_than_said(hub):
    hub.rows = [{"prompt": f"question {n}"} for n in range(1200)]
    found = load_benchmark("hf:me/Set::validation")
    assert (len(found.questions), hub.read) == (1000, 1000)
    assert found.source == "hf:me/Set::validation@c0ffee[:1000]"
    assert hub.asked[2]["split"] == "validation"


# --- requests ---------------------------------------------------------------------------------------------------------


def conversation(tmp_path, tokenizer, record=None, **settings):
    path = write(tmp_path / "chat.jsonl", [record or {"id": 1, "turns": ["the fox", "and the dog", "the end"]}])
    return prompt_set(load_benchmark(path), tokenizer, **({"max_new_tokens": 8, "room": 500} | settings))


def test_later_turns_stand_behind_the_models_own_answers(tmp_path, tokenizer):
    prompts = conversation(tmp_path, tokenizer)
    (first,) = prompts.requests
    assert first.id == "chat-1/1"
    ask = "<|im_start|>assistant\n"
    answer = tokenizer("it runs home").input_ids
    second = prompts.next_turn("chat-1", [[*answer, tokenizer.eos_token_id]])
    expected = USER.format("the fox") + ASSISTANT.format("it runs home") + USER.format("and the dog") + ask
    assert second.tokens == tokenizer(expected).input_ids
    assert (second.id, second.max_new_tokens) == ("chat-1/2", 8)
    assert prompts.next_turn("chat-1", [answer]) == second  # an answer that was cut has no stop token
    special = tokenizer.pad_token_id
    assert prompts.next_turn("chat-1", [[special, *answer]]) == second  # no user would see it, so no template gets it
    third = prompts.next_turn("chat-1", [answer, answer])
    expected = expected.removesuffix(ask) + ASSISTANT.format("it runs home") + USER.format("the end") + ask
    assert third.tokens == tokenizer(expected).input_ids
    assert prompts.next_turn("chat-1", [answer] * 3) is None
    assert prompts.about == {
        r.id: About("chat-1", turn, "chat", "en", len(r.tokens)) for turn, r in enumerate([first, second, third], 1)
    }
    assert prompts.dropped == []


def test_stop_tokens_that_are_plain_text_are_taken_off(tmp_path, tokenizer):
    said = tokenizer("the dog").input_ids
    with_stop = conversation(tmp_path, tokenizer, stop_ids=[said[-1]]).next_turn("chat-1", [said])
    assert with_stop.tokens == conversation(tmp_path, tokenizer).next_turn("chat-1", [said[:-1]]).tokens


def test_a_conversation_ends_where_the_next_turn_does_not_fit(tmp_path, tokenizer):
    prompts = conversation(tmp_path, tokenizer, room=100)
    for _ in range(2):  # also when it is asked for again
        assert prompts.next_turn("chat-1", [tokenizer("the fox runs home " * 20).input_ids]) is None
    assert prompts.dropped == ["chat-1/2"]
    assert prompts.problems == [
        "left out: 1 × prompt and 8 answer tokens need more than the 100 there is room for (chat-1/2)"
    ]
    assert list(prompts.about) == ["chat-1/1"]


def test_the_hash_covers_what_later_turns_ask(tmp_path, tokenizer):
    hashes = {
        conversation(tmp_path, tokenizer, {"id": 1, "turns": turns}, **settings).sha256
        for turns, settings in [
            (["one", "two"], {}),
            (["one", "three"], {}),
            (["one"], {}),
            (["two", "two"], {}),
            (["one", "two"], {"max_new_tokens": 9}),
        ]
    }
    assert len(hashes) == 5


def test_prompts_that_cannot_be_decoded_are_named(tmp_path, tokenizer):
    path = write(
        tmp_path / "mine.jsonl",
        [
            {"id": "long", "prompt": "the fox " * 200},
            {"id": "fine", "prompt": "the fox"},
            {"id": "spoken", "prompt": "the fox", "system": "Be short."},
        ],
    )
    picky = make_tiny_tokenizer()
    picky.chat_template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system turns') }}{% endif %}"
        + picky.chat_template
    )
    prompts = prompt_set(load_benchmark(path), picky, max_new_tokens=8, room=100)
    assert [r.id for r in prompts.requests] == ["mine-fine"]
    assert prompts.dropped == ["mine-long", "mine-spoken"]
    assert any("refuses it: no system turns (mine-spoken)" in line for line in prompts.problems)
    with pytest.raises(
        DraftsmithError, match=r"no prompt of mine can be decoded: left out: 2 ×.*; lower eval\.max_new"
    ):
        prompt_set(load_benchmark(path), picky, max_new_tokens=99, room=100)
    spoken = prompt_set(load_benchmark(path), tokenizer, max_new_tokens=8, room=100).requests[-1]
    assert spoken.tokens == tokenizer(
        "<|im_start|>system\nBe short.<|im_end|>\n" + USER.format("the fox") + "<|im_start|>assistant\n"
    ).input_ids  # fmt: skip


def test_two_turns_decoded(tmp_path, tiny_target):
    """The whole way: a question, the target's own greedy answer, the next question."""
    prompts = conversation(tmp_path, tiny_target.tokenizer, stop_ids=tiny_target.eos_ids)
    drafter, answers = PlainDrafter(), []
    request = prompts.requests[0]
    while request is not None:
        assert request.id == f"chat-1/{len(answers) + 1}"
        ends = tiny_target.tokenizer.decode(request.tokens).count(EOS)
        assert ends == 2 * len(answers) + 1  # one behind each turn: the answers' own are not said twice
        capacity = rows_needed([request], drafter)
        (result,) = decode(tiny_target, drafter, [request], slots=1, capacity=capacity)
        answers.append(result.tokens)
        request = prompts.next_turn("chat-1", answers)
    assert len(answers) == 3
