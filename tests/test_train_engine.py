"""ZeRO stages: the same steps and checkpoints with any number of ranks; DeepSpeed's configuration; a rank that dies."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_train_optimizer import model, train
from torch import Tensor, nn
from train_worker import make_fit, make_store, recipe, run

from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.train import checkpoint
from draftsmith.train.batches import BatchPlan
from draftsmith.train.engine import engine_config, preset_for, preset_names
from draftsmith.train.optimizer import MuonAdamW
from draftsmith.train.partition import Fragment, Partition
from draftsmith.train.ranks import Ranks
from draftsmith.train.settings import TrainSettings

WORKER = Path(__file__).with_name("train_worker.py")
STEPS, SAVED = 5, 3
SHARED: dict[str, Any] = {"steps": STEPS, "save_every": SAVED, "clip": 0.05}  # a clip that bites


@pytest.fixture(scope="module")
def store(tiny_target: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tiny_target, tmp_path_factory.mktemp("store") / "features")


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What `train.deepspeed` is for the stages 0 to 3: the presets, and a file that cuts small weights, too."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    own = tmp_path_factory.mktemp("deepspeed") / "zero3.json"
    return ["cpu", "one-node", "many-nodes", write(own, {"zero_optimization": zero})]


def write(path: Path, values: Any) -> str:
    path.write_text(json.dumps(values))
    return str(path)


def tensors(out: Path, step: int = STEPS) -> dict[str, Tensor]:
    folder = out / f"checkpoints/step-{step:06d}"
    return load_file(folder / "model.safetensors") | load_file(folder / "optimizer.safetensors")


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        difference = (found[name] - tensor).abs().max().item()
        assert difference < 1e-5, f"{what}: {name} differs by {difference}"


# --- the same steps ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def one(store: Path, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory, files: list[str]) -> Path:
    """One rank at stage 0, accumulating two batches."""
    out = tmp_path_factory.mktemp("one")
    run(store, tiny_folder, out, {**SHARED, "accumulation": 2, "deepspeed": files[0]})
    return out


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_each_stage_takes_the_steps_of_stage_0(
    store: Path, tiny_folder: Path, tmp_path: Path, one: Path, files: list[str], stage: int
) -> None:
    linear = torch.nn.functional.linear
    run(store, tiny_folder, tmp_path, {**SHARED, "accumulation": 2, "deepspeed": files[stage]})
    assert_close(tensors(tmp_path), tensors(one), f"stage {stage}")
    start = dict(make_fit(store, tiny_folder, recipe())[3].named_parameters())
    moved = [n for n, p in start.items() if (tensors(tmp_path)[n] - p).abs().max() > 1e-4]
    assert set(start) - set(moved) <= {"norm"}, "all but a norm's weight are trained"
    figures = [[json.loads(x) for x in (out / "metrics.jsonl").open()] for out in (one, tmp_path)]
    assert [x["loss"] for x in figures[1] if "loss" in x] == pytest.approx(
        [x["loss"] for x in figures[0] if "loss" in x], rel=1e-5
    )
    assert torch.nn.functional.linear is linear, "ZeRO 3 would leave its own to the whole process"


def test_two_ranks_at_each_stage_and_one_that_dies(
    store: Path, tiny_folder: Path, tmp_path: Path, one: Path, files: list[str]
) -> None:
    """Two ranks at stages 1 to 3 = one at stage 0; resumed from 1 on 2 ranks (stage 0, 3), from 2 on 1 (stage 2, 0)."""

    def job(name: str, stage: int) -> dict[str, Any]:
        paths = {"store": str(store), "target": str(tiny_folder), "out": str(tmp_path / name)}
        return {**paths, "train": {**SHARED, "deepspeed": files[stage]}}

    shutil.copytree(one, tmp_path / "more")
    shutil.rmtree(tmp_path / f"more/checkpoints/step-{STEPS:06d}")
    jobs = [job(f"two{stage}", stage) for stage in (1, 2, 3)] + [job("more", 3)]
    jobs.append({**job("dies", 2), "rank_one_dies_at": STEPS})
    code, err, after = torchrun(jobs, tmp_path / "dies")
    for name in ("two1", "two2", "two3", "more"):
        assert_close(tensors(tmp_path / name), tensors(one), name)

    assert code != 0
    assert after < 20, "the other rank is gone, too"
    assert "SIGKILL" in err, err
    assert "rank      : 1" in err.partition("Root Cause")[2], err
    assert not (tmp_path / f"dies/checkpoints/step-{STEPS:06d}").exists()
    run(store, tiny_folder, tmp_path / "dies", {**SHARED, "accumulation": 2, "deepspeed": files[0]})
    assert_close(tensors(tmp_path / "dies"), tensors(one), "two ranks at stage 2, then one at stage 0")


def torchrun(jobs: list[dict[str, Any]], dying: Path) -> tuple[int, str, float]:
    """Run jobs on two ranks; returns the exit code, standard error, and the seconds from the last save to the end."""
    import draftsmith

    path = os.pathsep.join([str(Path(draftsmith.__path__[0]).absolute().parent), os.environ.get("PYTHONPATH", "")])
    found = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(WORKER),
         json.dumps(jobs)],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    ended = time.time()
    saved = dying / f"checkpoints/step-{SAVED:06d}/state.json"
    assert saved.exists(), found.stderr
    return found.returncode, found.stderr, ended - saved.stat().st_mtime


@pytest.mark.parametrize("stage", [2, 3])
def test_a_step_that_is_not_finite_is_left_out_at_each_stage(
    store: Path, tiny_folder: Path, tmp_path: Path, files: list[str], stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.train import batches

    original = batches.make_batch

    def poisoned(opened: Any, indices: Any, max_length: int) -> Any:
        batch = original(opened, indices, max_length)
        if 3 in indices:
            batch.features[:2] = float("nan")
        return batch

    monkeypatch.setattr(batches, "make_batch", poisoned)
    results = {s: run(store, tiny_folder, tmp_path / str(s), {"epochs": 1, "deepspeed": files[s]}) for s in (0, stage)}
    assert results[stage]["skipped"] == results[0]["skipped"] == 1
    found, expected = (tensors(tmp_path / str(s), results[0]["step"]) for s in (stage, 0))
    assert all(bool(torch.isfinite(x).all()) for x in found.values())
    assert_close(found, expected, f"stage {stage}")


def test_bf16_computes_on_fp32_masters(store: Path, tiny_folder: Path, tmp_path: Path, files: list[str]) -> None:
    for stage in (0, 3):
        train = {"steps": 2, "dtype": "bfloat16", "deepspeed": files[stage]}
        run(store, tiny_folder, tmp_path / str(stage), train)
    found, expected = (tensors(tmp_path / str(s), 2) for s in (3, 0))
    assert {x.dtype for x in found.values()} == {torch.float32}
    weight = found["lm_head.weight"]
    assert (weight != weight.bfloat16().float()).float().mean() > 0.9, "rounded to bf16 somewhere"
    for name, tensor in expected.items():  # a weight that is rounded the other way costs a bf16 step in some sum
        torch.testing.assert_close(found[name], tensor, rtol=1e-2, atol=1e-3, msg=lambda m, n=name: f"{n}: {m}")


def test_stage_3_refuses_a_target_that_is_trained(
    store: Path, tiny_folder: Path, tmp_path: Path, files: list[str]
) -> None:
    from test_medusa2_runs import run as run_joint

    with pytest.raises(DraftsmithError, match="trained together with its target takes stage 0, 1 or 2"):
        run_joint(store, tiny_folder, tmp_path, steps=1, deepspeed=files[3])


def test_an_adapter_trains_alike_at_stage_2(store: Path, tiny_folder: Path, tmp_path: Path, files: list[str]) -> None:
    from test_medusa2_runs import run as run_joint
    from test_medusa2_runs import weights

    for stage in (0, 2):  # the heads alone first, whose steps give the adapter no gradient
        run_joint(store, tiny_folder, tmp_path / str(stage), steps=6, deepspeed=files[stage])
    found, expected = (weights(tmp_path / f"{s}/checkpoints/step-000006") for s in (2, 0))
    assert_close(found, expected, "stage 2")


# --- the optimizer ----------------------------------------------------------------------------------------------------


def test_slices_are_put_together_and_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 of 2: the end of `a` [2, 3] and all of `b` [2], then one element of padding."""
    shapes = {"a": torch.Size([2, 3]), "b": torch.Size([2])}
    mine = Partition(torch.zeros(5), shapes, (Fragment("a", 4, 0, 2), Fragment("b", 0, 2, 2)))
    others = torch.tensor([1.0, 2, 3, 4, 0, 0, 0, 0])
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda x: x.add_(others))
    whole = mine.whole(torch.tensor([5.0, 6, 7, 8, 99]))
    assert whole["a"].tolist() == [[1, 2, 3], [4, 5, 6]]
    assert whole["b"].tolist() == [7, 8]
    for _, place, values in mine.pairs(mine.tensor, whole):
        place.copy_(values)
    assert mine.tensor.tolist() == [5, 6, 7, 8, 0]


