"""Stage collect: states of answered documents, in every form of the store, by several ranks, within a time budget."""

from __future__ import annotations

import dataclasses
import errno
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data_recipes import collect as collect_module
from draftsmith.data_recipes import forward
from draftsmith.data_recipes.collect import CollectSettings, chunk_meta, collect, features_stage
from draftsmith.data_recipes.forward import plan_forward, recorded_document
from draftsmith.data_recipes.layout import DocumentRow, PromptRow, TargetInfo, read_answers, stage_digest, write_rows
from draftsmith.data_recipes.quantise import dequantise, quantise
from draftsmith.data_recipes.store import FeatureStore, write_chunk
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Needs
from draftsmith.manifest import Stage

LAYERS = (2, 3, 4)
CHUNKS, EACH = 5, 6


def rows_of(number: int) -> list[DocumentRow]:
    """Documents of two turns; the last one of a chunk is a single token."""
    draw = random.Random(number)
    rows = []
    for i in range(EACH):
        n = 1 if i == EACH - 1 else draw.randint(12, 60)
        tokens = [draw.randrange(3, 320) for _ in range(n)]
        spans = [[4, 8], [10, n]] if n > 1 else []
        split = "val" if i == 1 else "train"
        rows.append(DocumentRow(f"{number}-{i}", split, "ab"[draw.randrange(2)], tokens, spans))
    return rows


def make_data(folder: Path) -> Path:
    for number in range(CHUNKS):
        write_rows(folder / "answers" / f"chunk-{number:05d}.jsonl", rows_of(number))
    Stage.open(folder / "answers", "regenerate", 1, {}).finish()
    return folder


@pytest.fixture
def data(tmp_path):
    return make_data(tmp_path / "data")


@pytest.fixture(scope="module")
def info(tiny_folder):
    return TargetInfo.read(str(tiny_folder))


def no_work():
    pytest.fail("there is nothing to do")


def outputs(data: Path) -> dict[str, bytes]:
    names = ("chunk-*.safetensors", "index.json", "label_counts.safetensors")
    return {f.name: f.read_bytes() for name in names for f in sorted((data / "features").glob(name))}


def alone(tiny_target: Any, row: DocumentRow) -> tuple[torch.Tensor, torch.Tensor]:
    aux, last = tiny_target.states(torch.tensor([row.tokens[:-1]]), Needs(LAYERS, last=True))
    return aux[0], last[0]


# --- what is stored --------------------------------------------------------------------------------------------------


def test_stored_states_are_those_of_a_document_alone(data, info, tiny_target):
    stage = collect(CollectSettings(LAYERS, token_budget=150), data, info, lambda: tiny_target)
    store = FeatureStore.open(data / "features", info.fingerprint, LAYERS)
    rows = [row for i in range(CHUNKS) for row in rows_of(i)]
    assert store.ids == [row.id for row in rows]
    assert store.verify() == len(rows)
    for i, row in enumerate(rows):
        d = store.document(i)
        assert (d.split, d.source, d.tokens.tolist()) == (row.split, row.source, row.tokens)
        answer = [any(a <= k < b for a, b in row.spans) for k in range(len(row.tokens))]
        assert d.answer.tolist() == answer
        if len(row.tokens) > 1:
            aux, last = alone(tiny_target, row)
            # the stored bf16 may fall to either side of a rounding
            torch.testing.assert_close(d.features, aux.bfloat16(), rtol=2**-7, atol=1e-4)
            torch.testing.assert_close(d.last, last.bfloat16(), rtol=2**-7, atol=1e-4)
    record = stage.manifest["record"]
    assert (record["chunks"], record["chunks_planned"], record["chunks_computed_here"]) == (CHUNKS, CHUNKS, CHUNKS)
    assert record["documents"] == len(rows)
    assert record["tokens"] == sum(len(row.tokens) for row in rows)
    assert record["answer_tokens"] == sum(row.answer_tokens for row in rows)
    assert (record["minutes"], record["not_finite"]) == (None, [])
    assert collect(CollectSettings(LAYERS), data, info, no_work).manifest == stage.manifest


