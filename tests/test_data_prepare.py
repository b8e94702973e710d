"""Stage prepare: rows, splits, limits, mixtures, own answers, what is left out, and the report on all that."""

from __future__ import annotations

import datetime
import json

import pytest
from tiny import EOS, make_tiny_tokenizer

from draftsmith.data_recipes import prepare as stage_module
from draftsmith.data_recipes import regenerate as regenerate_module
from draftsmith.data_recipes.builtin import builtin_prompts
from draftsmith.data_recipes.chat import render_prompt
from draftsmith.data_recipes.layout import TargetInfo, prompt_chunks, read_own_answers, read_prompts
from draftsmith.data_recipes.prepare import PrepareSettings, prepare
from draftsmith.data_recipes.recipe import Filters, Recipe, SourceSpec, recipe_of_source
from draftsmith.data_recipes.regenerate import RegenerateSettings
from draftsmith.data_recipes.rows import Counts, split_of
from draftsmith.errors import DraftsmithError

INFO = TargetInfo(fingerprint="f", tokenizer_sha256="t", max_positions=512)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


def write(path, records):
    path.write_text("".join(json.dumps(r if isinstance(r, dict) else {"prompt": r}) + "\n" for r in records))
    return str(path)


def talk(*texts):
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]}


def recipe(*sources, **filters):
    return Recipe(name="r", sources=[SourceSpec(source=source) for source in sources], filters=Filters(**filters))


def run(data, tokenizer, recipe, **settings):
    return prepare(PrepareSettings(**{"max_new_tokens": 32, **settings}), recipe, data, INFO, lambda: tokenizer)


def rows_of(data):
    return [row for path in prompt_chunks(data) for row in read_prompts(path)]


def files(data):
    return {f.name: f.read_bytes() for f in (data / "prompts").glob("chunk-*")}


def counts_of(tallies):
    return {reason: tally["count"] for reason, tally in tallies.items()}


def test_rows_splits_and_what_is_left_out(tmp_path, tokenizer):
    held_out = next(p.text for p in builtin_prompts("heldout") if len(p.text.split()) < 13)
    words = [f"w{i}" for i in range(12)]
    asked = [f"question number {i}" for i in range(60)]
    near = [" ".join(words), " ".join([*words, "w12"])]
    others = [*near, "Question  NUMBER 3", held_out.upper(), "long " * 400, {"nothing": 1}, {"text": "plain"}]
    stage = run(tmp_path / "data", tokenizer, recipe(write(tmp_path / "a.jsonl", [*asked, *others])), chunk=40)
    rows = rows_of(tmp_path / "data")
    assert len(rows) == len({row.id for row in rows}) == 61
    chunks = [read_prompts(path) for path in prompt_chunks(tmp_path / "data")]
    assert [len(chunk) for chunk in chunks] in ([40, 21], [39, 22])  # by where the long one came
    assert rows[1].split == "val"
    assert sum(row.split == "val" for row in rows) in (2, 3)  # of 62 places; the long one may be such a place
    assert all(row.prompt == render_prompt(tokenizer, row.messages) for row in rows)
    assert {(row.source, row.category, row.tools, tuple(row.documents)) for row in rows} == {("a", "a", None, ())}
    record = stage.manifest["record"]
    census = record["sources"]["a"]
    assert (census["records"], census["kept"]) == (67, 61)
    assert counts_of(census["left_out"]) == {
        "a prompt of more than 480 tokens": 1,
        "an evaluation prompt": 1,
        "duplicate": 1,
        "near-duplicate": 1,
        "no question that the target could answer": 1,
    }
    assert list(counts_of(census["malformed"]).values()) == [1]
    assert [t["examples"] for t in census["malformed"].values()] == [["a.jsonl:66"]]
    assert (record["chunks"], record["conversations"], record["documents"]) == (2, 61, 0)
    assert record["val"] == sum(row.split == "val" for row in rows)
    assert record["tokens"] == sum(len(row.prompt) for row in rows)
    assert record["categories"] == {"a": 61}


