"""The pieces of training that need no run: settings, schedule, plan, loss, figures, walk, files, launch, imports."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_worker import make_fit, make_store, recipe

from draftsmith.errors import DraftsmithError


@pytest.fixture(scope="module")
def made(tiny_target: Any, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    store = make_store(tiny_target, tmp_path_factory.mktemp("parts") / "features", documents=10, new_tokens=12)
    return make_fit(store, tiny_folder, recipe())


# --- settings and schedule -----------------------------------------------------------------------------------------


def test_overrides_nested_dotted_and_exponents() -> None:
    from draftsmith.train.settings import load_head_recipe

    found = load_head_recipe("eagle3", {"train.lr_matrix": "2e-3", "train": {"token_budget": 99}, "head.steps": 4})
    assert (found.train.lr_matrix, found.train.token_budget, found.head.steps) == (2e-3, 99, 4)
    assert found.train.epochs == 10, "without any limit"
    assert load_head_recipe("eagle3", {"train.minutes": 3}).train.epochs is None


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"train.token_budgets": 1}, r"train\.token_budgets: there is no such setting.*token_budget"),
        ({"train.token_budget": 2.5}, "train.token_budget = 2.5"),
        ({"head.steps": 0}, "head.steps = 0"),
        ({"train.schedule": "linear"}, "train.schedule = 'linear'"),
        ({"optimizer": 1}, "optimizer: there is no such setting"),
    ],
)
def test_wrong_settings_are_named(overrides: dict[str, Any], message: str) -> None:
    from draftsmith.train.settings import load_head_recipe

    with pytest.raises(DraftsmithError, match=message):
        load_head_recipe("eagle3", overrides)


def test_unknown_head_lists_what_exists() -> None:
    from draftsmith.train.settings import load_head_recipe

    with pytest.raises(DraftsmithError, match=r"unknown head 'eagle9'; there are: .*eagle3"):
        load_head_recipe("eagle9")


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_schedule_warms_up_and_decays(schedule: str) -> None:
    from draftsmith.train.schedule import lr_factor

    settings = recipe(schedule=schedule, warmup=4).train
    factors = [lr_factor(s, 100, settings) for s in range(100)]
    assert factors[0] == pytest.approx(0.2, rel=0.01)
    assert 0.9 < factors[4] <= 1
    assert all(0 < f <= 1 for f in factors)
    assert factors[-1] < 0.05
    assert lr_factor(50, None, settings) == 1


def test_length_of_a_time_limited_run_leaves_room_for_validations() -> None:
    from draftsmith.train.schedule import steps_within

    settings = recipe(validate_every=None).train
    total = steps_within(100.0, 0.5, 5.0, settings, 11)
    every = settings.validation_interval(total)
    assert 90 <= (total - 11) * 0.5 + -(-total // every) * 5.0 <= 100
    with_more = steps_within(100.0, 0.5, 5.0, settings, 11, after_seconds=30.0)
    assert with_more == steps_within(70.0, 0.5, 5.0, settings, 11) < total, "what follows is kept free"
    assert steps_within(1.0, 0.5, 50.0, settings, 11) == 12, "at least one more"


# --- which batch comes when ----------------------------------------------------------------------------------------


def test_ranks_share_the_same_plan_and_positions_go_on(made: tuple[Any, ...]) -> None:
    from draftsmith.train.batches import BatchPlan, BatchStream, trainable_documents

    store = made[1]
    documents, without = trainable_documents(store, "train", 64)
    assert without == 0
    assert all(store.split(i) == "train" for i in documents)
    plan = BatchPlan.over(store, documents, 40, 64, seed=3)
    places = [p for p, _ in zip(plan.from_position((0, 0)), range(12), strict=False)]

    def read(position: tuple[int, int], rank: int, world: int, n: int) -> list[Any]:
        stream = BatchStream(store, plan, position, rank, world)
        found = [next(stream) for _ in range(n)]
        stream.close()
        return [(item.position, item.documents) for item in found]

    assert read((0, 0), 0, 1, 12) == places
    assert read((0, 0), 0, 2, 6) == places[::2]
    assert read((0, 0), 1, 2, 6) == places[1::2]
    for n in range(12):
        position = plan.advance((0, 0), n)
        assert read(position, 0, 1, 1) == [places[n]]
    first_epoch = [d for (epoch, _), batch in places if epoch == 0 for d in batch]
    assert sorted(first_epoch) == documents, "each document once"
    assert plan.steps_in(2, 3) == -(-(len(plan.epoch(0)) + len(plan.epoch(1))) // 3)


def test_errors_of_the_reading_thread_reach_the_trainer(made: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train import batches

    def broken(*_: Any) -> Any:
        raise DraftsmithError("chunk-00000 is cut off")

    monkeypatch.setattr(batches, "make_batch", broken)
    plan = batches.BatchPlan.over(made[1], [0, 1], 40, 64, 0)
    stream = batches.BatchStream(made[1], plan, (0, 0))
    with pytest.raises(DraftsmithError, match="cut off"):
        next(stream)
    stream.close()


def test_documents_whose_answer_is_cut_away_are_counted(made: tuple[Any, ...]) -> None:
    from draftsmith.train.batches import BatchPlan, trainable_documents

    kept, without = trainable_documents(made[1], "train", 3)
    assert kept == []
    assert without == 8
    with pytest.raises(DraftsmithError, match=r"raise train\.max_length"):
        BatchPlan.over(made[1], kept, 40, 3, 0)


# --- loss and figures ----------------------------------------------------------------------------------------------


def test_batches_losses_add_up_to_the_loss_over_all_rows(made: tuple[Any, ...]) -> None:
    from draftsmith.data_recipes.packing import make_batch
    from draftsmith.train.metrics import summarise
    from draftsmith.train.step import TrainStep

    _, store, parts, head = made
    head = head.double()
    parts = parts.to("cpu", torch.float64)
    step = TrainStep(head, parts, torch.float32)
    batches = [make_batch(store, d, 64).to("cpu", torch.float64) for d in ([0, 1, 2], [3, 5], [0, 1, 2, 3, 5])]
    counts = head.loss_counts(batches[2])
    assert torch.equal(counts, head.loss_counts(batches[0]) + head.loss_counts(batches[1]))
    found = [step(b, counts, 1.0) for b in batches]
    torch.testing.assert_close(found[0][0] + found[1][0], found[2][0])
    torch.testing.assert_close(found[0][1] + found[1][1], found[2][1])
    assert torch.equal(found[2][1][:, 1].long(), counts), "the head counts what it sums"
    assert summarise(found[2][1], head.step_weights())["loss"] == pytest.approx(float(found[2][0].detach()))
    head.float()


def test_figures_are_ratios_of_totals() -> None:
    from draftsmith.train.metrics import summarise

    sums = torch.tensor([[6.0, 3, 4, 3, 4, 3], [4.0, 2, 2, 1, 1, 1], [0.0, 0, 0, 0, 0, 0]]).double()
    found = summarise(sums, [1.0, 0.8, 0.64])
    assert found["loss"] == pytest.approx(2 + 0.8 * 2)
    assert found["accuracy"] == [0.75, 0.5, None]
    assert found["acceptance_cumulative"] == [0.75, 0.5, None]
    assert found["acceptance_conditional"] == [0.75, 1.0, None]


@pytest.mark.parametrize(
    ("matched", "depth", "steps"),
    [
        ([0, 0, 0, 0, 0], 4, 5),  # nothing right: a token a step
        ([4, 3, 2, 1, 0], 4, 1),  # all right: 4 drafts + 1
        ([4, 3, 2, 1, 0], 2, 2),  # K = 2: 3 + 2
        ([1, 9, 0, 1, 9], 4, 3),  # rows 0, 2, 3; rows 1 and 4 are jumped over
        ([0, 1, 9, 0, 0], 4, 4),  # the last step's row 4 ends the answer
    ],
)
def test_walk_on_tables(matched: list[int], depth: int, steps: int) -> None:
    from draftsmith.train.validate import walk

    n = len(matched)
    right = torch.zeros(4, n + 4, dtype=torch.bool)
    for j, m in enumerate(matched):
        right[: min(m, 4), j + 2] = True
    supervised = torch.zeros(n + 4, dtype=torch.bool)
    supervised[2 : n + 2] = True
    assert walk(right, supervised, depth) == (n, steps)


def test_walk_begins_anew_at_every_answer() -> None:
    from draftsmith.train.validate import walk

    right = torch.ones(4, 9, dtype=torch.bool)
    supervised = torch.tensor([1, 1, 0, 1, 1, 1, 0, 0, 1], dtype=torch.bool)
    assert walk(right, supervised, 4) == (6, 3)


def test_a_guess_that_is_right_behind_a_wrong_one_does_not_count() -> None:
    from draftsmith.train.validate import walk

    right = torch.tensor([[0, 1, 1], [1, 1, 1]], dtype=torch.bool)
    assert walk(right, torch.ones(3, dtype=torch.bool), 2) == (3, 2)


# --- files ---------------------------------------------------------------------------------------------------------


def test_head_round_trip_and_strictness(made: tuple[Any, ...], tmp_path: Path) -> None:
    from draftsmith.heads.checkpoint import load_head, save_head

    head = made[3]
    save_head(head, tmp_path)
    found = load_head(tmp_path)
    assert found.config == head.config
    assert all(torch.equal(a, b) for a, b in zip(head.parameters(), found.parameters(), strict=True))
    assert torch.equal(found.target_ids, head.target_ids)
    tensors = load_file(tmp_path / "model.safetensors")
    assert set(tensors) == {n for n, _ in head.named_parameters()}, "nothing of the target's"
    cases = [
        ({k: v for k, v in tensors.items() if k != "fc.weight"}, "'fc.weight' is missing"),
        ({**tensors, "embed_tokens.weight": torch.zeros(2, 2)}, "'embed_tokens.weight' is none of this eagle3 head's"),
        ({**tensors, "norm": torch.zeros(3)}, r"'norm' has shape \[3\]"),
    ]
    for wrong, message in cases:
        save_file(wrong, tmp_path / "model.safetensors")
        with pytest.raises(DraftsmithError, match=message):
            load_head(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"cut off")
    with pytest.raises(DraftsmithError, match="damaged"):
        load_head(tmp_path)
    save_file({"target_ids": torch.arange(len(head.vocab))}, tmp_path / "vocab.safetensors")
    with pytest.raises(DraftsmithError, match="another draft vocabulary"):
        load_head(tmp_path)
    (tmp_path / "head.json").unlink()
    with pytest.raises(DraftsmithError, match=r"has no head\.json"):
        load_head(tmp_path)


def test_checkpoint_round_trip_and_damage(made: tuple[Any, ...], tmp_path: Path) -> None:
    from draftsmith.train.checkpoint import RunState, load_checkpoint, save_checkpoint, step_folders
    from draftsmith.train.optimizer import MuonAdamW

    head = made[3]
    optimizer = MuonAdamW(head.named_parameters(), lr_matrix=0.1, lr_other=0.1)
    for tensor in optimizer.named_state().values():
        tensor.normal_()
    optimizer.updates, optimizer.adapter_updates = 7, 3
    state = RunState(
        step=8, epoch=1, index=3, total_steps=20, updates=7, adapter_updates=3, skipped=1, best_step=4,
        best_tau_walk=1.5,
    )  # fmt: skip
    for step in (4, 6, 8):
        folder = save_checkpoint(tmp_path, head, optimizer.named_state(), dataclasses.replace(state, step=step))
    assert [p.name for p in step_folders(tmp_path)] == ["step-000006", "step-000008"]
    for step in (999_999, 1_000_000):
        last = save_checkpoint(tmp_path, head, optimizer.named_state(), dataclasses.replace(state, step=step))
    assert [p.name for p in step_folders(tmp_path)] == ["step-999999", "step-1000000"]
    assert load_checkpoint(last, head, optimizer).step == 1_000_000
    folder = save_checkpoint(tmp_path / "again", head, optimizer.named_state(), state)
    other = MuonAdamW(head.named_parameters(), lr_matrix=0.1, lr_other=0.1)
    assert load_checkpoint(folder, head, other) == state
    assert (other.updates, other.adapter_updates) == (7, 3)
    assert all(torch.equal(v, optimizer.named_state()[k]) for k, v in other.named_state().items())
    written = json.loads((folder / "state.json").read_text())
    for values, name in (({"more": 1}, "more is unknown"), ({}, "adapter_updates is missing")):
        wrong = {**written, **values}
        if not values:
            del wrong["adapter_updates"]
        (folder / "state.json").write_text(json.dumps(wrong))
        with pytest.raises(DraftsmithError, match=rf"state\.json: {name}: another version"):
            load_checkpoint(folder, head, other)
    (folder / "state.json").write_text(json.dumps(written))
    (folder / "optimizer.safetensors").write_bytes(b"")
    with pytest.raises(DraftsmithError, match=r"optimizer\.safetensors is damaged"):
        load_checkpoint(folder, head, other)


def test_metrics_lines_of_steps_to_be_taken_again_are_dropped(tmp_path: Path) -> None:
    from draftsmith.train.tracking import Tracker

    tracker = Tracker(tmp_path, 0, wandb=False)
    for step in (2, 4, 6):
        tracker.log("train", step, {"loss": 1.0})
    tracker.close()
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"kind": "tra')  # killed while writing
    again = Tracker(tmp_path, 4, wandb=False)
    again.log("train", 6, {"loss": 2.0})
    again.close()
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").open()]
    assert [(x["step"], x["loss"]) for x in lines] == [(2, 1.0), (4, 1.0), (6, 2.0)]


# --- launch and imports --------------------------------------------------------------------------------------------


def test_what_checkpointing_needs_and_which_head_has_it(made: tuple[Any, ...]) -> None:
    from types import SimpleNamespace

    from draftsmith.train.estimate import Rows, activation_bytes
    from draftsmith.train.placement import training_bytes
    from draftsmith.train.step import set_checkpointing

    head: Any = made[3]
    plain = activation_bytes(head, Rows(96, 96), 4)
    needed = training_bytes(head, 8, torch.float32)
    assert needed == training_bytes(head, head.config.trained_length, torch.float32), (
        "the longest is a batch of its own"
    )
    assert needed > activation_bytes(head, Rows(head.config.trained_length, head.config.trained_length), 4)
    set_checkpointing(head, True)
    assert head.checkpointing
    assert 0 < activation_bytes(head, Rows(96, 96), 4) < plain
    set_checkpointing(head, False)
    assert activation_bytes(head, Rows(96, 96), 4) == plain
    other: Any = SimpleNamespace(config=SimpleNamespace(family="medusa"))
    set_checkpointing(other, False)
    with pytest.raises(DraftsmithError, match=r"train\.checkpointing = true with the head family 'medusa'"):
        set_checkpointing(other, True)
    settings = made[0]
    assert settings.model_copy(update={"checkpointing": True, "wandb": True}).identity() == settings.identity()


def test_heads_decoder_and_train_step_import_without_the_trainers_libraries() -> None:
    import draftsmith

    program = """
