"""The command `tune`: walks equal real decoding, predictions add up, killed tunings go on, engines get settings."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from decoder_checks import random_head, random_prompts
from test_compare import add_run
from test_eval_harness import make_head
from tiny import make_tiny_target
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.eval import advice, tuning, walks
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.draft_model import DraftModelDrafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, Result, StepLog, decode, rows_needed
from draftsmith.eval.decoder.sampling import Sampling
from draftsmith.eval.decoder.search import Shape, Static, parse_shape
from draftsmith.eval.lockstep import Runner
from draftsmith.eval.report.figures import Shown, best_settings
from draftsmith.eval.report.tuning import best_rows, engine_lines, print_tuning, table_rows
from draftsmith.eval.tune import (
    PLAIN,
    PassCosts,
    StepCost,
    chunks,
    compose,
    covering,
    grid,
    leaders,
    may_pay,
    predict,
    without_drift,
)
from draftsmith.eval.tuning import TuneSettings, tune
from draftsmith.eval.walks import foresee
from draftsmith.heads.checkpoint import MeasuredTree, save_tree
from draftsmith.heads.formats.export import default_folder
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target

FIXED = ["chain:2", "chain:5", "static:0,1,2,0.0,0.1,1.0,0.0.0"]
DYNAMIC = ["dynamic:2x3x4", "dynamic:2x4x9", "dynamic:3x2x6", "dynamic:3x3x8"]
HEAD_TREES = ["chain:3", "dynamic:40x2x60", "dynamic:40x1x30", f"static:{','.join(map(str, range(90)))},0.0"]


# --- walks against really decoding ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target of two layers."""
    folder = make_tiny_target(tmp_path_factory.mktemp("small") / "target", layers=2, hidden=32, heads=2, kv_heads=1)
    return Target.load(str(folder), dtype=torch.float32, device="cpu")


@pytest.fixture(scope="module")
def noisy(small: Target, tmp_path_factory: pytest.TempPathFactory) -> Target:
    """The small target with noise on its weights: a draft model that is often right."""
    from transformers import LlamaForCausalLM

    folder = tmp_path_factory.mktemp("noisy") / "draft"
    shutil.copytree(small.id, folder)
    model = LlamaForCausalLM.from_pretrained(folder)
    g = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight += 0.03 * weight.std() * torch.randn(weight.shape, generator=g)
    model.save_pretrained(folder)
    return Target.load(str(folder), dtype=torch.float32, device="cpu")


def make_requests(target: Any, sampling: Sampling, limits: tuple[int, ...] = (12, 8, 13, 9, 1)) -> list[Request]:
    """Answers of several lengths, more of them than slots; one is a single token."""
    prompts = random_prompts(target, [5, 9, 12, 7, 4])
    return [Request(f"r{i}", p, n, sampling) for i, (p, n) in enumerate(zip(prompts, limits, strict=True))]


def really(target: Any, drafter: Any, requests: list[Request]) -> list[Result]:
    """Decode with a tree, in the order of the requests."""
    found = {r.id: r for r in decode(target, drafter, requests, slots=3, capacity=rows_needed(requests, drafter))}
    return [found[request.id] for request in requests]


def assert_walks_are_decoding(
    target: Any, make: Any, texts: list[str], requests: list[Request], exact: list[str]
) -> float:
    """Every exact tree's steps; returns accepted drafts a step."""
    found = foresee(target, make, requests, {text: parse_shape(text) for text in texts}, 3)
    assert found.exact == set(exact)
    accepted = 0
    for text in exact:
        for walked, result in zip(found.steps[text], really(target, make(parse_shape(text)), requests), strict=True):
            assert [s.emitted for s in walked] == [s.emitted for s in result.steps], text
            assert walked[:-1] == result.steps[:-1], text
            for step, real in zip(walked[-1:], result.steps[-1:], strict=True):  # drafts past the end are unknown
                assert step.accepted <= real.accepted
                assert step == real or step.accepted == step.drafted == step.emitted
            accepted += sum(step.accepted for step in walked)
    plain = [result.tokens for result in really(target, make(parse_shape(exact[0])), requests)]
    assert found.answers == plain
    return accepted / sum(len(step) for text in exact for step in found.steps[text])