def test_states_in_a_batch_are_those_of_a_document_alone_in_fp32(tiny_target, monkeypatch):
    monkeypatch.setattr(forward, "encode", lambda states, topk, meta: ({"states": states}, states.isfinite().all(-1)))
    rows = rows_of(0)
    meta, seen = chunk_meta(tiny_target, CollectSettings(LAYERS)), []
    for numbers, sizes, copied in forward._passes(rows, tiny_target, meta, 150):
        seen += numbers
        assert sum(sizes) == len(copied.rows["states"])
        for number, states in zip(numbers, copied.rows["states"].split(sizes), strict=True):
            expected = torch.cat(alone(tiny_target, rows[number]), 1)
            assert (states - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert sorted(seen) == list(range(EACH - 1))  # the last one has no states


def test_int8_and_topk(data, info, tiny_target):
    settings = CollectSettings(LAYERS, dtype="int8", teacher="topk", topk=7)
    collect(settings, data, info, lambda: tiny_target)
    store = FeatureStore.open(data / "features")
    assert (store.meta.dtype, store.meta.teacher, store.meta.topk) == ("int8", "topk", 7)
    row, d = rows_of(0)[2], store.document(2)
    aux, _ = alone(tiny_target, row)
    codes, scales = quantise(aux.view(-1, 3, 64))
    step = scales.float()[..., None].expand(-1, -1, 64).flatten(1)
    assert ((d.features.float() - dequantise(codes, scales).flatten(1).float()).abs() <= 1.1 * step).all()
    with tiny_target.attention():
        logits = tiny_target.model(torch.tensor([row.tokens[:-1]])).logits[0]
    best = torch.log_softmax(logits, -1).topk(7, -1)
    assert d.topk is not None
    assert (d.topk[0] == best.indices).float().mean() > 0.99  # ties may change places
    torch.testing.assert_close(d.topk[1].float(), best.values, rtol=1e-3, atol=1e-3)
    small = CollectSettings(LAYERS, teacher="topk", topk=10_000)
    assert chunk_meta(tiny_target, small).topk == tiny_target.vocab_size


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_recorded_states_give_the_same_chunk(data, info, tiny_target, teacher):
    """States that decoding recorded, bf16, against those of the pass."""
    settings = CollectSettings(LAYERS, teacher=teacher, topk=5)
    stage = features_stage(data, stage_digest(data / "answers", "regenerate"), info, settings)
    meta = chunk_meta(tiny_target, settings)
    rows = [row for row in read_answers(data / "answers" / "chunk-00000.jsonl") if len(row.tokens) > 1]
    write_rows(data / "answers" / "chunk-00000.jsonl", rows)
    states = [torch.cat(alone(tiny_target, row), 1).bfloat16() for row in rows]
    documents = [recorded_document(row, s, tiny_target, meta) for row, s in zip(rows, states, strict=True)]
    assert write_chunk(stage.folder / "chunk-00000.safetensors", documents, meta) == []
    done = collect(settings, data, info, lambda: tiny_target)
    assert done.manifest["record"]["chunks_computed_here"] == CHUNKS - 1
    recorded = FeatureStore.open(stage.folder).document(0)
    (stage.folder / "chunk-00000.safetensors").unlink()
    collect(settings, data, info, lambda: tiny_target)
    computed = FeatureStore.open(stage.folder).document(0)
    assert (recorded.id, recorded.source) == (computed.id, computed.source)
    assert torch.equal(recorded.answer, computed.answer)
    torch.testing.assert_close(recorded.features, computed.features, rtol=2**-7, atol=1e-4)
    if teacher == "topk":
        assert recorded.topk is not None
        assert computed.topk is not None
        assert (recorded.topk[0] == computed.topk[0]).float().mean() > 0.9
        torch.testing.assert_close(recorded.topk[1], computed.topk[1], rtol=0.05, atol=0.05)
    else:
        torch.testing.assert_close(recorded.last, computed.last, rtol=2**-7, atol=1e-4)


def test_the_data_sets_own_answers(tmp_path, info, tiny_target):
    documents = [{"tokens": [5, 6, 7, 8, 9], "spans": [[2, 5]]}, {"tokens": [5, 6, 7, 3, 4, 11], "spans": [[3, 6]]}]
    rows = [
        PromptRow("one", "train", "s", "s", [], None, [5, 6], documents[:1]),
        PromptRow("two", "val", "s", "s", [], None, [5, 6], documents),
        PromptRow("none", "train", "s", "s", [], None, [5, 6], []),
    ]
    write_rows(tmp_path / "prompts" / "chunk-00000.jsonl", rows)
    with pytest.raises(DraftsmithError, match="run 'draftsmith prepare' first"):
        collect(CollectSettings(LAYERS, answers="dataset"), tmp_path, info, no_work)
    Stage.open(tmp_path / "prompts", "prepare", 1, {}).finish()
    collect(CollectSettings(LAYERS, answers="dataset"), tmp_path, info, lambda: tiny_target)
    store = FeatureStore.open(tmp_path / "features")
    assert store.ids == ["one", "two/1", "two/2"]
    assert [store.split(i) for i in range(3)] == ["train", "val", "val"]
    assert store.document(2).tokens.tolist() == documents[1]["tokens"]
    with pytest.raises(DraftsmithError, match="run 'draftsmith regenerate' first"):
        collect(CollectSettings(LAYERS), tmp_path, info, no_work)


def test_other_forms_are_set_aside_not_lost(data, info, tiny_target):
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    before = outputs(data)
    collect(CollectSettings(LAYERS, dtype="int8"), data, info, lambda: tiny_target)
    assert FeatureStore.open(data / "features").meta.dtype == "int8"
    collect(CollectSettings(LAYERS, topk=9), data, info, no_work)  # topk means nothing beside states
    assert outputs(data) == before


def test_a_chunk_that_is_made_anew_is_indexed_anew(data, info, tiny_target):
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    path = data / "answers" / "chunk-00002.jsonl"
    rows = read_answers(path)
    write_rows(path, [dataclasses.replace(rows[0], tokens=[7] * 40, spans=[[2, 40]]), *rows[1:]])
    (data / "features" / "chunk-00002.safetensors").unlink()
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    store = FeatureStore.open(data / "features")
    assert store.document(2 * EACH).tokens.tolist() == [7] * 40
    assert store.verify() == CHUNKS * EACH


# --- what goes wrong -------------------------------------------------------------------------------------------------


def poison(monkeypatch, tiny_target, poisoned: list[DocumentRow]) -> None:
    real = type(tiny_target).states

    def states(self, tokens, needs):
        aux, last = real(self, tokens, needs)
        last = last.clone()
        for line, row in enumerate(tokens.tolist()):
            if any(row[: len(bad.tokens) - 1] == bad.tokens[:-1] for bad in poisoned):
                last[line, 3] = torch.nan
        return aux, last

    monkeypatch.setattr(type(tiny_target), "states", states)


@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_states_that_are_not_finite_stop_the_stage(data, info, tiny_target, monkeypatch, teacher):
    settings = CollectSettings(LAYERS, teacher=teacher)
    bad, worse = poisoned = [rows_of(1)[2], rows_of(2)[2]]
    poison(monkeypatch, tiny_target, poisoned)
    with pytest.raises(DraftsmithError, match=rf"2 of 30 documents \({bad.id}, {worse.id}\), more than one and 0\.1%"):
        collect(settings, data, info, lambda: tiny_target)
    (data / "features/chunk-00002.safetensors").unlink()
    assert len(list((data / "features").glob("chunk-*"))) == 2  # nothing is computed once it is certain
    poisoned.pop()
    stage = collect(settings, data, info, lambda: tiny_target)  # a single one is left out, however few there are
    assert stage.manifest["record"]["not_finite"] == [bad.id]
    store = FeatureStore.open(data / "features")
    assert store.ids == [row.id for i in range(CHUNKS) for row in rows_of(i) if row.id != bad.id]
    torch.testing.assert_close(
        store.document(EACH + 2).features, alone(tiny_target, rows_of(1)[3])[0].bfloat16(), rtol=2**-7, atol=1e-4
    )


def test_documents_of_another_model_are_refused(data, info, tiny_target):
    path = data / "answers" / "chunk-00001.jsonl"
    rows = read_answers(path)
    for tokens, message in (
        ([5, 320, 4], r"document x of chunk-00001 has token id 320, the target's are 0\.\.319"),
        ([5] * 513, r"document x of chunk-00001 has 513 tokens, more than the 512"),
    ):
        write_rows(path, [*rows, DocumentRow("x", "train", "a", tokens, [])])
        with pytest.raises(DraftsmithError, match=message):
            collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    other = TargetInfo("0" * 64, info.tokenizer_sha256, info.max_positions)
    with pytest.raises(DraftsmithError, match="changed since its documents were made"):
        collect(CollectSettings(LAYERS), data, other, lambda: tiny_target)


def test_documents_can_be_longer_than_a_batch(data, info, tiny_target):
    collect(CollectSettings(LAYERS, token_budget=20), data, info, lambda: tiny_target)
    assert max(FeatureStore.open(data / "features").lengths) > 20


def test_a_full_disk_is_named_and_leaves_nothing_half_written(data, info, tiny_target, monkeypatch):
    real, calls = forward.ChunkWriter.put, [0]

    def put(self, *args):
        calls[0] += 1
        if calls[0] == EACH + 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, *args)

    monkeypatch.setattr(forward.ChunkWriter, "put", put)
    with pytest.raises(DraftsmithError, match=r"disk is full while writing .*chunk-00001\.safetensors"):
        collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    files = {f.name for f in (data / "features").iterdir()}
    assert files == {"plan.json", "times-0.json", "chunk-00000.safetensors"}
    monkeypatch.undo()
    stage = collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    assert stage.manifest["record"]["chunks_computed_here"] == CHUNKS - 1


