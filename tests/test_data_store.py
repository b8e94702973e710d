"""The feature store: chunk files, int8 states, the index, checksums."""

from __future__ import annotations

import dataclasses
import json
import re
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from store_samples import DOCUMENTS, INT8, META, TOPK, TOPK_INT8, as_topk, fill, made

from draftsmith.data_recipes.chunk_file import Chunk, ChunkWriter, Text, encode
from draftsmith.data_recipes.quantise import dequantise, quantise
from draftsmith.data_recipes.store import ChunkMeta, Document, FeatureStore, build_index, write_chunk
from draftsmith.errors import DraftsmithError


@pytest.fixture
def folder(tmp_path):
    return fill(tmp_path / "features")


# --- what comes back -------------------------------------------------------------------------------------------------


def test_documents_come_back(folder):
    store = FeatureStore.open(folder, "fp", (2, 3))
    assert len(store) == 4
    assert (store.ids, list(store.lengths)) == (["d0", "d1", "d2", "d3"], [7, 3, 5, 30])
    assert [store.split(i) for i in range(4)] == ["train", "train", "val", "train"]
    assert ([store.source(i) for i in range(4)], store.sources) == (["a", "a", "b", "b"], ["a", "b"])
    for i in (3, 0, 2, 1):
        found, there = store.document(i), DOCUMENTS[i]
        assert (found.id, found.split, found.source, found.topk) == (there.id, there.split, there.source, None)
        for name in ("tokens", "answer", "features", "last"):
            assert torch.equal(getattr(found, name), getattr(there, name)), name
        assert found.tokens.dtype == torch.int64
        cut = store.document(i, 3)
        assert (cut.tokens.tolist(), len(cut.answer)) == (there.tokens[:3].tolist(), 3)
        assert torch.equal(cut.features, there.features[:2])
    assert store.totals() == {
        "documents": 4,
        "tokens": 45,
        "answer_tokens": 4 + 1 + 3 + 20,
        "bytes": sum(f.stat().st_size for f in folder.glob("chunk-*.safetensors")),
    }
    assert store.verify() == 4


def test_topk_documents_come_back(tmp_path):
    documents = [as_topk(d) for d in DOCUMENTS]
    store = FeatureStore.open(fill(tmp_path / "features", TOPK, documents))
    for i, there in enumerate(documents):
        found = store.document(i)
        assert found.last is None
        assert torch.equal(found.features, there.features)
        assert found.topk is not None
        assert there.topk is not None
        assert all(torch.equal(a, b) for a, b in zip(found.topk, there.topk, strict=True))
    assert store.verify() == 4
    with pytest.raises(ValueError, match="teacher 'hidden' goes without top-k tokens"):
        write_chunk(tmp_path / "x.safetensors", documents, META)
    with pytest.raises(ValueError, match="teacher 'topk' goes with top-k tokens"):
        write_chunk(tmp_path / "x.safetensors", DOCUMENTS, TOPK)


def test_a_chunk_is_plain_safetensors(folder):
    from safetensors.torch import load_file

    tensors = load_file(folder / "chunk-00000.safetensors")
    assert tensors["tokens"].tolist() == [*DOCUMENTS[0].tokens.tolist(), *DOCUMENTS[1].tokens.tolist()]
    assert tensors["states"].dtype == torch.bfloat16
    assert torch.equal(tensors["states"][6:], torch.cat((DOCUMENTS[1].features, DOCUMENTS[1].last), 1))
    assert tensors["table"][:, [0, 2]].tolist() == [[7, 1], [3, 1]]
    d = DOCUMENTS[1]
    stored = d.tokens.numpy().astype("<i4").tobytes() + d.answer.numpy().tobytes()
    stored += torch.cat((d.features, d.last), 1).view(torch.int16).numpy().tobytes()
    assert tensors["table"][1, 1] == zlib.crc32(stored)