def test_walks_of_every_tree_are_the_steps_of_greedy_decoding(small: Target, noisy: Target) -> None:
    def make(shape: Shape) -> DraftModelDrafter:
        return DraftModelDrafter(small, noisy, shape)

    texts = [*FIXED, *DYNAMIC]
    share = assert_walks_are_decoding(small, make, texts, make_requests(small, Sampling()), texts)
    assert 0.3 < share < 2.0  # some drafts are right, some wrong


@pytest.mark.parametrize("family", ["eagle3", "hydra", "medusa", "mtp"])
def test_walks_of_a_heads_trees_are_the_steps_of_greedy_decoding(tiny_target: Any, family: str) -> None:
    head, parts = random_head(tiny_target, family=family), tiny_target.parts()
    requests = make_requests(tiny_target, Sampling(), (8, 6, 9, 5, 1))

    def make(shape: Shape) -> Any:
        return make_drafter(head, parts, shape)

    assert assert_walks_are_decoding(tiny_target, make, HEAD_TREES, requests, HEAD_TREES) > 0


def test_sampled_walks_are_exact_for_dynamic_trees_alone(small: Target, noisy: Target) -> None:
    def make(shape: Shape) -> DraftModelDrafter:
        return DraftModelDrafter(small, noisy, shape)

    requests = make_requests(small, Sampling(temperature=0.7, seed=3))
    assert assert_walks_are_decoding(small, make, [*DYNAMIC, *FIXED[:1]], requests, DYNAMIC) > 0.1


def test_a_smaller_drawn_tree_accepts_the_part_of_the_path_that_it_has(small: Target, noisy: Target) -> None:
    """Behind the same tokens, that is in the first step; what is cut off an answer's end stays cut off."""
    requests = [
        Request(f"r{i}", prompt, 5, Sampling(temperature=0.7, seed=i))
        for i, prompt in enumerate(random_prompts(small, [6] * 10, seed=2))
    ]
    found = foresee(
        small, lambda shape: DraftModelDrafter(small, noisy, shape), requests,
        {text: parse_shape(text) for text in FIXED}, 8,
    )  # fmt: skip
    assert found.exact == set()
    firsts = set()
    for text in FIXED:
        results = really(small, DraftModelDrafter(small, noisy, parse_shape(text)), requests)
        for walked, result in zip(found.steps[text], results, strict=True):
            if result.steps and walked:
                assert walked[0].accepted == result.steps[0].accepted, text
                firsts.add(walked[0].accepted)
            assert all(1 <= step.emitted <= step.accepted + 1 for step in walked)
    assert len(firsts) >= 3


def test_an_answer_without_any_step_has_none(small: Target, noisy: Target) -> None:
    requests = [dataclasses.replace(make_requests(small, Sampling())[0], max_new_tokens=1)]
    make = lambda shape: DraftModelDrafter(small, noisy, shape)  # noqa: E731
    found = foresee(small, make, requests, {"chain:2": parse_shape("chain:2")}, 2)
    assert found.steps == {"chain:2": [[]]}
    assert len(found.answers[0]) == 1


def test_parts_of_a_path() -> None:
    shape = Static([[0], [1], [0, 0]])
    steps = [StepLog(3, 3, 4), StepLog(3, 2, 3), StepLog(3, 1, 2), StepLog(3, 1, 2), StepLog(3, 0, 1), StepLog(3, 3, 2)]
    ranks = [(0, 0, 0), (0, 1), (1,), (2,), (), (0, 0, 0)]  # of the tree that holds it; the last step was cut
    assert walks._within(shape, steps, ranks) == [
        StepLog(2, 2, 3), StepLog(2, 1, 2), StepLog(2, 1, 2), StepLog(2, 0, 1), StepLog(2, 0, 1), StepLog(2, 2, 2)
    ]  # fmt: skip


# --- settings and their costs -----------------------------------------------------------------------------------------


def test_the_grid_keeps_to_what_a_head_drafts() -> None:
    every = grid(None, 8192)
    assert every[:8] == [f"chain:{depth}" for depth in range(1, 9)]
    assert {"dynamic:4x3x8", "dynamic:8x6x60"} <= set(every)
    assert "dynamic:4x3x60" not in every  # finds 37 nodes
    for text in every:
        assert 2 <= parse_shape(text).rows <= 60
    assert grid(3, 8192) == ["chain:1", "chain:2", "chain:3", *[t for t in every if t.split("x")[1:2] == ["3"]]]
    assert not any(text.startswith("dynamic:8") for text in grid(None, 5))


