"""The command `load`: figures by batch follow from raw logs, acceptance stays the same, killed runs go on."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from decoder_checks import RandomTreeDrafter, make_truth, random_head, random_prompts

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval import batches, closed_loop
from draftsmith.eval import load as module
from draftsmith.eval.batches import below_one_from, below_one_line, copies, measure_batch, same_steps
from draftsmith.eval.check import OutputCheck
from draftsmith.eval.closed_loop import ROUNDS, SPECULATIVE, WAYS, Matched, Served, Ways
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.loop import Request, Result, StepLog
from draftsmith.eval.journal import Journal
from draftsmith.eval.load import LoadSettings, load
from draftsmith.eval.tune import PLAIN
from draftsmith.files import write_json
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.resolve import resolve_target
from draftsmith.progress import Progress

PROMPTS, TOKENS = 2, 10
SERVE = Ways.serve


def bar() -> Progress:
    return Progress("load", None, "answers")


@pytest.fixture(scope="module")
def runs(tiny_target: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with one untrained head."""
    folder = tmp_path_factory.mktemp("runs")
    best = folder / resolve_target(str(tiny_folder)).name / "eagle3" / "train" / "checkpoints" / "best"
    best.mkdir(parents=True)
    head = random_head(tiny_target)
    head.config = dataclasses.replace(head.config, target_fingerprint=tiny_target.fingerprint)
    save_head(head, best)
    write_json(best.parents[1] / "manifest.json", {"identity": {}, "record": {"train_seconds": 1.0}})
    return folder


@pytest.fixture(scope="module")
def settings(runs: Path, tiny_folder: Path) -> LoadSettings:
    return LoadSettings(
        str(tiny_folder), "eagle3", runs, tree="chain:2", batches=(1, 3), prompts=PROMPTS, max_new_tokens=TOKENS
    )


@pytest.fixture(scope="module")
def result(settings: LoadSettings, runs: Path) -> dict[str, Any]:
    found = load(settings)
    assert json.loads(next(runs.glob("*/eagle3/load.json")).read_text()) == found
    return found


# --- by batch ---------------------------------------------------------------------------------------------------------


def test_figures_follow_from_the_raw_logs(result: dict[str, Any]) -> None:
    json.dumps(result, allow_nan=False)
    assert [row["batch"] for row in result["batches"]] == [1, 3]
    assert [row["requests"] for row in result["batches"]] == [4, 10]  # three waves at least, each prompt equally often
    for row in result["batches"]:
        answers = row["answers"]
        assert len(answers) == ROUNDS * row["requests"]
        speed = {}
        for way in WAYS:
            tokens = sum(a[PLAIN]["tokens"] for a in answers)  # the same answers in both ways
            speed[way] = tokens / sum(a[way]["seconds"] for a in answers)
        assert row["baseline_tokens_per_s"] == pytest.approx(speed[PLAIN])
        assert row["tokens_per_s"] == pytest.approx(speed[SPECULATIVE])
        assert row["speedup"] == pytest.approx(speed[SPECULATIVE] / speed[PLAIN])
        assert row["speedup_ci"][0] <= row["speedup"] <= row["speedup_ci"][1]
        steps = [step for a in answers for step in a[SPECULATIVE]["steps"]]
        assert row["tau"] == pytest.approx(sum(s[2] for s in steps) / len(steps))
        assert row["output_check"] == "identical"
        assert 1 <= row["running"][SPECULATIVE] <= row["batch"]
    assert result["batches"][0]["running"] == {PLAIN: 1.0, SPECULATIVE: 1.0}
    assert result["batches"][1]["running"][PLAIN] > 2


def test_what_was_measured_is_said(result: dict[str, Any]) -> None:
    sweep = result["sweep"]
    assert sweep["setting"] == {
        "tree": "chain:2", "depth": 2, "nodes": 3, "max_new_tokens": TOKENS, "template_kwargs": {}
    }  # fmt: skip
    assert sweep["environment"]["sessions"] == 1
    assert sweep["same_steps"]["differing"] == 0
    assert "the same steps for all 2 prompts at every batch" in sweep["same_steps"]["verdict"]
    assert [(p["name"], p["n_prompts"], p["dropped"]) for p in sweep["prompts"]] == [("builtin", PROMPTS, [])]
    assert (result["schema"], result["head"], result["replay"]) == ("draftsmith.load/1", "eagle3", None)