def test_few_batches_wait_to_be_written(tiny_target, tmp_path, monkeypatch):
    real_passes, real_put, made, written, most = forward._passes, forward._put, [0], [0], [0]

    def passes(*args):
        for batch in real_passes(*args):
            made[0] += 1
            yield batch

    def put(*args):
        time.sleep(0.02)
        real_put(*args)
        most[0] = max(most[0], made[0] - written[0])
        written[0] += 1

    monkeypatch.setattr(forward, "_passes", passes)
    monkeypatch.setattr(forward, "_put", put)
    rows = [dataclasses.replace(rows_of(0)[0], id=str(i)) for i in range(16)]
    meta = chunk_meta(tiny_target, CollectSettings(LAYERS))
    bar = forward.Progress("collect", None, "tokens")
    forward.write_states(tmp_path / "chunk-00000.safetensors", rows, tiny_target, meta, 1, bar)
    assert (written[0], bar.done) == (16, 16 * (len(rows[0].tokens) - 1))
    assert 1 < most[0] <= forward._AHEAD + 2


def test_forward_plan():
    lengths = [5, 1, 9, 3, 3]
    plan = plan_forward(lengths, 9)
    assert plan == [[1, 3, 4], [0], [2]]
    assert plan_forward([20], 9) == [[0]]
    assert plan_forward([], 9) == []