def test_equal_documents_give_equal_bytes_in_any_order(folder, tmp_path):
    write_chunk(tmp_path / "again.safetensors", DOCUMENTS[:2], META)
    expected = (folder / "chunk-00000.safetensors").read_bytes()
    assert (tmp_path / "again.safetensors").read_bytes() == expected
    texts = [Text(d.id, d.split, d.source, d.tokens, d.answer) for d in DOCUMENTS[:2]]
    with ChunkWriter(tmp_path / "backwards.safetensors", texts, META) as writer:
        for i in (1, 0):
            states = torch.cat((DOCUMENTS[i].features, DOCUMENTS[i].last), 1)
            writer.put(i, encode(states, None, META)[0], True)
        assert writer.finish() == []
    assert (tmp_path / "backwards.safetensors").read_bytes() == expected
    with ChunkWriter(tmp_path / "half.safetensors", texts, META) as writer:
        with pytest.raises(ValueError, match=r"no states of \['d0', 'd1'\]"):
            writer.finish()
        with pytest.raises(ValueError, match="d0: 48 bytes of states instead of 144"):
            writer.put(0, encode(torch.zeros(2, 12), None, META)[0], True)


def test_odd_chunks(tmp_path):
    """No document at all, and documents of one token, which have no states."""
    write_chunk(tmp_path / "chunk-00000.safetensors", [], META)
    one = made(7, [4], 0)
    write_chunk(tmp_path / "chunk-00001.safetensors", [one, DOCUMENTS[0], one], META)
    build_index(tmp_path, ["chunk-00000", "chunk-00001"], "fp", (2, 3), "identity")
    store = FeatureStore.open(tmp_path)
    assert list(store.lengths) == [1, 7, 1]
    assert torch.equal(store.document(1).last, DOCUMENTS[0].last)
    assert store.document(2).features.shape == (0, 8)
    assert store.trainable("train", 100) == ([1], 2)
    assert store.verify() == 3


@pytest.mark.parametrize("meta", [META, INT8])
def test_states_that_are_not_finite_are_left_out(tmp_path, meta):
    broken = made(9, [1, 2, 3, 4], 2)
    broken.last[1, 2] = torch.inf
    documents = [DOCUMENTS[0], broken, DOCUMENTS[3]]
    assert write_chunk(tmp_path / "chunk-00000.safetensors", documents, meta) == ["d9"]
    index = build_index(tmp_path, ["chunk-00000"], "fp", (2, 3), "identity")
    store = FeatureStore.open(tmp_path)
    assert (store.ids, index["chunks"][0]["dropped"]) == (["d0", "d3"], [1])
    torch.testing.assert_close(store.document(1).last, DOCUMENTS[3].last, rtol=0.02, atol=0.02)
    assert store.totals()["answer_tokens"] == 4 + 20
    assert int(store.label_counts().sum()) == 3 + 19  # 3, 4 of the broken one count nowhere
    again = tmp_path / "again.safetensors"
    broken.features[0, 0] = torch.nan  # what was computed of it leaves no trace
    write_chunk(again, documents, meta)
    assert again.read_bytes() == (tmp_path / "chunk-00000.safetensors").read_bytes()
    assert store.verify() == 3


def test_digest_grows_with_the_store(folder):
    before = FeatureStore.open(folder).digest
    assert before == FeatureStore.open(folder).digest
    build_index(folder, ["chunk-00000"], "fp", (2, 3), "identity")
    assert FeatureStore.open(folder).digest != before


def test_states_are_mapped_not_read(folder):
    store = FeatureStore.open(folder)
    a, b = store.document(0).features, store.document(0).features
    assert a.data_ptr() == b.data_ptr()
    maps = Path("/proc/self/maps")
    if maps.exists():
        assert str(folder / "chunk-00000.safetensors") in maps.read_text()


@pytest.mark.parametrize(("meta", "most"), [(META, 1.01), (INT8, 0.52 * 1.01), (TOPK, 0.85)])
def test_bytes_of_a_token(tmp_path, meta, most):
    """Of three aux layers at H = 576 against 8 H, which is what their bf16 states and the last one's take."""
    meta = dataclasses.replace(meta, layer_ids=(2, 15, 27), hidden_size=576, topk=64 if meta.topk else 0)
    n = 100
    last, topk = torch.ones(n - 1, 576), None
    if meta.teacher == "topk":
        last, topk = None, (torch.ones(n - 1, 64), torch.zeros(n - 1, 64))
    documents = [
        Document(f"a-source/{i:032x}", "train", "a-source", torch.arange(n), torch.ones(n, dtype=torch.bool),
                 torch.ones(n - 1, 3 * 576), last, topk)
        for i in range(20)
    ]  # fmt: skip
    path = tmp_path / "chunk-00000.safetensors"
    write_chunk(path, documents, meta)
    assert path.stat().st_size / (20 * n) <= most * 8 * 576


