"""The command line: names, configuration, errors, and what goes to which stream."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith import cli, files, pipeline, progress
from draftsmith.errors import DraftsmithError
from draftsmith.heads import named
from draftsmith.run_config import EvalSection, PrepareSection, RegenerateSection, plan_minutes, resolve, to_yaml
from draftsmith.train import settings

RUN = [sys.executable, "-m", "draftsmith.cli"]
STAGES = ["run", "prepare", "regenerate", "collect", "train", "eval"]


def call(*args, env=None, cwd=None):
    """Run the command line in a process of its own."""
    home = Path(cli.__file__).parent
    path = os.pathsep.join([*sys.path, str(home.parent)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200", **(env or {})}
    return subprocess.run([*RUN, *args], capture_output=True, text=True, env=environment, cwd=cwd, check=False)


def refused(*args):
    with pytest.raises(DraftsmithError) as caught:
        resolve("run", {}, None, args)
    return str(caught.value)


def test_help_is_quick_and_imports_nothing_heavy():
    code = (
        "import sys, draftsmith.cli as c\n"
        "try: c.app(['--help'])\n"
        "except SystemExit: pass\n"
        "print(sorted({'torch', 'transformers', 'pydantic', 'numpy', 'yaml', 'deepspeed'} & set(sys.modules)))"
    )
    home = Path(cli.__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(home.parent)])}
    seconds = []
    for _ in range(3):
        started = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
        seconds.append(time.perf_counter() - started)
    assert done.stdout.rstrip().endswith("[]")
    for stage in STAGES:
        assert f"\n  {stage} " in done.stdout
    assert min(seconds) < 1.5


@pytest.mark.parametrize("stage", STAGES)
def test_each_command_has_help_with_the_common_options(stage):
    shown = CliRunner().invoke(cli.app, [stage, "--help"])
    assert shown.exit_code == 0
    for option in ("--model", "--head", "--config", "--set", "--dry-run", "--json", "--runs", "--recipe", "--data"):
        assert option in shown.output


@pytest.mark.parametrize("stage", STAGES)
def test_dry_run_prints_yaml_that_config_reads_back(stage, tmp_path):
    first = CliRunner().invoke(cli.app, [stage, "--dry-run", "train.token_budget=2048", "head.steps=3"])
    assert first.exit_code == 0
    shown = yaml.safe_load(first.stdout)
    assert shown["train"]["token_budget"] == 2048
    assert shown["head"]["steps"] == 3
    assert shown["recipe"] == "builtin"
    (tmp_path / "c.yaml").write_text(first.stdout)
    again = CliRunner().invoke(cli.app, [stage, "--dry-run", "--config", str(tmp_path / "c.yaml")])
    assert again.stdout == first.stdout
    assert not Path("runs/smollm2-135m/.write-probe").exists()


def test_a_model_brings_defaults_that_everything_else_beats(tmp_path):
    own = resolve("run", {}, None, [])
    assert (own.head_options.steps, own.train.token_budget, own.regenerate.max_new_tokens) == (4, 512, 128)
    assert resolve("run", {"head": "eagle1"}, None, []).head_options.steps == 1  # the model's own are for single heads
    other = resolve("run", {"model": "Qwen3-8B"}, None, [])
    assert (other.head_options.steps, other.train.token_budget) == (7, 1024)
    file = tmp_path / "c.yaml"
    file.write_text("train: {token_budget: 64}\n")
    beaten = resolve("run", {}, file, ["head.steps=2"])
    assert (beaten.head_options.steps, beaten.train.token_budget, beaten.regenerate.max_new_tokens) == (2, 64, 128)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ({"nnodes": 2}, "needs master"),
        ({"node_rank": 1}, "node_rank = 1 must be between 0 and 0"),
        ({"nnodes": 2, "node_rank": 2, "master": "h"}, "between 0 and 1"),
    ],
)
def test_machine_numbers_that_would_wait_forever_are_refused(flags, told):
    with pytest.raises(DraftsmithError, match=told):
        resolve("run", flags, None, [])
    assert resolve("run", {"nnodes": 2, "node_rank": 1, "master": "h"}, None, []).master == "h"


def test_flags_beat_the_file_and_overrides_beat_flags(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("minutes: 3\nhead: {steps: 2}\ntrain: {token_budget: 64, lr_matrix: 1e-3}\neval: {prompts: 7}\n")
    config = resolve(
        "run",
        {"minutes": 4.0, "head": "eagle3"},
        file,
        ["train.token_budget=128", "eval.trees=[chain:1, dynamic:4x3x8]"],
    )
    assert (config.minutes, config.head_options.steps, config.train.token_budget) == (4.0, 2, 128)
    assert (config.train.lr_matrix, config.eval.prompts, config.eval.trees) == (1e-3, 7, ["chain:1", "dynamic:4x3x8"])
    assert config.eval.max_new_tokens == 64
    assert resolve("eval", {}, None, []).eval == EvalSection()


def test_defaults_of_sections_are_the_stages_own():
    import dataclasses

    from draftsmith.data_recipes.collect import CollectSettings
    from draftsmith.data_recipes.prepare import PrepareSettings
    from draftsmith.data_recipes.regenerate import RegenerateSettings
    from draftsmith.eval.harness import EvalSettings

    config = resolve("eval", {"model": "Qwen3-8B"}, None, [])  # a target without defaults of its own
    assert config.answers == "auto"  # what the time of a run allows: the target's where no time is set
    template, answers = {"template_kwargs": config.template_kwargs}, {"answers": "target"}
    assert {**config.eval.model_dump(), **template} == dataclasses.asdict(EvalSettings())
    assert {**config.regenerate.model_dump(), **template} == dataclasses.asdict(RegenerateSettings())
    layers = {"layer_ids": (1,)}
    assert {**config.collect.model_dump(), **answers, **layers} == dataclasses.asdict(CollectSettings(**layers))
    room = {"max_new_tokens": config.regenerate.max_new_tokens}
    assert {**config.prepare.model_dump(), **template, **answers, **room} == dataclasses.asdict(PrepareSettings())
    assert set(PrepareSection.model_fields) | set(RegenerateSection.model_fields) >= {"max_prompt_tokens", "slots"}


def test_unknown_names_list_what_exists():
    assert "smollm2-135m" in refused("model=smolm2-135m")
    assert "did you mean smollm2-135m?" in refused("model=smolm2-135m")
    message = refused("head=eagle9")
    assert "there are: " in message
    assert "eagle3" in message
    message = refused("recipe=nothing")
    assert "builtin" in message
    assert "sharegpt-ultrachat" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("train.token_bugdet=1", "token_budget"),
        ("eval.promts=1", "did you mean prompts?"),
        ("evil.prompts=1", "did you mean eval?"),
        ("eval.prompts=many", "eval.prompts = 'many'"),
        ("eval.prompts=0", "eval.prompts = 0"),
        ("train.lr_matrix=-1", "train.lr_matrix = -1"),
        ("minutes=-3", "minutes = -3"),
        ("minutes=soon", "minutes = 'soon'"),
        ("train=3", "train"),
        ("eval=3", "group of settings"),
        ("run=../elsewhere", "run = '../elsewhere'"),
        ("nonsense", "KEY=VALUE"),
        ("eval.trees=[1", "not valid YAML"),
        ("eval.trees=[]", "eval.trees = []"),
        ("eval.trees=[static:0,1]", "eval.trees.1 = 1: input should be a valid string"),
        ("weights_of=eagle3", "weights_of follows from the head"),
    ],
)
def test_bad_overrides_are_named(text, told):
    assert told in refused(text)


def test_a_head_may_be_another_way_to_decode_one():
    two = resolve("eval", {"head": "eagle2"}, None, ["train.steps=9", "head.options.noise=0.0"])
    one = resolve("eval", {"head": "eagle1"}, None, ["train.steps=9", "head.options.noise=0.0"])
    assert (two.weights_of, one.weights_of) == ("eagle1", None)
    assert (two.head_options, two.train) == (one.head_options, one.train)
    assert two.train.steps == 9
    assert two.eval.trees != one.eval.trees == ["chain:1", "chain:2", "chain:3", "chain:4"]
    assert resolve("eval", {"head": "eagle2"}, None, ["eval.trees=[chain:2]"]).eval.trees == ["chain:2"]
    assert "weights_of" not in to_yaml(two)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("weights_of: nobody", "weights_of names the unknown head 'nobody'; there are: other, real, strange"),
        ("weights_of: strange", "'strange', which has no weights of its own"),
        ("weights_of: other", "'other', which has no weights of its own"),
        ("weights_of: real\ntrain: {steps: 3}", "what trains comes from real, leave train out"),
        ("weights_of: real\ndecode: {trees: []}", "decode.trees = \\[\\] for head 'strange'"),
        ("weights_of: real\ndecode: {tree: [chain:1]}", "decode.tree: there is no such setting .* there are: trees"),
    ],
)
def test_weights_that_can_not_be_taken_are_named(tmp_path, monkeypatch, text, told):
    (tmp_path / "real.yaml").write_text("head: {family: eagle3, steps: 1, step_decay: 1.0}\ntrain: {steps: 1}\n")
    (tmp_path / "other.yaml").write_text("weights_of: strange\n")
    (tmp_path / "strange.yaml").write_text(text + "\n")
    monkeypatch.setattr(named, "_folder", lambda: tmp_path)
    with pytest.raises(DraftsmithError, match=told):
        settings.load_head_recipe("strange")


def test_recipe_and_data_exclude_each_other(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n')
    assert resolve("run", {"data": tmp_path / "mine.jsonl"}, None, []).recipe.startswith("mine-")
    with pytest.raises(DraftsmithError, match="exclude each other"):
        resolve("run", {"data": tmp_path / "mine.jsonl", "recipe": "builtin"}, None, [])
    with pytest.raises(DraftsmithError, match="does not exist"):
        resolve("run", {"data": tmp_path / "none.jsonl"}, None, [])


def test_looks_print_their_configuration_too(tmp_path):
    (tmp_path / "mine.jsonl").write_text('{"prompt": "hello"}\n')
    source = ["prepare", "--source", str(tmp_path / "mine.jsonl")]
    for look in (["vocab"], ["collect", "--verify"], ["prepare", "--report"], [*source, "--show", "2"]):
        shown = CliRunner().invoke(cli.app, [*look, "--dry-run", "--runs", str(tmp_path / "runs")])
        assert shown.exit_code == 0
        assert yaml.safe_load(shown.stdout)["answers"] == ("dataset" if look[:2] == source[:2] else "auto")
    assert not (tmp_path / "runs").exists()
    for more, told in (
        (["--show", "2", "--json"], "leave --json out"),
        (["--report", "--data", "x.jsonl"], "--data x.jsonl: look at one"),
        (["--report", "--recipe", "builtin"], "--recipe builtin: look at one"),
    ):
        with pytest.raises(DraftsmithError, match=told):
            cli.app([*source, *more], standalone_mode=False)
    for option in ("--answers", "--server", "--mode"):
        assert CliRunner().invoke(cli.app, ["vocab", "--dry-run", option, "target"]).exit_code == 2
    assert CliRunner().invoke(cli.app, ["run", "--dry-run", "--mode", "online"]).exit_code == 0


def test_hub_models_take_the_hub_recipe():
    assert resolve("run", {"model": "Qwen3-8B"}, None, []).recipe == "sharegpt-ultrachat"
    assert resolve("run", {"model": "some/model"}, None, []).recipe == "sharegpt-ultrachat"


def test_a_budget_is_shared_and_training_gets_what_is_left():
    shares = plan_minutes(15)
    assert shares.regenerate + shares.train + shares.evaluate < 15
    assert shares.regenerate + shares.train + shares.evaluate > 14
    assert shares.train_minutes(shares.regenerate) > shares.train
    assert shares.train_minutes(14.9) == shares.train / 2
    assert plan_minutes(1).evaluate < 0.5
    assert resolve("run", {"minutes": 15.0}, None, []).train.minutes == round(shares.train, 3)
    assert resolve("run", {"minutes": 15.0}, None, ["train.steps=9"]).train.minutes is None
    assert resolve("train", {"minutes": 3.0}, None, []).train.minutes == 3.0
    assert yaml.safe_load(to_yaml(resolve("run", {}, None, [])))["minutes"] == 15.0


def test_a_mistake_is_one_line_and_exit_code_2(tmp_path):
    done = call("run", "--model", "nope", "--runs", str(tmp_path / "runs"))
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("error: there is no model 'nope'")
    assert done.stderr.count("\n") == 1


def test_a_runs_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(DraftsmithError, match="is a file"):
        files.probe_writable(tmp_path / "runs")
    with pytest.raises(DraftsmithError, match="can't be written"):
        files.probe_writable(tmp_path / "runs" / "below")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_runs_folder_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(DraftsmithError, match="can't be written"):
        files.probe_writable(tmp_path / "runs")


@pytest.mark.parametrize(("code", "told"), [(errno.ENOSPC, "disk is full"), (errno.EROFS, "can't be written")])
def test_a_full_or_read_only_disk_is_named_before_any_work(tmp_path, monkeypatch, code, told):
    def fail(self, data):
        raise OSError(code, os.strerror(code), str(self))

    monkeypatch.setattr(Path, "write_bytes", fail)
    with pytest.raises(DraftsmithError, match=told):
        files.probe_writable(tmp_path / "runs")
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_interrupt_is_one_line_and_130(monkeypatch):
    def interrupted(config):
        raise KeyboardInterrupt

    monkeypatch.setitem(pipeline.COMMANDS, "prepare", interrupted)
    done = CliRunner().invoke(cli.app, ["prepare"])
    assert done.exit_code == 130
    assert "run the same command again" in done.stderr


def test_standard_output_holds_the_json_alone():
    code = (
        "import os, sys\n"
        "from draftsmith import cli, pipeline\n"
        "def noisy(config):\n"
        "    print('from python'); os.system('echo from a child'); return {'a': 'τ'}\n"
        "pipeline.COMMANDS['eval'] = noisy\n"
        "cli.app(['eval', '--json'])\n"
    )
    home = Path(cli.__file__).parent
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(home.parent)])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    assert json.loads(done.stdout) == {"a": "τ"}
    assert "from python" in done.stderr
    assert "from a child" in done.stderr


def test_progress_is_a_line_every_ten_seconds_in_a_log(monkeypatch, capsys):
    clock = iter([0.0, 4.0, 11.0, 11.0, 20.0])
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    monkeypatch.delenv(progress.QUIET_VARIABLE, raising=False)
    with progress.progress_bar("work", 100, "rows") as bar:
        bar.advance(20)
        bar.advance(24)
        assert bar.done == 44
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "work: 44/100 rows, 4.0 rows/s, 14 s left"
    assert lines[1] == "work: 44/100 rows, 2.2 rows/s, 25 s left"
    assert len(lines) == 2


def test_progress_can_be_silenced(monkeypatch, capsys):
    monkeypatch.setenv(progress.QUIET_VARIABLE, "1")
    with progress.progress_bar("work") as bar:
        bar.advance(5)
        bar.note("x")
    progress.say("news")
    assert capsys.readouterr().err == ""
    assert bar.done == 5


def test_progress_on_a_terminal_is_a_bar(monkeypatch, capsys):
    monkeypatch.delenv(progress.QUIET_VARIABLE, raising=False)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with progress.progress_bar("work", 10, "rows") as bar:
        bar.advance(10)
        bar.note("loss 2.31")
    assert "10 rows" in capsys.readouterr().err


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0 s"), (59, "59 s"), (185, "3:05 min"), (3723, "1:02:03 h")])
def test_clock(seconds, text):
    assert progress.clock(seconds) == text
