"""Reading conversations: every shape, what is malformed and where it stands, recipes, the hub."""

from __future__ import annotations

import gzip
import json

import pytest

from draftsmith.data_recipes import sources
from draftsmith.data_recipes.conversation import Malformed, duplicate_key, first_prompt, parse_conversation
from draftsmith.data_recipes.recipe import (
    Recipe,
    SourceSpec,
    load_recipe,
    parse_recipe,
    recipe_from_path,
    recipe_names,
)
from draftsmith.data_recipes.sources import Census, open_source, read_records, source_identity
from draftsmith.errors import DraftsmithError

USER = [{"role": "user", "content": "Hi"}]
SYSTEM_USER = [{"role": "system", "content": "Be brief"}, *USER]
SHAPES = {
    "string": ("Hi", USER),
    "messages": ({"messages": [*SYSTEM_USER, {"role": "assistant", "content": "Yo"}]}, SYSTEM_USER),
    "sharegpt": ({"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yo"}]}, USER),
    "sharegpt, system": (
        {"conversations": [{"from": "system", "value": "Be brief"}, {"from": "human", "value": "Hi"}]},
        SYSTEM_USER,
    ),
    "sharegpt, starts on gpt": (
        {"conversations": [{"from": "gpt", "value": "Yo"}, {"from": "human", "value": "Hi"}]},
        USER,
    ),
    "sharegpt, a role twice": (
        {"conversations": [{"from": "human", "value": "Hi"}, {"from": "human", "value": "?"}]},
        USER,
    ),
    "prompt": ({"prompt": "Hi"}, USER),
    "prompt and completion": ({"prompt": "Hi", "completion": "Yo"}, USER),
    "prompt of messages": ({"prompt": USER, "completion": [{"role": "assistant", "content": "Yo"}]}, USER),
    "turns": ({"turns": ["Hi", "And then?"], "category": "qa"}, USER),
    "bare list": ([*USER, {"role": "assistant", "content": "Yo"}], USER),
    "system beside": ({"system": "Be brief", "messages": USER}, SYSTEM_USER),
    "text parts": ({"messages": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}, USER),
    "call of a tool": ({"messages": [*USER, {"role": "assistant", "content": None, "tool_calls": []}]}, USER),
}
MALFORMED = {
    "no user turn": {"messages": [{"role": "assistant", "content": "Yo"}]},
    "the first user turn is empty": {"messages": [{"role": "user", "content": " \n"}]},
    "unknown role 'alien'": {"messages": [{"role": "alien", "content": "Hi"}]},
    "a message without role or from": {"messages": [{"content": "Hi"}]},
    "a message whose content is not text": {"messages": [{"role": "user", "content": 3}]},
    "a message with parts that are not text": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
    "a message that is not an object": {"messages": ["Hi"]},
    "a conversation without messages": {"messages": []},
    "a int instead of a conversation": 3,
    "'prompt' is a dict, not text or messages": {"prompt": {"text": "Hi"}},
    "'turns' is not a list with a first turn": {"turns": []},
    "none of the known keys (messages, conversations, prompt, turns)": {"question": "Hi"},
    "text that is not valid Unicode (half of a surrogate pair)": {"prompt": "\ud83d"},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_shapes(shape):
    record, expected = SHAPES[shape]
    assert first_prompt(parse_conversation(record)) == expected


@pytest.mark.parametrize("reason", MALFORMED)
def test_malformed_records_say_why(reason):
    with pytest.raises(Malformed) as caught:
        first_prompt(parse_conversation(MALFORMED[reason]))
    assert str(caught.value) == reason


def test_duplicates_differ_in_case_spacing_and_unicode_form_only():
    def key(text):
        return duplicate_key([{"role": "user", "content": text}])

    assert key("Café  now?") == key("cafe\u0301 NOW?\n")
    assert key("x < 3") != key("x > 3")
    assert duplicate_key(USER) != duplicate_key(SYSTEM_USER)


def places(path):
    return [
        (where, type(value).__name__ if isinstance(value, Malformed) else value)
        for where, value in read_records(path, path.name)
    ]


def test_places_of_records(tmp_path):
    lines = tmp_path / "a.jsonl"
    lines.write_bytes(b'\xef\xbb\xbf"one"\n\n{"broken\n"\xff"\n["x"]\n')
    assert places(lines) == [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "Malformed"),
        ("a.jsonl:4", "Malformed"),
        ("a.jsonl:5", ["x"]),
    ]
    spread = tmp_path / "b.json"
    spread.write_text('[\n  "one",\n  {"prompt":\n "two"},\n\n "three"\n]')
    assert places(spread) == [("b.json:2", "one"), ("b.json:3", {"prompt": "two"}), ("b.json:6", "three")]
    single = tmp_path / "c.json"
    single.write_text(json.dumps(SYSTEM_USER))
    assert places(single) == [("c.json:1", SYSTEM_USER)]
    misnamed = tmp_path / "d.json"
    misnamed.write_text('"one"\n"two"\n')
    assert places(misnamed) == [("d.json:1", "one"), ("d.json:2", "two")]
    packed = tmp_path / "e.jsonl.gz"
    packed.write_bytes(gzip.compress(b'"one"\n"two"'))
    assert places(packed) == [("e.jsonl.gz:1", "one"), ("e.jsonl.gz:2", "two")]
    empty = tmp_path / "f.json"
    empty.write_text("[ ]")
    assert places(empty) == []


