"""The command `compare`: every way to decode in turns, honest figures, restarts, mistakes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_adapter import make_adapter, moved
from test_eval_harness import make_head
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval import compare as module
from draftsmith.eval.compare import CompareSettings, compare
from draftsmith.eval.harness import EvalSettings, load_benchmarks
from draftsmith.eval.report.comparison import COLUMNS, benchmark_rows, comparison_rows, print_comparison
from draftsmith.eval.report.content import SAMPLED
from draftsmith.files import sha256_file, write_json
from draftsmith.heads.checkpoint import WEIGHTS, save_head
from draftsmith.heads.medusa2 import Medusa2Head, medusa2_config
from draftsmith.heads.mtp import MtpHead, mtp_config
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.vocab import DraftVocab

PROMPTS, TOKENS = 2, 10
DECODE = module._decode


def report_on(best: Path, tree: str, speedup: float | None) -> dict[str, Any]:
    """As much of a report as a comparison reads."""
    summary = {"speedup": speedup, "setting": {"tree": tree}}
    return {"summary": summary, "head_sha256": sha256_file(best / WEIGHTS)}


def add_run(home: Path, name: str, head: Any, tree: str | None = None, speedup: float = 1.0) -> Path:
    """What training leaves in a run's folder, and what an evaluation does; returns the checkpoint."""
    best = home / name / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    save_head(head, best)
    write_json(home / name / "train" / "manifest.json", {"identity": {}, "record": {"train_seconds": 90.0}})
    if tree is not None:
        write_json(home / name / "report.json", report_on(best, tree, speedup))
    return best