def test_passes_are_timed_once_a_shape() -> None:
    texts = ["chain:1", "chain:7", "static:0,1,2,0.0,0.1,1.0,0.0.0", "dynamic:4x3x8", "dynamic:4x3x16", "dynamic:4x4x8"]
    trees = {text: parse_shape(text) for text in [*texts, "dynamic:4x4x16"]}
    assert covering(trees) == texts
    timed = PassCosts()
    timed.add(PLAIN, 1, [0.5], [0.0], [0.1])
    for number, (text, target) in enumerate(zip(texts, [1.0, 2.0, 3.0, 5.0, 7.0, 6.0], strict=True), 1):
        timed.add(text, trees[text].rows, [target], [0.1 * number], [0.01 * number])
    costs = compose(timed, trees).ways
    assert costs[PLAIN] == timed.ways[PLAIN]
    assert costs["chain:1"] == timed.ways["chain:1"]
    last = costs["dynamic:4x4x16"]  # the pass of 16 tree rows, and the drafting of 4x4
    assert (last.rows, last.target, last.draft, last.rest) == (16, 7.0, pytest.approx(0.6), pytest.approx(0.06))
    assert costs["dynamic:4x4x8"].target == 5.0  # the median of 3, 5 and 6: 8 rows of a tree, of whichever kind
    assert costs["chain:7"].target == 2.0
    timed.ways.pop("dynamic:4x3x16")  # nobody else has its pass
    assert compose(timed, trees).ways.keys() == {PLAIN, *trees} - {"dynamic:4x3x16", "dynamic:4x4x16"}


def test_a_machine_that_slows_down_changes_no_cost() -> None:
    costs = {PLAIN: StepCost(1, 1.0, 0.0, 0.1), "a": StepCost(3, 1.5, 0.4, 0.1), "b": StepCost(9, 2.0, 0.8, 0.2)}
    speeds = [(PLAIN, 1.0), ("a", 1.0), (PLAIN, 1.0), ("b", 1.5), (PLAIN, 2.0), ("a", 2.0), (PLAIN, 2.0), (PLAIN, 1.0)]
    runs = []
    for way, slower in speeds:
        c = costs[way]
        runs.append((way, StepCost(c.rows, slower * c.target, slower * c.draft, slower * c.rest)))
    found = without_drift(runs).ways
    for way, cost in costs.items():
        assert dataclasses.astuple(found[way]) == pytest.approx(dataclasses.astuple(cost))


def test_who_is_timed_together() -> None:
    assert chunks(["a", "b", "c", "d"]) == [[], ["a", "b", "c"], ["d"]]
    assert chunks([]) == [[]]


def test_passes_that_take_too_long_are_not_timed() -> None:
    timed = PassCosts()
    timed.add(PLAIN, 1, [1.0], [0.0], [0.1])
    timed.add("dynamic:4x3x16", 16, [2.1], [0.3], [0.1])
    assert may_pay(32, timed, tau=2.0)  # 2.1 < 2.0 x 1.1
    assert not may_pay(32, timed, tau=1.9)
    assert may_pay(16, timed, tau=1.0)  # small ones always


def test_predictions_are_tokens_over_seconds() -> None:
    costs = PassCosts()
    costs.add(PLAIN, 1, [0.2], [0.0], [0.0])
    costs.add("chain:2", 3, [0.25], [0.1], [0.05])
    predicted = predict(costs, {PLAIN: 1.0, "chain:2": 2.2}, batch=4)
    assert predicted == {PLAIN: pytest.approx(20.0), "chain:2": pytest.approx(22.0)}
    assert leaders(predicted, 1) == ["chain:2"]


# --- advice -----------------------------------------------------------------------------------------------------------


def test_a_weak_head_is_to_be_changed_not_its_k() -> None:
    said = advice.on_acceptance(0.4, 0.0)
    assert "α = 0.40 greedy" in said
    assert "1.7 tokens a step" in said  # 1 / (1 - 0.4)
    assert "Change the head, not K" in said
    assert "Change" not in advice.on_acceptance(0.5, 0.0)
    assert "2.0 tokens a step" in advice.on_acceptance(0.5, 0.0)
    assert "every draft" in advice.on_acceptance(1.0, 0.0)


