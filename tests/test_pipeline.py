"""The whole pipeline on the tiny target: one run, the second run, runs killed and gone on with, two processes."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from draftsmith import cli, pipeline, stages
from draftsmith.data_recipes.regenerate import answer_seconds
from draftsmith.errors import DraftsmithError
from draftsmith.files import sha256_file
from draftsmith.heads.target import Target
from draftsmith.run_config import plan_minutes, resolve

SMALL = [
    "prepare.val_every=4",
    "prepare.chunk=8",
    "regenerate.max_new_tokens=12",
    "train.steps=16",
    "train.save_every=2",
    "train.validate_every=8",
    "train.token_budget=256",
    "train.warmup=2",
    "head.steps=2",
    "eval.prompts=2",
    "eval.max_new_tokens=8",
    "eval.tuning_prompts=2",
    "eval.tuning_new_tokens=6",
    "eval.timed_prompts=1",
    "eval.timed_new_tokens=6",
]


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("data") / "mine.jsonl"
    things = ("ship", "fox", "dog", "winter", "story", "answer", "home", "north")
    lines = [{"prompt": f"write about the {a} and the {b}"} for a in things for b in things[:3] if a != b]
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def configuration(tiny_folder, prompts, runs, *more, command="run"):
    flags = {"model": str(tiny_folder), "data": prompts, "runs": runs}
    if command == "run":
        flags["minutes"] = 1.0
    return resolve(command, flags, None, [*SMALL, *more])


@pytest.fixture(scope="module")
def first(tiny_folder, prompts, tmp_path_factory):
    """An uninterrupted run: its configuration and result."""
    config = configuration(tiny_folder, prompts, tmp_path_factory.mktemp("first") / "runs")
    return config, pipeline.run_all(config)


def files(config):
    """Bytes that every run of this configuration must end with, by path below the runs folder."""
    found = {}
    for pattern in ("*/data/*/*/chunk-*", "*/data/*/prompts/*.jsonl", "*/eagle3/train/checkpoints/best/*"):
        for path in sorted(config.runs.glob(pattern)):
            found[str(path.relative_to(config.runs))] = sha256_file(path)
    return found


def test_one_command_ends_with_a_report(first):
    config, result = first
    folder = Path(result["report"]).parent
    assert folder.name == "eagle3"
    assert json.loads((folder / "report.json").read_text())["summary"]["output_check"] == "identical"
    assert "</html>" in (folder / "report.html").read_text()
    assert result["head"]["target_fingerprint"] == result["target"]["fingerprint"]
    data = next(folder.parent.glob("data/*"))
    for stage in (data / "prompts", data / "answers", data / "features", folder / "train", folder / "eval" / "2x8"):
        record = json.loads((stage / "manifest.json").read_text())["record"]
        assert record["seconds"] >= 0
        assert record["peak_rss_bytes"] > 0
    assert not list(config.runs.rglob("*.part"))
    assert not (config.runs / ".write-probe").exists()


def test_the_second_run_finds_everything_done(first, monkeypatch, capsys):
    config, result = first
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    monkeypatch.setattr(stages, "prepare", lambda *_: pytest.fail("a stage was asked"))
    started = time.monotonic()
    again = pipeline.run_all(config)
    assert time.monotonic() - started < 5
    assert again == result
    assert "everything is done" in capsys.readouterr().err


def test_a_finished_run_is_recognised_without_loading_torch(first):
    """The source is handed over, because a folder's name holds its fingerprint, which torch reads."""
    config, _ = first
    source = pipeline.Run(config).source
    code = (
        "import sys\n"
        "for name in ('torch', 'transformers', 'deepspeed', 'numpy'): sys.modules[name] = None\n"
        "from pathlib import Path\n"
        "from draftsmith import pipeline, run, run_config\n"
        "from draftsmith.heads.resolve import TargetSource\n"
        f"source = TargetSource(**{dataclasses.asdict(source)!r})\n"
        "run.resolve_target = run_config.resolve_target = lambda *_, **__: source\n"
        f"flags = {{'model': {config.model!r}, 'data': {str(config.data)!r}, 'runs': {str(config.runs)!r}}}\n"
        f"config = run_config.resolve('run', {{**flags, 'minutes': 1.0}}, None, {SMALL!r})\n"
        "pipeline.run_all(config)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "everything is done" in done.stderr


def test_a_missing_result_or_other_settings_are_noticed(first, tiny_folder, prompts):
    config, _ = first
    run = pipeline.Run(config)
    assert pipeline.finished(run)
    other = configuration(tiny_folder, prompts, config.runs, "train.seed=1")
    assert not pipeline.finished(pipeline.Run(other))
    manifest = run.folder / "train" / "manifest.json"
    manifest.rename(manifest.with_suffix(".gone"))
    assert not pipeline.finished(run)
    manifest.with_suffix(".gone").rename(manifest)
    assert pipeline.finished(run)


def test_a_lost_report_is_made_again_without_decoding(first, monkeypatch):
    config, result = first
    Path(result["page"]).unlink()
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    assert pipeline.run_all(config)["summary"] == result["summary"]
    assert Path(result["page"]).exists()


def test_eval_measures_more_prompts_beside_the_runs_own(first, tiny_folder, prompts):
    config, _ = first
    more = configuration(tiny_folder, prompts, config.runs, "eval.prompts=3", command="eval")
    assert pipeline.COMMANDS["eval"](more)["summary"]["n_prompts"] == 3
    assert pipeline.finished(pipeline.Run(config))
    assert pipeline.run_all(config)["summary"]["n_prompts"] == 3


def test_killed_twice_and_run_again_ends_with_the_same_bytes(first, tiny_folder, prompts, tmp_path):
    config = configuration(tiny_folder, prompts, tmp_path / "runs")
    kill_when(config, "*/data/*/answers/chunk-00000.jsonl")
    assert not list(config.runs.glob("*/data/*/answers/manifest.json"))
    kill_when(config, "*/eagle3/train/checkpoints/step-000004/state.json")
    assert not list(config.runs.glob("*/eagle3/train/manifest.json"))
    pipeline.run_all(config)
    assert files(config) == files(first[0])


def test_going_back_to_an_earlier_head_shows_its_report_again(first, tiny_folder, prompts, monkeypatch):
    config, _ = first
    folder = next(config.runs.glob("*/eagle3"))
    before = json.loads((folder / "report.json").read_text())
    other = configuration(tiny_folder, prompts, config.runs, "train.steps=3")
    assert pipeline.run_all(other)["head_sha256"] != before["head_sha256"]
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    again = pipeline.run_all(config)
    assert again["head_sha256"] == before["head_sha256"]
    assert files(config)  # nothing of it was lost on the way
    assert pipeline.finished(pipeline.Run(config))


def environment():
    home = Path(cli.__file__).parent.parent
    return {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(home)])}


