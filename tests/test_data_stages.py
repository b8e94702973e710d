"""Stages regenerate and collect: budgets, equality of the two ways to features, kill and resume."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from draftsmith.data_recipes import regenerate as regenerate_module
from draftsmith.data_recipes.collect import CollectSettings, collect
from draftsmith.data_recipes.layout import (
    DocumentRow,
    TargetInfo,
    answer_chunks,
    prompt_chunks,
    read_answers,
    read_prompts,
)
from draftsmith.data_recipes.prepare import PrepareSettings, prepare
from draftsmith.data_recipes.recipe import Recipe, SourceSpec
from draftsmith.data_recipes.regenerate import RegenerateSettings, regenerate
from draftsmith.data_recipes.store import FeatureStore
from draftsmith.errors import DraftsmithError
from draftsmith.heads.base import Needs

LAYERS = (2, 3, 4)
SETTINGS = RegenerateSettings(max_new_tokens=16, slots=4)
RECORD = CollectSettings(LAYERS)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    path = tmp_path_factory.mktemp("source") / "asks.jsonl"
    draw = random.Random(0)
    words = ["the", "fox", "runs", "home", "and", "asks", "what", "a", "ship", "is", "in", "winter"]
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 12))) + f" {i}" for i in range(28)]
    path.write_text("".join(json.dumps(text) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def info(tiny_folder):
    return TargetInfo.read(str(tiny_folder))


@pytest.fixture
def data(tmp_path, source, info, tiny_target):
    recipe = Recipe(name="r", sources=[SourceSpec(source=str(source))])
    prepare(PrepareSettings(max_new_tokens=16, chunk=8), recipe, tmp_path / "data", info, lambda: tiny_target.tokenizer)
    return tmp_path / "data"


def no_work():
    pytest.fail("there is nothing to do")


def answers(data: Path) -> list[DocumentRow]:
    return [row for path in answer_chunks(data) for row in read_answers(path)]


def test_answers_are_the_targets_own(data, info, tiny_target):
    stage = regenerate(SETTINGS, data, info, lambda: tiny_target)
    rows = answers(data)
    prompts = [row for path in prompt_chunks(data) for row in read_prompts(path)]
    assert [(r.id, r.split, r.source) for r in rows] == [(p.id, p.split, p.source) for p in prompts]
    assert {"eos", "length"} == {r.finish for r in rows}
    for row, asked in zip(rows, prompts, strict=True):
        start = len(asked.prompt)
        assert row.tokens[:start] == asked.prompt
        assert row.spans == [[start, len(row.tokens)]]
        assert (row.tokens[-1] in tiny_target.eos_ids) == (row.finish == "eos")
        assert row.answer_tokens == 16 or row.finish == "eos"
    for row, asked in list(zip(rows, prompts, strict=True))[::9]:
        prompt = torch.tensor([asked.prompt])
        with tiny_target.attention():
            made = tiny_target.model.generate(prompt, max_new_tokens=16, do_sample=False)[0]
        assert row.tokens == made.tolist()
    record = stage.manifest["record"]
    assert (record["chunks"], record["answers"], record["answer_tokens"]) == (4, 28, sum(r.answer_tokens for r in rows))
    assert record["minutes"] is None
    regenerate(SETTINGS, data, info, no_work)
    regenerate(SETTINGS, data, info, no_work, minutes=5)


def test_recorded_features_equal_the_forward_pass(data, info, tiny_target):
    regenerate(SETTINGS, data, info, lambda: tiny_target, record=RECORD)
    stage = collect(CollectSettings(LAYERS), data, info, no_work)
    assert stage.manifest["record"]["chunks_computed_here"] == 0
    recorded = FeatureStore.open(data / "features", info.fingerprint, LAYERS)
    kept = [recorded.document(i) for i in range(len(recorded))]
    for path in (data / "features").iterdir():
        path.unlink()
    # the stored bf16 may fall to either side of a rounding; fp32 states themselves agree to 1e-4
    collect(CollectSettings(LAYERS, token_budget=200), data, info, lambda: tiny_target)
    computed = FeatureStore.open(data / "features", info.fingerprint, LAYERS)
    assert computed.ids == recorded.ids
    for i, a in enumerate(kept):
        b = computed.document(i)
        assert torch.equal(a.tokens, b.tokens)
        assert torch.equal(a.answer, b.answer)
        for x, y in ((a.features, b.features), (a.last, b.last)):
            torch.testing.assert_close(x.float(), y.float(), rtol=2**-7, atol=1e-4)
            assert (x != y).float().mean() < 1e-2
        aux, last = tiny_target.states(a.tokens[None], Needs(LAYERS, last=True))
        torch.testing.assert_close(b.features, aux[0, :-1].bfloat16(), rtol=2**-7, atol=1e-4)
        torch.testing.assert_close(b.last, last[0, :-1].bfloat16(), rtol=2**-7, atol=1e-4)


def test_other_layers_are_collected_from_the_same_answers(data, info, tiny_target):
    regenerate(SETTINGS, data, info, lambda: tiny_target, record=RECORD)
    collect(CollectSettings(LAYERS), data, info, no_work)
    stage = collect(CollectSettings((1, 5)), data, info, lambda: tiny_target)
    assert stage.manifest["record"]["chunks_computed_here"] == 4
    store = FeatureStore.open(data / "features", layer_ids=(1, 5))
    assert store.document(3).features.shape == (store.lengths[3] - 1, 2 * 64)
    collect(CollectSettings(LAYERS), data, info, no_work)  # the first ones were set aside, not lost
    FeatureStore.open(data / "features", layer_ids=LAYERS)


class Clock:
    """Time that passes only when the decoder works: 10 seconds an answer."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        real = regenerate_module.decode

        def decode(*args, **kwargs):
            for result in real(*args, **kwargs):
                self.now += 10
                yield result

        monkeypatch.setattr(regenerate_module, "decode", decode)
        monkeypatch.setattr(regenerate_module.time, "monotonic", lambda: self.now)