@pytest.fixture(scope="module")
def runs(tiny_target: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three heads: without a report, with a tree's, and one that is decoded with another's weights."""
    folder = tmp_path_factory.mktemp("runs")
    home = folder / resolve_target(str(tiny_folder)).name
    best = add_run(home, "eagle1", make_head(tiny_target))
    add_run(home, "eagle3@tree", make_head(tiny_target), "static:0,1,0.0", speedup=2.0)
    (home / "eagle2").mkdir()
    write_json(home / "eagle2" / "report.json", report_on(best, "dynamic:2x2x4", None))
    (home / "data").mkdir()
    return folder


@pytest.fixture
def settings(runs: Path, tiny_folder: Path, tmp_path: Path) -> CompareSettings:
    """A small comparison in a copy of the runs."""
    shutil.copytree(runs, tmp_path / "runs")
    return CompareSettings(str(tiny_folder), tmp_path / "runs", PROMPTS, TOKENS)


@pytest.fixture(scope="module")
def result(runs: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole comparison, uninterrupted."""
    copy = tmp_path_factory.mktemp("whole") / "runs"
    shutil.copytree(runs, copy)
    found = compare(CompareSettings(str(tiny_folder), copy, PROMPTS, TOKENS, with_prompt_lookup=True))
    assert json.loads(next(copy.glob("*/compare.json")).read_text()) == found
    return found


def by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {scheme["name"]: scheme for scheme in result["schemes"]}


def test_every_way_is_there_with_its_own_tree(result: dict[str, Any], tiny_target: Any) -> None:
    found = by_name(result)
    assert list(found) == [
        "plain", "prompt-lookup", "lookahead", "lookahead + prompt-lookup", "eagle1", "eagle2", "eagle3@tree",
        "eagle3@tree + prompt-lookup",
    ]  # fmt: skip
    trees = {name: scheme["tree"] for name, scheme in found.items()}
    assert (trees["eagle1"], trees["eagle2"], trees["eagle3@tree"]) == ("chain:4", "dynamic:2x2x4", "static:0,1,0.0")
    assert (found["eagle2"]["depth"], found["eagle2"]["nodes"]) == (2, 4)
    assert found["eagle1"]["train_minutes"] == found["eagle2"]["train_minutes"] == 1.5
    assert found["lookahead"]["train_minutes"] is found["lookahead"]["parameters"] is None
    assert found["eagle1"]["parameters"] == sum(p.numel() for p in make_head(tiny_target).parameters())


def test_figures_stand_beside_a_matched_baseline(result: dict[str, Any]) -> None:
    found = by_name(result)
    spoken = {name: [sum(s[2] for s in a["steps"]) for a in rows] for name, rows in result["answers"].items()}
    for name, scheme in found.items():
        assert spoken[name] == spoken["plain"]  # the same answers
        steps = [step for answer in result["answers"][name] for step in answer["steps"]]
        assert scheme["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
        assert scheme["lossless"]
        if name != "plain":
            assert scheme["output_check"] == "identical"
            assert scheme["speedup_ci"][0] <= scheme["speedup"] <= scheme["speedup_ci"][1]
    assert found["plain"]["tau"] == 1.0
    assert found["plain"]["speedup"] is None
    assert len(found["eagle1"]["acceptance_conditional"]) == 4
    json.dumps(result, allow_nan=False)


def test_the_table_holds_every_figure(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    rows = {row[0]: dict(zip(COLUMNS, row, strict=True)) for row in comparison_rows(result)}
    assert rows["plain"]["speed-up"] == "baseline"
    assert (rows["eagle1"]["training"], rows["lookahead"]["training"]) == ("1.5 min", "none")
    assert all(row["lossless"] == "yes" for row in rows.values())
    assert f"{by_name(result)['eagle2']['tau']:.2f}" == rows["eagle2"]["τ"]
    print_comparison(result)
    shown = capsys.readouterr().out
    assert "2 prompts (builtin) × 10 new tokens, greedy" in shown
    assert "by benchmark" not in shown


def test_everybody_goes_first_and_last_equally_often() -> None:
    ways: Any = ["a", "b", "c", "d"]
    orders = [module._order(ways, i) for i in range(8)]
    for place in (0, -1):
        assert sorted(order[place] for order in orders) == sorted(2 * ways)
    before = sum(order.index("a") < order.index("b") for order in orders)
    assert before == 4


def stop_after(monkeypatch: pytest.MonkeyPatch, decodes: int | None) -> list[tuple[str, str]]:
    calls: list[tuple[str, str]] = []

    def decode(way: Any, request: Any, bar: Any, timer: Any = None) -> Any:
        if len(calls) == decodes:
            raise KeyboardInterrupt
        calls.append((way.name, request.id))
        return DECODE(way, request, bar, timer)

    monkeypatch.setattr(module, "_decode", decode)
    return calls


def test_an_interrupted_comparison_goes_on_and_a_finished_one_is_kept(
    settings: CompareSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    some = dataclasses.replace(settings, heads=("eagle2",))
    ways = 4
    before = ways + PROMPTS * ways  # warm-ups, and passes on every prompt, as they are so few
    calls = stop_after(monkeypatch, before + ways + 1)  # in the second round
    with pytest.raises(KeyboardInterrupt):
        compare(some)
    there, back = calls[ways : 2 * ways], calls[2 * ways : before]
    assert [name for name, _ in there] == [name for name, _ in reversed(back)]  # passes are timed in turns, too
    calls = stop_after(monkeypatch, None)
    found = compare(some)
    assert len(calls) == ways + ways  # warm-ups and the round that was torn
    assert found["environment"]["sessions"] == 2
    monkeypatch.setattr(module, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    assert compare(some) == found


def test_a_pass_costs_the_median_over_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 8.0, 9.0, 2.0, 3.0, 0.0])  # a, b; b, a; b (the next round begins with it), a: no step

    def decode(way: Any, request: Any, bar: Any, timer: Any) -> None:
        timer.target = next(seconds)
        timer.steps = 1 if timer.target else 0

    monkeypatch.setattr(module, "_decode", decode)
    ways: Any = [SimpleNamespace(name="a"), SimpleNamespace(name="b")]
    requests: Any = ["x", "y", "z"]
    bar: Any = None
    assert module._pass_costs(ways, requests, bar) == {"a": 1.5, "b": 8.0}


def identity(settings: CompareSettings) -> dict[str, Any]:
    source = resolve_target(settings.model)
    heads = module._chosen(settings.runs / source.name, settings.heads)
    asked = EvalSettings(prompts=settings.prompts, bench=list(settings.benchmarks))
    return module._identity(source, heads, settings, load_benchmarks(asked))


def test_what_a_comparison_shows_is_in_its_identity(settings: CompareSettings) -> None:
    """Else a finished one would be shown again when it is out of date."""
    home = next(settings.runs.glob("*"))
    manifest, best = home / "eagle1" / "train" / "manifest.json", home / "eagle1" / "train" / "checkpoints" / "best"
    seen = [identity(settings)]
    assert identity(settings) == seen[0]

    def changed() -> bool:
        seen.append(identity(settings))
        return seen[-1] not in seen[:-1]

    write_json(manifest, {"identity": {}, "record": {"train_seconds": 91.0}})
    assert changed()
    write_json(manifest, {"identity": {}, "record": {"train_seconds": 91.0, "drift": {"kl": 0.1}}})
    assert changed()
    manifest.unlink()
    assert changed()
    write_json(best / "tree.json", {"paths": [[0]]})
    assert changed()
    write_json(best / "tree.json", {"paths": [[0], [1]]})
    assert changed()
    write_json(home / "eagle2" / "report.json", report_on(best, "chain:1", None))
    assert changed()
    settings = dataclasses.replace(settings, with_prompt_lookup=True)
    assert changed()
    write_json(home / "eagle2" / "report.json", report_on(best, "chain:1", 9.0))  # prompt lookup joins this one now
    assert changed()
    settings = dataclasses.replace(settings, draft_model=settings.model)
    assert changed()
    settings = dataclasses.replace(settings, temperature=0.5)
    assert changed()
    file = settings.runs / "mine.jsonl"
    file.write_text('{"prompt": "a story"}\n')
    settings = dataclasses.replace(settings, benchmarks=(str(file),))
    assert changed()
    file.write_text('{"prompt": "another story"}\n')
    assert changed()


def test_a_half_trained_head_is_compared_as_it_is(
    settings: CompareSettings, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its best weights are there; its report is on earlier ones, whose own tree is gone."""
    home = next(settings.runs.glob("*"))
    best = home / "eagle1" / "train" / "checkpoints" / "best"
    write_json(home / "eagle1" / "report.json", {**report_on(best, "own:9", 3.0), "head_sha256": "0" * 64})
    (home / "eagle1" / "train" / "manifest.json").unlink()
    found = compare(dataclasses.replace(settings, heads=("eagle1", "eagle3@tree"), with_prompt_lookup=True))
    ways = by_name(found)
    assert (ways["eagle1"]["tree"], ways["eagle1"]["train_minutes"]) == ("chain:4", None)
    assert {row[0]: row[1] for row in comparison_rows(found)}["eagle1"] == "unfinished"
    assert list(ways)[-1] == "eagle3@tree + prompt-lookup"  # a speed-up of other weights makes no head the fastest
    told = capsys.readouterr().err
    assert "eagle1 is not trained to its end: it is compared as it is, with chain:4" in told
    assert "eagle1 has a report on other weights than these, whose tree is not taken" in told
    assert "eagle3@tree has" not in told


def test_wrong_answers_get_no_speedup_and_hasty_ones_are_flagged(
    settings: CompareSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(way: Any, request: Any, bar: Any, timer: Any = None) -> Any:
        result = DECODE(way, request, bar, timer)
        if way.name == "lookahead":
            result.tokens = [(result.tokens[0] + 1) % 300, *result.tokens[1:]]
        if way.name == "prompt-lookup":
            result.seconds /= 1000
        return result

    monkeypatch.setattr(module, "_decode", broken)
    result = compare(dataclasses.replace(settings, heads=("eagle2",)))
    found = by_name(result)
    assert (found["lookahead"]["speedup"], found["lookahead"]["lossless"]) == (None, False)
    assert found["lookahead"]["output_check"].startswith("FAILED")
    assert "above" in found["prompt-lookup"]["flag"]
    assert found["eagle2"]["lossless"]
    rows = {row[0]: row for row in comparison_rows(result)}
    assert rows["lookahead"][-1] == "no"
    assert rows["prompt-lookup"][-3].endswith("(doubtful)")
    print_comparison(result)
    assert "lookahead: FAILED" in capsys.readouterr().out


def test_answers_of_one_token_have_no_speedup(
    settings: CompareSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one benchmark, or of all."""
    ended = {"b-"}

    def ending(way: Any, request: Any, bar: Any, timer: Any = None) -> Any:
        result = DECODE(way, request, bar, timer)
        if request.id.startswith(tuple(ended)):
            result.tokens, result.steps, result.seconds = result.tokens[:1], [], 0.0
        return result

    files = [tmp_path / f"{name}.jsonl" for name in "ab"]
    for file in files:
        file.write_text(json.dumps({"prompt": "a story"}) + "\n")
    monkeypatch.setattr(module, "_decode", ending)
    asked = dataclasses.replace(settings, heads=("eagle2",), benchmarks=tuple(map(str, files)))
    found = compare(asked)
    assert by_name(found)["eagle2"]["speedup"] > 0
    short = by_name(found["benchmarks"][1])["eagle2"]
    assert (short["tau"], short["speedup"], short["flag"], short["lossless"]) == (0, None, None, True)
    print_comparison(found)
    assert "eagle2: every answer" not in capsys.readouterr().out
    ended.add("a-")
    with pytest.raises(DraftsmithError, match="every answer ends with its first token"):
        compare(dataclasses.replace(asked, max_new_tokens=5))


def test_a_tuned_target_brings_its_own_baseline(
    settings: CompareSettings, tiny_folder: Path, tiny_target: Any, tmp_path: Path
) -> None:
    adapter = moved(make_adapter(tiny_folder))
    name = adapter.save(tmp_path / "adapter")
    vocab = DraftVocab(torch.arange(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    config = medusa2_config(
        tiny_target.config, vocab, target_id="tiny", target_revision=None, target_fingerprint=tiny_target.fingerprint,
        chat_template_sha256=None, trained_length=64, steps=3, step_decay=0.8, adapter_sha256=name,
    )  # fmt: skip
    head = Medusa2Head(config, vocab)
    head.initialise(tiny_target.parts(), torch.Generator().manual_seed(0))
    home = settings.runs / resolve_target(str(tiny_folder)).name
    best = add_run(home, "medusa2", head)
    shutil.copytree(tmp_path / "adapter", best / "adapter")
    found = by_name(compare(dataclasses.replace(settings, heads=("medusa2",))))
    assert found["medusa2"]["baseline"] == "plain (medusa2)"
    assert found["medusa2"]["lossless"]
    assert found["medusa2"]["parameters"] > sum(p.numel() for p in head.parameters())
    assert found["lookahead"]["baseline"] == "plain"
    answers = found["plain (medusa2)"]
    assert answers["speedup"] is None
    rows = {row[0]: row for row in comparison_rows({"schemes": list(found.values())})}
    assert rows["medusa2"][-1] == "vs the tuned target"


def test_mtp_heads_and_benchmarks_have_their_rows(
    settings: CompareSettings, tiny_target: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vocab = DraftVocab(torch.arange(0, tiny_target.vocab_size, 2), tiny_target.vocab_size)
    config = mtp_config(
        tiny_target.config, vocab, target_id="tiny", target_revision=None, target_fingerprint=tiny_target.fingerprint,
        chat_template_sha256=None, trained_length=64,
    )  # fmt: skip
    head = MtpHead(config, vocab)
    head.initialise(tiny_target.parts(), torch.Generator().manual_seed(0))
    add_run(settings.runs / resolve_target(settings.model).name, "mtp", head, "chain:2")
    asked = []
    for name, lines in (("first", 2), ("second", 1)):
        asked.append(tmp_path / f"{name}.jsonl")
        asked[-1].write_text("".join(f'{{"prompt": "{name} story {i}"}}\n' for i in range(lines)) + "broken\n")
    found = compare(
        dataclasses.replace(settings, heads=("mtp",), benchmarks=tuple(map(str, asked)), draft_model=settings.model)
    )
    assert list(by_name(found)) == ["plain", "prompt-lookup", "lookahead", "draft-model", "mtp"]
    assert by_name(found)["mtp"]["family"] == "mtp"
    assert all(row["lossless"] for row in found["schemes"])
    assert found["prompts"]["count"] == 3
    first, second = found["benchmarks"]
    assert [(b["name"], b["n_prompts"], b["licence"]) for b in (first, second)] == [
        ("first", 2, None),
        ("second", 1, None),
    ]
    assert "first.jsonl:3" in first["problems"][0]
    ids = [answer["id"] for answer in found["answers"]["mtp"]]
    for benchmark, own in ((first, ids[:2]), (second, ids[2:])):
        for row in benchmark["schemes"]:
            steps = [s for a in found["answers"][row["name"]] if a["id"] in own for s in a["steps"]]
            assert row["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
    assert by_name({"schemes": first["schemes"]})["draft-model"]["tau"] > 2  # it is the target itself
    print_comparison(found)
    told = capsys.readouterr().out
    assert "by benchmark" in told
    assert "first.jsonl:3" in told
    assert [len(row) for row in benchmark_rows(found)] == [4] * 5


def test_sampled_answers_are_timed_and_not_compared(settings: CompareSettings) -> None:
    found = compare(dataclasses.replace(settings, heads=("eagle1",), temperature=0.8))
    for row in found["schemes"][1:]:
        assert (row["output_check"], row["lossless"]) == (SAMPLED, None)
        assert row["speedup_ci"][0] <= row["speedup"] <= row["speedup_ci"][1]
    assert {row[-1] for row in comparison_rows(found)} == {"yes", "by its law"}


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["compare", *args], standalone_mode=False)


def test_mistakes_are_named(settings: CompareSettings, tmp_path: Path) -> None:
    common = ("--model", settings.model, "--runs", str(settings.runs))
    done = call(*common, "--heads", "eagle9")
    assert isinstance(done.exception, DraftsmithError)
    assert "holds no trained head (there are: eagle1, eagle2, eagle3@tree" in str(done.exception)
    assert "names no head" in str(call(*common, "--heads", " , ").exception)
    assert "are both called mine" in str(two_files_of_the_same_name(common, tmp_path).exception)
    with pytest.raises(DraftsmithError, match="--temperature -1 must be at least 0"):
        CompareSettings("m", tmp_path, temperature=-1)
    with pytest.raises(DraftsmithError, match="--max-new-tokens 1 must be at least 2"):
        CompareSettings("m", tmp_path, max_new_tokens=1)
    assert "no model" in str(call("--model", "nope", "--runs", str(tmp_path / "other")).exception)


def two_files_of_the_same_name(common: tuple[str, ...], folder: Path) -> Any:
    files = [folder / name / "mine.jsonl" for name in "ab"]
    for file in files:
        file.parent.mkdir()
        file.write_text('{"prompt": "a story"}\n')
    return call(*common, "--bench", ",".join(map(str, files)))


def test_without_heads_the_others_are_compared(tiny_folder: Path, tmp_path: Path) -> None:
    done = call("--model", str(tiny_folder), "--runs", str(tmp_path / "none"), "--prompts", "1", "--max-new-tokens",
                "6", "--draft-model", str(tiny_folder), "--json")  # fmt: skip
    assert done.exit_code == 0, done.exception
    assert "holds no trained head, so schemes without one" in done.stderr
    names = [scheme["name"] for scheme in json.loads(done.stdout)["schemes"]]
    assert names == ["plain", "prompt-lookup", "lookahead", "draft-model"]


def test_a_damaged_head_is_named_before_anything_is_decoded(settings: CompareSettings) -> None:
    file = next(settings.runs.glob(f"*/eagle1/train/checkpoints/best/{WEIGHTS}"))
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(DraftsmithError, match="is damaged"):
        compare(settings)