def test_unreadable_files_are_named(tmp_path):
    cut = tmp_path / "cut.json"
    cut.write_text('[\n "one",\n {"pro')
    with pytest.raises(DraftsmithError, match=r"cut\.json:3 is not valid JSON"):
        list(read_records(cut, "cut.json"))
    packed = tmp_path / "cut.jsonl.gz"
    packed.write_bytes(gzip.compress(b"x" * 100)[:20])
    with pytest.raises(DraftsmithError, match=r"cut\.jsonl\.gz can't be read"):
        list(read_records(packed, "x"))
    for path, reason in ((tmp_path / "none.json", "does not exist"), (tmp_path / "notes.txt", "can't be read")):
        (tmp_path / "notes.txt").write_text("x")
        with pytest.raises(DraftsmithError, match=reason):
            list(open_source(SourceSpec(source=str(path)), 0, Census(), 0.1))
    (tmp_path / "sub").mkdir()
    with pytest.raises(DraftsmithError, match="holds no file that ends in"):
        list(open_source(SourceSpec(source=str(tmp_path / "sub")), 0, Census(), 0.1))


def write_folder(folder, bad):
    folder.mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "z.jsonl").write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(40)))
    (folder / "a.jsonl").write_text('{"turns": ["first"], "category": "qa"}\n' + '{"nothing": 1}\n' * bad)
    return SourceSpec(source=str(folder))


def test_a_folder_is_shuffled_and_its_malformed_records_counted(tmp_path):
    spec, census = write_folder(tmp_path / "mine", bad=4), Census()
    prompts = list(open_source(spec, 0, census, 0.1))
    assert len(prompts) == len({p.id for p in prompts}) == 41
    assert {p.category for p in prompts} == {"qa", "mine"}
    assert [p.id for p in prompts] == [p.id for p in open_source(spec, 0, Census(), 0.1)]
    assert [p.id for p in prompts] != [p.id for p in open_source(spec, 1, Census(), 0.1)]
    reason = "none of the known keys (messages, conversations, prompt, turns)"
    assert census.to_dict()["malformed"] == {reason: {"count": 4, "examples": ["a.jsonl:2", "a.jsonl:3", "a.jsonl:4"]}}
    assert census.lines() == [f"4 × {reason} (a.jsonl:2, a.jsonl:3, a.jsonl:4, …)"]


def test_too_many_malformed_records_stop_the_run(tmp_path):
    spec = write_folder(tmp_path / "mine", bad=5)
    with pytest.raises(DraftsmithError, match=r"5 of 46 records are malformed, more than the cap of 10%.*a\.jsonl:2"):
        list(open_source(spec, 0, Census(), 0.1))
    assert len(list(open_source(spec, 0, Census(), 0.2))) == 41


def test_identity_follows_content_not_place(tmp_path):
    first = source_identity(write_folder(tmp_path / "mine", bad=1))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").rename(tmp_path / "elsewhere" / "mine")
    moved = SourceSpec(source=str(tmp_path / "elsewhere" / "mine"))
    assert source_identity(moved) == first
    (tmp_path / "elsewhere" / "mine" / "a.jsonl").write_text('"other"\n')
    assert source_identity(moved) != first


