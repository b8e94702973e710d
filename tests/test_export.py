"""Exports hold what their engine loads, and read back to the very head that they were made of."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from exported_heads import accepted, drafts, make_run, make_tuned_run, random_head
from native_checkpoints import make_checkpoint
from safetensors.torch import load_file
from test_native_mtp import build_head
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.errors import DraftsmithError
from draftsmith.heads.checkpoint import MeasuredTree, load_tree, save_tree
from draftsmith.heads.formats.about import read_about
from draftsmith.heads.formats.contracts import contract, engines
from draftsmith.heads.formats.export import export_head
from draftsmith.heads.formats.export_layouts import facts_of
from draftsmith.heads.formats.export_run import export_run
from draftsmith.heads.formats.load import load_any
from draftsmith.heads.formats.run_source import public_start
from draftsmith.heads.named import head_names
from draftsmith.heads.target import Target


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTSMITH_QUIET", "1")


# --- round trips ------------------------------------------------------------------------------------------------------

PLAIN: dict[str, Any] = {"fc_bias": False}
TRIPS: list[tuple[str, str, str, dict[str, Any]]] = [
    ("vllm", "eagle1", "eagle1", PLAIN),
    ("vllm", "eagle2", "eagle1", PLAIN),
    ("vllm", "hass", "eagle1", PLAIN),
    ("sglang", "eagle1", "eagle1", PLAIN),
    ("sglang", "eagle2", "eagle1", {"fc_bias": True}),
    ("sglang", "hass", "eagle1", {"fc_bias": True}),
    ("vllm", "eagle3", "eagle3", {"norm_before_residual": True}),
    ("sglang", "eagle3", "eagle3", {}),
    ("tensorrt-llm", "eagle3", "eagle3", {"layer_ids": [1, 3, 6]}),
    ("speculators", "eagle3", "eagle3", {"norm_before_residual": True}),
    ("vllm", "eagle3.1", "eagle31", {}),
    ("sglang", "eagle3.1", "eagle31", {}),
    ("tensorrt-llm", "eagle3.1", "eagle31", {}),
    ("speculators", "eagle3.1", "eagle31", {}),
    ("vllm", "medusa1", "medusa", {}),
    ("tgi", "medusa1", "medusa", {}),
    ("tensorrt-llm", "medusa1", "medusa", {}),
]
APART = {(engine, head) for engine in engines() for head in ("medusa2", "mtp") if contract(engine, head).supported}
"""Pairs that need more than a head: an adapter, a target with modules of its own. They have tests of their own."""
DECODED = {
    ("vllm", "eagle1"), ("sglang", "eagle1"), ("tensorrt-llm", "eagle3"), ("speculators", "eagle3"),
    ("sglang", "eagle3.1"), ("vllm", "medusa1"), ("tgi", "medusa1"),
}  # fmt: skip
"""A pair for each layout; the others write the same files."""


def test_every_supported_pair_makes_the_trip() -> None:
    pairs = {(engine, head) for engine in engines() for head in head_names() if contract(engine, head).supported}
    assert {trip[:2] for trip in TRIPS} | APART == pairs
    layouts = {contract(*pair).layout.name for pair in pairs - APART}
    assert {contract(*pair).layout.name for pair in DECODED} == layouts


@pytest.mark.parametrize(("engine", "name", "family", "values"), TRIPS)
def test_an_export_reads_back_to_the_very_head(
    tiny_folder: Path, tiny_target: Any, tmp_path: Path, engine: str, name: str, family: str, values: dict[str, Any]
) -> None:
    head = random_head(tiny_target, family, **values)
    run = make_run(tmp_path, head, name if name != "eagle2" else "eagle1")
    for short, long, dtype in (("bf16", "bfloat16", torch.bfloat16), ("fp32", "float32", torch.float32)):
        done = export_head(run, tmp_path / short, engine, head=name, dtype=short, target=tiny_folder)
        tensors = load_file(tmp_path / short / contract(engine, name).layout.weights)
        wanted = contract(engine, name).layout.tensors(facts_of(head.config.to_dict()))
        there = {k: (tuple(x.shape), x.dtype) for k, x in tensors.items()}
        integers = {"int64": torch.int64, "bool": torch.bool}
        assert there == {k: (x.shape, integers.get(x.dtype, dtype)) for k, x in wanted.items() if x.written}
        back = load_any(tmp_path / short, tiny_target)
        assert back.config == head.config
        assert torch.equal(back.vocab.target_ids, head.vocab.target_ids)
        for (ours, p), (theirs, q) in zip(back.named_parameters(), head.named_parameters(), strict=True):
            assert ours == theirs
            assert torch.equal(p, q.to(dtype)), ours
        parts = tiny_target.parts().to("cpu", dtype)
        for after, before in zip(drafts(back, parts), drafts(head, parts), strict=True):
            assert torch.equal(after, before)
        assert (done.about.dtype, done.about.engine, done.about.head) == (long, engine, name)
    if (engine, name) in DECODED:
        before, after = accepted(tiny_target, head), accepted(tiny_target, load_any(tmp_path / "fp32", tiny_target))
        assert before == after
        assert sum(step.accepted for _, steps in before for step in steps) > 3, "some drafts are right"


@pytest.mark.parametrize("kind", ["deepseek_v3", "qwen3_next", "mimo"])
def test_mtp_modules_go_into_a_copy_of_their_target(tmp_path: Path, kind: str) -> None:
    target = make_checkpoint(tmp_path / "target", kind)
    head = build_head(target)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.add_(0.125)
    run = make_run(tmp_path, head, "mtp")
    done = export_head(run, tmp_path / "out", "vllm", target=target)
    back = load_any(tmp_path / "out", None)
    assert back.config == head.config
    for (name, p), q in zip(back.named_parameters(), head.parameters(), strict=True):
        assert torch.allclose(p, q, rtol=0, atol=1e-6), name  # norms that are stored less 1 round once more
    assert (done.about.layout, done.about.dtype) == ("native-mtp", "float32")
    engines_of = ["sglang", "tensorrt-llm", "vllm"] if kind == "deepseek_v3" else ["sglang", "vllm"]
    assert done.about.serves == engines_of
    assert (tmp_path / "out" / "notes.txt").read_text() == "kept"
    depth = 1 if kind == "mimo" else 3
    assert done.serve().commands == [
        f"vllm serve {tmp_path / 'out'} --speculative-config "
        f"""'{{"method": "mtp", "num_speculative_tokens": {depth}}}'"""
    ]
    if kind == "mimo":  # whatever was best in the decoder here
        assert export_head(run, tmp_path / "out", "vllm", target=target, depth=4).depth == 1
    if kind != "deepseek_v3":
        with pytest.raises(DraftsmithError, match=f"native_layout = '{kind}' instead of 'deepseek_v3'"):
            export_head(run, tmp_path / "trt", "tensorrt-llm", target=target)
    with pytest.raises(DraftsmithError, match="reads MTP modules inside their target"):
        export_head(run, tmp_path / "none", "sglang")
    with pytest.raises(DraftsmithError, match="in their target's dtype: leave --dtype out"):
        export_head(run, tmp_path / "none", "sglang", dtype="bf16", target=target)
    assert not (tmp_path / "none").exists()


def test_medusa_2_brings_its_adapter(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run, head = make_tuned_run(tmp_path, tiny_folder, tiny_target)
    for engine in ("vllm", "tgi", "tensorrt-llm"):
        done = export_head(run, tmp_path / engine, engine, dtype="fp32", target=tiny_folder)
        assert {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"} <= done.about.files.keys()
        assert any("merge_and_unload" in note for note in done.serve().notes)
        tuned = Target.load(str(tiny_folder), dtype=torch.float32, device="cpu", adapter=tmp_path / engine / "adapter")
        back = load_any(tmp_path / engine, tuned)
        assert back.config == head.config
        for p, q in zip(back.parameters(), head.parameters(), strict=True):
            assert torch.equal(p, q)
        with pytest.raises(DraftsmithError, match="with an adapter"):
            load_any(tmp_path / engine, tiny_target)


# --- what is written --------------------------------------------------------------------------------------------------


def test_one_eagle3_folder_serves_three_engines(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    made = {}
    for engine in ("vllm", "sglang", "tensorrt-llm"):
        done = export_head(run, tmp_path / engine, engine, target=tiny_folder)
        assert done.about.serves == ["sglang", "tensorrt-llm", "vllm"]
        made[engine] = {name: (done.folder / name).read_bytes() for name in done.about.files}
    assert made["vllm"] == made["sglang"] == made["tensorrt-llm"]
    assert sorted(made["vllm"]) == ["config.json", "model.safetensors"]
    config = json.loads(made["vllm"]["config.json"])
    own = json.loads((tiny_folder / "config.json").read_text())
    assert [config[f"{x}_token_id"] for x in ("bos", "eos", "pad")] == [
        own[f"{x}_token_id"] for x in ("bos", "eos", "pad")
    ]
    assert config["torch_dtype"] == "bfloat16"


def test_draft_ids_become_target_ids_by_offsets(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    """The vocabulary is 2, 4, 6, …: draft id i is target id 2 + 2i. Offsets stay whole numbers in a bf16 export."""
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    export_head(run, tmp_path / "out", "vllm", dtype="bf16")
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["d2t"].tolist() == [2 + i for i in range(159)]
    assert tensors["t2d"].tolist() == [k >= 2 and k % 2 == 0 for k in range(320)]


def test_a_head_with_all_tokens_has_no_map(tiny_target: Any, tmp_path: Path) -> None:
    head = random_head(tiny_target, "eagle3", full=True)
    export_head(make_run(tmp_path, head, "eagle3"), tmp_path / "out", "vllm")
    assert not {"d2t", "t2d"} & load_file(tmp_path / "out" / "model.safetensors").keys()
    assert load_any(tmp_path / "out", tiny_target).config == head.config


def test_medusa_rows_outside_the_draft_vocabulary_are_never_the_likeliest(tiny_target: Any, tmp_path: Path) -> None:
    head = random_head(tiny_target, "medusa")
    with torch.no_grad():
        head.lm_heads[1].weight.add_(3.0)
    export_head(make_run(tmp_path, head, "medusa1"), tmp_path / "out", "vllm", dtype="fp32")
    rows = load_file(tmp_path / "out" / "model.safetensors")["lm_heads.1.weight"]
    own = head.lm_heads[1].weight.detach()
    assert torch.equal(rows[2::2], own)
    others = torch.cat((rows[:2], rows[3::2]))
    assert torch.allclose(others, own.double().mean(0).float().expand_as(others))
    noise = torch.randn(200, 64, generator=torch.Generator().manual_seed(2))
    for x in (noise, 0.1 * noise - 1.0):
        assert torch.equal((x @ rows.t()).argmax(1), head.vocab.target_ids[(x @ own.t()).argmax(1)])
    assert bool((x @ own.t() < 0).all()), "rows of zeros would win there"


def test_what_engines_propose_from_is_what_is_loaded_as_served(tiny_target: Any, tmp_path: Path) -> None:
    """EAGLE-1 is read out with all of the target's rows there, Medusa has them, EAGLE-3 has its map."""
    for name, family, size in (("eagle1", "eagle1", 320), ("medusa1", "medusa", 320), ("eagle3", "eagle3", 159)):
        head = random_head(tiny_target, family, **(PLAIN if family == "eagle1" else {}))
        export_head(make_run(tmp_path, head, name), tmp_path / name, "vllm", dtype="fp32")
        served = load_any(tmp_path / name, tiny_target, as_served=True)
        assert (len(served.vocab), served.config.draft_vocab_size) == (size, size)
        plain, parts = load_any(tmp_path / name, tiny_target), tiny_target.parts()
        assert len(plain.vocab) == 159
        for all_tokens, some in zip(drafts(served, parts), drafts(plain, parts), strict=True):
            among = all_tokens if size == 159 else all_tokens[..., plain.vocab.target_ids]
            assert torch.allclose(among, some, rtol=1e-5, atol=1e-5)


