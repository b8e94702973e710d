"""Whose answers a run trains on: the target's own, the data set's, or those of servers; each ends with a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_server import MODEL, FakeServer
from test_pipeline import configuration

from draftsmith import cli, inspection, pipeline, sizing, stages
from draftsmith.data_recipes.layout import answer_chunks, read_answers, read_own_answers
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.heads.target import Target


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


def test_what_was_decided_stays(tiny_folder, conversations, tmp_path):
    runs = tmp_path / "runs"
    stages.prepare(stages.Run(configuration(tiny_folder, conversations, runs, "answers=dataset")))
    again = stages.Run(configuration(tiny_folder, conversations, runs))
    assert again.answers == "dataset"
    assert sizing.whose_answers(again, 10.0, {"hours": {"tokens_per_s": 1e9}}) == "dataset"


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
    assert "kB a token" in said


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
    cli.app(["vocab", *command, "--size", "64"], standalone_mode=False)
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
    cli.app([*command, "--show", "1", "--answers", "dataset"], standalone_mode=False)
    assert "tokens supervised" in capfd.readouterr().out
    assert not list((tmp_path / "runs").rglob("*.jsonl"))
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