def test_where_batches_stop_to_pay() -> None:
    assert advice.break_even({1: 1.8, 2: 1.0}) is None
    assert advice.break_even({4: 0.97, 1: 1.8, 8: 0.9}) == 4
    assert advice.break_even({4: 0.99, 1: 1.8, 8: 1.2}) is None  # a larger batch pays again
    assert advice.break_even({1: 0.9, 2: 1.1, 4: 0.95, 8: 0.8}) == 4
    again = advice.on_batches({1: 1.8, 4: 0.99, 8: 1.2}, 0.0)
    assert again == "1.20× is gained at batch 8 greedy. Batch 4 (0.99×) loses, too, though a larger one pays again."
    both = advice.on_batches({1: 0.9, 2: 1.1, 4: 0.95, 8: 0.8}, 0.0)
    assert both.startswith("At batch 4 greedy the best setting decodes 0.95×")
    assert both.endswith("Batch 1 (0.90×) loses, too, though a larger one pays again.")
    assert "At batch 4 greedy the best setting decodes 0.97×" in advice.on_batches({1: 1.8, 4: 0.97, 8: 0.9}, 0.0)
    kept = advice.on_batches({1: 1.8, 8: 1.25}, 0.7)
    assert "Of 1.80× at batch 1 1.25× is left at batch 8 at temperature 0.7" in kept
    assert "not drop" in kept or "doesn't drop" in kept
    assert "not measured" in advice.on_batches({2: 1.4}, 0.0)


def test_what_a_temperature_leaves() -> None:
    assert advice.on_temperatures({0.0: 1.5}, 1) is None
    assert "Of 1.50× greedy 1.20× is left at temperature 1 (batch 2)" in str(
        advice.on_temperatures({0: 1.5, 1: 1.2}, 2)
    )
    assert "costs nothing" in str(advice.on_temperatures({0.0: 1.5, 1.0: 1.6}, 1))


def test_a_long_prompt_is_no_matter_of_decoding() -> None:
    heavy = advice.on_prefill(prefill=3.0, decoding=1.0, speedup=2.0)
    assert "75% of a request's time is its prompt: decoding isn't the bottleneck" in heavy
    assert "answered 1.14× as fast" in heavy  # 4 / 3.5
    assert "bottleneck" not in advice.on_prefill(1.0, 3.0, 2.0)
    assert "answered 1.60× as fast" in advice.on_prefill(1.0, 3.0, 2.0)  # 4 / 2.5


def test_memory_and_errors_are_told_in_figures() -> None:
    memory = advice.Memory(target=500_000_000, head=50_000_000, target_token=40_000, head_token=2_000, rows=10, batch=4)
    assert memory.trees == 4 * 10 * 42_000
    assert "50.0 MB of weights (10% of the target's 500.0 MB)" in advice.on_memory(memory)
    assert "(5% more)" in advice.on_memory(memory)
    packed = advice.on_memory(dataclasses.replace(memory, quantised=True))
    assert "(10% of the target's 500.0 MB, unquantised)" in packed
    assert "off by -12.0% at most" in advice.on_errors([0.05, -0.12, 0.01])


# --- the command ------------------------------------------------------------------------------------------------------

PROMPTS, TOKENS = 2, 7
TREES = ("chain:1", "chain:2", "dynamic:2x2x4", "static:0,1")


@pytest.fixture(scope="module")
def runs(tiny_target: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One head, with a tree of its own."""
    folder = tmp_path_factory.mktemp("runs")
    best = add_run(folder / resolve_target(str(tiny_folder)).name, "eagle3", make_head(tiny_target))
    save_tree(MeasuredTree([[0], [1], [0, 0]] + [[i] for i in range(2, 8)], [[0.5] * 8, [0.3]], [9, 9], 1), best)
    return folder


@pytest.fixture(autouse=True, scope="module")
def _short_probes() -> Iterator[None]:
    """Times are not looked at here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuning, "PROBE_TOKENS", 3)
        patch.setattr(tuning, "PROBE_STEPS", 2)
        yield