def test_the_record_says_where_a_head_comes_from(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    head = random_head(tiny_target, "eagle3")
    run = make_run(tmp_path, head, "eagle3@long")
    began = {"source": str(tmp_path), "layout": "EAGLE", "sha256": "ab"}
    record = {"step": 7, "tokens": 99, "checkpoint": str(run), "head_init": began}
    (run / "train" / "manifest.json").write_text(json.dumps({"identity": {}, "record": record}))
    first = export_head(run, tmp_path / "a", "vllm", target=tiny_folder).about
    assert first.provenance["run"] == "tiny/eagle3@long"
    known = {"step": 7, "tokens": 99, "head_init": {"layout": "EAGLE", "sha256": "ab"}}
    assert first.provenance["training"] == known, "no paths of this machine"
    assert first.provenance["report"] is None
    summary = {"tau": 2.0, "setting": {"tree": "chain:4"}}
    report = {"head_sha256": first.provenance["weights_sha256"], "summary": summary}
    (run / "report.json").write_text(json.dumps(report))
    assert export_head(run, tmp_path / "a", "vllm", target=tiny_folder).about.provenance["report"] == summary
    (run / "report.json").write_text(json.dumps({**report, "head_sha256": "0"}))
    last = export_head(run, tmp_path / "a", "vllm", target=tiny_folder)
    assert last.about.provenance["report"] is None, "of other weights"
    assert read_about(tmp_path / "a") == last.about
    assert str(tmp_path) not in (tmp_path / "a" / "draftsmith.json").read_text(), "no paths of this machine"


COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("source", "stays"),
    [
        ("native", True), (f"org/name@{COMMIT}", True), ("org/name@v1.0", True), ("/home/a/runs/m/eagle3@gone", False),
        ("../runs/m/eagle3@gone", False), ("~/heads@old", False), (f"/mnt/org/name@{COMMIT}", False),
        ("org/name", False),
    ],
)  # fmt: skip
def test_only_what_names_no_place_is_told_of_a_heads_start(source: str, stays: bool) -> None:
    start = {"source": source, "layout": "EAGLE"}
    assert public_start(start) == (start if stays else {"layout": "EAGLE"})