def test_clips_by_the_global_norm_as_torch_does() -> None:
    ours, theirs = model(), model()
    options: dict[str, Any] = {"lr_matrix": 0.02, "lr_other": 0.01}
    one = MuonAdamW(ours.named_parameters(), clip=0.1, **options)
    train(ours, [one], 4)

    class Clipped(MuonAdamW):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.before = float(nn.utils.clip_grad_norm_(theirs.parameters(), 0.1))
            super().step()

    two = Clipped(theirs.named_parameters(), **options)
    train(theirs, [two], 4)
    assert two.before > 0.1
    assert one.gradient_norm == pytest.approx(two.before)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


def test_adamw_alone_is_torchs(store: Path, tiny_folder: Path, tmp_path: Path, files: list[str]) -> None:
    ours, theirs = model(), model()
    options: dict[str, Any] = {"weight_decay": 0.1, "betas": (0.9, 0.95)}
    train(ours, [MuonAdamW(ours.named_parameters(), lr_matrix=9.0, lr_other=0.01, muon=False, **options)])
    train(theirs, [torch.optim.AdamW(theirs.parameters(), lr=0.01, **options)])
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    run(store, tiny_folder, tmp_path, {"steps": 1, "optimizer": "adamw", "deepspeed": files[1]})
    assert not any(name.endswith(".momentum") for name in tensors(tmp_path, 1))


