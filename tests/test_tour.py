"""The command `tour`: a few heads on shared features, measured and compared; the second time everything is there."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftsmith import cli, evaluation, stages
from draftsmith.data_recipes import recipe
from draftsmith.errors import DraftsmithError
from draftsmith.eval import compare
from draftsmith.heads.target import Target
from draftsmith.run_config import resolve
from draftsmith.tour import TourSettings, _plan, configurations, tour
from draftsmith.train import stage

SMALL = [
    "prepare.val_every=4", "prepare.chunk=8", "regenerate.max_new_tokens=12", "train.steps=4",
    "train.validate_every=4", "train.save_every=4",
    "train.token_budget=256", "head.steps=2", "eval.tuning_new_tokens=4", "eval.timed_prompts=1",
    "eval.timed_new_tokens=4", "eval.trees=[chain:1]",
]  # fmt: skip
TOUR = """
sources: [{source: builtin, limit: 24}]
tour:
  heads: [eagle3, eagle2]
  answer_minutes: 5
  minutes: 1
  eval: {prompts: 1, max_new_tokens: 6, tuning_prompts: 1}
  compare: {prompts: 1, max_new_tokens: 6}
"""


@pytest.fixture
def small_tour(monkeypatch: pytest.MonkeyPatch) -> None:
    """The recipe `family-tour` with little to do."""
    files = {"family-tour": TOUR, "builtin": "sources: [{source: builtin}]"}
    monkeypatch.setattr(recipe, "_recipe_files", lambda: files)


@pytest.mark.usefixtures("small_tour")
def test_heads_share_features_and_end_in_one_table(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = TourSettings(str(tiny_folder), tmp_path / "runs", overrides=SMALL)
    found = tour(settings)
    assert [s["name"] for s in found["schemes"]][-2:] == ["eagle3@tour", "eagle2@tour"]
    home = next(settings.runs.glob("*/compare.json")).parent
    assert [folder.name for folder in (home / "data").iterdir()] == ["family-tour"]
    assert sorted(f.parents[1].name for f in home.glob("*/train/manifest.json")) == ["eagle1@tour", "eagle3@tour"]
    assert (home / "eagle2@tour" / "report.json").exists()
    monkeypatch.setattr(Target, "load", lambda *_, **__: pytest.fail("the target was loaded"))
    monkeypatch.setattr(stage, "fit", lambda *_, **__: pytest.fail("a head was trained again"))
    monkeypatch.setattr(compare, "load_model", lambda *_, **__: pytest.fail("decoded again"))
    assert tour(settings) == found

    monkeypatch.setattr(stages, "prepare", lambda *_: pytest.fail("work began"))
    other = dataclasses.replace(settings, heads=("eagle2",), overrides=[*SMALL, "head.step_decay=0.5"])
    with pytest.raises(
        DraftsmithError, match=r"eagle2 takes the weights of eagle1, .* head\.step_decay = 1\.0, not 0\.5"
    ):
        tour(other)


@pytest.mark.usefixtures("small_tour")
def test_weights_are_trained_before_what_takes_them(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith import tour as module

    trained: list[str] = []
    compared: list[Any] = []
    monkeypatch.setattr(module, "_shared_features", lambda *_: None)
    monkeypatch.setattr(stages, "train", lambda run, _: trained.append(run.config.head))
    monkeypatch.setattr(evaluation, "evaluate", lambda _: None)
    monkeypatch.setattr(compare, "compare", lambda settings: compared.append(settings.heads))
    tour(TourSettings(str(tiny_folder), tmp_path / "runs", heads=("eagle2", "medusa1", "eagle1")))
    assert trained == ["medusa1", "eagle1", "eagle2"]
    assert compared == [("eagle2@tour", "medusa1@tour", "eagle1@tour")]


def test_the_published_tour_resolves_and_every_head_is_on_it() -> None:
    from draftsmith.heads.named import head_names

    plan = _plan(recipe.load_recipe("family-tour"))
    configs = configurations(TourSettings("Qwen3-8B", minutes=3.0))
    assert {config.head for config in configs} == set(head_names())
    assert {config.run for config in configs} == {"tour"}
    assert {config.train.minutes for config in configs} == {3.0}
    assert {config.recipe for config in configs} == {"family-tour"}
    assert configs[0].eval.prompts == plan.eval["prompts"]
    for config in configs:
        evaluation.check_trees(config)


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--heads", "eagle9"], "unknown head 'eagle9'; there are:"),
        (["--recipe", "builtin"], "the recipe 'builtin' has no section 'tour'; these have: family-tour"),
        (["--recipe", "none"], "there is no recipe 'none'"),
        (["eval.trees=[bush:1]"], "the tree 'bush:1' can't be read"),
        (["train.token_bugdet=1"], "token_budget"),
    ],
)
def test_mistakes_are_named_before_any_work(args: list[str], told: str, tiny_folder: Path, tmp_path: Path) -> None:
    common = ["tour", "--model", str(tiny_folder), "--runs", str(tmp_path / "runs")]
    done: Any = CliRunner().invoke(cli.app, [*common, *args], standalone_mode=False)
    assert isinstance(done.exception, DraftsmithError)
    assert told in str(done.exception)
    assert not list(tmp_path.glob("runs/*/*"))


@pytest.mark.parametrize("command", ["run", "tour"])
def test_a_benchmark_that_is_none_is_named_before_any_work(
    command: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "prepare", lambda *_: pytest.fail("work began"))
    args = [command, "--model", str(tiny_folder), "--runs", str(tmp_path / "runs"), "eval.bench=[mt-bunch]"]
    done: Any = CliRunner().invoke(cli.app, args, standalone_mode=False)
    assert isinstance(done.exception, DraftsmithError)
    assert "there is no benchmark 'mt-bunch'" in str(done.exception)


def test_a_tour_whose_push_failed_shows_its_comparison_and_exits_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith import tour as module
    from draftsmith.eval.report import comparison

    shown: list[Any] = []
    monkeypatch.setattr(comparison, "print_comparison", shown.append)
    for one, code in (({"url": "u"}, 0), ({"error": "no luck"}, 1)):
        result = {"schemes": [], "push": {"eagle3": one}}
        monkeypatch.setattr(module, "tour", lambda _, result=result: result)
        assert CliRunner().invoke(cli.app, ["tour"]).exit_code == code
        assert shown.pop() is result


@pytest.mark.usefixtures("small_tour")
def test_heads_that_read_other_layers_can_not_share(tiny_folder: Path, tmp_path: Path) -> None:
    from draftsmith import tour as module

    flags = {"model": str(tiny_folder), "runs": tmp_path, "head": "eagle3", "recipe": "family-tour"}
    configs = [resolve("eval", flags, None, [f"head.layer_ids={ids}"]) for ids in ([1, 2, 3], [1, 2, 4])]
    with pytest.raises(DraftsmithError, match="heads of a tour share their features"):
        module._shared_features([stages.Run(config) for config in configs], _plan(recipe.load_recipe("family-tour")))
