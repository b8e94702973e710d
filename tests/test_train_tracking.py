"""Tracking: what a line of the log holds, Weights & Biases with and without a network, and no key anywhere."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.train.tracking import METRICS, WANDB_ID, Tracker


class FakeRun:
    """Notes what is logged."""

    offline, sync_dir = True, "there/offline-run-1"

    def __init__(self, seen: list[Any], options: dict[str, Any]) -> None:
        self.seen, self.options = seen, options

    def log(self, values: dict[str, float], step: int) -> None:
        self.seen.append((step, values))

    def finish(self) -> None:
        self.seen.append("end")


@pytest.fixture
def wandb(monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[dict[str, Any]]]:
    """A fake module; returns what its runs log, and how they were started."""
    seen: list[Any] = []
    started: list[dict[str, Any]] = []
    module = types.ModuleType("wandb")

    def init(**options: Any) -> FakeRun:
        started.append(options)
        return FakeRun(seen, options)

    module.init = init  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT", "WANDB_CONSOLE", "DRAFTSMITH_QUIET"):
        monkeypatch.setenv(name, "")  # so that whatever is set meanwhile goes away again
        monkeypatch.delenv(name)
    return seen, started


def test_offline_without_a_key_and_not_at_all_when_disabled(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import os

    seen, started = wandb
    Tracker(tmp_path, 0).close()
    assert not started, "off unless asked for"
    tracker = Tracker(tmp_path, 0, wandb=True, config={"train": {"steps": 3}})
    tracker.log("train", 2, {"loss": 1.0, "accuracy": [0.5, None], "mfu": None, "disagreement": "text"})
    tracker.close()
    assert os.environ["WANDB_MODE"] == "offline"
    assert seen == [(2, {"train/loss": 1.0, "train/accuracy_0": 0.5}), "end"]
    assert started[0]["config"] == {"train": {"steps": 3}}
    assert "to upload: wandb sync there/offline-run-1" in capsys.readouterr().err
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Tracker(tmp_path, 0, wandb=True).close()
    assert len(started) == 1


def test_a_resumed_run_is_the_same_and_its_steps_never_go_backwards(tmp_path: Path, wandb: Any) -> None:
    seen, started = wandb
    tracker = Tracker(tmp_path, 0, wandb=True)
    for step in (2, 4, 6):
        tracker.log("train", step, {"loss": 1.0 * step})
        if step == 4:
            tracker.log("validation", step, {"tau": 1.5})
    tracker.close()
    with open(tmp_path / METRICS, "a") as f:
        f.write('{"kind": "tra')  # killed while writing
    again = Tracker(tmp_path, 3, wandb=True)  # from the checkpoint of step 3
    for step in (4, 6, 8):
        again.log("train", step, {"loss": 1.0 * step})
        if step != 6:
            again.log("validation", step, {"tau": 1.5})
    again.close()
    assert started[0]["id"] == started[1]["id"] == (tmp_path / WANDB_ID).read_text().strip()
    assert started[1]["resume"] == "allow"
    steps = [x[0] for x in seen if x != "end"]
    assert steps == [2, 4, 4, 6, 8, 8], "each once, in order"
    written = [json.loads(x) for x in (tmp_path / METRICS).open()]
    assert [(x["kind"][0], x["step"]) for x in written] == [
        ("t", 2), ("t", 4), ("v", 4), ("t", 6), ("t", 8), ("v", 8)
    ]  # fmt: skip
    fresh = Tracker(tmp_path / "other", 0, wandb=True)
    fresh.close()
    assert started[2]["id"] != started[0]["id"]


def test_lines_from_before_wandb_was_asked_for_are_no_reason_to_leave_any_out(tmp_path: Path, wandb: Any) -> None:
    seen, _ = wandb
    before = Tracker(tmp_path, 0, wandb=False)
    before.log("train", 6, {"loss": 1.0})
    before.close()
    after = Tracker(tmp_path, 2, wandb=True)
    after.log("train", 4, {"loss": 1.0})
    after.close()
    assert seen[0][0] == 4


def test_no_key_is_shown_when_wandb_fails(
    tmp_path: Path, wandb: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")

    def refuse(**_: Any) -> None:
        raise RuntimeError("no access with 0123456789abcdef")

    monkeypatch.setattr(sys.modules["wandb"], "init", refuse)
    tracker = Tracker(tmp_path, 0)
    tracker.log("train", 1, {"loss": 1.0})
    tracker.close()
    said = capsys.readouterr().err
    assert "Weights & Biases is left out: no access with <key>" in said
    assert "0123456789abcdef" not in said
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert {p.name for p in files} == {METRICS, WANDB_ID}
    assert not any("0123456789abcdef" in p.read_text() for p in files)


def test_the_real_wandb_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_SILENT", "WANDB_CONSOLE", "DRAFTSMITH_QUIET"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("WANDB_MODE", "offline")
    for place in ("WANDB_CONFIG_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(place, str(tmp_path / "home"))
    tracker = Tracker(tmp_path / "run", 0, wandb=True, config={"world": 1})
    tracker.log("train", 2, {"loss": 1.0, "accuracy": [0.5]})
    tracker.log("validation", 2, {"tau": 1.5})
    tracker.close()
    (line,) = [x for x in capsys.readouterr().err.splitlines() if "wandb sync" in x]
    folder = Path(line.rpartition(" ")[2])
    mark = (tmp_path / "run" / WANDB_ID).read_text().strip()
    assert folder.name.startswith("offline-run-")
    assert folder.name.endswith(mark)
    assert list(folder.glob("*.wandb"))


def test_what_is_not_finite_is_null(tmp_path: Path, wandb: Any) -> None:
    seen, _ = wandb
    tracker = Tracker(tmp_path, 0, wandb=True)
    tracker.log("validation", 2, {"loss": float("nan"), "accuracy": [0.5, float("inf")], "documents": 3})
    tracker.close()
    (line,) = (tmp_path / METRICS).read_text().splitlines()
    assert json.loads(line) == {"kind": "validation", "step": 2, "loss": None, "accuracy": [0.5, None], "documents": 3}
    assert seen[0] == (2, {"validation/accuracy_0": 0.5, "validation/documents": 3})


@pytest.mark.parametrize(("setting", "given"), [("auto", None), (True, True), (False, False)])
def test_the_setting_reaches_the_tracker(
    setting: Any, given: Any, tiny_target: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train_worker import make_fit, make_store, recipe

    from draftsmith.train import fit

    asked = []

    def stop(_folder: Path, _step: int, wandb: Any, _config: Any) -> None:
        asked.append(wandb)
        raise KeyboardInterrupt

    monkeypatch.setattr(fit, "Tracker", stop)
    store = make_store(tiny_target, tmp_path / "features", documents=5, new_tokens=6)
    with pytest.raises(KeyboardInterrupt):
        fit.fit(*make_fit(store, tiny_folder, recipe(steps=1, wandb=setting)), tmp_path / "run")
    assert asked == [given]


# --- what is logged ---------------------------------------------------------------------------------------------------


def test_a_window_holds_what_its_steps_add_up_to(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train import metrics

    now = [100.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    window = metrics.Window([1.0], ["target_kl"])
    line = torch.tensor([[6.0, 3, 4, 3, 4, 3], [2.0, 8, 8, 5, 0, 0]]).double()
    window.add(10, line.flatten(), 0.5)
    window.add(10, None, float("inf"))  # left out: its rows were seen all the same
    window.add(20, line.flatten(), 1.5)
    now[0] += 4
    with window.paused():
        now[0] += 60
    now[0] += 1
    found = window.close()
    assert found["tokens_per_s"] == 8.0, "40 rows in 5 s of training"
    assert (found["gradient_norm"], found["gradient_norm_max"]) == (1.0, 1.5)
    assert found["supervised"] == 0.2, "8 of 40"
    assert (found["loss"], found["accuracy"], found["target_kl"]) == (2.0, [0.75], 0.25)
    now[0] += 1
    window.add(3, None, float("nan"))
    empty = window.close()
    assert (empty["gradient_norm"], empty["gradient_norm_max"], empty["supervised"]) == (None, None, 0.0)
    assert empty["tokens_per_s"] == 3.0


def test_mfu_is_the_heads_operations_over_the_devices() -> None:
    from draftsmith.heads.costs import HeadCosts
    from draftsmith.train.metrics import Utilisation, peak_flops
    from draftsmith.train.ranks import Ranks
    from draftsmith.train.step import TrainStep

    costs = HeadCosts(
        params=0, first=0, step=0, train_all=1000, train_rows=4000, frozen_rows=0, attention=10, kv=0, steps=1,
        draft_vocab=50, hidden=20, teacher=True,
    )  # fmt: skip
    # a token: 6 * (1000 + 0.5 * 4000) for weights, 2 * 20 * 50 for the teacher, 14 * 0.5 * 10 * 100 of attention
    assert Utilisation(costs, 100.0, 1e6, 2).mfu(0.5, 40.0) == pytest.approx(27000 * 40 / 2e6)
    assert Utilisation(costs, 100.0, None, 2).mfu(0.5, 40.0) is None
    assert Utilisation(None, 100.0, 1e6, 2).mfu(0.5, 40.0) is None, "a target is trained beside the head"
    assert peak_flops(torch.device("cpu"), torch.float32) is None
    step: Any = type("Step", (TrainStep,), {"__init__": lambda self: torch.nn.Module.__init__(self)})()
    step.adapter, step.dtype = object(), torch.float32
    # documents of 1 and 3 tokens: their rows see 1; 1, 2, 3 rows
    assert Utilisation.of(step, [1, 3], Ranks(0, 4, torch.device("cpu"))) == Utilisation(None, 7 / 4, None, 4)


def test_a_listed_gpus_peak_by_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train.metrics import peak_flops

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "NVIDIA H200")
    cuda = torch.device("cuda", 0)
    assert (peak_flops(cuda, torch.bfloat16), peak_flops(cuda, torch.float32)) == (989.4e12, 66.9e12)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "another")
    assert peak_flops(cuda, torch.bfloat16) is None


def test_the_data_is_described_without_what_is_secret(
    tiny_target: Any, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from train_worker import make_fit, make_store, recipe

    from draftsmith.files import write_json
    from draftsmith.train.tracking import describe_run

    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("HF_TOKEN", "hf_0123456789")
    store = make_store(tiny_target, tmp_path / "features", documents=5, new_tokens=6)
    settings, opened, _, head = make_fit(store, tiny_folder, recipe())
    write_json(store / "manifest.json", {"identity": {"stage": "collect"}, "record": {"seconds": 3}})
    found = describe_run(settings, head, opened, 2)
    assert found["data"]["manifest"] == {"stage": "collect"}
    assert (found["data"]["documents"], found["data"]["digest"]) == (5, opened.digest)
    assert found["head"]["family"] == "eagle3"
    assert (found["train"]["token_budget"], found["world"]) == (96, 2)
    assert "0123456789" not in json.dumps(found)
