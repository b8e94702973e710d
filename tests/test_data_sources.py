"""Sources and recipes: what a source is called, its order and identity, the hub."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from draftsmith.data_recipes import sources
from draftsmith.data_recipes.builtin import builtin_prompts
from draftsmith.data_recipes.recipe import (
    Recipe,
    load_recipe,
    parse_recipe,
    recipe_from_path,
    recipe_names,
    recipe_of_source,
)
from draftsmith.data_recipes.records import TableRow
from draftsmith.data_recipes.sources import HubDataset, find_source, shuffled, source_names, unique_names
from draftsmith.errors import DraftsmithError
from draftsmith.run import Run
from draftsmith.run_config import resolve, to_yaml


def write_folder(folder):
    folder.mkdir()
    (folder / "sub").mkdir()
    (folder / "sub" / "z.jsonl").write_text("".join(f'{{"prompt": "question {i}"}}\n' for i in range(40)))
    (folder / "a.jsonl").write_text('{"turns": ["first"], "category": "qa"}\n{"broken\n')
    return str(folder)


def test_a_folder_is_shuffled_and_keeps_its_places(tmp_path):
    source = find_source(write_folder(tmp_path / "mine.d"))
    assert source.label == "mine"
    assert source.pin() is None
    records = list(source.records(0, None))
    lines = [f"sub/z.jsonl:{i}" for i in range(1, 41)]
    assert sorted(where for where, _ in records) == sorted(["a.jsonl:1", "a.jsonl:2", *lines])
    assert [where for where, _ in records if where in lines] != lines
    assert [where for where, _ in source.records(0, None)] == [where for where, _ in records]
    assert [where for where, _ in source.records(1, None)] != [where for where, _ in records]


def test_shuffling_holds_no_more_than_its_window():
    read, held = 0, []

    def records():
        nonlocal read
        for read in range(1, 1001):
            yield f"f:{read}", read

    order = []
    for _, number in shuffled(records(), seed=0, window=50):
        order.append(number)
        held.append(read - len(order))
    assert max(held) == 50
    assert sorted(order) == list(range(1, 1001))
    assert order[:50] != list(range(1, 51))
    assert all(number <= place + 51 for place, number in enumerate(order))
    assert sum(abs(number - place) for place, number in enumerate(order)) / 1000 > 20


def test_identity_follows_content_not_place(tmp_path):
    first = find_source(write_folder(tmp_path / "mine")).identity()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mine").rename(tmp_path / "elsewhere" / "mine")
    moved = str(tmp_path / "elsewhere" / "mine")
    assert find_source(moved).identity() == first
    (tmp_path / "elsewhere" / "mine" / "a.jsonl").write_text('"other"\n')
    assert find_source(moved).identity() != first


def test_builtin_source_keeps_its_order():
    source = find_source("builtin")
    records = list(source.records(7, None))
    assert len(records) >= 1500
    assert [(where, record["prompt"]) for where, record in records] == [
        (p.id, p.text) for p in builtin_prompts("train")
    ]
    assert source.identity() == find_source("builtin").identity()


def test_named_sources():
    assert {"sharegpt", "ultrachat", "open-perfectblend", "magpie", "gsm8k", "code"} <= set(source_names())
    for name, meant in source_names().items():
        source = find_source(name, "v1")
        assert source.label == name
        assert source.identity() == {"kind": "hf", "dataset": meant, "revision": "v1"}
    assert find_source("hf:me/Set").label == "Set"


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("sharegtp", "'sharegtp' does not exist: give builtin, one of code, gsm8k, .*, ultrachat, hf:<dataset>"),
        ("none/x.json", r"'none/x\.json' does not exist"),
        ("hf:", "hf:: a dataset on the hub reads"),
        ("hf:a/b:c:d:e", "hf:a/b:c:d:e: a dataset on the hub reads"),
    ],
)
def test_unknown_sources(text, reason):
    with pytest.raises(DraftsmithError, match=reason):
        find_source(text)


def test_only_the_hub_has_revisions():
    with pytest.raises(DraftsmithError, match="'builtin' has no revision 'v1'"):
        find_source("builtin", "v1")


def test_unique_names(tmp_path):
    paths = [tmp_path / place for place in ("a/data.jsonl", "b/data.jsonl", "c/data-2.jsonl", "d/data.jsonl")]
    for path in paths:
        path.parent.mkdir()
        path.write_text("1")
    assert unique_names([find_source(str(path)) for path in paths]) == ["data", "data-2", "data-2-2", "data-3"]


class Hub:
    """What the hub's libraries are asked, and what they answer."""

    def __init__(self, monkeypatch, rows=(), answers=True):
        import datasets
        import huggingface_hub

        self.asked, self.rows = {}, rows
        monkeypatch.setattr(sources, "_hub_answers", lambda: answers)
        monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", self.info)
        monkeypatch.setattr(datasets, "load_dataset", self.load)

    def info(self, name, revision=None):
        self.asked.update(info=name, wanted=revision)
        return type("Info", (), {"sha": "abc"})

    def load(self, name, config, **kwargs):
        self.asked.update(name=name, config=config, **kwargs)
        return self.rows


def test_hub_datasets_are_streamed_at_a_pinned_commit(monkeypatch):
    hub = Hub(monkeypatch, rows=[{"n": 0}, {"n": 1}])
    source = find_source("hf:me/Set:default:train_sft", "main")
    assert source.pin() == "abc"
    assert hub.asked == {"info": "me/Set", "wanted": "main"}
    hub.asked.clear()
    assert sorted(source.records(0, "abc")) == [("me/Set:0", {"n": 0}), ("me/Set:1", {"n": 1})]
    assert hub.asked == {
        "name": "me/Set", "config": "default", "split": "train_sft", "revision": "abc", "streaming": True,
    }  # fmt: skip
    assert HubDataset.parse("hf:me/Set", None, None).split == "train"
    assert all(isinstance(row, TableRow) for _, row in source.records(0, "abc"))


