"""Whole runs: ranks and accumulation, kills, signals, time limits, bad numbers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from train_worker import make_fit, make_store, recipe, run

from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError

WORKER = Path(__file__).with_name("train_worker.py")


@pytest.fixture(scope="module")
def store(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tiny_target, tmp_path_factory.mktemp("store") / "features")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def start(job: dict[str, Any], **env: str) -> subprocess.Popen[str]:
    # the package's own parent comes first, so that the run is of this checkout
    import draftsmith

    path = os.pathsep.join([str(Path(draftsmith.__path__[0]).absolute().parent), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, **env}
    return subprocess.Popen(
        [sys.executable, str(WORKER), json.dumps([job])],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip


def job(store: Path, target: Path, out: Path, **train: Any) -> dict[str, Any]:
    return {"store": str(store), "target": str(target), "out": str(out), "train": train}


def weights(out: Path, step: int) -> dict[str, torch.Tensor]:
    folder = out / "checkpoints" / f"step-{step:06d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def test_one_rank_accumulating_two_equals_two_ranks(
    store: Path, tiny_folder: Path, tmp_path: Path, quiet: None
) -> None:
    shared = {"steps": 5, "clip": 0.05, "save_every": 5}  # a clip that bites: it must see the global gradient
    from draftsmith.train.ranks import _free_port

    port = _free_port()
    processes = [
        start(
            job(store, tiny_folder, tmp_path / "two", **shared),
            RANK=str(r), LOCAL_RANK=str(r), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
        )
        for r in range(2)
    ]  # fmt: skip
    one = run(store, tiny_folder, tmp_path / "one", {**shared, "accumulation": 2})
    for p in processes:
        out, err = p.communicate(timeout=120)
        assert p.returncode == 0, err
    two = json.loads(out)
    assert two["tokens"] == one["tokens"]
    assert two["best_tau_walk"] == pytest.approx(one["best_tau_walk"])
    a, b = weights(tmp_path / "one", 5), weights(tmp_path / "two", 5)
    start_weights = dict(make_fit(store, tiny_folder, recipe(**shared))[3].named_parameters())
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-5)
        if name in start_weights and name != "norm":
            assert (a[name] - start_weights[name]).abs().max() > 1e-4, f"{name} was never trained"
    lines = [[json.loads(x) for x in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two")]
    for x, y in zip(*lines, strict=True):
        assert x["step"] == y["step"]
        assert x["loss"] == pytest.approx(y["loss"], rel=1e-5)
        assert x["accuracy"] == pytest.approx(y["accuracy"])


def test_killed_or_terminated_and_resumed_equals_uninterrupted(
    store: Path, tiny_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train = {"steps": 12, "save_every": 3}
    killed = start({**job(store, tiny_folder, tmp_path / "killed", **train), "kill_in_save": 3})
    ended = start({**job(store, tiny_folder, tmp_path / "ended", **train), "terminate_at": 5})
    late = start({**job(store, tiny_folder, tmp_path / "late", **train), "terminate_at": 12})
    put_off = start({**job(store, tiny_folder, tmp_path / "put_off", **train), "terminate_at": 4, "signal": 2})
    whole = run(store, tiny_folder, tmp_path / "whole", train)
    killed.communicate(timeout=120)
    out, err = ended.communicate(timeout=120)
    assert killed.returncode == -9
    assert ended.returncode == 0, err
    assert "to go on: make train" in err
    stopped = json.loads(out)
    assert not stopped["finished"]
    assert (tmp_path / "ended/checkpoints/step-000005/state.json").exists()
    _, err = put_off.communicate(timeout=120)
    assert put_off.returncode == 0, err
    lines = [json.loads(x) for x in (tmp_path / "put_off/metrics.jsonl").open()]
    assert {x["kind"] for x in lines} == {"train"}, "the validation of step 4 waits"
    assert json.loads((tmp_path / "put_off/checkpoints/step-000004/state.json").read_text())["validation_due"]
    out, err = late.communicate(timeout=120)
    assert late.returncode == 0, err
    assert "to go on" not in err, "nothing is left to do"
    assert json.loads(out)["finished"]
    tree = (tmp_path / "whole/checkpoints/best/tree.json").read_bytes()
    assert (tmp_path / "late/checkpoints/best/tree.json").read_bytes() == tree
    assert not (tmp_path / "ended/checkpoints/best/tree.json").exists()
    names = {p.name for p in (tmp_path / "killed/checkpoints").glob("step*")}
    assert names == {"step-000003", "step-000006"}, "step 9 was being written"
    expected = weights(tmp_path / "whole", 12)
    for name in ("killed", "ended", "late", "put_off"):
        result = run(store, tiny_folder, tmp_path / name, train)
        assert result["finished"]
        assert result["best_tau_walk"] == whole["best_tau_walk"]
        assert (tmp_path / name / "checkpoints/best/tree.json").read_bytes() == tree
        found = weights(tmp_path / name, 12)
        assert set(found) == set(expected)
        assert all(torch.equal(found[n], expected[n]) for n in expected), name
        steps = [json.loads(x)["step"] for x in (tmp_path / name / "metrics.jsonl").open()]
        assert steps == sorted(steps), "steps never go backwards"
        kinds = [json.loads(x)["kind"] for x in (tmp_path / name / "metrics.jsonl").open()]
        assert kinds.count("validation") == 3, name
        assert not list((tmp_path / name / "checkpoints").glob("step-000003")), "only the newest two are kept"
    first = load_file(tmp_path / "whole/checkpoints/best/model.safetensors")
    second = load_file(tmp_path / "killed/checkpoints/best/model.safetensors")
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_time_budget_fixes_the_number_of_steps(store: Path, tiny_folder: Path, tmp_path: Path, quiet: None) -> None:
    from draftsmith.train.fit import fit

    before = time.monotonic()
    result = fit(*make_fit(store, tiny_folder, recipe(minutes=1.0)), tmp_path, budget_seconds=6.0)
    assert 11 < result["step"] == result["total_steps"]
    assert 2.0 < time.monotonic() - before < 12.0
    state = json.loads((tmp_path / f"checkpoints/step-{result['step']:06d}/state.json").read_text())
    assert state["total_steps"] == result["total_steps"]


def test_steps_that_are_not_finite_are_named_and_capped(
    store: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from draftsmith.train import batches

    original = batches.make_batch

    def poisoned(opened: Any, indices: Any, max_length: int) -> Any:
        batch = original(opened, indices, max_length)
        if bad & set(indices):
            batch.features[:2] = float("nan")
        return batch

    monkeypatch.setattr(batches, "make_batch", poisoned)
    bad = {3}
    result = run(store, tiny_folder, tmp_path / "some", {"epochs": 5})
    assert result["skipped"] == 5, "one document, once an epoch, is no reason to stop"
    assert "doc-003" in capsys.readouterr().err
    assert all(bool(torch.isfinite(w).all()) for w in weights(tmp_path / "some", result["step"]).values())
    bad = set(range(20))
    with pytest.raises(DraftsmithError, match=r"steps of 4 different documents were left out, more than 3"):
        run(store, tiny_folder, tmp_path / "many", {"epochs": 6})


def test_what_is_left_out_is_counted_by_cause() -> None:
    from draftsmith.train.checkpoint import RunState
    from draftsmith.train.faults import note_left_out

    state = RunState()
    for names in (["a", "b"], ["c", "a"], ["a", "d"]):
        assert "1 of at most 3" in note_left_out(state, names, 1)
    assert state.suspects == [["a"]]
    assert "2 of at most 3" in note_left_out(state, ["b", "c"], 1), "neither has been the cause before"
    with pytest.raises(DraftsmithError, match="4 steps in a row were left out"):
        note_left_out(state, ["a"], 4)


def test_documents_of_good_batches_are_not_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from types import SimpleNamespace

    from draftsmith.train.fit import Trainer

    names = {0: "good", 1: "other", 7: "elsewhere"}
    said: list[list[str]] = []
    monkeypatch.setattr("draftsmith.train.fit.note_left_out", lambda _, found, __: said.append(list(found)) or "")
    good, other = SimpleNamespace(documents=[0]), SimpleNamespace(documents=[1])
    for of_others, bad in ((["elsewhere"], []), ([], []), ([], [other])):
        trainer: Any = SimpleNamespace(
            store=SimpleNamespace(ids=names), state=None, left_out_in_a_row=1,
            ranks=SimpleNamespace(gather=lambda mine, more=of_others: [*mine, *more], is_main=False),
        )  # fmt: skip
        trainer._ids = lambda items, t=trainer: Trainer._ids(t, items)
        Trainer._left_out(trainer, bad, [good, other])
    assert said == [["elsewhere"], ["good", "other"], ["other"]]


def test_another_number_of_processes_trains_as_much(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    """Accumulation changes the batches of a step as a number of processes does."""
    from draftsmith.train.batches import plans_of
    from draftsmith.train.checkpoint import RunState
    from draftsmith.train.length import fit_length

    settings, opened, _, _ = make_fit(store, tiny_folder, recipe(epochs=4))
    plan = plans_of(opened, settings)[0]
    batches = sum(len(plan.epoch(e)) for e in range(4))

    def resumed(change: dict[str, Any], step: int, total: int, timed: bool = False) -> tuple[int | None, str | None]:
        epoch, index = plan.advance((0, 0), 2 * step)
        state = RunState(step=step, epoch=epoch, index=index, total_steps=total, batches_per_step=2)
        news = fit_length(state, plan, settings.model_copy(update=change), 1, timed)
        assert state.batches_per_step == 1
        return state.total_steps, news

    total = -(-batches // 2)
    found, news = resumed({}, 5, total)
    assert found == 5 + batches - 10
    assert news is not None
    assert f"{found} steps in all instead of {total}" in news
    tokens = {"epochs": None, "tokens": 600}
    assert resumed(tokens, 2, plan.steps_for(600, 2))[0] == 2 + plan.steps_for(600, 1) - 4
    assert resumed({"epochs": None, "minutes": 3.0}, 4, 10, timed=True)[0] == 16, "12 batches were left"
    assert resumed({"epochs": None, "steps": 10}, 4, 10) == (
        10, "a step has 1 batches now (processes x train.accumulation), not 2; the run keeps its 10 steps, as "
        "train.steps says",
    )  # fmt: skip
    assert resumed({}, 9, 9) == (9, None), "it was at its end"


def test_other_heads_checkpoint_is_refused(store: Path, tiny_folder: Path, tmp_path: Path, quiet: None) -> None:
    run(store, tiny_folder, tmp_path, {"steps": 1})
    longest = max(FeatureStore.open(store).lengths)
    with pytest.raises(DraftsmithError, match=f"trained_length is {longest}, this run's is {longest - 1}"):
        run(store, tiny_folder, tmp_path, {"steps": 2, "max_length": longest - 1})


def test_stage_is_skipped_once_done_and_redone_for_other_settings(
    store: Path, tiny_folder: Path, tmp_path: Path, quiet: None
) -> None:
    from draftsmith.heads.checkpoint import load_head
    from draftsmith.train.stage import train_stage

    place: dict[str, Any] = {"location": str(tiny_folder), "revision": None, "features": store}
    first = train_stage(recipe(steps=2), folder=tmp_path / "train", **place)
    assert first["finished"]
    assert 0.5 < first["vocabulary_coverage"] <= 1
    head = load_head(Path(first["checkpoint"]))
    assert head.config.target_fingerprint
    before = time.monotonic()
    again = train_stage(recipe(steps=2), folder=tmp_path / "train", **place)
    assert time.monotonic() - before < 3
    assert again["best_tau_walk"] == first["best_tau_walk"]
    other = train_stage(recipe(steps=3), folder=tmp_path / "train", **place)
    assert other["step"] == 3
    assert len(list(tmp_path.glob("train.*"))) == 1, "the first run is set aside"
