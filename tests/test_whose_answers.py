"""Whose answers a run trains on: the target's own, the data set's, or those of servers; each ends with a report."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from fake_server import MODEL, FakeServer
from test_pipeline import configuration

from draftsmith import cli, inspection, pipeline, sizing, stages
from draftsmith.data_recipes.layout import TargetInfo, answer_chunks, read_answers, read_own_answers
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.data_recipes.vocabulary import end_tokens
from draftsmith.errors import DraftsmithError
from draftsmith.heads.target import Target, load_tokenizer


@pytest.fixture(scope="module")
def conversations(tmp_path_factory):
    path = tmp_path_factory.mktemp("talks") / "talks.jsonl"
    things = ("ship", "fox", "dog", "winter", "story", "answer")
    talks = [
        [
            {"role": "user", "content": f"write about the {a} and the {b}"},
            {"role": "assistant", "content": f"the {a} runs home and the {b} sails to the north in the winter"},
            {"role": "user", "content": "and then"},
            {"role": "assistant", "content": f"the {b} is the answer of the {a}"},
        ]
        for a in things for b in things if a != b
    ]  # fmt: skip
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return path


def test_a_run_on_the_data_sets_own_answers(tiny_folder, conversations, tmp_path):
    config = configuration(tiny_folder, conversations, tmp_path / "runs", "answers=dataset", "collect.dtype=int8")
    result = pipeline.run_all(config)
    assert result["summary"]["output_check"] == "identical"
    run = stages.Run(config)
    assert not answer_chunks(run.data)
    documents = [row for path in sorted((run.data / "prompts").glob("chunk-*.jsonl")) for row in read_own_answers(path)]
    store = FeatureStore.open(run.data / "features")
    assert store.ids == [row.id for row in documents]
    assert all(len(row.spans) == 2 for row in documents)  # both turns of a conversation, in one row
    said = Target.load(str(tiny_folder)).tokenizer.decode(
        [t for start, end in documents[0].spans for t in documents[0].tokens[start:end]]
    )
    assert said.count("<|im_end|>") == 2
    assert "sails to the north" in said
    assert pipeline.finished(stages.Run(config))


@pytest.mark.parametrize(("rate", "chosen"), [(1e6, "target"), (10.0, "dataset"), (None, "target")])
def test_what_the_time_allows_decides(tiny_folder, conversations, tmp_path, capsys, rate, chosen):
    run = stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs"))
    found = sizing.whose_answers(run, 10.0, {"hours": {"tokens_per_s": rate}})
    assert found == chosen
    warning = capsys.readouterr().err
    assert ("about 10 % less" in warning and "ANSWERS=target" in warning) == (chosen == "dataset")


def test_what_leaves_no_choice(tiny_folder, conversations, prompts_only, tmp_path):
    slow = {"hours": {"tokens_per_s": 1.0}}
    assert sizing.whose_answers(stages.Run(configuration(tiny_folder, prompts_only, tmp_path)), 1.0, slow) == "target"
    servers = configuration(tiny_folder, conversations, tmp_path, "regenerate.servers=[http://localhost:1]")
    assert sizing.whose_answers(stages.Run(servers), 1.0, slow) == "target"
    for answers in ("target", "dataset"):
        said = configuration(tiny_folder, conversations, tmp_path, f"answers={answers}")
        assert sizing.whose_answers(stages.Run(said), 1.0, slow) == answers


@pytest.mark.parametrize("record", [{"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}, {"text": "a story"}])
@pytest.mark.parametrize("rate", [1.0, 1e9])
def test_records_that_ask_nothing_are_learned(tiny_folder, tmp_path, record, rate):
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(record) + "\n")
    run = stages.Run(configuration(tiny_folder, path, tmp_path / "runs"))
    assert sizing.whose_answers(run, 1.0, {"hours": {"tokens_per_s": rate}}) == "dataset"
    path.write_text(json.dumps(record) + "\n" + json.dumps({"prompt": "what is it"}) + "\n")
    chosen = sizing.whose_answers(run, 1.0, {"hours": {"tokens_per_s": rate}})
    assert chosen == ("target" if rate > 1 else "dataset")


def test_more_time_or_servers_decide_anew_and_answers_stay(tiny_folder, conversations, tmp_path, capsys):
    runs = tmp_path / "runs"
    stages.prepare(stages.Run(configuration(tiny_folder, conversations, runs, "answers=dataset")))
    again = stages.Run(configuration(tiny_folder, conversations, runs))
    slow, fast = ({"hours": {"tokens_per_s": rate}} for rate in (1.0, 1e9))
    assert again.answers == "dataset"
    assert sizing.whose_answers(again, 10.0, slow) == "dataset"
    assert "about 10 % less" in capsys.readouterr().err, "the advice is repeated"
    assert sizing.whose_answers(again, 10.0, fast) == "target"
    served = stages.Run(configuration(tiny_folder, conversations, runs, "regenerate.servers=[http://localhost:1]"))
    assert sizing.whose_answers(served, 10.0, slow) == "target"
    stages.prepare(stages.Run(configuration(tiny_folder, conversations, runs, "answers=target")))
    own = stages.Run(configuration(tiny_folder, conversations, runs))
    assert sizing.whose_answers(own, 10.0, slow) == "target", "there are some already"


@pytest.fixture
def prompts_only(tmp_path):
    path = tmp_path / "asks.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"what is {n}"}) + "\n" for n in range(8)))
    return path


def test_a_plan_is_the_first_that_a_run_says(tiny_folder, conversations, tmp_path, capsys):
    planned = sizing.announce(stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs")))
    assert planned is not None
    said = capsys.readouterr().err
    assert "eagle3 (" in said
    assert "kB of disk a token" in said


def test_answers_through_servers(tiny_folder, tiny_target, prompts_only, tmp_path, capsys):
    with FakeServer(tiny_target.tokenizer, name=MODEL) as fake:
        config = configuration(tiny_folder, prompts_only, tmp_path / "runs", f"regenerate.servers=[{fake.url}]",
                               command="regenerate")  # fmt: skip
        pipeline.COMMANDS["prepare"](config)
        record = pipeline.COMMANDS["regenerate"](config)["record"]
    assert record["answers"] == 8
    run = stages.Run(config)
    assert sum(len(read_answers(path)) for path in answer_chunks(run.data)) == 8
    pipeline.COMMANDS["collect"](config)
    assert len(FeatureStore.open(run.data / "features")) == 8


def test_features_are_verified_and_vocabularies_shown(tiny_folder, conversations, tmp_path, capsys):
    config = configuration(tiny_folder, conversations, tmp_path / "runs", "answers=dataset", command="collect")
    pipeline.COMMANDS["prepare"](config)
    pipeline.COMMANDS["collect"](config)
    folder = inspection.verify(config)
    found = inspection.vocabulary(config, 64)
    assert found["vocabularies"][0]["size"] == 64
    command = ["--model", str(tiny_folder), "--data", str(conversations), "--runs", str(tmp_path / "runs"), "--answers",
               "dataset"]  # fmt: skip
    cli.app(["vocab", *command[:-2], "--size", "64"], standalone_mode=False)
    assert "eagle3 takes" in capsys.readouterr().out
    chunk = next(Path(folder).glob("chunk-*.safetensors"))
    broken = bytearray(chunk.read_bytes())
    broken[-1] ^= 1
    chunk.write_bytes(broken)
    with pytest.raises(DraftsmithError, match=chunk.name):
        cli.app(["collect", *command, "--verify"], standalone_mode=False)


def test_a_look_at_a_source_writes_nothing(tiny_folder, conversations, tmp_path, capfd):
    command = ["prepare", "--model", str(tiny_folder), "--runs", str(tmp_path / "runs"), "--source", str(conversations)]
    cli.app([*command, "--report", "--json"], standalone_mode=False)
    found = json.loads(capfd.readouterr().out)
    assert found["sources"]["talks"]["kept"] == 30
    cli.app([*command, "--show", "1"], standalone_mode=False)
    assert "tokens supervised" in capfd.readouterr().out  # the data's own answers: nothing said whose
    cli.app([*command, "--show", "1", "--answers", "target"], standalone_mode=False)
    assert "the target answers" in capfd.readouterr().out
    assert not (tmp_path / "runs").exists()
    with pytest.raises(DraftsmithError, match="add --report or --show"):
        cli.app(command, standalone_mode=False)


def test_a_run_without_stored_states(tiny_folder, conversations, tmp_path, capsys):
    config = configuration(tiny_folder, conversations, tmp_path / "runs", "train.mode=online", "answers=target")
    result = pipeline.run_all(config)
    assert result["summary"]["output_check"] == "identical"
    run = stages.Run(config)
    assert not (run.data / "features").exists()
    assert FeatureStore.open(run.features, layer_ids=()).ids
    assert "mode online: as train.mode asks for" in capsys.readouterr().err
    assert pipeline.finished(stages.Run(config))
    # with auto a run goes on as it began
    assert stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs", "answers=target")).online


@pytest.mark.parametrize(("free", "mode"), [(1e15, "offline"), (1e4, "online")])
def test_features_that_do_not_fit_are_not_stored(tiny_folder, conversations, tmp_path, monkeypatch, capsys, free, mode):
    run = stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs"))
    monkeypatch.setattr(sizing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    planned = sizing.announce(run)
    assert sizing.choose_mode(run, 10.0, planned) == (mode == "online")
    assert f"mode {mode}: features of" in capsys.readouterr().err


@pytest.mark.parametrize(("free", "mode"), [(1e15, "offline"), (1e4, "online")])
def test_without_a_plan_features_are_estimated(tiny_folder, conversations, tmp_path, monkeypatch, capsys, free, mode):
    run = stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs", "collect.teacher=topk"))
    monkeypatch.setattr(sizing.shutil, "disk_usage", lambda _: type("Usage", (), {"free": free}))
    assert sizing.choose_mode(run, 10.0, None) == (mode == "online")
    said = capsys.readouterr().err
    assert "features are about 39,000 tokens × 0.8 kB" in said  # 30 conversations; 3 · 64 · 2 + 64 · 6 bytes
    assert f"mode {mode}: features of" in said
    narrow = stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs", "collect.teacher=topk",
                                      "collect.topk=8"))  # fmt: skip
    assert sizing._bytes_without_plan(run) - sizing._bytes_without_plan(narrow) == pytest.approx(38_970 * 56 * 6)
    planned = [sizing.announce(r)["disk"]["storages"] for r in (run, narrow)]
    assert [p["bf16+topk"]["row"] for p in planned] == [3 * 64 * 2 + k * 6 for k in (64, 8)]
    stages.prepare(stages.Run(configuration(tiny_folder, conversations, tmp_path / "runs", "answers=dataset")))
    sizing.choose_mode(run, 10.0, None)
    assert "data/talks-" in capsys.readouterr().err  # counted, as it is there


def test_end_tokens_are_those_of_all_three(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    own = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**own, "eos_token_id": 11}))
    tokenizer = load_tokenizer(str(folder))
    assert end_tokens(TargetInfo.read(str(folder)), tokenizer) == sorted({7, 9, 11, tokenizer.eos_token_id})
