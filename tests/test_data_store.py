"""The feature store, packing, and the draft vocabulary's counts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftsmith.data_recipes.packing import make_batch, plan_batches
from draftsmith.data_recipes.store import ChunkMeta, Document, FeatureStore, build_index, write_chunk
from draftsmith.data_recipes.vocabulary import choose_vocab
from draftsmith.errors import DraftsmithError
from draftsmith.heads import alignment

META = ChunkMeta(fingerprint="fp", layer_ids=(2, 3), hidden_size=4, vocab_size=50)


def made(i: int, tokens: list[int], prompt: int, split: str = "train") -> Document:
    generator = torch.Generator().manual_seed(i)
    states = torch.randn(len(tokens) - 1, 12, generator=generator).bfloat16()
    answer = torch.arange(len(tokens)) >= prompt
    return Document(f"d{i}", split, torch.tensor(tokens), answer, states[:, :8], states[:, 8:])


DOCUMENTS = [
    made(0, [1, 2, 3, 10, 11, 12, 9], 3),  # labels of step 0: 11, 12, 9
    made(1, [1, 5, 6], 2),
    made(2, [1, 2, 10, 10, 10], 2, "val"),
    made(3, list(range(1, 31)), 10),  # labels 12..30
]


@pytest.fixture
def folder(tmp_path):
    write_chunk(tmp_path / "chunk-00000.safetensors", DOCUMENTS[:2], META)
    write_chunk(tmp_path / "chunk-00001.safetensors", DOCUMENTS[2:], META)
    build_index(tmp_path, ["chunk-00000", "chunk-00001"], "fp", (2, 3), "identity")
    return tmp_path


def test_documents_come_back(folder):
    store = FeatureStore.open(folder, "fp", (2, 3))
    assert len(store) == 4
    assert (store.ids, store.lengths) == (["d0", "d1", "d2", "d3"], [7, 3, 5, 30])
    assert [store.split(i) for i in range(4)] == ["train", "train", "val", "train"]
    for i in (3, 0, 2, 1):
        found, there = store.document(i), DOCUMENTS[i]
        assert (found.id, found.split) == (there.id, there.split)
        for name in ("tokens", "answer", "features", "last"):
            assert torch.equal(getattr(found, name), getattr(there, name)), name
        assert found.tokens.dtype == torch.int64
    assert store.totals() == {
        "documents": 4,
        "tokens": 45,
        "answer_tokens": 4 + 1 + 3 + 20,
        "bytes": sum(f.stat().st_size for f in folder.glob("*.safetensors")),
    }


def test_equal_documents_give_equal_bytes(folder, tmp_path):
    write_chunk(tmp_path / "again.safetensors", DOCUMENTS[:2], META)
    assert (tmp_path / "again.safetensors").read_bytes() == (folder / "chunk-00000.safetensors").read_bytes()


def test_states_that_are_not_finite_are_left_out(tmp_path):
    broken = made(9, [1, 2, 3, 4], 2)
    broken.last[1, 2] = torch.inf
    assert write_chunk(tmp_path / "chunk-00000.safetensors", [DOCUMENTS[0], broken, DOCUMENTS[1]], META) == ["d9"]
    index = build_index(tmp_path, ["chunk-00000"], "fp", (2, 3), "identity")
    store = FeatureStore.open(tmp_path)
    assert (store.ids, index["chunks"][0]["dropped"]) == (["d0", "d1"], ["d9"])
    assert torch.equal(store.document(1).last, DOCUMENTS[1].last)


def test_damage_and_mismatch_are_named(folder):
    with pytest.raises(DraftsmithError, match="fingerprint is 'fp', not 'other'"):
        FeatureStore.open(folder, "other")
    with pytest.raises(DraftsmithError, match=r"layer_ids is \[2, 3\], not \[1, 3\]"):
        FeatureStore.open(folder, layer_ids=(1, 3))
    with pytest.raises(DraftsmithError, match=r"not collected yet"):
        FeatureStore.open(folder / "nowhere")
    write_chunk(folder / "chunk-00001.safetensors", [], ChunkMeta("fp", (1, 3), 4, 50))
    with pytest.raises(DraftsmithError, match=r"chunk-00001\.safetensors: layer_ids"):
        build_index(folder, ["chunk-00000", "chunk-00001"], "fp", (2, 3), "identity")
    chunk = folder / "chunk-00000.safetensors"
    whole = chunk.read_bytes()
    write_chunk(folder / "chunk-00001.safetensors", DOCUMENTS[2:], META)
    chunk.write_bytes(whole[:-10])
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors has \d+ bytes instead of"):
        FeatureStore.open(folder)
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors is cut off"):
        build_index(folder, ["chunk-00000"], "fp", (2, 3), "identity")
    chunk.unlink()
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors is missing"):
        FeatureStore.open(folder)
    chunk.write_bytes(whole.replace(b'\\"fp\\"', b'\\"FP\\"'))
    store = FeatureStore.open(folder)
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors: fingerprint is 'FP'"):
        store.document(0)


def test_digest_grows_with_the_store(folder):
    before = FeatureStore.open(folder).digest
    assert before == FeatureStore.open(folder).digest
    build_index(folder, ["chunk-00000"], "fp", (2, 3), "identity")
    assert FeatureStore.open(folder).digest != before


def test_label_counts_follow_the_alignment(folder):
    store = FeatureStore.open(folder)
    expected = torch.zeros(50, dtype=torch.int64)
    for d in (DOCUMENTS[0], DOCUMENTS[1], DOCUMENTS[3]):
        rows = alignment.supervised(d.answer, torch.zeros(len(d.tokens), dtype=torch.int64), 1)[0].nonzero().flatten()
        for row in rows.tolist():
            expected[d.tokens[row + 2]] += 1
    assert torch.equal(store.label_counts(), expected)
    assert expected.nonzero().flatten().tolist() == [9, *range(11, 31)]
    assert store.label_counts("val")[10] == 2
    vocab, coverage = choose_vocab(store, 3, [0])
    assert vocab.target_ids.tolist() == [0, 9, 12]  # 12 twice, then the lowest id of those seen once
    assert coverage == pytest.approx(float(expected[vocab.target_ids].sum() / expected.sum()))


@pytest.mark.parametrize("budget", [1, 64, 1000])
def test_a_plan_holds_every_document_once(budget):
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(5, 300, (500,), generator=generator).tolist()
    plan = plan_batches(lengths, budget, seed=3, epoch=1)
    assert sorted(i for batch in plan for i in batch) == list(range(500))
    assert all(len(batch) == 1 or sum(lengths[i] for i in batch) <= budget for batch in plan)
    assert plan == plan_batches(lengths, budget, seed=3, epoch=1)
    assert plan != plan_batches(lengths, budget, seed=3, epoch=2)
    assert plan != plan_batches(lengths, budget, seed=4, epoch=1)
    if budget == 1000:
        assert sum(lengths) / (len(plan) * budget) > 0.95


def test_plan_edges():
    assert plan_batches([], 10, 0, 0) == []
    assert sorted(plan_batches([20, 3], 10, 0, 0)) == [[0], [1]]
    with pytest.raises(DraftsmithError, match="token_budget 0"):
        plan_batches([1], 0, 0, 0)


def test_a_batch_packs_documents(folder):
    store = FeatureStore.open(folder)
    batch = make_batch(store, [3, 0], max_length=10)
    assert batch.tokens.tolist() == [*range(1, 11), 1, 2, 3, 10, 11, 12, 9]
    assert batch.documents.tolist() == [0] * 10 + [1] * 7
    assert batch.positions.tolist() == [*range(10), *range(7)]
    assert batch.answer.tolist() == [False] * 13 + [True] * 4
    assert torch.equal(batch.features[:9], DOCUMENTS[3].features[:9])
    assert torch.equal(batch.last[10:16], DOCUMENTS[0].last)
    assert batch.features[[9, 16]].abs().max() == 0
    assert batch.last[[9, 16]].abs().max() == 0
    assert (batch.features.dtype, batch.features.shape) == (torch.bfloat16, (17, 8))


def test_states_are_mapped_not_read(folder):
    store = FeatureStore.open(folder)
    a, b = store.document(0).features, store.document(0).features
    assert a.data_ptr() == b.data_ptr()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder / "chunk-00000.safetensors") in maps.read_text()
