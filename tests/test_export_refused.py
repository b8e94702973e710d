"""Heads, targets and folders that an export refuses, each by name, and nothing half-written left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_heads import make_run, random_head
from native_checkpoints import make_checkpoint
from safetensors.torch import load_file

from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import save_head
from draftsmith.heads.formats.export import default_folder, export_head
from draftsmith.heads.formats.export_run import export_run


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


def test_what_cannot_be_exported_says_why(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    hydra = make_run(tmp_path, random_head(tiny_target, "hydra"), "hydra")
    with pytest.raises(DraftsmithError, match=r"vLLM serves no hydra heads \(unsupported: vLLM has no class"):
        export_head(hydra, tmp_path / "out", "vllm")
    normed = make_run(tmp_path, random_head(tiny_target, "eagle3", norm_before_residual=True), "eagle3")
    with pytest.raises(DraftsmithError, match=r"SGLang can't load this eagle3 head: norm_before_residual = True"):
        export_head(normed, tmp_path / "out", "sglang")
    biased = make_run(tmp_path, random_head(tiny_target, "eagle1"), "eagle1")
    with pytest.raises(DraftsmithError, match=r"vLLM can't load this eagle1 head: fc_bias = True.*=false"):
        export_head(biased, tmp_path / "out", "vllm")
    with pytest.raises(DraftsmithError, match="holds a head of the kind eagle1 or hass, not eagle3"):
        export_head(biased, tmp_path / "out", "vllm", head="eagle3")
    with pytest.raises(DraftsmithError, match="unknown engine 'x'"):
        export_head(normed, tmp_path / "out", "x")
    with pytest.raises(DraftsmithError, match="dtype 'int4' is unknown; there are bf16, fp16, fp32"):
        export_head(normed, tmp_path / "out", "vllm", dtype="int4")
    with pytest.raises(DraftsmithError, match=r"holds the target's embedding: give the target, too \(--model\)"):
        export_head(normed, tmp_path / "out", "speculators")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*")), "nothing half-written is left"


def test_a_target_that_scales_its_embedding_has_no_eagle1_in_engines(
    tiny_folder: Path, tiny_target: Any, tmp_path: Path
) -> None:
    """Engines share the rows as they are stored; only the target tells that it scales them."""
    run = make_run(tmp_path, random_head(tiny_target, "eagle1", fc_bias=False), "eagle1")
    target = Path(shutil.copytree(tiny_folder, tmp_path / "target"))
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "embedding_multiplier": 12.0}))
    with pytest.raises(DraftsmithError, match=r"vLLM can't load this eagle1 head: embed_scale = 12.0 instead of 1.0"):
        export_head(run, tmp_path / "out", "vllm", target=target)
    export_head(run, tmp_path / "out", "vllm", target=tiny_folder)


def test_numbers_that_the_dtype_does_not_hold_are_refused(tiny_target: Any, tmp_path: Path) -> None:
    head = random_head(tiny_target, "eagle3")
    with torch.no_grad():
        head.norm[0] = 1e6
    run = make_run(tmp_path, head, "eagle3")
    with pytest.raises(DraftsmithError, match=r"aren't finite in float16; 1 tensor: norm.weight: nothing was written"):
        export_head(run, tmp_path / "out", "vllm", dtype="fp16")
    assert not (tmp_path / "out").exists()
    export_head(run, tmp_path / "out", "vllm", dtype="bf16")


def test_only_an_export_is_replaced(tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    (tmp_path / "mine").mkdir()
    export_head(run, tmp_path / "mine", "vllm", dtype="bf16")
    (tmp_path / "mine" / "left.txt").write_text("over")
    export_head(run, tmp_path / "mine", "vllm", dtype="fp32")
    assert sorted(x.name for x in (tmp_path / "mine").iterdir()) == [
        "config.json", "draftsmith.json", "model.safetensors",
    ]  # fmt: skip
    assert load_file(tmp_path / "mine" / "model.safetensors")["norm.weight"].dtype == torch.float32
    (tmp_path / "mine" / "draftsmith.json").write_text('{"schema": "draftsmith.export/0"}')
    export_head(run, tmp_path / "mine", "vllm")  # of another version, too
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "thesis.txt").write_text("x")
    best = run / "train" / "checkpoints" / "best"
    for place in (tmp_path / "theirs", tmp_path / "theirs" / "thesis.txt", best):
        with pytest.raises(DraftsmithError, match="is there already and is no export of this toolkit"):
            export_head(run, place, "vllm")
    assert (tmp_path / "theirs" / "thesis.txt").read_text() == "x"
    assert (best / "head.json").is_file()


def test_odd_places_are_no_traceback(tiny_target: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    monkeypatch.chdir(tmp_path)
    for place in (".", "..", "/"):
        with pytest.raises(DraftsmithError, match="is there already and is no export of this toolkit"):
            export_head(run, Path(place), "vllm")
    (tmp_path / "file").write_text("mine")
    for place in ("file/x", "file/x/y"):
        with pytest.raises(DraftsmithError, match=r"a part of this path is a file; choose another place .*--out"):
            export_head(run, Path(place), "vllm")
    assert (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    assert export_head(run, Path("../empty/here"), "vllm").folder == tmp_path / "empty" / "here"
    assert export_head(run, Path("here/."), "vllm").folder == tmp_path / "empty" / "here"


@pytest.mark.parametrize("text", ["{}", "[]", '{"record": 3}'])
def test_a_training_without_a_record_is_named(tiny_target: Any, tmp_path: Path, text: str) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    (run / "train" / "manifest.json").write_text(text)
    with pytest.raises(DraftsmithError, match=r"manifest.json holds no record of a training: delete it"):
        export_head(run, tmp_path / "out", "vllm")


def test_a_target_that_is_another_is_refused(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    other = make_checkpoint(tmp_path / "other", "mimo")
    with pytest.raises(DraftsmithError, match=r"was trained for tiny \(fingerprint .*give that model \(--model\)"):
        export_head(run, tmp_path / "out", "vllm", target=other)
    with pytest.raises(DraftsmithError, match=r"isn't told by the folder above it: give it with --model"):
        export_run(run, "vllm")
    with pytest.raises(DraftsmithError, match="there is no model 'nonsense'"):
        export_run(run, "vllm", model="nonsense")


def test_runs_without_a_head_are_refused(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    (tmp_path / "tiny" / "eagle3").mkdir(parents=True)
    with pytest.raises(DraftsmithError, match="eagle3 holds no trained head: give the folder of a run"):
        export_run(tmp_path / "tiny" / "eagle3", "vllm")
    with pytest.raises(DraftsmithError, match=r"medusa1 isn't there"):
        export_run(tmp_path / "tiny" / "medusa1", "vllm")
    head = random_head(tiny_target, "eagle3")
    (tmp_path / "alone").mkdir()
    save_head(head, tmp_path / "alone")
    with pytest.raises(DraftsmithError, match="alone lies in no run: say where to write with --out"):
        export_run(tmp_path / "alone", "vllm", model=str(tiny_folder))
    done = export_run(tmp_path / "alone", "vllm", out=tmp_path / "out", model=str(tiny_folder))
    assert done.about.provenance["run"] is None
    assert done.about.head == "eagle3"
    run = make_run(tmp_path, head, "eagle3@b")
    best = run / "train" / "checkpoints" / "best"
    assert default_folder(best, "vllm") == default_folder(run, "vllm") == run / "export" / "vllm"