# --- int8 ------------------------------------------------------------------------------------------------------------


def rows_in_eight_bits() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(64, 3, 96, generator=generator)
    rows[:8] *= torch.logspace(-9, 6, 8)[:, None, None]  # scales from below fp16's smallest to near its largest
    rows[9, 1, 5] = 3e6  # an outlier a million times the rest
    rows[10] = 0
    rows[11, 2] = 0
    rows[11, 2, 0] = 1e-30
    return rows


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_within_half_a_step_of_fp64(dtype):
    x = rows_in_eight_bits().to(dtype)
    codes, scales = quantise(x)
    assert (codes.dtype, scales.dtype, tuple(scales.shape)) == (torch.int8, torch.float16, (64, 3))
    exact = x.double().numpy()
    scale = scales.double().numpy()
    wanted = np.abs(exact).max(-1) / 127
    normal = wanted >= 2**-14  # below, fp16 has fewer digits
    assert (scale >= wanted * (1 - 1e-6)).all(), "a scale that is too small cuts the largest values"
    assert (scale[normal] <= wanted[normal] * (1 + 2**-10)).all()
    assert (scale[~normal] <= wanted[~normal] + 2**-24).all()
    step = np.where(scale > 0, scale, 1)[..., None]
    reference = np.rint(exact / step)
    near_tie = np.abs(np.abs(exact / step % 1) - 0.5) < 1e-4
    assert np.array_equal(codes.numpy()[~near_tie], reference[~near_tie].astype(np.int8))
    assert near_tie.mean() < 1e-2
    back = dequantise(codes, scales, torch.float32).double().numpy()
    assert (np.abs(back - exact) <= scale[..., None] * (0.5 + 1e-4)).all()
    assert not codes[10].any()
    assert not scales[10].any()
    assert codes.min() >= -127
    torch.testing.assert_close(dequantise(codes, scales), torch.from_numpy(back).bfloat16(), rtol=2**-7, atol=0)


def test_int8_refuses_what_a_scale_cannot_hold(tmp_path):
    huge = torch.zeros(4, 1, 8)
    huge[0, 0, 3], huge[1, 0, 3], huge[2, 0, 3] = 127 * 65504, 127 * 65600, torch.nan
    assert quantise(huge)[1].isfinite().flatten().tolist() == [True, False, False, True]
    document = made(3, [1, 2, 3, 4], 2)
    document.features[1, 0] = 1e30
    assert write_chunk(tmp_path / "a.safetensors", [document], INT8) == ["d3"]
    assert write_chunk(tmp_path / "b.safetensors", [document], META) == []


def test_int8_documents_come_back(tmp_path):
    store = FeatureStore.open(fill(tmp_path / "features", INT8))
    for i, there in enumerate(DOCUMENTS):
        found = store.document(i)
        states = torch.cat((there.features, there.last), 1).view(-1, 3, 4)
        expected = dequantise(*quantise(states)).flatten(1)
        assert torch.equal(found.features, expected[:, :8])
        assert torch.equal(found.last, expected[:, 8:])
        assert found.features.dtype == torch.bfloat16
        assert torch.equal(store.document(i, 3).last, expected[:2, 8:])