def test_one_in_so_many_is_held_out_by_its_place(tmp_path, tokenizer):
    """However the conversations are cut into chunks, and whichever others are dropped."""
    source = recipe(write(tmp_path / "a.jsonl", [f"question {i} " + "long " * (60 * (i % 7 == 3)) for i in range(90)]))
    run(tmp_path / "all", tokenizer, source, chunk=90, val_every=25)
    everything = [row.id for row in rows_of(tmp_path / "all")]
    for chunk, val_every in ((90, 25), (16, 25), (16, 60), (1, 25)):
        run(tmp_path / "all", tokenizer, source, chunk=chunk, val_every=val_every)
        held_out = [i for i, row in enumerate(rows_of(tmp_path / "all")) if row.split == "val"]
        assert held_out == list(range(1, 90, val_every))
    run(tmp_path / "some", tokenizer, source, chunk=16, max_prompt_tokens=50)
    some = rows_of(tmp_path / "some")
    assert len(some) == 77
    held_out = {everything[i] for i in range(26, 90, 25)} & {row.id for row in some}
    assert {row.id for row in some if row.split == "val"} - {some[1].id} == held_out


def test_any_two_conversations_have_one_of_each_kind(tmp_path, tokenizer):
    assert [split_of(place, kept, 25) for place, kept in ((1, 0), (26, 1), (30, 1), (50, 2), (51, 2))] == [
        "train", "val", "val", "train", "val",
    ]  # fmt: skip
    source = recipe(write(tmp_path / "a.jsonl", ["one", "two", *(f"{i} " + "long " * 60 for i in range(9))]))
    run(tmp_path / "data", tokenizer, source, chunk=1, max_prompt_tokens=50)
    assert [row.split for row in rows_of(tmp_path / "data")] == ["train", "val"]


def test_a_stage_that_goes_on_another_day_tells_templates_the_first(tmp_path, monkeypatch):
    dated = make_tiny_tokenizer()
    dated.chat_template = "{{ strftime_now('%Y-%m-%d') }}" + dated.chat_template
    source = recipe(write(tmp_path / "a.jsonl", [talk("one", "yes", "and?", "no"), talk("two", "yes", "and?", "no")]))

    def on(day):
        fixed = type("Fixed", (datetime.date,), {"today": classmethod(lambda cls: datetime.date(2001, 2, day))})
        monkeypatch.setattr(stage_module, "date", fixed)
        return run(tmp_path / "data", dated, source, chunk=1)

    stage = on(3)
    before = files(tmp_path / "data")
    assert dated.decode(rows_of(tmp_path / "data")[0].prompt).startswith("2001-02-03")
    (stage.folder / "chunk-00001.jsonl").unlink()
    assert on(4).digest == stage.digest
    assert files(tmp_path / "data") == before
    began = stage_module.began_on(tmp_path / "data")
    asking = regenerate_module._asking(RegenerateSettings(turns=0), INFO, dated, frozenset({2}), began)
    going = asking.begin(rows_of(tmp_path / "data")[0])  # which compares its own rendering with the row's prompt
    going.take([*dated.encode("yes", add_special_tokens=False), 2], "eos")
    assert dated.decode(going.prompt).startswith("2001-02-03")


def test_own_answers(tmp_path, tokenizer):
    long = talk("count", "one " * 60, "go on", "two " * 60)
    records = [talk("Hi", "Yo", "And?", "Fine"), talk("no answer"), long, talk("ask " * 200, "answer")]
    tokenised = {"input_ids": [5, 6, 7, 8], "loss_mask": [0, 0, 1, 1]}
    source = write(tmp_path / "a.jsonl", [*records, tokenised])
    stage = run(tmp_path / "data", tokenizer, recipe(source), answers="dataset", max_tokens=120, malformed_cap=0)
    by_first = {row.messages[0]["content"][:3] if row.messages else "": row for row in rows_of(tmp_path / "data")}
    assert set(by_first) == {"Hi", "cou", ""}

    [spoken] = by_first["Hi"].documents
    tokens, spans = spoken["tokens"], spoken["spans"]
    assert [tokenizer.decode(tokens[start:end]) for start, end in spans] == [f"Yo{EOS}", f"Fine{EOS}"]
    assert tokens[: spans[0][0]] == by_first["Hi"].prompt == render_prompt(tokenizer, records[0]["messages"][:1])

    [cut] = by_first["cou"].documents
    whole = tokenizer.apply_chat_template(long["messages"], return_dict=False)
    assert cut["tokens"] == whole[:120]
    assert cut["spans"] == [[len(by_first["cou"].prompt), 120]]
    assert cut["finish"] == "length"
    assert by_first[""].documents == [{"tokens": [5, 6, 7, 8], "spans": [[2, 4]], "finish": "eos"}]
    assert by_first[""].prompt == []

    documents = [row for path in prompt_chunks(tmp_path / "data") for row in read_own_answers(path)]
    record = stage.manifest["record"]
    census = record["sources"]["a"]
    assert counts_of(census["left_out"]) == {"no answer to train on": 1, "no answer within 120 tokens": 1}
    assert counts_of(census["changed"]) == {"cut at 120 tokens": 1}
    assert record["documents"] == len(documents) == 3
    assert record["tokens"] == sum(len(row.tokens) for row in documents)
    assert record["supervised_tokens"] == sum(row.answer_tokens for row in documents)
    assert record["supervised_share"] == round(record["supervised_tokens"] / record["tokens"], 4)