# --- ranks and budgets -----------------------------------------------------------------------------------------------


def open_as_rank_0(data: Path, info: TargetInfo, settings: CollectSettings) -> Stage:
    return features_stage(data, stage_digest(data / "answers", "regenerate"), info, settings)


@pytest.mark.parametrize("world", [2, 7])
def test_ranks_make_the_same_bytes(data, tmp_path, info, tiny_target, world):
    settings = CollectSettings(LAYERS, token_budget=100)
    collect(settings, data, info, lambda: tiny_target)
    shared = make_data(tmp_path / "shared")
    open_as_rank_0(shared, info, settings)
    made = []
    for rank in range(world - 1, -1, -1):
        before = set(outputs(shared))
        stage = collect(settings, shared, info, lambda: tiny_target, rank, world)
        made += sorted(set(outputs(shared)) - before - {"index.json", "label_counts.safetensors"})
        assert (stage.manifest is None) == (rank > 0)
    assert sorted(made) == [f"chunk-{i:05d}.safetensors" for i in range(CHUNKS)]
    assert outputs(shared) == outputs(data)


def test_rank_0_waits_for_the_others(data, info, tiny_target, monkeypatch):
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    whole = outputs(data)
    late = data / "features" / "chunk-00003.safetensors"
    shutil.move(late, data / "late")
    monkeypatch.setattr(collect_module, "_POLL_S", 0.01)
    timer = threading.Timer(0.3, shutil.move, (data / "late", late))
    timer.start()
    collect(CollectSettings(LAYERS), data, info, no_work, rank=0, world=2)
    timer.join()
    assert outputs(data) == whole
    late.unlink()
    monkeypatch.setattr(collect_module, "PATIENCE_S", 0.1)
    with pytest.raises(DraftsmithError, match=r"chunk-00003\.safetensors of rank 1 and 0 more chunks are missing"):
        collect(CollectSettings(LAYERS), data, info, no_work, rank=0, world=2)
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target, rank=1, world=2)
    collect(CollectSettings(LAYERS), data, info, no_work, rank=0, world=2)
    assert outputs(data) == whole


