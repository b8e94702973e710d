"""Online training: documents without states, states computed in the job, the same losses as on stored ones."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from draftsmith.data_recipes.collect import CollectSettings, collect
from draftsmith.data_recipes.layout import ANSWERS, DocumentRow, TargetInfo, write_rows
from draftsmith.data_recipes.packing import make_batch
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Batch, Needs
from draftsmith.heads.registry import head_family
from draftsmith.heads.target import Target, load_parts
from draftsmith.manifest import Stage
from draftsmith.train import placement
from draftsmith.train.fit import Trainer, fit
from draftsmith.train.online import (
    OnlineStep,
    choose_mode,
    collect_tokens,
    make_step,
    mode_begun,
    side_by_side,
)
from draftsmith.train.settings import load_head_recipe
from draftsmith.train.stage import prepare_head, train_stage
from draftsmith.train.step import TrainStep

LAYERS, V = (2, 3, 4), 320
TOLERANCE = 1e-5
"""Of losses and gradients in fp32, relative to the largest value of each tensor."""


def rows_of(chunk: int) -> list[DocumentRow]:
    """Documents of several lengths, one of a single token and one without an answer among them."""
    g = torch.Generator().manual_seed(chunk)
    made = []
    for i, length in enumerate([24, 9, 31, 1, 17, 12]):
        tokens = torch.randint(3, V, (length,), generator=g).tolist()
        spans = [[3, 6], [8, length]] if length > 12 else [[2, length]] if length > 9 else []
        split, source = "val" if i == 2 else "train", "ab"[i % 2]
        made.append(DocumentRow(f"{source}/{chunk}{i}", split, source, tokens, spans))
    return made


def add_answers(data: Path, chunks: int) -> Path:
    """A finished stage `regenerate` with these chunks."""
    stage = Stage.open(data / ANSWERS, "regenerate", 0, {"of": "test"})
    for chunk in range(chunks):
        write_rows(stage.folder / f"chunk-{chunk:05d}.jsonl", rows_of(chunk))
    stage.finish()
    return data


@pytest.fixture(scope="module")
def data(tiny_target: Target, tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents with stored states, and without."""
    folder = add_answers(tmp_path_factory.mktemp("data"), 3)
    info = TargetInfo.read(str(tiny_folder))
    collect(CollectSettings(LAYERS), folder, info, lambda: tiny_target)
    collect_tokens(folder, info, V)
    return folder


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def recipe(name: str = "eagle3", **train: Any) -> Any:
    small = {"token_budget": 60, "dtype": "float32", "warmup": 2, "log_every": 2, "validate_every": 2, **train}
    return load_head_recipe(name, {"head": {"steps": 3, "draft_vocab_size": 280}, "train": small})


def made(data: Path, folder: Path, name: str, online: bool, **train: Any) -> tuple[Any, ...]:
    """What `fit` takes: train settings, store, parts, head."""
    settings = recipe(name, **train)
    settings = settings.model_copy(update={"head": settings.head.model_copy(update={"layer_ids": list(LAYERS)})})
    place = data / ("tokens" if online else "features")
    config, vocab, _, store = prepare_head(settings, str(folder), None, place, online=online)
    parts, head = load_parts(str(folder), None, torch.float32), head_family(config.family).head(config, vocab)
    head.initialise(parts, torch.Generator().manual_seed(0))
    return settings.train, store, parts, head


# --- documents --------------------------------------------------------------------------------------------------------


def test_the_store_of_tokens_is_the_store_of_features_without_states(data: Path) -> None:
    stored, bare = FeatureStore.open(data / "features"), FeatureStore.open(data / "tokens", layer_ids=())
    assert bare.ids == stored.ids == [row.id for chunk in range(3) for row in rows_of(chunk)]
    assert bare.lengths == stored.lengths
    assert bare.fingerprint == stored.fingerprint
    assert bare.vocab_size == stored.vocab_size == V
    for split in ("train", "val"):
        assert bare.trainable(split, 20) == stored.trainable(split, 20)
        assert torch.equal(bare.label_counts(split), stored.label_counts(split))
    assert int(bare.label_counts().sum()) > 0
    for i in range(len(bare)):
        a, b = bare.document(i, 20), stored.document(i, 20)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.answer, b.answer)
        assert (a.id, a.split, a.source) == (b.id, b.split, b.source)
    size = sum(path.stat().st_size for path in (data / "tokens").glob("chunk-*"))
    assert size < 5 * sum(bare.lengths) + 3 * 2000, "more than tokens, masks and headers"
    assert bare.verify() == 18