def test_a_larger_budget_goes_on(data, info, tiny_target, monkeypatch):
    Clock(monkeypatch)
    stage = regenerate(SETTINGS, data, info, lambda: tiny_target, minutes=0.1, record=RECORD)
    assert stage.manifest["record"]["chunks"] == 1  # one at least
    first = answer_chunks(data)[0].read_bytes()
    regenerate(SETTINGS, data, info, no_work, minutes=0.1, record=RECORD)
    regenerate(SETTINGS, data, info, no_work, minutes=0.05, record=RECORD)
    stage = regenerate(SETTINGS, data, info, no_work, minutes=2.5, record=RECORD)  # 80 + 80 s don't fit 150
    assert stage.manifest["record"]["chunks"] == 1
    collect(CollectSettings(LAYERS), data, info, no_work)
    small = FeatureStore.open(data / "features")
    stage = regenerate(SETTINGS, data, info, lambda: tiny_target, minutes=3, record=RECORD)
    assert (stage.manifest["record"]["chunks"], stage.manifest["record"]["minutes"]) == (2, 3)
    assert stage.manifest["record"]["decode_seconds"] == 160
    assert answer_chunks(data)[0].read_bytes() == first
    collect(CollectSettings(LAYERS), data, info, no_work)
    grown = FeatureStore.open(data / "features")
    assert (len(small), len(grown)) == (8, 16)
    assert small.digest != grown.digest
    stage = regenerate(SETTINGS, data, info, lambda: tiny_target)
    assert stage.manifest["record"]["chunks"] == 4
    assert stage.manifest["record"]["minutes"] is None


def test_a_deleted_chunk_is_made_again(data, info, tiny_target):
    regenerate(SETTINGS, data, info, lambda: tiny_target, record=RECORD)
    collect(CollectSettings(LAYERS), data, info, no_work)
    answer, feature = answer_chunks(data)[1], data / "features" / "chunk-00001.safetensors"
    before = answer.read_bytes(), feature.read_bytes()
    feature.unlink()
    collect(CollectSettings(LAYERS), data, info, lambda: tiny_target)
    assert len(FeatureStore.open(data / "features")) == 28
    answer.unlink()
    regenerate(SETTINGS, data, info, lambda: tiny_target, record=RECORD)
    assert (answer.read_bytes(), feature.read_bytes()) == before


def test_another_target_is_refused(data, info, tiny_target):
    other = TargetInfo("0" * 64, info.tokenizer_sha256, info.max_positions)
    with pytest.raises(DraftsmithError, match="changed since its prompts were made"):
        regenerate(SETTINGS, data, other, lambda: tiny_target)


def test_stages_name_what_comes_first(tmp_path, info):
    with pytest.raises(DraftsmithError, match="prompts is not finished: run 'draftsmith prepare' first"):
        regenerate(SETTINGS, tmp_path, info, no_work)
    with pytest.raises(DraftsmithError, match="answers is not finished: run 'draftsmith regenerate' first"):
        collect(CollectSettings(LAYERS), tmp_path, info, no_work)