def test_a_folder_that_looks_like_a_hub_id_is_a_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tiny" / "eagle3@long").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert public_start({"source": "tiny/eagle3@long"}) == {}


def test_a_target_without_a_hub_id_is_served_from_its_folder(
    tiny_folder: Path, tiny_target: Any, tmp_path: Path
) -> None:
    """What is printed names the folder, what is written only its name; the user is told where a hub id belongs."""
    medusa, eagle3 = random_head(tiny_target, "medusa"), random_head(tiny_target, "eagle3")
    for engine, name, head, place in (
        ("tgi", "medusa1", medusa, "base_model_name_or_path"),
        ("speculators", "eagle3", eagle3, "speculators_config.verifier.name_or_path"),
        ("vllm", "eagle3@b", eagle3, None),
    ):
        done = export_head(make_run(tmp_path, head, name), tmp_path / engine, engine, target=tiny_folder)
        written = b"".join(path.read_bytes() for path in done.folder.rglob("*") if path.is_file())
        assert str(tiny_folder).encode() not in written
        told = [note for note in done.serve().notes if "hub id into config.json" in note]
        if place is not None:
            assert told == [f"write your target's hub id into config.json ({place}): tiny is only its folder's name"]
            assert "".join(told) in " ".join(done.lines())
        else:
            assert told == []
        if engine != "tgi":
            assert str(tiny_folder) in " ".join(done.serve().commands)
            assert "org/other" in " ".join(done.serve("org/other").commands)
    on_hub = random_head(tiny_target, "medusa")
    on_hub.config = dataclasses.replace(on_hub.config, target_id="org/tiny")
    done = export_head(make_run(tmp_path, on_hub, "medusa1@hub"), tmp_path / "hub", "tensorrt-llm", target=tiny_folder)
    assert "--model_dir org/tiny " in done.serve().commands[0]
    assert not any("hub id into" in note for note in done.serve().notes)