def test_a_cut_between_answers_drops_the_question_without_one(tmp_path, tokenizer):
    source = write(tmp_path / "a.jsonl", [talk("Hi", "Yo", "word " * 60, "late")])
    run(tmp_path / "data", tokenizer, recipe(source), answers="dataset", max_tokens=50)
    [[row]] = [row.documents for row in rows_of(tmp_path / "data")]
    assert len(row["spans"]) == 1
    assert row["spans"][0][1] == len(row["tokens"]) < 50
    assert row["finish"] == "eos"


def test_without_chat_template(tmp_path):
    bare = make_tiny_tokenizer(chat_template=False)
    source = recipe(write(tmp_path / "a.jsonl", [{"text": "the fox runs home"}]))
    with pytest.raises(DraftsmithError, match="has no chat template"):
        run(tmp_path / "data", bare, source, answers="dataset")
    run(tmp_path / "data", bare, source, answers="dataset", plain_text=True)
    [row] = rows_of(tmp_path / "data")
    assert row.documents[0]["spans"] == [[1, len(row.documents[0]["tokens"])]]


def test_template_variables_and_end_tokens_are_settings(tmp_path, tokenizer):
    source = recipe(write(tmp_path / "a.jsonl", [talk("Hi", "Yo")]))
    digests = {
        run(tmp_path / "data", tokenizer, source, answers="dataset").digest,
        run(tmp_path / "data", tokenizer, source, answers="target").digest,
        run(tmp_path / "data", tokenizer, source, answers="target", template_kwargs={"thinking": True}).digest,
    }
    assert len(digests) == 3
    settings = PrepareSettings(answers="dataset")
    info = TargetInfo(fingerprint="f", tokenizer_sha256="t", max_positions=512, stop_ids=(7,))
    digests.add(prepare(settings, source, tmp_path / "data", info, lambda: tokenizer).digest)
    assert len(digests) == 4


def test_skips_redoes_and_takes_back(tmp_path, tokenizer):
    source = tmp_path / "a.jsonl"
    wanted = recipe(write(source, ["one", "two"]))
    first = run(tmp_path / "data", tokenizer, wanted)
    file = tmp_path / "data" / "prompts" / "chunk-00000.jsonl"
    before = file.read_bytes(), file.stat().st_mtime_ns
    again = prepare(PrepareSettings(max_new_tokens=32), wanted, tmp_path / "data", INFO, lambda: pytest.fail("no work"))
    assert (file.read_bytes(), file.stat().st_mtime_ns) == before
    assert again.digest == first.digest
    write(source, ["one", "two", "three"])
    assert run(tmp_path / "data", tokenizer, wanted).digest != first.digest
    assert len(rows_of(tmp_path / "data")) == 3
    write(source, ["one", "two"])
    prepare(PrepareSettings(max_new_tokens=32), wanted, tmp_path / "data", INFO, lambda: pytest.fail("no work"))
    assert file.read_bytes() == before[0]


def test_only_missing_chunks_are_rendered_again(tmp_path, tokenizer, monkeypatch):
    source = write(tmp_path / "a.jsonl", [talk(f"question {i}", "yes " * (i % 7)) for i in range(23)])
    stage = run(tmp_path / "data", tokenizer, recipe(source), answers="dataset", chunk=6, malformed_cap=0.5)
    before, record = files(tmp_path / "data"), stage.manifest["record"]
    assert len(before) == 2 * 4
    for name in ("chunk-00001.jsonl", "chunk-00003.json"):
        (tmp_path / "data" / "prompts" / name).unlink()
    rendered, real = [], stage_module.render
    monkeypatch.setattr(stage_module, "render", lambda chunk, *args: rendered.append(len(chunk)) or real(chunk, *args))
    again = run(tmp_path / "data", tokenizer, recipe(source), answers="dataset", chunk=6, malformed_cap=0.5)
    assert len(rendered) == 2
    assert files(tmp_path / "data") == before
    observed = ("seconds", "peak_rss_bytes", "versions")
    left = [{k: v for k, v in r.items() if k not in observed} for r in (record, again.manifest["record"])]
    assert left[0] == left[1]