def test_the_command_prints_a_table_and_does_nothing_twice(
    result: dict[str, Any], settings: LoadSettings, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(module, "load_model", None)  # a finished measurement loads no model
    options = ["--tree", "chain:2", "--prompts", str(PROMPTS), "--max-new-tokens", str(TOKENS)]
    common = ["load", "--model", settings.model, "--runs", str(settings.runs), *options]
    cli.app([*common, "--batches", "1,3"], standalone_mode=False)
    out, err = capfd.readouterr()
    assert "everything is measured already" in err
    assert "eagle3 for" in out
    assert f"{result['batches'][1]['baseline_tokens_per_s']:.1f}" in out
    assert "tau: the same steps for all 2 prompts" in out
    journal = next(settings.runs.glob("*/eagle3/load/batches/journal.jsonl"))
    before = journal.read_bytes()
    cli.app([*common, "--batches", "3", "--json"], standalone_mode=False)
    assert json.loads(capfd.readouterr().out) == result  # what was measured before stays in it
    assert journal.read_bytes() == before  # nor is a session noted in which nothing was measured


def test_benchmark_files_are_looked_for_and_told_apart(settings: LoadSettings, tmp_path: Path) -> None:
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "mine.jsonl").write_text('{"prompt": "a story"}\n')
    found = load(dataclasses.replace(settings, batches=(1,), benchmarks=("mine.jsonl",), bench_dir=str(tmp_path / "a")))
    assert [(p["name"], p["n_prompts"]) for p in found["sweep"]["prompts"]] == [("mine", 1)]
    two = tuple(str(tmp_path / place / "mine.jsonl") for place in ("a", "b"))
    with pytest.raises(DraftsmithError, match="rename a file"):
        load(dataclasses.replace(settings, benchmarks=two))


