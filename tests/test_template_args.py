"""What the chat template is given reaches every command that decodes: what was asked for, else what the report had."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from test_compare import add_run
from test_eval_harness import make_head
from test_eval_places import SMALL
from tiny import CHATML, make_tiny_target
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval.benchmarks import load_benchmark, prompt_set
from draftsmith.eval.compare import CompareSettings, compare
from draftsmith.eval.given_head import find_head
from draftsmith.eval.replay import RequestReader
from draftsmith.files import read_json, write_json
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target
from draftsmith.run_config import template_args

THINKS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
OFF = {"enable_thinking": False}
TOKENS = 4


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target that thinks unless its template is told not to."""
    folder = make_tiny_target(tmp_path_factory.mktemp("thinks") / "target", layers=7)
    (folder / "chat_template.jinja").write_text(THINKS)
    found = Target.load(str(folder), dtype="float32", device="cpu")
    assert found.tokenizer.chat_template == THINKS
    return found


@pytest.fixture(scope="module")
def runs(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A head that was measured without thoughts."""
    folder = tmp_path_factory.mktemp("runs")
    add_run(folder / resolve_target(target.id).name, "eagle3", make_head(target))
    said(
        folder,
        target,
        "eval",
        "--prompts",
        "1",
        "eval.trees=[chain:1]",
        "template_kwargs.enable_thinking=false",
        *SMALL,
    )
    return folder


def said(runs: Path, target: Target, command: str, *args: str) -> dict[str, Any]:
    given = [command, *args, "--model", target.id, "--runs", str(runs), "--json"]
    done = CliRunner().invoke(cli.app, given, catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def rendered(target: Target, prompts: int = 1, **template: Any) -> str:
    """Hash of the built-in prompts' tokens."""
    return prompt_set(
        load_benchmark("builtin", prompts), target.tokenizer, max_new_tokens=TOKENS, room=400, template_kwargs=template
    ).sha256


def test_a_report_says_what_the_template_was_given(runs: Path) -> None:
    assert read_json(next(runs.glob("*/eagle3/report.json")))["template_kwargs"] == OFF


@pytest.mark.parametrize(("args", "off"), [((), True), (("--template-arg", "enable_thinking=true"), False)])
def test_generate(runs: Path, target: Target, args: tuple[str, ...], off: bool) -> None:
    found = said(runs, target, "generate", "hello", "--max-new-tokens", str(TOKENS), *args)
    messages = [{"role": "user", "content": "hello"}]
    on, without = (
        len(target.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **given))
        for given in ({}, OFF)
    )
    assert without > on
    assert found["prompt_tokens"] == (without if off else on)


def test_generate_without_a_head_is_told(runs: Path, target: Target) -> None:
    args = ("generate", "hello", "--drafter", "plain", "--max-new-tokens", "2")
    plain, off = (said(runs, target, *args, *more) for more in ((), ("--template-arg", "enable_thinking=false")))
    assert plain["prompt_tokens"] < off["prompt_tokens"]
    with pytest.raises(DraftsmithError, match="--raw takes no chat template"):
        said(runs, target, *args, "--raw", "--template-arg", "enable_thinking=false")
    with pytest.raises(DraftsmithError, match="--template-arg 'thinking': write NAME=VALUE"):
        said(runs, target, *args, "--template-arg", "thinking")


@pytest.mark.parametrize(
    ("args", "given"), [((), OFF), (("--template-arg", "enable_thinking=true"), {"enable_thinking": True})]
)
def test_load_tune_and_compare(runs: Path, target: Target, args: tuple[str, ...], given: dict[str, Any]) -> None:
    size = ("--bench", "builtin", "--prompts", "1", "--max-new-tokens", str(TOKENS), *args)
    sha = rendered(target, **given)
    assert sha != rendered(target, enable_thinking=not given["enable_thinking"])
    loaded = said(runs, target, "load", "--batches", "1", *size)["sweep"]
    assert (loaded["setting"]["template_kwargs"], loaded["prompts"][0]["sha256"]) == (given, sha)
    (tuned,) = said(runs, target, "tune", "--batches", "1", "--tree", "chain:1", *size)["prompts"]
    assert (tuned["template_kwargs"], tuned["sha256"]) == (given, sha)
    compared = said(runs, target, "compare", *size)
    assert (compared["prompts"]["template_kwargs"], compared["benchmarks"][0]["sha256"]) == (given, sha)


def test_heads_whose_reports_differ_are_compared_only_when_told(runs: Path, target: Target, tmp_path: Path) -> None:
    home = tmp_path / resolve_target(target.id).name
    for name, given in (("eagle1", OFF), ("eagle3", {})):
        add_run(home, name, make_head(target), "chain:1")
        report = home / name / "report.json"
        write_json(report, {**read_json(report), "template_kwargs": given})
    settings = CompareSettings(target.id, tmp_path, 1, 2)
    told = r"eagle1 \{'enable_thinking': False\}; eagle3 \{\}.*--template-arg NAME=VALUE"
    with pytest.raises(DraftsmithError, match=told):
        compare(settings)
    alone = compare(dataclasses.replace(settings, heads=("eagle1",)))
    assert alone["prompts"]["template_kwargs"] == OFF
    assert compare(dataclasses.replace(settings, template_kwargs={}))["prompts"]["template_kwargs"] == {}


def test_a_head_from_elsewhere_is_told_by_its_report(runs: Path, target: Target, tmp_path: Path) -> None:
    place = tmp_path / "theirs"
    shutil.copytree(next(runs.glob("*/eagle3/train/checkpoints/best")), place)
    home = runs / resolve_target(target.id).name
    before = find_head(home, str(place))
    assert (before.template_kwargs, before.tree) == ({}, None)
    said(runs, target, "eval", "--head", str(place), "--prompts", "1", "eval.trees=[chain:2]",
         "template_kwargs.enable_thinking=false", *SMALL)  # fmt: skip
    after = find_head(home, str(place))
    assert (after.template_kwargs, after.tree) == (OFF, "chain:2")
    report = after.folder / "report.json"
    write_json(report, {**read_json(report), "head_sha256": "0" * 64})  # of other weights
    assert find_head(home, str(place)).tree is None


def test_what_yaml_makes_no_plain_value_of_stays_a_text() -> None:
    given = ["date_string=2025-01-01", "thinking=false", "budget=12", "names=[a, b]"]
    assert template_args(given) == {
        "date_string": "2025-01-01", "thinking": False, "budget": 12, "names": ["a", "b"],
    }  # fmt: skip


def test_beside_a_prompt_it_changes_nothing(target: Target, tmp_path: Path) -> None:
    ways: Any = SimpleNamespace(target=target, context=512)
    path = tmp_path / "r.jsonl"
    path.write_text(json.dumps({"prompt": "x", "chat_template_kwargs": OFF, "tools": []}) + "\n")
    assert RequestReader(ways, 4).read(path).unused == {"chat_template_kwargs": 1, "tools": 1}


def test_a_recorded_request_has_its_own(target: Target, tmp_path: Path) -> None:
    ways: Any = SimpleNamespace(target=target, context=512)
    hello = {"messages": [{"role": "user", "content": "hello"}]}
    path = tmp_path / "r.jsonl"
    lines = [hello, *({**hello, "chat_template_kwargs": own} for own in ({"enable_thinking": True}, ["no"]))]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = RequestReader(ways, 4, OFF).read(path)
    off, on = (target.tokenizer.decode(request.tokens) for request in found.requests)
    assert off == on + "<think></think>"
    assert found.unused == {}
    assert ["'chat_template_kwargs' is a list, not an object" in problem for problem in found.problems] == [True]
