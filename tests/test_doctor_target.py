"""What doctor asks of a head beside its target: rows that travel along, a scaled embedding, an adapter."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from doctor_bases import LAYER_IDS, make_head, make_target
from doctor_changes import put
from exported_heads import make_tuned_run
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import DraftsmithError
from draftsmith.eval import exported
from draftsmith.eval.exported import examine
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.doctor import diagnose
from draftsmith.heads.formats.doctor_case import OWN, TargetFacts
from draftsmith.heads.formats.export import export_head
from draftsmith.heads.formats.load import apart


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    """An EAGLE-3 head in the engines' layout, from elsewhere."""
    (tmp_path / "checkpoint").mkdir()
    save_head(make_head(target, "eagle3", layer_ids=LAYER_IDS), tmp_path / "checkpoint")
    folder = export_head(tmp_path / "checkpoint", tmp_path / "head", "vllm", target=target).folder
    (folder / "draftsmith.json").unlink()
    return folder


def embedding(target: Path) -> Tensor:
    return load_file(target / "model.safetensors")["model.embed_tokens.weight"]


def test_a_copy_of_the_embedding_is_a_remark(target: Path, head: Path) -> None:
    put(embed_tokens__weight=lambda _: embedding(target).bfloat16())(head)
    found = diagnose(head, TargetFacts.read(target))
    assert [(f.check, f.is_fault) for f in found.findings] == [("copies", False)]
    assert found.passed("vllm")


def test_a_multiple_of_the_embedding_matters_to_sglang_alone(target: Path, head: Path) -> None:
    """SGLang takes the target's rows; heads here do, too, with the target's own factor."""
    put(embed_tokens__weight=lambda _: (3 * embedding(target)).bfloat16())(head)
    found = diagnose(head, TargetFacts.read(target))
    assert [f.check for f in found.findings] == ["copies"]
    assert "embed_tokens.weight is 3 times the target's" in found.findings[0].cause
    assert {engine: found.states[engine] for engine in ("sglang", "vllm", OWN)} == {
        "sglang": "weak", "vllm": "loads", OWN: "loads",
    }  # fmt: skip


def test_a_negative_multiple_is_another_embedding(target: Path, head: Path) -> None:
    put(embed_tokens__weight=lambda _: -embedding(target).bfloat16())(head)
    found = diagnose(head, TargetFacts.read(target))
    assert "differs from the target's by 100.0%" in found.findings[0].cause
    assert found.states[OWN] == "refused"


def test_a_quantised_target_rounds_more(target: Path, head: Path) -> None:
    own = embedding(target)
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(5))
    put(embed_tokens__weight=lambda _: (own + 0.08 * own.std() * noise).bfloat16())(head)
    facts = TargetFacts.read(target)
    assert not facts.quantised
    assert diagnose(head, facts).findings[0].is_fault
    assert not any(f.is_fault for f in diagnose(head, dataclasses.replace(facts, quantised=True)).findings)


def test_the_distance_to_a_multiple() -> None:
    """[3, 4] and [1, 0]: the nearest multiple is [3, 0], 4 away of a norm of 5."""
    assert apart(torch.tensor([[3.0, 4.0]]), torch.tensor([[1.0, 0.0]])) == pytest.approx((0.8, 3.0))
    assert apart(torch.tensor([[-2.0]]), torch.tensor([[1.0]])) == (1.0, 0.0)
    assert apart(torch.zeros(1, 2), torch.zeros(1, 2)) == (0.0, 1.0)
    assert apart(torch.zeros(1, 2), torch.ones(1, 2))[0] == 1.0


def test_an_adapter_that_cannot_be_merged_is_a_finding(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run, _ = make_tuned_run(tmp_path, tiny_folder, tiny_target)
    folder = export_head(run, tmp_path / "out", "vllm", target=tiny_folder).folder
    path = folder / "adapter" / "adapter_model.safetensors"
    raw = bytearray(path.read_bytes())
    raw[:8] = bytes([255] * 8)  # as long as it was: no file's size tells
    path.write_bytes(raw)
    found = examine(folder, str(tiny_folder), tmp_path)
    assert [f.check for f in found.findings] == ["reader"]
    assert "its adapter isn't merged: " in found.findings[0].cause
    assert "adapter_model.safetensors is damaged" in found.findings[0].cause
    assert {engine: found.states[engine] for engine in ("vllm", OWN)} == {"vllm": "weak", OWN: "refused"}
    assert not found.ok


def test_a_target_that_cannot_be_loaded_is_the_users_mistake(
    target: Path, head: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise DraftsmithError("no memory for it")

    monkeypatch.setattr(exported.Target, "load", fail)
    with pytest.raises(DraftsmithError, match="no memory for it"):
        examine(head, str(target))


def test_a_scaled_embedding_matters_to_a_head_from_elsewhere(target: Path, tmp_path: Path) -> None:
    (tmp_path / "checkpoint").mkdir()
    save_head(make_head(target, "eagle1"), tmp_path / "checkpoint")
    folder = export_head(tmp_path / "checkpoint", tmp_path / "head", "vllm", target=target).folder
    (folder / "draftsmith.json").unlink()
    facts = TargetFacts.read(target)
    assert facts.embed_scale == 1.0
    assert diagnose(folder, facts).states["vllm"] == "loads"
    found = diagnose(folder, dataclasses.replace(facts, embed_scale=8.0))
    assert any(f.check == "limits" and "embed_scale = 8.0" in f.cause for f in found.findings)
    assert found.states["vllm"] == "weak"