def test_chunks_don_t_depend_on_rendering(tmp_path, tokenizer):
    """A model whose template refuses or whose context is short drops rows, but no chunk takes another's."""
    texts = [f"question {i} " + "long " * (60 * (i % 3 == 0)) for i in range(30)]
    source = recipe(write(tmp_path / "a.jsonl", texts))
    run(tmp_path / "all", tokenizer, source, chunk=8)
    run(tmp_path / "some", tokenizer, source, chunk=8, max_prompt_tokens=100)
    everything, some = (
        [[row.id for row in read_prompts(p)] for p in prompt_chunks(tmp_path / d)] for d in ("all", "some")
    )
    assert sum(map(len, everything)) == 30
    assert sum(map(len, some)) == 20
    assert all(set(few) <= set(many) for few, many in zip(some, everything, strict=True))


def test_any_first_part_has_the_same_mixture(tmp_path, tokenizer):
    sources = [
        SourceSpec(source=write(tmp_path / "a.jsonl", [f"a {i}" for i in range(50)]), weight=3),
        SourceSpec(source=write(tmp_path / "b.jsonl", [f"b {i}" for i in range(50)]), limit=10),
    ]
    stage = run(tmp_path / "data", tokenizer, Recipe(name="r", sources=sources))
    kinds = [row.messages[0]["content"][0] for row in rows_of(tmp_path / "data")]
    assert [kinds[:n].count("b") for n in (4, 8, 20, 40)] == [1, 2, 5, 10]
    assert len(kinds) == 60
    found = stage.manifest["record"]["sources"]
    assert [(found[name]["records"], found[name]["kept"]) for name in ("a", "b")] == [(50, 50), (10, 10)]


def test_duplicates_are_found_across_sources(tmp_path, tokenizer):
    sources = [write(tmp_path / f"{name}.jsonl", ["the same", name]) for name in ("a", "b")]
    stage = run(tmp_path / "data", tokenizer, recipe(*sources))
    assert sorted(row.messages[0]["content"] for row in rows_of(tmp_path / "data")) == ["a", "b", "the same"]
    left = [census["left_out"] for census in stage.manifest["record"]["sources"].values()]
    assert sum(tally["count"] for found in left for tally in found.values()) == 1


def test_filters(tmp_path, tokenizer):
    words = [f"w{i}" for i in range(40)]
    image = {"messages": [{"role": "user", "content": [{"type": "text", "text": "What?"}, {"type": "image"}]}]}
    secret = "tell me what the capital of France is"
    source = write(tmp_path / "a.jsonl", [" ".join(words), " ".join(words[:-1]), image, f"Please, {secret}!"])
    bench = write(tmp_path / "bench.jsonl", [secret])

    def kept(**filters):
        run(tmp_path / "data", tokenizer, recipe(source, **filters), malformed_cap=0.5)
        return {row.messages[0]["content"] for row in rows_of(tmp_path / "data")}

    usual = kept()
    assert len(usual) == 2
    assert f"Please, {secret}!" in usual
    assert len(kept(near_duplicates=None)) == 3
    assert kept(media="text") - usual == {"What?"}
    assert usual - kept(keep_out=[bench]) == {f"Please, {secret}!"}
    with pytest.raises(DraftsmithError, match=r"none\.jsonl does not exist"):
        kept(keep_out=["none.jsonl"])


def test_the_hub_is_asked_once_for_a_commit(tmp_path, tokenizer, monkeypatch):
    """A stage that goes on reads what it began with, whatever was pushed in between."""
    import datasets
    import huggingface_hub

    from draftsmith.data_recipes import sources

    commits, read = iter(["first", "second"]), []
    monkeypatch.setattr(sources, "_hub_answers", lambda: True)
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, name, revision: type("I", (), {"sha": next(commits)})
    )

    def load_dataset(name, config, **kwargs):
        read.append(kwargs["revision"])
        return [{"prompt": "one"}, {"prompt": "two"}]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    stage = run(tmp_path / "data", tokenizer, recipe("hf:me/Set"), chunk=1)
    assert stage.manifest["record"]["sources"]["Set"]["revision"] == "first"
    (stage.folder / "chunk-00001.jsonl").unlink()
    run(tmp_path / "data", tokenizer, recipe("hf:me/Set"), chunk=1)
    assert read == ["first", "first"]