# --- damage ----------------------------------------------------------------------------------------------------------


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
    write_chunk(folder / "chunk-00001.safetensors", DOCUMENTS[2:], INT8)
    with pytest.raises(DraftsmithError, match=r"chunk-00001\.safetensors: dtype is 'int8', not 'bf16'"):
        build_index(folder, ["chunk-00000", "chunk-00001"], "fp", (2, 3), "identity")
    chunk = folder / "chunk-00000.safetensors"
    whole = chunk.read_bytes()
    write_chunk(folder / "chunk-00001.safetensors", DOCUMENTS[2:], META)
    for size in (0, 7, 100, len(whole) - 10):
        chunk.write_bytes(whole[:size])
        with pytest.raises(DraftsmithError, match=rf"chunk-00000\.safetensors has {size} bytes instead of"):
            FeatureStore.open(folder)
        with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors is cut off"):
            build_index(folder, ["chunk-00000"], "fp", (2, 3), "identity")
    chunk.unlink()
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors is missing"):
        FeatureStore.open(folder)
    write_chunk(chunk, DOCUMENTS[:2], dataclasses.replace(META, fingerprint="FP"))
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors: fingerprint is 'FP'"):
        FeatureStore.open(folder).document(0)
    write_chunk(chunk, DOCUMENTS[1::-1], META)  # the same size, other bytes
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors is not the chunk that index\.json"):
        FeatureStore.open(folder).document(0)


def regions(path: Path) -> dict[str, tuple[int, int]]:
    """[start, end) of the length, the header and every tensor of a safetensors file."""
    raw = path.read_bytes()
    n = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + n])
    tensors = {k: v["data_offsets"] for k, v in header.items() if k != "__metadata__"}
    return {"length": (0, 8), "header": (8, 8 + n)} | {k: (8 + n + a, 8 + n + b) for k, (a, b) in tensors.items()}


@pytest.mark.parametrize("meta", [META, TOPK_INT8])
def test_every_flipped_byte_is_found(tmp_path, meta):
    documents = [as_topk(d) for d in DOCUMENTS] if meta.topk else DOCUMENTS
    folder = fill(tmp_path / "features", meta, documents)
    chunk = folder / "chunk-00000.safetensors"
    whole, parts = chunk.read_bytes(), regions(chunk)
    assert sum(b - a for a, b in parts.values()) == len(whole)
    states = ["states", *(["scales", "topk_ids", "topk_logprobs"] if meta.topk else [])]
    assert set(parts) == {"length", "header", "seal", "table", "tokens", "answer", *states}
    store = FeatureStore.open(folder)
    for name, (start, end) in parts.items():
        in_documents = name in ("tokens", "answer", *states)
        for at in sorted({start, *range(start, end, 17), end - 1}):
            chunk.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
            where = r"damaged: the stored bytes of document d[01]" if in_documents else ""
            with pytest.raises(DraftsmithError, match=rf"{re.escape(str(chunk))}.*{where}"):
                store.verify()
            if not in_documents:  # found as soon as the chunk is used
                with pytest.raises(DraftsmithError, match=re.escape(str(chunk))):
                    FeatureStore.open(folder).document(1)
    chunk.write_bytes(whole)
    assert store.verify() == 4


def test_a_damaged_index_is_found(folder):
    path = folder / "index.json"
    whole = path.read_bytes()

    def changed(before: bytes, after: bytes) -> None:
        assert whole.count(before)
        path.write_bytes(whole.replace(before, after, 1))

    for before, after in ((b'"sources"', b'"sourcez"'), (b'"lengths":[7,', b'"lengths":[7.'), (b"[", b"]")):
        changed(before, after)
        with pytest.raises(DraftsmithError, match=r"index\.json is (damaged|not valid)"):
            FeatureStore.open(folder)
    for before, after in ((b'"d1"', b'"dx"'), (b'"first_labels":[4', b'"first_labels":[5')):
        changed(before, after)
        with pytest.raises(DraftsmithError, match=r"index\.json is damaged: what it says of chunk-00000"):
            FeatureStore.open(folder).verify()
    path.write_bytes(whole)
    counts = folder / "label_counts.safetensors"
    counts.write_bytes(counts.read_bytes()[:-1] + b"\1")
    with pytest.raises(DraftsmithError, match=r"label_counts\.safetensors is missing, damaged"):
        FeatureStore.open(folder).verify()


def test_a_chunk_of_another_format_is_named(folder):
    path = folder / "chunk-00000.safetensors"
    path.write_bytes(path.read_bytes().replace(b'format_version\\":2', b'format_version\\":1'))
    with pytest.raises(DraftsmithError, match=r"chunk-00000\.safetensors: its format is 1, this version reads 2"):
        Chunk(path)