def kill_when(config, sign):
    """Start the run in a process of its own and kill it as soon as a file appears."""
    arguments = ["run", "--model", config.model, "--data", str(config.data), "--runs", str(config.runs)]
    command = [sys.executable, "-m", "draftsmith.cli", *arguments, "--minutes", "1", *SMALL]
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 120
    while not list(config.runs.glob(sign)):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "the sign never appeared"
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def test_two_processes_that_are_asked_to_stop_save_and_say_how_to_go_on(first, tiny_folder, prompts):
    """The signal goes to the command alone: it reaches the processes, and the command waits until they have saved."""
    config, _ = first
    arguments = ["train", "--model", str(tiny_folder), "--data", str(prompts), "--runs", str(config.runs)]
    command = [sys.executable, "-m", "draftsmith.cli", *arguments, "--run", "stop", "--gpus", "2", *SMALL]
    command.append("train.steps=100000")
    process = subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    deadline = time.monotonic() + 200
    while not (saved := list(config.runs.glob("*/eagle3@stop/train/checkpoints/step-000002/state.json"))):
        assert process.poll() is None, process.stderr.read().decode()
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    told = process.communicate(timeout=120)[1].decode()
    assert process.returncode == 0, told
    assert f"to go on: draftsmith train --model {tiny_folder}" in told
    steps = [int(path.name[5:]) for path in saved[0].parents[1].glob("step-*")]
    assert f"stopped after step {max(steps)}, which is saved" in told
    assert not list(saved[0].parents[3].glob("*.left"))


