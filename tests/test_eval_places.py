"""`draftsmith eval --head` with a kind, a run's folder, a checkpoint anywhere, an export; where the result goes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from test_eval_harness import make_head
from typer.testing import CliRunner

from draftsmith import cli, evaluation
from draftsmith.errors import DraftsmithError
from draftsmith.eval.harness import GENERATED
from draftsmith.files import write_json
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.export import export_head
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target
from draftsmith.run_config import resolve

SMALL = [
    "eval.max_new_tokens=6", "eval.tuning_prompts=1", "eval.tuning_new_tokens=4", "eval.timed_prompts=1",
    "eval.timed_new_tokens=4",
]  # fmt: skip


@pytest.fixture(scope="module")
def runs(tiny_target: Target, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one head that was, for all that can be seen, trained."""
    folder = tmp_path_factory.mktemp("runs")
    best = folder / resolve_target(str(tiny_folder)).name / "eagle3" / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    save_head(make_head(tiny_target), best)
    write_json(best.parents[1] / "manifest.json", {"identity": {}, "record": {"train_seconds": 1.0, "seconds": 2.0}})
    return folder


@pytest.fixture(scope="module")
def home(runs: Path) -> Path:
    return next(runs.iterdir())


@pytest.fixture
def measure(tiny_folder: Path, runs: Path) -> Any:
    """The command in this process; returns its JSON."""

    def run(*args: str, trees: str = "[chain:1]") -> dict[str, Any]:
        given = ["--model", str(tiny_folder), "--runs", str(runs), "--prompts", "1", "--json"]
        given += [f"eval.trees={trees}"] if trees else []
        done = CliRunner().invoke(cli.app, ["eval", *given, *args, *SMALL], catch_exceptions=False)
        assert done.exit_code == 0
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    return run


def test_a_runs_folder_is_the_run(measure: Any, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure("--head", "eagle3")
    assert Path(found["report"]) == home / "eagle3" / "report.json"
    assert set(found["stages"]) == {"train", "eval"}
    assert str(home) not in (home / "eagle3" / "report.json").read_text()
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("measured again"))
    for place in (home / "eagle3", home / "eagle3" / "train" / "checkpoints" / "best"):
        assert measure("--head", str(place)) == found
    assert json.loads((home / "eagle3" / "report.json").read_text())["summary"] == found["summary"]


def test_a_checkpoint_from_elsewhere(measure: Any, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "mine"
    shutil.copytree(home / "eagle3" / "train" / "checkpoints" / "best", place)
    found = measure("--head", str(place), trees="")
    assert Path(found["page"]).parent.parent == home
    assert Path(found["page"]).parent.name.startswith("mine-")
    assert Path(found["page"]).exists()
    assert set(found["stages"]) == {"eval"}
    assert [row["tree"] for row in found["tuning"]["table"]] == ["chain:1", "chain:2", "chain:3", "chain:4"]
    out = tmp_path / "out"
    assert Path(measure("--head", str(place), "--out", str(out))["report"]).parent == out
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("measured again"))
    assert measure("--head", str(place), trees="") == found


def test_an_export_accepts_what_its_head_does(measure: Any, home: Path, tiny_folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "served"
    best = home / "eagle3" / "train" / "checkpoints" / "best"
    export_head(best, place, "vllm", head="eagle3", dtype="fp32", target=tiny_folder)
    found, own = (measure("--head", head, trees="[chain:3]") for head in (str(place), "eagle3"))
    assert Path(found["report"]).parent.parent == home
    assert Path(found["report"]).parent.name.startswith("served-")
    assert found["prompts"]["sha256"] == own["prompts"]["sha256"]
    steps = [[row["steps"] for row in report["prompts"]["speculative"]] for report in (found, own)]
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("head", "told"),
    [
        ("eagle9", "unknown head 'eagle9'"),
        ("./nowhere/at-all", "nowhere/at-all"),
    ],
)
def test_places_without_a_head_are_named(tiny_folder: Path, runs: Path, head: str, told: str) -> None:
    done = CliRunner().invoke(cli.app, ["eval", "--model", str(tiny_folder), "--runs", str(runs), "--head", head])
    assert isinstance(done.exception, DraftsmithError)
    assert told in str(done.exception)


def test_a_run_goes_with_a_kind_alone(tiny_folder: Path, runs: Path, home: Path) -> None:
    args = ["eval", "--model", str(tiny_folder), "--runs", str(runs), "--head", str(home / "eagle3"), "--run", "x"]
    done = CliRunner().invoke(cli.app, args)
    assert isinstance(done.exception, DraftsmithError)
    assert "--run x" in str(done.exception)


def test_flags_reach_the_settings() -> None:
    flags = {"benchmarks": "mt-bench, my.jsonl", "bench_dir": "/b", "bench_prompts": 7, "temperatures": [0.5, 1.0]}
    config = resolve("eval", flags, None, ["eval.max_new_tokens=9"])
    settings = config.eval
    assert (settings.bench, settings.bench_dir, settings.prompts) == (["mt-bench", "my.jsonl"], "/b", 7)
    assert (settings.temperatures, settings.max_new_tokens) == ([0.5, 1.0], 9)
    assert evaluation.eval_name(config) == "7x9-mt-bench-my.jsonl-t0.5-t1"
    assert evaluation.eval_name(resolve("eval", {}, None, [])) == "80x128"
    with pytest.raises(DraftsmithError, match=r"eval\.bench = \[\]"):
        resolve("eval", {"benchmarks": ","}, None, [])


def test_other_questions_under_the_same_name_are_measured_anew(
    measure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "own.jsonl"
    file.write_text('{"prompt": "the quick brown fox"}\n')
    first = measure("--bench", str(file))
    file.write_text('{"prompt": "the lazy dog"}\n')
    second = measure("--bench", str(file))
    assert first["prompts"]["sha256"] != second["prompts"]["sha256"]
    file.write_text('{"prompt": "the quick brown fox"}\n')
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("measured again"))
    assert measure("--bench", str(file))["prompts"] == first["prompts"]


def test_a_run_measures_no_more_than_it_did() -> None:
    """`run` shows 20 prompts: the answers of `transformers.generate` are as many as before."""
    config = resolve("run", {}, None, [])
    assert config.eval.prompts <= GENERATED
    assert (config.eval.bench, config.eval.temperatures) == (["builtin"], [0.0])