import importlib, pkgutil, sys
for name in ("deepspeed", "datasets", "wandb", "pydantic"):
    sys.modules[name] = None  # an import of it fails, and find_spec says that there is none
import draftsmith
for package in ("draftsmith.heads", "draftsmith.eval.decoder"):
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        importlib.import_module(module.name)
importlib.import_module("draftsmith.train.step")
print("fine")
"""
    import os

    path = os.pathsep.join([str(Path(draftsmith.__path__[0]).absolute().parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.stdout.strip() == "fine", done.stderr


def test_which_validation_is_the_best() -> None:
    from draftsmith.train.checkpoint import RunState
    from draftsmith.train.validate import note

    state = RunState()

    def best(step: int, by: str, **found: float) -> tuple[bool, int]:
        state.step = step
        return note(found, state, by), state.below_best

    assert best(1, "tau", tau_walk=9.0) == (False, 0), "not decoded: no candidate"
    assert best(2, "tau", tau_walk=1.1, tau=1.5) == (True, 0)
    assert best(3, "tau", tau_walk=9.0, tau=1.4) == (False, 1)
    assert best(4, "tau", tau_walk=9.0) == (False, 1)
    assert best(5, "tau", tau_walk=1.1, tau=1.5) == (False, 2), "the earlier one of equals"
    assert best(6, "tau", tau_walk=1.2, tau=1.5) == (True, 0), "equal taus: by tau_walk"
    assert (state.best_step, state.best_tau, state.best_tau_walk) == (6, 1.5, 1.2)
    state = RunState()
    assert best(1, "tau_walk", tau_walk=1.3) == (True, 0)
    assert best(2, "tau_walk", tau_walk=1.2, tau=9.0) == (False, 1)
    assert (state.best_step, state.best_tau, state.best_tau_walk) == (1, None, 1.3)