@pytest.mark.parametrize(
    ("code", "asked", "left", "expected"),
    [(1, signal.SIGTERM, True, 0), (1, signal.SIGINT, False, 130), (-15, signal.SIGTERM, False, 143),
     (0, None, True, 0), (0, None, False, 1), (7, None, False, 7), (-9, None, False, 137)],
)  # fmt: skip
def test_how_a_command_ends_whose_processes_did_not_finish(first, tmp_path, monkeypatch, code, asked, left, expected):
    run = pipeline.Run(first[0])

    def ended(_line, given):
        if left:
            Path(given[stages.LEFT_VARIABLE]).touch()
        return code, asked

    monkeypatch.setattr("draftsmith.train.interrupt.run_passing_signals", ended)
    with pytest.raises(SystemExit) as stopped:
        stages._in_processes(run, "train", tmp_path, None)
    assert stopped.value.code == expected


def test_another_way_to_decode_trains_the_head_that_it_names(first, tiny_folder, prompts, monkeypatch):
    config, _ = first
    more = ("head=eagle2", "eval.trees=[dynamic:2x2x4]", "train.steps=4")
    two = configuration(tiny_folder, prompts, config.runs, *more)
    result = pipeline.run_all(two)
    home = Path(result["report"]).parents[1]
    assert Path(result["report"]).parent.name == "eagle2"
    assert not (home / "eagle2" / "train").exists()
    assert result["head"]["family"] == "eagle1"
    assert (result["summary"]["setting"]["tree"], result["summary"]["output_check"]) == ("dynamic:2x2x4", "identical")
    assert pipeline.finished(pipeline.Run(two))

    monkeypatch.setattr(stages, "_train_here", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(stages, "prepare", lambda *_: pytest.fail("a data stage was asked"))
    run = pipeline.Run(two)
    other_trees = configuration(tiny_folder, prompts, config.runs, *more[:1], "eval.trees=[chain:1]", more[2])
    assert pipeline.run_all(other_trees)["summary"]["setting"]["tree"] == "chain:1"
    one = configuration(tiny_folder, prompts, config.runs, "head=eagle1", "train.steps=4", command="train")
    assert pipeline.Run(one).training == run.training
    assert not stages.has_weights(pipeline.Run(one))  # it trains itself

    def limited(minutes):
        train = two.train.model_copy(update={"minutes": minutes})
        return pipeline.Run(two.model_copy(update={"train": train}))

    assert stages.has_weights(limited(round(plan_minutes(two.minutes).train, 3)))  # whatever the budget says
    epochs = run.training / "plan.json"
    planned = json.loads(epochs.read_text())
    by_epochs = {**planned, "train": {**planned["train"], "steps": None, "epochs": 3}}
    epochs.write_text(json.dumps(by_epochs))
    assert stages.has_weights(limited(round(plan_minutes(two.minutes).train, 3)))  # however long it was trained
    epochs.write_text(json.dumps(planned))

    before = sorted(home.rglob("*"))
    with pytest.raises(DraftsmithError, match=r"train\.minutes = None, not 0\.25: give RUN=NAME"):
        pipeline.run_all(limited(0.25).config)
    others = [(text, configuration(tiny_folder, prompts, config.runs, *more, f"{text}=1")) for text in
              ("head.steps", "head.options.noise")]  # fmt: skip
    for text, other in others:
        with pytest.raises(DraftsmithError, match=rf"those in .*eagle1.train were trained with {text} = .*, not 1"):
            pipeline.COMMANDS["train"](other)
    (run.training / "manifest.json").rename(run.training / "manifest.gone")  # half trained
    with pytest.raises(DraftsmithError, match=r"head\.steps = 2, not 1"):
        pipeline.COMMANDS["train"](others[0][1])
    assert not stages.has_weights(run)
    (run.training / "manifest.gone").rename(run.training / "manifest.json")
    assert sorted(home.rglob("*")) == before


def test_trees_that_can_not_be_read_are_refused_before_any_work(tiny_folder, prompts, tmp_path):
    for command in ("run", "eval"):
        config = configuration(tiny_folder, prompts, tmp_path / "runs", "eval.trees=[bush:1]", command=command)
        with pytest.raises(DraftsmithError, match="'bush:1' can't be read"):
            pipeline.COMMANDS[command](config)
    assert not list((tmp_path / "runs").glob("*/*"))


def test_two_processes_share_every_stage(first, tiny_folder, prompts, tmp_path):
    """What is kept of the states doesn't depend on who computed them; the answers are those of one process."""
    config, _ = first
    two = configuration(tiny_folder, prompts, tmp_path / "runs", "train.steps=4")
    two = two.model_copy(update={"gpus": 2})
    result = pipeline.run_all(two)
    assert result["summary"]["output_check"] == "identical"
    data = next(two.runs.glob("*/data/*"))
    assert {path.name for path in (data / "answers").glob("times-*.json")} == {"times-0.json", "times-1.json"}
    alone = next(config.runs.glob("*/data/*"))
    for path in sorted((alone / "answers").glob("chunk-*.jsonl")):
        assert (data / "answers" / path.name).read_bytes() == path.read_bytes()
    assert (next(two.runs.glob("*/eagle3")) / "train" / "checkpoints" / "best" / "model.safetensors").exists()


def test_stages_say_what_is_missing(tiny_folder, prompts, tmp_path):
    for command, told in (("regenerate", "draftsmith prepare"), ("eval", "draftsmith train")):
        config = configuration(tiny_folder, prompts, tmp_path / "runs", command=command)
        with pytest.raises(DraftsmithError, match=told):
            pipeline.COMMANDS[command](config)


def test_an_unreachable_hub_is_one_error(tmp_path, monkeypatch):
    monkeypatch.setattr("draftsmith.heads.resolve._hub_answers", lambda: False)
    config = resolve("run", {"model": "Qwen3-8B", "runs": tmp_path / "runs", "recipe": "builtin"}, None, [])
    with pytest.raises(DraftsmithError, match="hub can't be reached"):
        pipeline.run_all(config)


def test_the_key_follows_data_and_code(first, monkeypatch):
    config, _ = first
    run = pipeline.Run(config)
    key = pipeline.run_key(run)
    assert pipeline.run_key(pipeline.Run(config.model_copy(update={"gpus": 1}))) == key
    run.source = dataclasses.replace(run.source, revision="other")
    assert pipeline.run_key(run) != key
    read = []
    monkeypatch.setattr(pipeline, "sha256_file", lambda path: read.append(path.name) or "changed")
    assert pipeline.run_key(pipeline.Run(config)) != key
    assert {"run_config.py", "manifest.py", "files.py", "stages.py", "pipeline.py", "harness.py"} <= set(read)


def test_run_under_torchrun_is_refused(tiny_folder, prompts, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(DraftsmithError, match="call it without torchrun"):
        pipeline.run_all(configuration(tiny_folder, prompts, tmp_path / "runs"))


def test_earlier_answers_count_in_the_budget(first):
    """Training gets what the minutes leave after the answers, whoever made them."""
    config, _ = first
    run = pipeline.Run(config)
    shares = plan_minutes(config.minutes)
    assert answer_seconds(run.data) > 0
    config_by_clock = run.config.model_copy(
        update={"train": run.config.train.model_copy(update={"minutes": round(shares.train, 3)})}
    )
    run.config = config_by_clock
    fresh, later = (pipeline._train_budget(run, shares, before) for before in (0.0, 0.3))
    assert fresh - later == pytest.approx(0.3, abs=0.02)


def test_other_machines_wait_for_this_very_configuration(first, tiny_folder, prompts):
    config, _ = first
    run = pipeline.Run(config)
    said = pipeline._said(run)
    assert said is not None
    assert (said["answers"], said["online"]) == ("target", False)
    assert said["shared"] == said["done"] == ["regenerate", "collect"]
    run.config = config.model_copy(update={"minutes": 2.0})
    assert pipeline._said(run) is None


def test_the_second_machine_hears_of_a_failure(tiny_folder, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text("not json\n")
    config = configuration(tiny_folder, empty, tmp_path / "runs")
    with pytest.raises(DraftsmithError, match="malformed") as first_said:
        pipeline.run_all(config)
    with pytest.raises(DraftsmithError, match="machine 0 stopped: ") as second_said:
        pipeline.run_all(config.model_copy(update={"nnodes": 2, "node_rank": 1, "master": "first"}))
    assert str(first_said.value) in str(second_said.value)


def test_the_second_machine_does_its_share_of_what_the_first_says(first, monkeypatch):
    config, _ = first
    shared = config.model_copy(update={"nnodes": 2, "node_rank": 1, "master": "first"})
    asked = []

    def in_processes(run, command, folder, minutes, seconds=None):
        asked.append((command, folder.name, minutes))
        return stages.Stage(folder, {})

    monkeypatch.setattr(stages, "_in_processes", in_processes)
    monkeypatch.setattr(pipeline, "finished", lambda run: False)
    pipeline.run_all(shared)
    minutes = plan_minutes(config.minutes).regenerate
    assert asked == [("regenerate", "answers", minutes), ("collect", "features", None), ("train", "train", 1.0)]