def test_errors(tmp_path, tokenizer):
    source = recipe(write(tmp_path / "a.jsonl", ["long " * 400]))
    with pytest.raises(DraftsmithError, match=r"no conversation is left: left out: 1 × a prompt of more than 480 tok"):
        run(tmp_path / "data", tokenizer, source)
    with pytest.raises(DraftsmithError, match="max_new_tokens 512 leaves no room"):
        run(tmp_path / "data", tokenizer, source, max_new_tokens=512)
    with pytest.raises(DraftsmithError, match=r"b\.jsonl holds no record"):
        run(tmp_path / "data", tokenizer, recipe(write(tmp_path / "b.jsonl", [])))
    bad = recipe(write(tmp_path / "c.jsonl", [*(f"question {i}" for i in range(41)), *[{"no": 1}] * 5]))
    with pytest.raises(DraftsmithError, match=r"5 of 46 records are malformed, more than the cap of 10%.*c\.jsonl:4"):
        run(tmp_path / "data", tokenizer, bad)
    run(tmp_path / "data", tokenizer, bad, malformed_cap=0.2)


def test_what_the_template_refuses_counts_against_the_cap(tmp_path):
    strict = make_tiny_tokenizer()
    strict.chat_template = "{{ raise_exception('no') if messages[0].content == 'two' }}" + strict.chat_template
    source = recipe(write(tmp_path / "a.jsonl", ["one", "two"]))
    with pytest.raises(DraftsmithError, match=r"1 of 2 records are malformed.*the chat template refuses it"):
        run(tmp_path / "data", strict, source)
    assert run(tmp_path / "data", strict, source, malformed_cap=0.5).manifest["record"]["conversations"] == 1


def test_text_that_no_file_can_hold(tmp_path, tokenizer):
    tool = {"name": "f", "description": "\ud83d"}
    source = recipe(write(tmp_path / "a.jsonl", ["one", {**talk("two"), "tools": [tool]}]))
    stage = run(tmp_path / "data", tokenizer, source, malformed_cap=0.5)
    [reason] = stage.manifest["record"]["sources"]["a"]["malformed"]
    assert "Unicode" in reason


def test_counts_survive_their_json():
    counts = Counts()
    counts.totals.update(conversations=2, val=0, tokens=7)
    counts.categories["a"] = 2
    counts.census("s").refuse("f:1", "why")
    again = Counts.from_dict(json.loads(json.dumps(counts.to_dict())))
    assert again.to_dict() == counts.to_dict()
    again.merge(counts)
    assert (again.totals["tokens"], again.census("s").to_dict()["malformed"]["why"]["count"]) == (14, 2)


def test_target_info(tiny_folder, tokenizer):
    info = TargetInfo.read(str(tiny_folder))
    assert info.max_positions == 512
    assert info.stop_ids == (tokenizer.convert_tokens_to_ids(EOS),)
    assert info == TargetInfo.read(str(tiny_folder))


REAL = {
    "conversations": ("sharegpt_messy_180.json", "sharegpt_gpt4_256.jsonl", "oasst_en_100_tree.jsonl"),
    "tools_reasoning": ("bespoke_reasoning_5.think.jsonl",),
}


@pytest.mark.parametrize(("folder", "name"), [(folder, name) for folder, names in REAL.items() for name in names])
def test_real_files(tmp_path, test_data, tokenizer, folder, name):
    """Every record is kept, changed or dropped with a reason, and the stage's rows are the ones that are counted."""
    info = TargetInfo(fingerprint="f", tokenizer_sha256="t", max_positions=4096)
    settings = PrepareSettings(answers="dataset", malformed_cap=1.0)
    source = recipe_of_source(str(test_data / folder / name))
    stage = prepare(settings, source, tmp_path, info, lambda: tokenizer)
    record = stage.manifest["record"]
    [census] = record["sources"].values()
    dropped = sum(tally["count"] for kind in ("malformed", "left_out") for tally in census[kind].values())
    assert census["kept"] + dropped == census["records"]
    rows = rows_of(tmp_path)
    assert len(rows) == census["kept"] == record["conversations"] > 0
    for row in rows:
        for made in row.documents:
            edges = [edge for span in made["spans"] for edge in span]
            assert edges == sorted(edges)
            assert 0 < edges[0] < edges[-1] <= len(made["tokens"]) <= 4096