class Clock:
    """Time that passes only when the target reads: 10 seconds a document."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tiny_target: Any) -> None:
        self.now = 0.0
        real: Callable[..., Any] = type(tiny_target).states

        def states(target: Any, tokens: torch.Tensor, needs: Needs) -> Any:
            self.now += 10 * len(tokens)
            return real(target, tokens, needs)

        monkeypatch.setattr(type(tiny_target), "states", states)
        monkeypatch.setattr(collect_module.time, "monotonic", lambda: self.now)


def test_a_larger_budget_goes_on(data, info, tiny_target, monkeypatch):
    Clock(monkeypatch, tiny_target)
    settings = CollectSettings(LAYERS)
    record = collect(settings, data, info, lambda: tiny_target, minutes=0.1).manifest["record"]
    assert (record["chunks"], record["chunks_planned"], record["minutes"]) == (1, CHUNKS, 0.1)  # one at least
    assert len(FeatureStore.open(data / "features")) == EACH
    again = collect(settings, data, info, no_work, minutes=0.1)
    assert again.manifest["record"] == record
    record = collect(settings, data, info, lambda: tiny_target, minutes=3).manifest["record"]  # 50 s a chunk or so
    assert 1 < record["chunks"] < CHUNKS
    record = collect(settings, data, info, lambda: tiny_target).manifest["record"]
    assert (record["chunks"], record["minutes"]) == (CHUNKS, None)
    assert FeatureStore.open(data / "features").verify() == CHUNKS * EACH


def test_rank_0_waits_no_longer_than_the_budget(data, info, tiny_target, monkeypatch):
    settings = CollectSettings(LAYERS)
    monkeypatch.setattr(collect_module, "_POLL_S", 0.01)
    record = collect(settings, data, info, lambda: tiny_target, world=2, minutes=0.02).manifest["record"]
    assert record["chunks"] <= 3
    assert set(FeatureStore.open(data / "features").ids) <= {row.id for i in (0, 2, 4) for row in rows_of(i)}