def test_builtin_source_keeps_its_order():
    census = Census()
    prompts = list(open_source(SourceSpec(source="builtin"), 7, census, 0.1))
    assert census.read == len(prompts) >= 1500
    assert [p.id for p in prompts] == [p.id for p in sources.builtin.builtin_prompts("train")]


class Rows(list):
    def shuffle(self, seed, buffer_size):
        return self


def test_hub_datasets_are_streamed_at_a_pinned_commit(monkeypatch):
    import datasets
    import huggingface_hub

    asked = {}

    def load_dataset(name, config, **kwargs):
        asked.update(name=name, config=config, **kwargs)
        return Rows([{"messages": USER}, {"messages": []}])

    monkeypatch.setattr(sources, "_hub_answers", lambda: True)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: type("I", (), {"sha": "abc"})
    )
    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    census = Census()
    prompts = list(open_source(SourceSpec(source="hf:me/Set:default:train_sft"), 0, census, 0.5))
    assert [p.messages for p in prompts] == [USER]
    assert prompts[0].category == "Set"
    assert asked == {"name": "me/Set", "config": "default", "split": "train_sft", "revision": "abc", "streaming": True}
    assert census.to_dict()["revision"] == "abc"
    assert census.examples == {"a conversation without messages": ["me/Set:1"]}


def test_unreachable_hub_is_one_line(monkeypatch):
    monkeypatch.setattr(sources, "_hub_answers", lambda: False)
    with pytest.raises(DraftsmithError, match="hf:me/Set can't be read from the hub") as caught:
        next(open_source(SourceSpec(source="hf:me/Set"), 0, Census(), 0.1))
    assert "\n" not in str(caught.value)


def test_named_recipes():
    assert {"builtin", "sharegpt-ultrachat"} <= set(recipe_names())
    for name in recipe_names():
        assert load_recipe(name).name == name
    with pytest.raises(
        DraftsmithError, match="no recipe 'bulitin': give one of builtin, family-tour, sharegpt-ultrachat"
    ):
        load_recipe("bulitin")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sources: []", r"r\.yaml: sources: .*at least 1"),
        ("sources: [{source: builtin, wieght: 2}]", r"sources\.0\.wieght: Extra inputs"),
        ("sources: [{source: builtin, weight: 0}]", r"sources\.0\.weight: .*greater than 0"),
        ("sources: [{source: builtin}]\nseed: x", "seed: .*valid integer"),
        (
            "sources: [{source: builtin}]\ntour: {heads: [], minutes: 1, answer_minutes: 1}",
            r"tour\.heads: .*at least 1",
        ),
        ("- builtin", "a mapping"),
        ("sources: [", "not valid YAML"),
    ],
)
def test_faulty_recipes_name_the_key(text, reason):
    with pytest.raises(DraftsmithError, match=reason) as caught:
        parse_recipe("r", text, "r.yaml")
    assert "\n" not in str(caught.value)


def test_a_tour_does_not_decide_which_prompts_come_out():
    text = "sources: [{source: builtin}]\n"
    plain, toured = (
        parse_recipe("r", text + more, "r.yaml") for more in ("", "tour: {heads: [a], minutes: 1, answer_minutes: 2}")
    )
    assert plain.identity() == toured.identity()
    assert (plain.tour, toured.tour.minutes) == (None, 1)


def test_recipe_of_own_data(tmp_path):
    file = tmp_path / "chats.v2.jsonl"
    file.write_text('"Hi"\n')
    recipe = recipe_from_path(file)
    assert isinstance(recipe, Recipe)
    assert recipe.name.startswith("chats-")
    assert recipe.sources[0].source == str(file)
    with pytest.raises(DraftsmithError, match=r"none\.jsonl does not exist"):
        recipe_from_path(tmp_path / "none.jsonl")


@pytest.mark.parametrize(
    ("name", "prompts", "malformed"),
    [("sharegpt_messy_180.json", 178, 2), ("xtuner_bare_list_128.jsonl", 128, 0), ("sharegpt_gpt4_256.jsonl", 256, 0)],
)
def test_real_files(test_data, name, prompts, malformed):
    census = Census()
    found = list(open_source(SourceSpec(source=str(test_data / "conversations" / name)), 0, census, 0.1))
    assert (len(found), census.malformed.total()) == (prompts, malformed)