def test_tokens_are_written_once_and_more_answers_add_to_them(tiny_folder: Path, tmp_path: Path) -> None:
    info = TargetInfo.read(str(tiny_folder))
    collect_tokens(add_answers(tmp_path, 1), info, V)
    first = FeatureStore.open(tmp_path / "tokens").digest
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").iterdir()}
    collect_tokens(tmp_path, info, V)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "tokens").iterdir()} == times
    collect_tokens(add_answers(tmp_path, 2), info, V)
    store = FeatureStore.open(tmp_path / "tokens")
    assert len(store) == 12
    assert store.digest != first, "the digest tells runs on more documents apart"


def test_a_token_that_the_target_does_not_have_is_named(tiny_folder: Path, tmp_path: Path) -> None:
    info = TargetInfo.read(str(tiny_folder))
    largest = max(max(row.tokens) for row in rows_of(0))
    with pytest.raises(DraftsmithError, match=rf"document ./0\d of .*chunk-00000.jsonl has token id {largest}"):
        collect_tokens(add_answers(tmp_path, 1), info, largest)
    with pytest.raises(DraftsmithError, match="prompts is not finished: run 'draftsmith prepare' first"):
        collect_tokens(tmp_path, info, V, "dataset")


# --- states, losses, gradients ----------------------------------------------------------------------------------------