@pytest.fixture
def settings(runs: Path, tiny_folder: Path, tmp_path: Path) -> TuneSettings:
    """A small tuning in a copy of the runs."""
    shutil.copytree(runs, tmp_path / "runs")
    return TuneSettings(
        str(tiny_folder), "eagle3", tmp_path / "runs", batches=(2, 1), temperatures=(0.0, 1.0), prompts=PROMPTS,
        max_new_tokens=TOKENS, trees=TREES,
    )  # fmt: skip


@pytest.fixture(scope="module")
def result(runs: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The whole tuning, uninterrupted."""
    copy = tmp_path_factory.mktemp("whole") / "runs"
    shutil.copytree(runs, copy)
    asked = TuneSettings(
        str(tiny_folder), "eagle3", copy, batches=(3, 1), temperatures=(1.0, 0.0), prompts=PROMPTS,
        max_new_tokens=TOKENS, trees=TREES,
    )  # fmt: skip
    found = tune(asked)
    assert json.loads(next(copy.glob("*/eagle3/tune.json")).read_text()) == found
    return found


def test_every_load_has_a_table_of_all_settings(result: dict[str, Any]) -> None:
    cells = result["cells"]
    assert [(c["temperature"], c["batch"]) for c in cells] == [(0.0, 1), (0.0, 3), (1.0, 1), (1.0, 3)]
    for cell in cells:
        assert [row["tree"] for row in cell["table"]] == list(TREES)
        assert cell["left_out"] == []
        timed = [row for row in cell["table"] if row["measured_tokens_per_s"] is not None]
        assert 3 <= len(timed) <= 4  # the leaders, and the best chain if it is none of them
        promising = sorted(cell["table"], key=lambda row: -row["predicted_tokens_per_s"])[:3]
        assert {row["tree"] for row in promising} <= {row["tree"] for row in timed}
        assert any(row["tree"].startswith("chain") for row in timed)
        for row in timed:
            assert row["error"] == pytest.approx(row["predicted_tokens_per_s"] / row["measured_tokens_per_s"] - 1)
            assert row["speedup_ci"][0] <= row["measured_speedup"] <= row["speedup_ci"][1]
            assert row["output_check"] == ("identical" if cell["temperature"] == 0 else tuning.SAMPLED)
        best = max(timed, key=lambda row: row["measured_speedup"])
        assert (cell["best"]["tree"], cell["best"]["pays"]) == (best["tree"], best["measured_speedup"] >= 1)
        assert cell["best_chain"]["tree"].startswith("chain")
    errors = [row["error"] for cell in cells for row in cell["table"] if row["error"] is not None]
    assert result["prediction"]["settings"] == len(errors)
    assert result["prediction"]["largest_error"] in errors


def test_predictions_follow_from_acceptance_and_passes(result: dict[str, Any]) -> None:
    taus = {(a["temperature"], a["tree"]): a["tau"] for a in result["acceptance"]}
    steps = {
        (p["batch"], p["sampled"], p["tree"]): p["target_seconds"] + p["draft_seconds"] + p["rest_seconds"]
        for p in result["passes"]
    }
    for cell in result["cells"]:
        kind = cell["batch"], cell["temperature"] > 0
        for row in cell["table"]:
            tau = taus[cell["temperature"], row["tree"]]
            speedup = tau * steps[(*kind, PLAIN)] / steps[(*kind, row["tree"])]
            assert row["predicted_speedup"] == pytest.approx(speedup)
            assert row["predicted_tokens_per_s"] == pytest.approx(speedup * cell["plain_tokens_per_s"])
            if cell["temperature"] == 0 and cell["batch"] == 1 and row["measured_tau"] is not None:
                assert row["measured_tau"] == pytest.approx(tau)  # the walks are exact
    assert {a["tree"] for a in result["acceptance"] if a["temperature"] > 0 and a["exact"]} == {"dynamic:2x2x4"}


def test_every_batch_says_where_it_stops_to_pay(result: dict[str, Any]) -> None:
    for line in result["break_even"]:
        speedups = {
            c["batch"]: c["best"]["speedup"] for c in result["cells"] if c["temperature"] == line["temperature"]
        }
        known = {(True, True): 1, (False, True): 3}  # whether batches 1 and 3 lose
        assert line["batch"] == known.get((speedups[1] < 1, speedups[3] < 1))


def test_engines_get_what_they_can_run(result: dict[str, Any], runs: Path) -> None:
    entries = {entry["engine"]: entry for entry in result["serve"]}
    assert entries["vllm"]["tree"].startswith("chain:")
    depth = int(entries["vllm"]["tree"].partition(":")[2])
    assert f'"num_speculative_tokens": {depth}' in entries["vllm"]["commands"][-1]
    home = next(runs.glob("*/eagle3"))
    assert str(Path(home.parent.name) / "eagle3" / "export" / "vllm") in entries["vllm"]["commands"][-1]
    assert default_folder(home, "vllm") == home / "export" / "vllm"
    batches = [b for entry in result["serve"] if entry["engine"] == "sglang" for b in entry["batches"]]
    assert sorted(batches) == [1, 3]
    for entry in result["serve"]:
        if entry["engine"] == "sglang":
            shape: Any = parse_shape(entry["tree"])
            assert entry["settings"] == {"depth": shape.depth, "topk": getattr(shape, "top_k", 1), "nodes": shape.rows}
    assert all("static" not in entry.get("tree", "") for entry in result["serve"])
    lines = engine_lines(result["serve"])
    assert any(line.startswith("vLLM, chain:") for line in lines)
    assert any("not for this head" in line for line in lines)


def test_the_terminal_shows_every_figure(result: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert [(row[0], row[1]) for row in best_rows(result)] == [("0", "1"), ("0", "3"), ("1", "1"), ("1", "3")]
    rows = table_rows(result["cells"][0])
    assert sorted(row[0] for row in rows) == sorted(TREES)
    print_tuning(result)
    shown = capsys.readouterr().out
    assert "α = " in shown
    for line in result["advice"]:
        assert line in shown
    failed = {**result["cells"][0], "best": None}
    assert best_rows({"cells": [failed]})[0][2:4] == ("–", "outputs differ")


def stop_before(monkeypatch: pytest.MonkeyPatch, steps: int | None) -> list[Runner]:
    """Count the steps of all ways; interrupt before step number `steps`. Returns who took them, one after the other."""
    taken: list[Runner] = []

    def step(self: Runner) -> StepCost | None:
        if len(taken) == steps:
            raise KeyboardInterrupt
        taken.append(self)
        return STEP(self)

    monkeypatch.setattr(Runner, "step", step)
    return taken


STEP = Runner.step


def test_a_killed_tuning_goes_on_and_a_finished_one_is_kept(
    settings: TuneSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = dataclasses.replace(settings, temperatures=(0.0,), batches=(1,), trees=("chain:1", "chain:2"))
    rounds = tuning.PROBE_STEPS + 1
    probes = (rounds + 1) + (3 * rounds + 1)  # plain decoding alone, and with both; it ends each
    taken = stop_before(monkeypatch, probes + 2)  # among the leaders
    with pytest.raises(KeyboardInterrupt):
        tune(small)
    plain, first, second = taken[rounds + 1 : rounds + 4]
    assert taken[rounds + 1 : probes] == [plain, first, second] * rounds + [plain]
    monkeypatch.setattr(tuning, "foresee", lambda *_, **__: pytest.fail("acceptance was measured again"))
    taken = stop_before(monkeypatch, None)
    found = tune(small)
    assert len({id(runner) for runner in taken}) == 3  # the leaders alone
    assert found["environment"]["sessions"] == 2
    monkeypatch.setattr(tuning, "load_model", lambda *_, **__: pytest.fail("the target was loaded"))
    assert tune(small) == found


def test_wrong_answers_get_no_speedup(settings: TuneSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Runner) -> StepCost | None:
        cost = STEP(self)
        if not isinstance(self.drafter, PlainDrafter):
            for r in self.found.values():
                r.tokens[0] = (r.tokens[0] + 1) % 300
        return cost

    monkeypatch.setattr(Runner, "step", broken)
    found = tune(dataclasses.replace(settings, prompts=1, temperatures=(0.0,), batches=(1,), trees=("chain:1",)))
    (row,) = found["cells"][0]["table"]
    assert (row["measured_speedup"], found["cells"][0]["best"]) == (None, None)
    assert row["output_check"].startswith("FAILED")
    assert found["break_even"] == [{"temperature": 0.0, "batch": None}]
    assert not [entry for entry in found["serve"] if "commands" in entry]
    assert best_rows(found)[0][2] == "–"


def test_an_implausible_speed_up_is_flagged(
    settings: TuneSettings, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Drafted answers whose seconds are shortened by a thousand, where the leaders are timed."""

    def hasty(self: Runner) -> StepCost | None:
        before = set(self.found)
        cost = STEP(self)
        for name in self.found.keys() - before if not isinstance(self.drafter, PlainDrafter) else ():
            self.found[name].seconds /= 1000
        return cost

    monkeypatch.setattr(Runner, "step", hasty)
    found = tune(dataclasses.replace(settings, temperatures=(0.0,), batches=(1,), trees=("chain:1",)))
    (row,), best = found["cells"][0]["table"], found["cells"][0]["best"]
    target = {p["tree"]: p["target_seconds"] for p in found["passes"]}
    most = row["measured_tau"] * target[PLAIN] / min(target.values())
    low = row["speedup_ci"][0]
    assert row["flag"] == f"the speed-up's lower bound {low:.2f} is above τ·c(1)/min c(N) = {most:.2f}"
    assert best["flag"] == row["flag"]
    assert best_rows(found)[0][3].endswith("(doubtful)")
    (chart,) = best_settings(Shown({}, tune=found))
    assert chart.note == f"Doubtful: batch 1, greedy: {row['flag']}."
    print_tuning(found)
    assert f"chain:1, temperature 0, batch 1: {row['flag']}" in capsys.readouterr().out


def test_a_speed_up_is_believed_up_to_what_its_passes_allow() -> None:
    costs = PassCosts()
    costs.add(PLAIN, 1, [1.0], [0.0], [0.0])
    costs.add("chain:2", 3, [0.8], [0.1], [0.1])
    assert costs.doubt(2.0, [2.5, 3.0]) is None
    assert costs.doubt(2.0, [2.51, 3.0]) == "the speed-up's lower bound 2.51 is above τ·c(1)/min c(N) = 2.50"


def call(*args: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *args], standalone_mode=False)


