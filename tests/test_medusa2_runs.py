"""Medusa-2: whole runs with an adapter, the target that comes out of them, and how far it has moved."""

from __future__ import annotations

import dataclasses
import functools
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
from families import make_case
from safetensors.torch import load_file
from test_adapter import moved
from tiny import make_tiny_target
from torch import Tensor
from train_worker import make_fit, make_store

from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import load_head
from draftsmith.heads.medusa2 import Medusa2Config
from draftsmith.heads.target import Target, load_model
from draftsmith.train import drift, stage
from draftsmith.train.joint import TunedTarget
from draftsmith.train.settings import load_head_recipe

# --- whole runs -------------------------------------------------------------------------------------------------------


def recipe(head: dict[str, Any] | None = None, **train: Any) -> Any:
    """Medusa-2's, small and in fp32."""
    small = {"token_budget": 96, "dtype": "float32", "warmup": 2, "log_every": 2, "seed": 1, "validate_every": 4}
    options = {"lora_rank": 4, "lora_alpha": 2}
    return load_head_recipe(
        "medusa2",
        {
            "head": {"steps": 4, "draft_vocab_size": 280, **(head or {})},
            "head.options": options,
            "train": {**small, **train},
        },
    )


@pytest.fixture(scope="module")
def store(tiny_target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_store(tiny_target, tmp_path_factory.mktemp("store") / "features", documents=20, new_tokens=28, seed=3)


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def run(store: Path, target: Path, out: Path, **train: Any) -> dict[str, Any]:
    from draftsmith.train.fit import fit

    settings, opened, parts, head = make_fit(store, target, recipe(**train))
    tuned = TunedTarget.load(str(target), None, head.config, 1, torch.device("cpu"), torch.float32)
    return fit(settings, opened, parts, head, out, tuned=tuned)


def weights(folder: Path) -> dict[str, Tensor]:
    found = load_file(folder / "model.safetensors") | load_file(folder / "adapter/adapter_model.safetensors")
    return found | (load_file(folder / "optimizer.safetensors") if (folder / "optimizer.safetensors").exists() else {})


def test_resumed_equals_uninterrupted_and_the_target_stays(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    before = {p.name: p.read_bytes() for p in tiny_folder.glob("*.safetensors")}
    run(store, tiny_folder, tmp_path / "run", steps=8, save_every=3)
    folder = tmp_path / "run/checkpoints"
    assert {p.name for p in folder.iterdir()} == {"best", "step-000006", "step-000008"}
    whole = weights(folder / "step-000008")
    at_six = weights(folder / "step-000006")
    changed = [n for n in at_six if "lora" in n and not torch.equal(at_six[n], whole[n])]
    assert len(changed) == 6 * 7 * 7, "A and B of each of 49 layers, with two moments each"
    assert not any(n.startswith("model.") for n in whole), "nothing of the target's own is saved"
    shutil.rmtree(folder / "step-000008")
    again = run(store, tiny_folder, tmp_path / "run", steps=8, save_every=3)
    assert (again["finished"], again["step"]) == (True, 8)
    found = weights(folder / "step-000008")
    assert set(found) == set(whole)
    assert all(torch.equal(found[n], whole[n]) for n in whole)
    head = json.loads((folder / "step-000008/head.json").read_text())
    (folder / "step-000008/head.json").write_text(json.dumps({**head, "adapter_sha256": "0" * 64}))
    with pytest.raises(DraftsmithError, match=r"is not the adapter that head.json names"):
        run(store, tiny_folder, tmp_path / "run", steps=9)
    assert {p.name: p.read_bytes() for p in tiny_folder.glob("*.safetensors")} == before


def test_the_adapter_rests_while_the_heads_are_alone(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    run(store, tiny_folder, tmp_path, steps=6, save_every=3)
    three = weights(tmp_path / "checkpoints/step-000003")
    assert not any(bool(w.any()) for n, w in three.items() if "lora_B" in n or ("lora_A" in n and "exp_avg" in n))
    six = weights(tmp_path / "checkpoints/step-000006")
    for name, w in three.items():
        assert not torch.equal(w, six[name]), f"{name} was never trained"
    lines = [json.loads(x) for x in (tmp_path / "metrics.jsonl").open()]
    shown = {x["step"]: x["target_kl"] for x in lines if x["kind"] == "train"}
    assert shown[2] is None
    assert shown[4] == 0.0, "the first joint step: nothing has moved yet"
    assert shown[6] > 0
    held_out = {x["step"]: x["target_kl"] for x in lines if x["kind"] == "validation"}
    assert set(held_out) == {4, 6}
    assert held_out[6] > 0
    best = json.loads((tmp_path / "checkpoints/best/validation.json").read_text())
    assert best["target_kl"] == held_out[best["step"]]


def test_one_rank_accumulating_two_equals_two_ranks(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    import draftsmith
    from draftsmith.train.ranks import _free_port

    code = "import sys; sys.path.insert(0, sys.argv[1]); import test_medusa2_runs as t; t.worker(*sys.argv[2:])"
    command = [
        sys.executable,
        "-c",
        code,
        str(Path(__file__).parent),
        str(store),
        str(tiny_folder),
        str(tmp_path / "two"),
    ]
    path = os.pathsep.join([str(Path(draftsmith.__path__[0]).absolute().parent), os.environ.get("PYTHONPATH", "")])
    shared = {
        **os.environ,
        "PYTHONPATH": path,
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _free_port(),
    }
    processes = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(r), "LOCAL_RANK": str(r)}, stderr=subprocess.PIPE, text=True
        )
        for r in range(2)
    ]
    run(store, tiny_folder, tmp_path / "one", **_TWO, accumulation=2)
    for p in processes:
        _, err = p.communicate(timeout=300)
        assert p.returncode == 0, err
    one, two = (weights(tmp_path / n / "checkpoints/step-000004") for n in ("one", "two"))
    assert set(one) == set(two)
    for name in one:
        torch.testing.assert_close(one[name], two[name], rtol=1e-5, atol=1e-5)
    a, b = ([json.loads(x) for x in (tmp_path / n / "metrics.jsonl").open()] for n in ("one", "two"))
    assert [x["step"] for x in a] == [x["step"] for x in b]
    assert a[-1]["tau_walk"] == pytest.approx(b[-1]["tau_walk"])
    kl = [[x["target_kl"] for x in lines if x["kind"] == "train"][-1] for lines in (a, b)]
    assert kl[0] == pytest.approx(kl[1], rel=1e-4)


def test_the_target_must_come_with_its_head(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    from draftsmith.train.fit import fit

    with pytest.raises(ValueError, match="`tuned` goes with a head that is trained together with its target"):
        fit(*make_fit(store, tiny_folder, recipe(steps=1)), tmp_path)


_TWO: dict[str, Any] = {"steps": 4, "clip": 0.05, "save_every": 4}  # a clip that bites


def worker(store: str, target: str, out: str) -> None:
    run(Path(store), Path(target), Path(out), **_TWO)


def decoded(target: Target, head: Any, documents: list[Any], new_tokens: int) -> list[Any]:
    from draftsmith.eval.decoder.drafters import make_drafter
    from draftsmith.eval.decoder.drafters.plain import PlainDrafter
    from draftsmith.eval.decoder.loop import Request, decode
    from draftsmith.eval.decoder.search import Chain

    drafter = PlainDrafter() if head is None else make_drafter(head, target.parts(), Chain(4))
    requests = [Request(d.id, d.tokens[~d.answer].tolist(), new_tokens) for d in documents]
    return sorted(decode(target, drafter, requests, slots=4, capacity=64), key=lambda r: r.id)


def sharp_target(folder: Path) -> Path:
    """The tiny target with its logits scaled: its laws are almost flat, where every change turns some greedy token."""
    model = load_model(str(make_tiny_target(folder)), None, torch.float32)
    with torch.no_grad():
        model.lm_head.weight *= 8
    model.save_pretrained(folder)
    return folder


def test_overfit_gate_on_the_tuned_target(tmp_path: Path) -> None:
    """The whole stage: the first head learns the answers by heart; drafts don't change what the tuned target says."""
    folder = sharp_target(tmp_path / "target")
    original = Target.load(str(folder), dtype=torch.float32, device="cpu")
    store = make_store(original, tmp_path / "features", documents=20, new_tokens=28, seed=3)
    settings = recipe(
        {"draft_vocab_size": 320}, steps=80, token_budget=700, lr_matrix=0.04, lr_other=0.005, weight_decay=0.0,
        validate_every=80,
    )  # fmt: skip
    record = stage.train_stage(settings, location=str(folder), revision=None, features=store, folder=tmp_path / "train")
    best = tmp_path / "train/checkpoints/best"
    head, opened = load_head(best), FeatureStore.open(store)
    tuned = Target.load(str(folder), dtype=torch.float32, device="cpu", adapter=best / "adapter")
    tuned.check_head(head.config)
    documents = [opened.document(i) for i in range(len(opened)) if opened.split(i) == "train"]
    drafted, plain = decoded(tuned, head, documents, 22), decoded(tuned, None, documents, 22)
    assert [r.tokens for r in drafted] == [r.tokens for r in plain]
    steps = [s for r in drafted for s in r.steps]
    assert sum(s.accepted > 0 for s in steps) >= 0.9 * len(steps)
    written = json.loads((tmp_path / "train/manifest.json").read_text())["record"]
    found = written["drift"]
    assert (found, written["drift_seconds"]) == (record["drift"], record["drift_seconds"])
    assert 0 < found["kl"] < 0.02
    assert found["greedy_agreement"] > 0.9
    assert (found["documents"], found["prompts"]) == (4, 4)
    # the same rows in the same dtype: validation and drift agree
    assert json.loads((best / "validation.json").read_text())["target_kl"] == pytest.approx(found["kl"], rel=1e-3)


# --- drift ------------------------------------------------------------------------------------------------------------


def small_target(folder: Path) -> TunedTarget:
    config = make_case("medusa2", "one-block").config
    assert isinstance(config, Medusa2Config)
    config = dataclasses.replace(config, target_layers=7, lora_rank=2, lora_alpha=2)
    return TunedTarget(load_model(str(folder), None, torch.float32), config, 0)


def test_drift_is_what_plain_models_say(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    from peft import PeftModel

    adapter = small_target(tiny_folder).adapter
    adapter.save(tmp_path / "nothing")
    for weight in moved(adapter).parameters.values():
        weight.data.mul_(0.6)
    adapter.save(tmp_path / "something")
    load = functools.partial(Target.load, str(tiny_folder), dtype=torch.float32, device="cpu")
    opened = FeatureStore.open(store)
    documents = [i for i in range(len(opened)) if opened.split(i) == "val"]
    still = drift.measure_drift(load, tmp_path / "nothing", opened, documents, 30)
    assert (still["greedy_agreement"], still["identical_answers"]) == (1.0, 1.0)
    assert still["kl"] == pytest.approx(0, abs=1e-6)
    found = drift.measure_drift(load, tmp_path / "something", opened, documents, 30)

    plain = load_model(str(tiny_folder), None, torch.float32).eval()
    tuned = PeftModel.from_pretrained(load_model(str(tiny_folder), None, torch.float32), tmp_path / "something").eval()
    kl, same, rows, identical = 0.0, 0, 0, 0
    for i in documents:
        d = opened.document(i)
        tokens, answer = d.tokens[None, :30], d.answer[:30]
        with torch.no_grad():
            p, q = (torch.softmax(m(input_ids=tokens).logits[0, :-1].double(), -1)[answer[1:]] for m in (plain, tuned))
            prompt = {"input_ids": tokens[:, ~answer], "attention_mask": torch.ones_like(tokens[:, ~answer])}
            texts = [
                m.generate(**prompt, max_new_tokens=drift.NEW_TOKENS, do_sample=False).tolist() for m in (plain, tuned)
            ]
        kl += float((p * (p / q).log()).sum())
        same += int((p.argmax(-1) == q.argmax(-1)).sum())
        rows += len(p)
        identical += texts[0] == texts[1]
    assert found["answer_tokens"] == rows
    assert found["kl"] == pytest.approx(kl / rows, rel=1e-3)
    assert found["greedy_agreement"] == same / rows
    assert found["identical_answers"] == identical / len(documents)
    assert found["kl"] > 0.01
    assert found["greedy_agreement"] < 1


def test_drift_of_a_bf16_target_is_that_of_fp32_logits(store: Path, tiny_folder: Path, tmp_path: Path) -> None:
    adapter = moved(small_target(tiny_folder).adapter)
    for weight in adapter.parameters.values():
        weight.data.mul_(0.6)
    adapter.save(tmp_path / "adapter")
    load = functools.partial(Target.load, str(tiny_folder), dtype=torch.bfloat16, device="cpu")
    opened = FeatureStore.open(store)
    documents = [i for i in range(len(opened)) if opened.split(i) == "val"]
    found = drift.measure_drift(load, tmp_path / "adapter", opened, documents, 30)
    texts = [opened.document(i) for i in documents]
    tokens, answers = [d.tokens[:30] for d in texts], [d.answer[:30] for d in texts]
    tuned = load(adapter=tmp_path / "adapter")
    weight = tuned.parts().lm_head.double()
    moved_states, fixed = (torch.cat(drift._states(t, tokens, answers)) for t in (tuned, load(adapter=None)))
    p, q = (torch.softmax(x.double() @ weight.t(), -1) for x in (fixed, moved_states))
    assert found["kl"] == pytest.approx(float((p * (p / q).log()).sum()) / len(p), rel=1e-4)
    assert found["greedy_agreement"] == float((p.argmax(-1) == q.argmax(-1)).double().mean())


def test_a_time_limited_run_keeps_time_for_the_drift(
    store: Path, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = FeatureStore.open(store)
    documents = [i for i in range(len(opened)) if opened.split(i) == "val"]
    shapes: list[tuple[int, int]] = []

    def seconds(tuned: Any, sequences: int, length: int) -> float:
        shapes.append((sequences, length))
        return 0.25 * length if sequences == 1 else 0.5

    with monkeypatch.context() as patch:
        patch.setattr(drift, "_pass_seconds", seconds)
        estimate = drift.expected_seconds(small_target(tiny_folder), 7.0, opened, documents, 30)
    tokens = sum(min(opened.lengths[i], 30) for i in documents)
    # twice: a load, the documents' tokens at 0.25 s each, and 64 steps of at most 8 answers at once
    assert estimate == pytest.approx(2 * (7.0 + 0.25 * tokens + 0.5 * 64))
    assert shapes == [(1, 30), (8, 1)]

    given: list[float] = []

    def fit(*_: Any, budget_seconds: float, **__: Any) -> dict[str, Any]:
        given.append(budget_seconds)
        return {"finished": False}

    monkeypatch.setattr(stage, "fit", fit)
    monkeypatch.setattr(stage, "expected_seconds", lambda tuned, loading, *_: 100.0 + loading)
    before = time.monotonic()
    place: dict[str, Any] = {"location": str(tiny_folder), "revision": None, "features": store}
    stage.train_stage(recipe(minutes=20.0), folder=tmp_path / "a", **place)
    stage.train_stage(recipe(minutes=20.0), folder=tmp_path / "b", budget_seconds=600.0, **place)
    spent = time.monotonic() - before
    for whole, left in zip((1200.0, 600.0), given, strict=True):  # what loading took is kept for the drift again
        assert whole - 100.0 - 2 * spent <= left < whole - 100.0