def alone(folder: Path, batch: Batch, layers: list[int]) -> Batch:
    """The batch with states of the plain transformers model, each document by itself and whole."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    before_norm: list[Tensor] = []
    model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.append(args[0][0]))
    aux, last = [], []
    with torch.no_grad():
        for number in batch.documents.unique().tolist():
            tokens = batch.tokens[batch.documents == number]
            states = model(input_ids=tokens[None], output_hidden_states=True).hidden_states
            aux.append(torch.cat([states[k][0] for k in layers] or [states[0][0][:, :0]], -1))
            last.append(before_norm.pop())
    return dataclasses.replace(batch, features=torch.cat(aux), last=torch.cat(last))


def close(found: Tensor, wanted: Tensor, tolerance: float = TOLERANCE) -> None:
    """The largest difference is within the tolerance, relative to the largest value."""
    error, size = float((found - wanted).abs().max()), float(wanted.abs().max())
    assert size > 0
    assert error <= tolerance * size, error / size


def grads(step: TrainStep, batch: Batch) -> tuple[Tensor, dict[str, Tensor]]:
    step.zero_grad()
    loss, _ = step(batch, step.loss_counts(batch), 1.0)
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in step.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["eagle1", "eagle3", "hydra", "medusa1", "mtp"])
def test_losses_and_gradients_equal_those_on_the_states_of_each_document_alone(
    data: Path, tiny_folder: Path, tiny_target: Target, name: str
) -> None:
    _, store, parts, head = made(data, tiny_folder, name, online=True)
    online = make_step(head, parts, torch.float32, store, tiny_target)
    plain = TrainStep(head, parts, torch.float32)
    for p in head.parameters():  # heads start with zeros here and there, behind which nothing gets a gradient
        p.data += 0.02 * torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
    documents, _ = store.trainable("train", 20)
    bare = dataclasses.replace(make_batch(store, [*documents, 3], 20), seed=5).to("cpu", torch.float32)
    whole = alone(tiny_folder, bare, head.config.layer_ids)
    seen = online.seen(bare)
    assert seen.last is not None
    assert whole.last is not None
    ends = torch.cat((bare.documents[1:] != bare.documents[:-1], torch.tensor([True])))
    assert not seen.last[ends].any(), "rows that nothing reads are zero, as in stored batches"
    close(seen.last[~ends], whole.last[~ends])
    if head.config.layer_ids:
        close(seen.features[~ends], whole.features[~ends])
    assert torch.equal(online.loss_counts(bare), plain.loss_counts(whole))
    (loss, found), (wanted_loss, wanted) = grads(online, bare), grads(plain, whole)
    close(loss, wanted_loss)
    assert set(found) == set(wanted) == {n for n, _ in online.named_parameters()}
    for key in wanted:
        close(found[key], wanted[key])
    assert not any(p.grad is not None for p in tiny_target.model.parameters())


def test_losses_and_gradients_equal_those_on_stored_states(data: Path, tiny_folder: Path, tiny_target: Target) -> None:
    """The store holds bf16: online states are rounded to that for the comparison; unrounded they are the better."""
    _, store, parts, head = made(data, tiny_folder, "eagle3", online=True)
    stored = FeatureStore.open(data / "features")
    online, offline = OnlineStep(head, parts, torch.float32, tiny_target), TrainStep(head, parts, torch.float32)
    documents, _ = store.trainable("train", 20)
    bare, full = (make_batch(x, documents, 20).to("cpu", torch.float32) for x in (store, stored))
    seen = online.seen(bare)
    assert seen.last is not None
    rounded = dataclasses.replace(
        seen, features=seen.features.bfloat16().float(), last=seen.last.bfloat16().float()
    )  # fmt: skip
    assert full.last is not None
    # passes of other shapes differ in fp32's last bits: of few values that turns the neighbouring bf16 number
    close(rounded.features, full.features, 2**-8)
    assert rounded.last is not None
    assert float((rounded.features != full.features).float().mean()) < 1e-3
    assert float((rounded.last != full.last).float().mean()) < 1e-3
    (loss, found), (wanted_loss, wanted) = grads(offline, rounded), grads(offline, full)
    close(loss, wanted_loss)
    for key in wanted:
        close(found[key], wanted[key], 5 * TOLERANCE)
    exact, _ = grads(online, bare)
    assert 0 < abs(float(exact - wanted_loss)) < 5e-3 * float(wanted_loss), "what bf16 storage costs"


def test_documents_lie_side_by_side_without_their_last_tokens() -> None:
    tokens = torch.arange(1, 13)
    documents = torch.tensor([0] * 6 + [1] + [2] * 3 + [3] * 2)
    batch = Batch(tokens, tokens > 0, documents, documents, tokens[:, None], tokens[:, None])
    found = [(padded.tolist(), within.tolist(), rows.tolist()) for padded, within, rows in side_by_side(batch)]
    assert found == [
        ([[11, 0], [8, 9]], [0, 2, 3], [10, 7, 8]),  # no document sees another, the padding is behind
        ([[1, 2, 3, 4, 5]], [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ]


# --- whole runs -------------------------------------------------------------------------------------------------------


def weights(out: Path, step: int) -> dict[str, Tensor]:
    return load_file(out / f"checkpoints/step-{step:06d}/model.safetensors")


def test_a_run_learns_as_the_one_on_stored_states_does_and_resumes(
    data: Path, tiny_folder: Path, tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = {"steps": 6, "save_every": 3, "decode_documents": 2, "decode_tokens": 6}
    lend = {"online": tiny_target, "load_target": lambda *, adapter: tiny_target}
    stored = fit(*made(data, tiny_folder, "eagle3", False, **train), tmp_path / "offline")
    whole = fit(*made(data, tiny_folder, "eagle3", True, **train), tmp_path / "online", **lend)
    assert whole["best_by"] == "tau"
    assert whole["best_tau"] is not None
    assert whole["tokens"] == stored["tokens"]
    lines = [[json.loads(x) for x in (tmp_path / n / "metrics.jsonl").open()] for n in ("offline", "online")]
    for a, b in zip(*lines, strict=True):
        assert (a["kind"], a["step"]) == (b["kind"], b["step"])
        assert b["loss"] == pytest.approx(a["loss"], rel=0.01)  # bf16 states against fp32 ones
        if a["kind"] == "validation":
            assert b["expected_acceptance"] == pytest.approx(a["expected_acceptance"], rel=0.02)
            assert b["tau_walk"] == pytest.approx(a["tau_walk"], rel=0.1)
    assert (tmp_path / "online/checkpoints/best/tree.json").exists()

    original = Trainer.train_step

    def dies(self: Trainer, bar: Any) -> None:
        if self.state.step == 5:
            raise KeyboardInterrupt
        original(self, bar)

    monkeypatch.setattr(Trainer, "train_step", dies)
    with pytest.raises(KeyboardInterrupt):
        fit(*made(data, tiny_folder, "eagle3", True, **train), tmp_path / "died", **lend)
    monkeypatch.setattr(Trainer, "train_step", original)
    fit(*made(data, tiny_folder, "eagle3", True, **train), tmp_path / "died", **lend)
    found, wanted = weights(tmp_path / "died", 6), weights(tmp_path / "online", 6)
    assert all(torch.equal(found[n], wanted[n]) for n in wanted)


def test_the_stage_says_which_mode_it_began_in(data: Path, tiny_folder: Path, tmp_path: Path) -> None:
    place: dict[str, Any] = {"location": str(tiny_folder), "revision": None, "folder": tmp_path / "train"}
    train = {"steps": 2, "decode_documents": 0}
    assert mode_begun(tmp_path / "train") is None
    record = train_stage(recipe(**train), features=data / "tokens", online=True, **place)
    assert record["finished"]
    assert mode_begun(tmp_path / "train") == "online"
    best = tmp_path / "train/checkpoints/best/model.safetensors"
    before = best.stat().st_mtime_ns
    again = train_stage(recipe(**train, mode="online"), features=data / "tokens", online=True, **place)
    assert best.stat().st_mtime_ns == before, "the setting is no part of the run: it is skipped"
    assert again["best_tau_walk"] == record["best_tau_walk"]
    train_stage(recipe(**train), features=data / "features", **place)
    assert mode_begun(tmp_path / "train") == "offline"
    assert len(list(tmp_path.glob("train.*"))) == 1, "the online run is set aside"


def test_what_cannot_run_online_is_refused(data: Path, tiny_folder: Path, tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(DraftsmithError, match=r"'medusa2': it is trained together with its target.*offline"):
        train_stage(
            recipe("medusa2"), location=str(tiny_folder), revision=None, features=data / "tokens",
            folder=tmp_path, online=True,
        )  # fmt: skip
    settings, store, parts, head = made(data, tiny_folder, "eagle3", True, steps=1)
    with pytest.raises(ValueError, match="goes with a store without states"):
        fit(settings, store, parts, head, tmp_path)
    longer = dataclasses.replace(head.config, trained_length=tiny_target.max_positions + 1)
    with pytest.raises(DraftsmithError, match=r"documents of up to 513 tokens.*set train.max_length=512"):
        OnlineStep(head_family("eagle3").head(longer, head.vocab), parts, torch.float32, tiny_target)


# --- mode and place ---------------------------------------------------------------------------------------------------


def test_auto_goes_offline_when_features_fit_half_of_the_free_disk() -> None:
    assert choose_mode("auto", "eagle3", 50e9, 100e9) == (
        "offline", "mode offline: features of 50.0 GB, 100.0 GB of disk free; they fit into half of it",
    )  # fmt: skip
    mode, sentence = choose_mode("auto", "eagle3", 51e9, 100e9)
    assert mode == "online"
    assert sentence == (
        "mode online: features of 51.0 GB, 100.0 GB of disk free; they don't fit into half of it, so the target runs "
        "in every training step"
    )
    assert choose_mode("auto", "eagle3", 51e9, 100e9, begun="offline")[0] == "offline", "a run goes on as it began"
    assert choose_mode("auto", "eagle3", 1e9, 100e9, begun="online")[0] == "online"
    assert choose_mode("online", "eagle3", 1e9, 100e9, begun="offline")[0] == "online"
    assert choose_mode("auto", "medusa2", 99e9, 100e9)[0] == "offline"
    with pytest.raises(DraftsmithError, match="online with the head family 'medusa2'"):
        choose_mode("online", "medusa2", 1e9, 100e9)


def test_a_target_goes_where_it_fits() -> None:
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    assert placement.choose_place(16e9, 20e9, 80e9, 200e9, gpu, "T") == "device"
    assert placement.choose_place(140e9, 20e9, 80e9, 200e9, gpu, "T") == "host"
    assert placement.choose_place(30e9, 20e9, 64e9, 64e9, cpu, "T") == "device"
    refused = [(140e9, 20e9, 80e9, 140e9, gpu), (16e9, 90e9, 80e9, 200e9, gpu), (50e9, 20e9, 64e9, 64e9, cpu)]
    for needed, training, free, host, device in refused:
        with pytest.raises(DraftsmithError, match=r"target T needs .* GB and training .*use train.mode=offline"):
            placement.choose_place(needed, training, free, host, device, "T")


def test_a_target_that_fits_nowhere_is_refused_before_it_is_loaded(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "host_bytes", lambda: 2_000_000)
    monkeypatch.setattr(placement, "load_model", None)
    with pytest.raises(DraftsmithError, match=r"the target .* needs .*cpu has 0.0 GB free, the host 0.0 GB"):
        placement.load_online_target(str(tiny_folder), None, torch.float32, torch.device("cpu"), 1e6)


def test_bytes_of_a_target_are_counted_from_headers(tiny_folder: Path, tiny_target: Target) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    assert placement.weight_count(tiny_folder) == sum(p.numel() for p in model.parameters())


def test_layers_that_stay_on_the_host_compute_the_same_and_are_free_again(tiny_folder: Path) -> None:
    model, plain = (AutoModelForCausalLM.from_pretrained(tiny_folder).eval().requires_grad_(False) for _ in range(2))
    layers = list(model.model.layers)
    kept = [[p.data_ptr() for p in layer.parameters()] for layer in layers]
    at_work: list[list[bool]] = []
    placement.stream_layers(model, layers, torch.device("cpu"))
    for layer in layers:
        layer.mlp.register_forward_hook(
            lambda *_: at_work.append([p.data_ptr() != k[0] for p, k in zip(_first(layers), kept, strict=True)])
        )
    tokens = torch.arange(5, 25)[None]
    with torch.inference_mode():
        assert torch.equal(model(input_ids=tokens).logits, plain(input_ids=tokens).logits)
    n = len(layers)
    assert at_work == [[i == j for j in range(n)] for i in range(n)], "one layer at a time is on the device"
    assert [[p.data_ptr() for p in layer.parameters()] for layer in layers] == kept
    layers[3].mlp.forward = _fails
    with pytest.raises(RuntimeError, match="out of memory"):
        model(input_ids=tokens)
    assert [[p.data_ptr() for p in layer.parameters()] for layer in layers] == kept


def test_a_target_that_is_loaded_to_the_host_gives_the_states_of_one_in_place(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placement, "choose_place", lambda *_: "host")
    cpu, needs, tokens = torch.device("cpu"), Needs(LAYERS, last=True), torch.arange(5, 25)[None]
    target = placement.load_online_target(str(tiny_folder), None, torch.bfloat16, cpu, 0.0)
    assert all(layer._forward_pre_hooks for layer in target.layers)
    plain = Target.load(str(tiny_folder), dtype=torch.bfloat16, device="cpu")
    for found, wanted in zip(target.states(tokens, needs), plain.states(tokens, needs), strict=True):
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, wanted)


def _first(layers: list[Any]) -> list[Tensor]:
    return [next(layer.parameters()) for layer in layers]


def _fails(*_: Any) -> Tensor:
    raise RuntimeError("out of memory")