def test_the_command_reads_lists_and_names_mistakes(settings: TuneSettings, tmp_path: Path) -> None:
    common = ("--model", settings.model, "--runs", str(settings.runs))
    asked = tmp_path / "mine.jsonl"
    asked.write_text('{"prompt": "write a story"}\nbroken\n{"prompt": "and another"}\n')
    done = call(*common, "--batches", "1", "--temperatures", "0", "--bench", str(asked), "--max-new-tokens", "6",
                "--tree", "chain:1", "--tree", "own:8", "--json")  # fmt: skip
    assert done.exit_code == 0, done.exception
    found = json.loads(done.stdout)
    (prompts,) = found["prompts"]
    assert (prompts["name"], prompts["count"]) == ("mine", 2)
    assert "mine.jsonl:2" in prompts["problems"][0]
    assert [row["tree"] for row in found["cells"][0]["table"]] == ["chain:1", "own:8"]
    for args, told in (
        (("--batches", "0"), "--batches 0: give finite values of at least 1"),
        (("--batches", "a"), "write whole numbers"),
        (("--temperatures", "warm"), "write numbers with commas"),
        (("--temperatures", "-1"), "--temperatures -1.0: give finite values of at least 0"),
        (("--temperatures", "nan"), "--temperatures nan: give finite values of at least 0"),
        (("--temperatures", "0,inf"), "--temperatures 0.0,inf: give finite values of at least 0"),
        (("--max-new-tokens", "1"), "--max-new-tokens 1 must be at least 2"),
        (("--tree", "own:64"), "own:64 asks for more"),
        (("--head", "hydra"), "holds no trained head"),
        (("--bench", "no-such"), "no-such"),
    ):
        assert told in str(call(*common, *args).exception)


def test_a_tree_deeper_than_the_head_is_refused(settings: TuneSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.heads.eagle3 import Eagle3Head

    monkeypatch.setattr(Eagle3Head, "most_depth", 2)
    with pytest.raises(DraftsmithError, match="--tree chain:3 is 3 deep, the head drafts 2 tokens"):
        tune(dataclasses.replace(settings, trees=("chain:3",)))
    given = tuning.find_head(next(settings.runs.glob("*")), "eagle3")
    head = tuning.load_any(given.checkpoint, None)
    own = tuning._trees(dataclasses.replace(settings, trees=()), head, given.checkpoint)
    assert max(shape.depth for shape in own.values()) == 2
    assert [text for text in own if text.startswith("own")] == ["own:8"]