def test_a_killed_measurement_goes_on_and_a_new_batch_alone_is_measured(
    settings: LoadSettings, tmp_path: Path, runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "runs"
    place = next(runs.glob("*/eagle3/train"))
    (home / place.relative_to(runs)).parent.mkdir(parents=True)
    (home / place.relative_to(runs)).symlink_to(place)
    calls: list[tuple[str, int]] = []

    def serve(ways: Ways, way: str, requests: Sequence[Request], slots: int, *args: Any, **more: Any) -> Served:
        if len(requests) > slots:  # no warm-up
            if len(calls) == 5:
                raise KeyboardInterrupt
            calls.append((way, slots))
        return SERVE(ways, way, requests, slots, *args, **more)

    monkeypatch.setattr(Ways, "serve", serve)
    small = dataclasses.replace(settings, runs=home, batches=(1, 2), max_new_tokens=4)
    with pytest.raises(KeyboardInterrupt):
        load(small)
    assert calls == [(PLAIN, 1), (SPECULATIVE, 1), (SPECULATIVE, 1), (PLAIN, 1), (PLAIN, 2)]
    monkeypatch.setattr(Ways, "serve", SERVE)
    served: list[tuple[str, int]] = []

    def count(ways: Ways, way: str, requests: Sequence[Request], slots: int, *args: Any, **more: Any) -> Served:
        served.extend([(way, slots)] * (len(requests) > slots))
        return SERVE(ways, way, requests, slots, *args, **more)

    monkeypatch.setattr(Ways, "serve", count)
    found = load(small)
    assert served == [(PLAIN, 2), (SPECULATIVE, 2), (SPECULATIVE, 2), (PLAIN, 2)]  # a round is of one process
    assert found["sweep"]["environment"]["sessions"] == 2
    served.clear()
    found = load(dataclasses.replace(small, batches=(4,)))
    assert {slots for _, slots in served} == {4}
    assert [row["batch"] for row in found["batches"]] == [1, 2, 4]


def test_acceptance_is_the_same_at_every_batch(tiny_target: Any) -> None:
    """Of drafts that are often right; random trees, which differ from call to call, are told apart from it."""
    phrase = "the lazy dog and the quick brown fox and "
    prompts = [tiny_target.tokenizer(phrase * n + "the lazy").input_ids for n in (2, 3)]
    requests = [Request(f"p{i}", tokens, 10) for i, tokens in enumerate(prompts)]
    ways = Ways(tiny_target, PromptLookupDrafter(tokens=3))
    rows = [measure_batch(ways, requests, batch, Journal(), bar()) for batch in (1, 3)]
    assert same_steps(rows)["differing"] == 0
    assert len({row["tau"] for row in rows}) == 1
    assert [row["requests"] for row in rows] == [4, 10]
    truth = make_truth(tiny_target, prompts, 16)
    ways = Ways(tiny_target, RandomTreeDrafter(truth, 5))
    rows = [measure_batch(ways, requests, batch, Journal(), bar()) for batch in (1, 2)]
    assert {row["output_check"].partition(":")[0] for row in rows} <= {"identical", "ties"}
    assert same_steps(rows)["differing"] > 0
    assert "took other steps" in same_steps(rows)["verdict"]
    assert rows[0]["tau"] > 1


def test_no_speed_up_beside_wrong_outputs(tiny_target: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = OutputCheck(False, "FAILED: p differs at answer token 3", 0.1, 0.1, [])
    monkeypatch.setattr(closed_loop, "check_outputs", lambda *args: wrong)
    requests = [Request("p", random_prompts(tiny_target, [5])[0], 6)]
    row = measure_batch(Ways(tiny_target, PlainDrafter()), requests, 1, Journal(), bar())
    assert (row["speedup"], row["speedup_ci"], row["flag"]) == (None, None, None)
    assert row["output_check"].startswith("FAILED")
    assert below_one_line([row]).startswith("no batch has a speed-up")


def test_answers_of_one_token_have_nothing_to_measure(tiny_target: Any) -> None:
    requests = [Request("p", random_prompts(tiny_target, [5])[0], 1)]
    with pytest.raises(DraftsmithError, match="every answer ends with its first token: there is no step to measure"):
        measure_batch(Ways(tiny_target, PlainDrafter()), requests, 1, Journal(), bar())


def results(seconds: float, emitted: int) -> list[Result]:
    return [
        Result(name, [1], [1, 2], "length", [StepLog(2, emitted - 1, emitted)] * 4, seconds, False) for name in "abcd"
    ]


def test_an_implausible_speed_up_is_flagged() -> None:
    """At most τ × c(1)/min c(N): 2 × 1 here, as the drafted pass costs more than the plain one."""

    def matched(fast_seconds: float, fast_pass: float) -> dict[str, Any]:
        served = {
            PLAIN: Served(results(8.0, 1), [], [], 1.0, 4),
            SPECULATIVE: Served(results(fast_seconds, 2), [], [], 1.0, 4),
        }
        passes = {PLAIN: 1.0, SPECULATIVE: fast_pass, "draft": 0.1}
        return Matched([served], [0, 1, 2, 3], passes, OutputCheck(True, "identical", None, None, [])).figures()

    honest = matched(10.0, 1.2)
    assert honest["speedup"] == pytest.approx(2 * 8 / 10)
    assert honest["flag"] is None
    assert matched(7.0, 1.2)["flag"] == "the speed-up's lower bound 2.29 is above τ·c(1)/min c(N) = 2.00"
    assert matched(7.0, 0.8)["flag"] is None


def test_copies_of_a_prompt_count_as_one() -> None:
    """An interval over copies would be too narrow: with one prompt there is nothing to resample."""
    served = {PLAIN: Served(results(8.0, 1), [], [], 1.0, 4), SPECULATIVE: Served(results(5.0, 2), [], [], 1.0, 4)}
    served[SPECULATIVE].results[0].seconds = 1.0
    passes = {PLAIN: 0.0, SPECULATIVE: 0.0, "draft": 0.0}
    ok = OutputCheck(True, "identical", None, None, [])
    one, four = (Matched([served], groups, passes, ok).figures() for groups in ([0] * 4, [0, 1, 2, 3]))
    assert one["speedup"] == four["speedup"] == pytest.approx(2 * 32 / 16)
    assert one["speedup_ci"][0] == one["speedup_ci"][1] == pytest.approx(4.0)
    assert four["speedup_ci"][0] < 4 < four["speedup_ci"][1]


def test_each_prompt_is_decoded_equally_often() -> None:
    requests = [Request(name, [1], 4) for name in "abc"]
    assert [r.id for r in copies(requests, 1)] == ["a", "b", "c"]
    assert [r.id for r in copies(requests, 2)] == ["a", "b", "c", "a#2", "b#2", "c#2"]
    for batch in (1, 2, 5, 8):
        asked = copies(requests, batch)
        assert len(asked) >= batches.WAVES * batch
        assert len(asked) % 3 == 0
        assert batches.answers_of(3, batch) == len(asked) * len(WAYS) * ROUNDS


def rows(**speedups: float | None) -> list[dict[str, Any]]:
    return [
        {"batch": int(name[1:]), "speedup": value, "speedup_ci": None if value is None else [value - 0.1, value + 0.1]}
        for name, value in speedups.items()
    ]


@pytest.mark.parametrize(
    ("found", "at", "line"),
    [
        (rows(b1=1.5, b2=1.3, b4=1.2), None, "the speed-up stays above 1 up to batch 4"),
        (rows(b1=1.5, b2=1.05), None, "stays above 1 up to batch 2, though its interval reaches down to 0.95"),
        (rows(b1=1.5, b2=0.8, b4=0.7), 2, "from batch 2 on the head slows decoding down"),
        (rows(b1=1.5, b2=0.95, b4=0.7), 2, "slows decoding down, though its interval reaches up to 1.05"),
        (
            rows(b1=0.8, b2=1.3, b4=0.7),
            4,
            "slows decoding down; it is below 1 at batch 1, too, though a larger one pays",
        ),
        (rows(b1=0.8, b2=0.7, b4=1.3), None, "the speed-up is above 1 at batch 4; it is below 1 at batch 1, 2, too"),
        (rows(b1=0.8, b2=0.8), 1, "from batch 1 on"),
        (rows(b1=1.5, b2=None, b4=0.7), 4, "from batch 4 on"),
        (rows(b1=1.5, b2=0.7, b4=None), 2, "from batch 2 on"),
    ],
)
def test_the_batch_from_which_a_head_slows_down(found: list[dict[str, Any]], at: int | None, line: str) -> None:
    assert below_one_from(found) == at
    assert line in below_one_line(found)


# --- the loop's clock -------------------------------------------------------------------------------------------------


def test_times_count_from_when_the_loop_takes_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A made-up loop with a made-up clock: two slots, the third request waits for one."""
    now = [0.0]
    monkeypatch.setattr(closed_loop.time, "perf_counter", lambda: now[0])

    def decode(target: Any, drafter: Any, requests: Iterator[Request], *, on_token: Any, **more: Any) -> Any:
        def tell(at: float, *names: str) -> None:
            now[0] = at
            for name in names:
                on_token(name, [7])

        now[0] = 1.0
        next(requests), next(requests)
        tell(3.0, "a")
        tell(4.0, "b")
        tell(5.0, "a", "b")  # a step of both
        tell(6.0, "a", "b")
        yield Result("a", [1], [7] * 3, "length", [StepLog(0, 0, 1)] * 2, 2.0)
        now[0] = 8.0
        next(requests)
        tell(9.5, "c")
        tell(10.0, "c", "b")  # in whichever order
        tell(11.0, "b", "c")
        yield Result("b", [1], [7] * 5, "length", [StepLog(0, 0, 1)] * 4, 3.0)
        tell(12.0, "c")
        yield Result("c", [1], [7] * 4, "length", [StepLog(0, 0, 1)] * 3, 2.0)

    monkeypatch.setattr(closed_loop, "decode", decode)
    served = Ways(None, PlainDrafter()).serve(SPECULATIVE, [Request(name, [1], 9) for name in "abc"], 2)  # type: ignore[arg-type]
    assert [r.id for r in served.results] == ["a", "b", "c"]
    assert served.first_token == [2.0, 3.0, 1.5]
    assert served.latency == [5.0, 10.0, 4.0]
    assert served.seconds == 12.0
    assert served.steps == 5
    assert served.running == (2 + 4 + 3) / 5
    assert Served.from_dict(json.loads(json.dumps(served.to_dict()))) == served


# --- mistakes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (["--batches", "1,two"], "--batches '1,two': write whole numbers"),
        (["--batches", "0,1"], "--batches 0,1: give whole numbers from 1 on"),
        (["--batches", "2,2"], "each once"),
        (["--bench", " , "], "--bench ' , ' names no benchmark"),
        (["--bench", "no-such-bench"], "no-such-bench"),
        (["--max-new-tokens", "1"], "--max-new-tokens 1 must be at least 2"),
        (["--concurrency", "4"], "--concurrency 4 goes with --replay FILE"),
        (["--replay", "x.jsonl", "--batches", "1"], "--replay x.jsonl brings its own requests: leave --batches out"),
        (["--replay", "x.jsonl", "--bench", "mt-bench"], "leave --bench out"),
        (["--replay", "x.jsonl"], "--replay x.jsonl: there is no such file"),
        (["--head", "medusa1"], "holds no trained head (there are: eagle3"),
        (["--tree", "bush:3"], "'bush:3' can't be read"),
        (["--head", "./nowhere"], "there is no head to start from"),
    ],
)
def test_mistakes_are_named(settings: LoadSettings, args: list[str], told: str) -> None:
    with pytest.raises(DraftsmithError) as caught:
        cli.app(["load", *args, "--model", settings.model, "--runs", str(settings.runs)], standalone_mode=False)
    assert told in str(caught.value)