# --- files and length -------------------------------------------------------------------------------------------------


def test_a_full_disk_keeps_the_last_good_checkpoint(
    store: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = make_fit(store, tiny_folder, recipe())[3]
    optimizer = MuonAdamW(head.named_parameters(), lr_matrix=0.1, lr_other=0.1)
    good = checkpoint.save_checkpoint(tmp_path, head, optimizer.named_state(), checkpoint.RunState(step=4))
    before = {p.name: p.read_bytes() for p in good.iterdir()}

    def full(path: Path, values: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(checkpoint, "write_json", full)
    with pytest.raises((OSError, DraftsmithError), match=r"No space left|disk is full"):
        checkpoint.save_checkpoint(tmp_path, head, optimizer.named_state(), checkpoint.RunState(step=8))
    assert [p.name for p in tmp_path.iterdir()] == ["step-000004"], "nothing half-written stays"
    assert {p.name: p.read_bytes() for p in good.iterdir()} == before
    assert checkpoint.load_checkpoint(good, head, optimizer).step == 4


def test_a_limit_in_tokens_ends_with_the_step_that_reaches_it(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    opened = FeatureStore.open(store)
    plan = BatchPlan.over(opened, list(range(16)), 96, 2048, 1)
    sizes = [sum(min(opened.lengths[i], 2048) for i in batch) for batch in plan.epoch(0)]
    assert plan.steps_for(sizes[0], 1) == 1
    assert plan.steps_for(sizes[0] + 1, 1) == 2
    assert plan.steps_for(sum(sizes) + 1, 2) == len(sizes) // 2 + 1
    result = run(store, tiny_folder, tmp_path, {"tokens": 200})
    assert result["finished"]
    assert result["tokens"] >= 200
    assert result["step"] == result["total_steps"] < 5


# --- DeepSpeed's configuration ----------------------------------------------------------------------------------------

ONE = Ranks(0, 1, torch.device("cpu"))


def config(**train: Any) -> dict[str, Any]:
    return engine_config(TrainSettings.model_validate({"steps": 1, **train}), ONE)


@pytest.mark.parametrize(
    ("place", "name", "stage"),
    [((False, 1, 1), "cpu", 0), ((False, 4, 2), "cpu", 0), ((True, 1, 1), "one-gpu", 0),
     ((True, 8, 1), "one-node", 1), ((True, 16, 2), "many-nodes", 2)],
)  # fmt: skip
def test_a_preset_for_each_place(place: tuple[bool, int, int], name: str, stage: int) -> None:
    assert preset_for(*place) == name
    assert name in preset_names()
    assert config(deepspeed=name)["zero_optimization"]["stage"] == stage


def test_a_file_is_merged_with_the_run(tmp_path: Path) -> None:
    values = {
        "zero_optimization": {"stage": 2, "reduce_bucket_size": "auto", "overlap_comm": False},
        "gradient_clipping": 0.5,
        "train_batch_size": 3,
        "train_micro_batch_size_per_gpu": "auto",
        "bf16": {"enabled": "auto"},
        "fp16": {"enabled": False},
    }
    found = config(deepspeed=write(tmp_path / "ds.json", values), clip=0.5, accumulation=3)
    assert found == {
        "zero_optimization": {"stage": 2, "overlap_comm": False},
        "gradient_clipping": 0.5,
        "train_batch_size": 3,
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 3,
        "zero_allow_untested_optimizer": True,
    }


def test_a_files_auto_stage_is_the_places(tmp_path: Path) -> None:
    values = {"zero_optimization": {"stage": "auto", "overlap_comm": False}}
    found = config(deepspeed=write(tmp_path / "ds.json", values))
    assert found["zero_optimization"] == {"stage": 0, "overlap_comm": False}


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"gradient_clipping": 0.3}, "gradient_clipping is 0.3, this run's is 1.0"),
        ({"train_batch_size": 64}, "train_batch_size is 64, this run's is 1"),
        ({"fp16": {"enabled": True}}, "fp16.enabled is true, this run's is false"),
        ({"bf16": {"enabled": True}}, "bf16.enabled is true, this run's is false"),
        ({"optimizer": {"type": "Muon"}}, 'optimizer is {"type": "Muon"}, this run\'s is none of DeepSpeed\'s'),
        ({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, 'device is "cpu", .* "none"'),
        ({"zero_optimization": {}}, "zero_optimization.stage is missing"),
        ([], "is an object, not list"),
    ],
)
def test_a_file_that_contradicts_the_run_is_refused(tmp_path: Path, values: Any, told: str) -> None:
    if isinstance(values, dict):
        values = {"zero_optimization": {"stage": 1}, **values}
    with pytest.raises(DraftsmithError, match=rf"mine\.json.*{told}"):
        config(deepspeed=write(tmp_path / "mine.json", values))


def test_unknown_names_and_broken_files_are_told(tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match="'zero9' is no file and no preset; there are: auto, cpu, many-nodes"):
        config(deepspeed="zero9")
    (tmp_path / "broken.json").write_text("{")
    with pytest.raises(DraftsmithError, match=r"broken\.json is not valid JSON"):
        config(deepspeed=str(tmp_path / "broken.json"))


def test_what_deepspeed_refuses_is_told(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    wrong = write(tmp_path / "wrong.json", {"zero_optimization": {"stage": 1, "reduce_bucket_size": "many"}})
    with pytest.raises(DraftsmithError, match=r"DeepSpeed refuses train\.deepspeed = .*reduce_bucket_size"):
        run(store, tiny_folder, tmp_path / "out", {"steps": 1, "deepspeed": wrong})