def test_the_measured_tree_travels_along(tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "medusa"), "medusa1")
    tree = MeasuredTree([[0], [1]], [[0.5, 0.25]], [10], 2)
    save_tree(tree, run / "train" / "checkpoints" / "best")
    done = export_head(run, tmp_path / "out", "tgi")
    assert load_tree(tmp_path / "out") == tree
    assert "tree.json" in done.about.files


# --- runs and the command line ----------------------------------------------------------------------------------------


def test_a_run_is_exported_for_its_own_target_and_depth(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle1", **PLAIN), "eagle1")
    shown = CliRunner().invoke(cli.app, ["export", str(run), "--model", str(tiny_folder), "--json"])
    assert shown.exit_code == 0, shown.output
    result = json.loads(shown.stdout)
    assert result["folder"] == str(run / "export" / "vllm")
    assert result["serves"] == ["vllm"]
    assert result["files"].keys() == {"config.json", "model.safetensors"}
    assert result["commands"] == [
        f"vllm serve {tiny_folder} --speculative-config "
        f"""'{{"method": "eagle", "model": "{run}/export/vllm", "num_speculative_tokens": 3}}'"""
    ]
    # EAGLE-2 is EAGLE-1's weights, decoded another way; its run needn't be there
    other = CliRunner().invoke(
        cli.app,
        ["export", str(run.with_name("eagle2")), "--engine", "sglang", "--dtype", "fp16", "--model", str(tiny_folder)],
    )
    assert other.exit_code == 0, other.output
    out = run.with_name("eagle2") / "export" / "sglang"
    assert f"{out}: eagle2 as EAGLE-1 for SGLang, float16, for sglang" in other.stdout
    assert "model.safetensors" in other.stdout
    assert "  python -m sglang.launch_server --model-path " in other.stdout
    assert f" {tiny_folder} --speculative-algorithm EAGLE " in other.stdout
    assert load_any(out, tiny_target).config.family == "eagle1"
    assert load_file(out / "model.safetensors")["fc.weight"].dtype == torch.float16


def test_the_depth_is_that_of_the_reports_chain(tiny_folder: Path, tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "eagle3"), "eagle3")
    first = export_run(run, "speculators", model=str(tiny_folder))
    assert first.depth == 3
    for tree, depth in (("chain:5", 5), ("dynamic:4x3x8", 3)):
        report = {"head_sha256": first.about.provenance["weights_sha256"], "summary": {"setting": {"tree": tree}}}
        (run / "report.json").write_text(json.dumps(report))
        assert export_run(run, "speculators", model=str(tiny_folder)).depth == depth
        config = json.loads((run / "export" / "speculators" / "config.json").read_text())
        assert config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == depth


def test_a_medusa_head_drafts_no_deeper_than_it_has_heads(tiny_target: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path, random_head(tiny_target, "medusa", steps=2), "medusa1")
    assert export_head(run, tmp_path / "out", "vllm").depth == 2
    with pytest.raises(DraftsmithError, match="depth 3: this head drafts 1 to 2 tokens"):
        export_head(run, tmp_path / "out", "vllm", depth=3)
