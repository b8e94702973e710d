"""The benchmark of training: what it counts is held against known steps. No time is judged here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planning import SMALL, batch, parts
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.files import write_json
from draftsmith.heads.base import Batch
from draftsmith.heads.eagle3 import Eagle3Head
from draftsmith.train.bench_feed import two_processes
from draftsmith.train.bench_memory import LiveBytes, activation_peak, planned_bytes, tensor_bytes
from draftsmith.train.bench_roofline import OUTSIDE, BareProducts, Product, RowCounts, eagle3_products, where
from draftsmith.train.bench_train import TrainBenchSettings, bench_train
from draftsmith.train.bench_work import (
    document_lengths,
    drawn_ids,
    make_head,
    open_trainer,
    store_meta,
    take_steps,
    upcoming,
    write_store,
)
from draftsmith.train.estimate import Rows, activation_bytes
from draftsmith.train.ranks import process_group

TINY = ["unrolled=2", "draft_vocab=128", "token_budget=256", "rounds=2", "profiled=1", "vocabularies=96,192",
        "stored_tokens=600,2400", "store_hidden=8", "store_rounds=2", "store_steps=2", "process_rounds=1",
        "process_steps=2"]  # fmt: skip


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def small_head(draft_vocab: int = 200, steps: int = 3) -> Eagle3Head:
    return make_head(SMALL.config(), parts(SMALL), draft_vocab, steps)


@pytest.fixture(scope="module")
def small_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    head = small_head()
    return write_store(tmp_path_factory.mktemp("bench") / "store", 1500, store_meta(head), drawn_ids(head))


def test_every_figure_is_written_with_its_aim(tiny_folder: Path, tmp_path: Path, quiet: None) -> None:
    arguments = ["bench", "train", *TINY, "--model", str(tiny_folder), "--runs", str(tmp_path), "--json"]
    result = CliRunner().invoke(cli.app, arguments)
    assert result.exit_code == 0, result.output
    written = json.loads((tmp_path / "bench" / "train.json").read_text())
    figures = written["figures"]
    assert {name: figure["aim"] for name, figure in figures.items()} == {
        "roofline_share": ">= 0.6", "live_bytes_ratio": "<= 1.2", "activations_by_vocabulary": "<= 1.1",
        "tokens_by_store": ">= 0.85", "two_processes": ">= 0.85",
    }  # fmt: skip
    for name, figure in figures.items():
        assert 0 < figure["low"] <= figure["median"] <= figure["high"], name
        above = figure["aim"].startswith(">=")
        bound = float(figure["aim"].split()[1])
        assert figure["met"] == (figure["median"] >= bound if above else figure["median"] <= bound), name
    roofline = figures["roofline_share"]
    assert roofline["high"] < 1, "a step does its products and more"
    assert sum(roofline["where"].values()) == pytest.approx(1)
    live, planned = figures["live_bytes_ratio"]["live"], figures["live_bytes_ratio"]["planned"]
    assert figures["live_bytes_ratio"]["median"] == pytest.approx(sum(live.values()) / sum(planned.values()))
    assert live["weights"] == planned["weights"]
    assert live["optimizer"] == planned["optimizer"]
    assert set(figures["activations_by_vocabulary"]["bytes"]) == {"96", "192"}
    for key in ("tokens_per_s", "read_tokens_per_s"):
        assert set(figures["tokens_by_store"][key]) == {"600", "2400"}
    assert set(figures["two_processes"]["tokens_per_s"]) == {"1", "2"}
    assert written["settings"]["vocabularies"] == [96, 192]
    assert written["target"]["dtype"] == "float32"


def test_storages_are_counted_from_their_making_to_their_end() -> None:
    x = torch.zeros(10)
    with LiveBytes() as live:
        x.add_(1)  # was there before
        assert live.now == 0
        y = x + 1  # 40 bytes
        view = y[2:5]
        del y
        z = view * view  # 12 bytes
        assert (live.now, live.peak, live.peak_in) == (52, 52, "aten.mul.Tensor")
        del view
        assert (live.now, live.peak) == (12, 52)
        torch._foreach_add([z, z], 1.0)  # two of 12 bytes, gone at once
        assert (live.now, live.peak) == (12, 52)
    assert z.sum() == 12


def test_a_known_step_counts_what_it_must() -> None:
    weight = torch.ones(8, 4, requires_grad=True)  # fp32, as all here
    x = torch.ones(3, 4)
    with LiveBytes([weight.shape]) as live:
        y = torch.sigmoid(x @ weight.t())  # two of [3, 8], 96 bytes each, of which one stays
        assert (live.now, live.peak) == (96, 192)
        loss = y.sum()
        assert live.now == 100
        loss.backward()  # a scalar's gradient, that of the sigmoid's input, and the weight's [8, 4]
        assert (live.now, live.others_peak) == (100 + 128, 100 + 4 + 96)
        assert live.peak_in == "aten.mm.default"
        del y, loss
    assert live.now == weight.grad.nbytes == 128


def test_rows_of_the_eight_token_example() -> None:
    head = small_head(steps=2)
    states = torch.zeros(8, 3 * SMALL.hidden)
    document = Batch(
        tokens=torch.tensor([1, 2, 3, 10, 11, 300, 5, 0]),  # 300 is outside of the draft vocabulary
        answer=torch.tensor([0, 0, 0, 1, 1, 1, 1, 0]).bool(),
        documents=torch.zeros(8, dtype=torch.int64), positions=torch.arange(8), features=states,
        last=states[:, : SMALL.hidden],
    )  # fmt: skip
    # rows 2, 3, 4 predict 11, 300, 5 at step 0 and learn from the target's rows 3, 4, 5; rows 2, 3 then 300, 5
    assert RowCounts.of(head, document) == (8, 3, 2, (2, 1))
    # target's rows 3 and 5 at step 0, and 5 at step 1
    document.tokens[5] = 12
    assert RowCounts.of(head, document) == (8, 3, 3, (3, 2))


def test_the_products_are_those_that_torch_counts() -> None:
    head = small_head()
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    found = eagle3_products(head.config, RowCounts.of(head, packed))
    with FlopCounterMode(display=False) as counter:
        stats = head.losses(packed, parts(SMALL), scales=head.step_weights())
        torch.stack([s.num * w for s, w in zip(stats, head.step_weights(), strict=True)]).sum().backward()
    by_operation = counter.get_flop_counts()["Global"]
    counted = sum(n for operation, n in by_operation.items() if str(operation) in ("aten.mm", "aten.addmm"))
    in_place = sum(2 * p.rows * p.inputs * p.outputs for p in found if p.outputs == 200 and p.by_weight)
    assert sum(p.flops for p in found) == counted + in_place, "addmm_ in place isn't counted by torch"


def test_long_chunks_of_the_losses_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    head = small_head()
    rows = RowCounts(100, 70, 65, (70, 40, 10))
    whole = eagle3_products(head.config, rows)
    monkeypatch.setattr("draftsmith.train.bench_roofline.loss_rows_per_chunk", lambda *_: 32)
    cut = eagle3_products(head.config, rows)
    assert [p.rows for p in cut if p.outputs == 200] == [32, 32, 1, 32, 32, 6, 32, 8, 10]
    assert sum(p.flops for p in cut) == sum(p.flops for p in whole)


def test_bare_products_run_all_that_is_asked_for() -> None:
    asked = [Product(5, 3, 7), Product(4, 3, 7, by_input=False), Product(5, 3, 7), Product(2, 6, 1, by_weight=False)]
    assert [p.flops for p in asked] == [630, 336, 630, 48]
    with FlopCounterMode(display=False) as counter:
        BareProducts(asked, torch.float32).run()
    # products with `out` are operations of their own for the counter's sums
    assert counter.get_total_flops() == sum(p.flops for p in asked)


def test_time_is_told_apart_by_what_it_is_for() -> None:
    head = small_head()
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    target = parts(SMALL)

    def work() -> None:
        torch.stack([s.num for s in head.losses(packed, target)]).sum().backward()

    found = where(work)
    named = {f"{owner}: {kind}" for owner in ("losses", "attention", "network") for kind in ("products", "the rest")}
    assert set(found) == named | {OUTSIDE}, "no optimizer has run"
    assert sum(found.values()) == pytest.approx(1)
    assert all(share > 0 for name, share in found.items() if name != OUTSIDE)


def test_documents_are_as_asked_for_and_the_same(small_store: Path) -> None:
    head = small_head()
    opened = FeatureStore.open(small_store)
    assert list(opened.lengths) == document_lengths(1500)
    assert 1500 <= sum(opened.lengths) < 1900
    assert len(document_lengths(1)) == 2, "one to train on, one held out"
    first = opened.document(1)
    assert first.answer.tolist() == [i >= len(first.tokens) // 3 for i in range(len(first.tokens))]
    tokens = torch.cat([opened.document(i).tokens for i in range(len(opened))])
    assert drawn_ids(head) == 206
    assert 0.95 < float((tokens < 200).double().mean()) < 0.99
    assert drawn_ids(small_head(draft_vocab=512)) == 512, "the target has no more"


def test_what_is_planned_and_the_activations_by_hand(small_store: Path, quiet: None) -> None:
    head = small_head()
    h, v, q, kv, i = 96, 200, 96, 32, 256
    matrices = 3 * h * h + 2 * h * (q + 2 * kv) + q * h + 3 * h * i
    count = matrices + v * h + 4 * h
    with process_group() as ranks, open_trainer(
        head, parts(SMALL), small_store, ranks, token_budget=400, dtype="float32"
    ) as trainer:  # fmt: skip
        (packed,) = upcoming(trainer, 1)
        supervised = int(head.supervised_rows(packed)[0].sum())
        assert take_steps(trainer) == len(packed.tokens), "it is the batch that the next step takes"
        assert planned_bytes(trainer, packed) == {
            "weights": 4 * count,
            "gradients": 4 * count,
            "optimizer": 4 * matrices + 8 * (count - matrices),
            "batch": len(packed.tokens) * (4 * 4 * h + 3 * 8 + 1),
            "activations": activation_bytes(head, Rows(len(packed.tokens), supervised), 4),
            "logits of a chunk": 4 * supervised * v,
        }
        (packed,) = upcoming(trainer, 1)
        supervised = int(head.supervised_rows(packed)[0].sum())
        kept = activation_bytes(head, Rows(len(packed.tokens), supervised), 4) - 4 * v * h
        peak = activation_peak(trainer)
    # the formula is within 20 % of what is kept, and a chunk of the losses needs one to six times its logits
    assert 0.8 * kept + 4 * supervised * v < peak < 1.2 * kept + 6 * 4 * supervised * v


def test_a_storage_under_several_tensors_is_one() -> None:
    x = torch.zeros(6)
    assert tensor_bytes([x, x[2:], x.view(2, 3), "text", None, torch.zeros(2, dtype=torch.int64)]) == 24 + 16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rounds": 0}, "bench.rounds = 0 must be at least 1"),
        ({"vocabularies": (96, 0)}, r"bench.vocabularies = \(96, 0\) must be at least 1"),
        ({"token_budget": 7}, "bench.token_budget = 7 must be at least 8"),
        ({"store_hidden": 10}, "bench.store_hidden = 10 must be a multiple of 4"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DraftsmithError, match=message):
        TrainBenchSettings(**settings)


def test_a_target_on_a_gpu_is_refused() -> None:
    target: Any = SimpleNamespace(device=torch.device("cuda", 0))
    with pytest.raises(DraftsmithError, match="is for CPUs, the target is on cuda:0: hide the GPUs"):
        bench_train(target, TrainBenchSettings())


def test_cores_are_shared_and_a_process_that_fails_is_no_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quiet: None
) -> None:
    started: list[tuple[list[str], str]] = []

    def run(command: list[str], env: dict[str, str], check: bool) -> Any:
        started.append((command, env["OMP_NUM_THREADS"]))
        job = json.loads(command[-1])
        write_json(Path(job["folder"]) / "found.json", {"tokens": 10 * len(started), "seconds": 2.0})
        return SimpleNamespace(returncode=0 if len(started) < 4 else 3)

    monkeypatch.setattr("draftsmith.train.bench_feed.subprocess.run", run)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(6)))
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    head = small_head()
    found = two_processes(head, "somewhere", None, 1, 1, 500, token_budget=256)
    assert found == {
        "median": 0.5, "low": 0.5, "high": 0.5, "tokens_per_s": {"1": 10.0, "2": 5.0}, "threads": {"1": 6, "2": 3},
    }  # fmt: skip
    (two, two_threads), (one, one_threads) = started
    assert (two_threads, one_threads) == ("3", "6"), "whatever this process's own number is"
    assert two[1:5] == ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    assert one[1:3] == ["-m", "draftsmith.train.bench_feed"]
    assert json.loads(two[-1])["train"] == {"token_budget": 256, "accumulation": 1}
    assert json.loads(one[-1])["train"] == {"token_budget": 256, "accumulation": 2}, "the same batches a step"
    with pytest.raises(DraftsmithError, match=r"the run of 1 process\(es\) ended with status 3"):
        two_processes(head, "somewhere", None, 1, 1, 500, token_budget=256)