def test_unreachable_hub_is_one_line(monkeypatch):
    Hub(monkeypatch, answers=False)
    with pytest.raises(DraftsmithError, match="hf:me/Set can't be read from the hub") as caught:
        find_source("hf:me/Set").pin()
    assert "\n" not in str(caught.value)


def test_a_stream_that_breaks_is_one_line(monkeypatch):
    def rows():
        yield {"n": 0}
        raise OSError("connection\nreset")

    Hub(monkeypatch, rows=rows())
    with pytest.raises(DraftsmithError, match=r"hf:me/Set can't be read from the hub \(connection reset\)"):
        list(find_source("hf:me/Set").records(0, "abc"))


def test_named_recipes():
    assert {"builtin", "sharegpt-ultrachat"} <= set(recipe_names())
    for name in recipe_names():
        recipe = load_recipe(name)
        assert recipe.name == name
        for spec in recipe.sources:
            assert find_source(spec.source).label
    assert load_recipe("builtin").filters.near_duplicates is None
    assert load_recipe("sharegpt-ultrachat").filters.near_duplicates == 0.8
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
        ("sources: [{source: builtin}]\nfilters: {near_duplicates: 1.5}", r"filters\.near_duplicates: .*less than or"),
        ("sources: [{source: builtin}]\nfilters: {media: keep}", r"filters\.media: Input should be 'refuse' or 'text'"),
        (
            "sources: [{source: builtin}]\ntour: {heads: [], minutes: 1, answer_minutes: 1}",
            r"tour\.heads: .*at least 1",
        ),
        ("- builtin", "a mapping"),
        ("sources: [{source: builtin}]\n1: 2", r"r\.yaml: 1: Keys should be strings"),
        ("sources: [", "not valid YAML"),
    ],
)
def test_faulty_recipes_name_the_key(text, reason):
    with pytest.raises(DraftsmithError, match=reason) as caught:
        parse_recipe("r", text, "r.yaml")
    assert "\n" not in str(caught.value)


def test_recipe_of_own_data(tmp_path):
    file = tmp_path / "chats.v2.jsonl"
    file.write_text('"Hi"\n')
    recipe = recipe_from_path(file)
    assert isinstance(recipe, Recipe)
    assert recipe.name.startswith("chats-")
    assert recipe.sources[0].source == str(file)
    with pytest.raises(DraftsmithError, match=r"none\.jsonl does not exist"):
        recipe_from_path(tmp_path / "none.jsonl")


def test_data_may_be_any_source(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for data, label in (("gsm8k", "gsm8k"), ("hf:me/Set:main", "Set"), ("hf:me/../..", "data"), ("builtin", "builtin")):
        config = resolve("run", {"data": data}, None, [])
        assert re.fullmatch(rf"{label}-[0-9a-f]{{8}}", config.recipe)
        assert recipe_from_path(config.data).sources[0].source == data
    (tmp_path / "gsm8k").mkdir()  # what lies there goes before a name
    assert recipe_from_path(Path("gsm8k")).sources[0].source == str(tmp_path / "gsm8k")
    with pytest.raises(DraftsmithError, match=r"takes a file .* hf:<dataset>.* gsm8k"):
        resolve("run", {"data": "gsmk8"}, None, [])


def test_an_own_recipe_is_a_path(tmp_path, monkeypatch):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n')
    file = tmp_path / "ours.yaml"
    file.write_text("name: ../../elsewhere\nsources: [{source: mine.jsonl}, {source: gsm8k}]\n"
                    "filters: {keep_out: [./bench.jsonl]}\n")  # fmt: skip
    monkeypatch.chdir(tmp_path)
    config = resolve("run", {"recipe": "./ours.yaml"}, None, [])
    assert config.recipe == str(file)
    found = load_recipe(config.recipe)
    assert re.fullmatch(r"ours-[0-9a-f]{8}", found.name)
    assert [spec.source for spec in found.sources] == [str(tmp_path / "mine.jsonl"), "gsm8k"]
    assert found.filters.keep_out == [str(tmp_path / "bench.jsonl")]
    assert Run(config, writes=False).data.name == found.name
    (tmp_path / "c.yaml").write_text(to_yaml(config))
    monkeypatch.chdir("/")
    again = resolve("run", {}, tmp_path / "c.yaml", [])
    assert again == config
    (tmp_path / "mine.jsonl").write_text('{"prompt": "other words"}\n')
    changed = resolve("run", {}, tmp_path / "c.yaml", [])
    assert changed.tree() != config.tree()  # so that a finished run of the old files isn't taken for this one
    assert to_yaml(changed) == to_yaml(config)
    for name, told in (("none.yaml", "none.yaml can't be read"), ("ours.yaml", r"ours\.yaml: 1: .*keys .*strings")):
        file.write_text("1: 2\nsources: [{source: builtin}]\n")
        with pytest.raises(DraftsmithError, match="(?i)" + told):
            resolve("run", {"recipe": str(tmp_path / name)}, None, [])
    with pytest.raises(DraftsmithError, match="recipe_state follows from the recipe"):
        resolve("run", {"recipe_state": "x"}, None, [])


def test_recipe_of_one_source():
    assert [spec.source for spec in recipe_of_source("sharegpt").sources] == ["sharegpt"]
