"""Plans: known numbers by hand, counts held against autograd's and torch's own, predictions against manifests."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from planning import SMALL, TRAINED, batch, kept_bytes, meta_head, parts, real_head
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from draftsmith import cli
from draftsmith.data_recipes import estimate as data
from draftsmith.data_recipes.chunk_file import ChunkMeta
from draftsmith.data_recipes.store import Document, write_chunk
from draftsmith.errors import DraftsmithError
from draftsmith.eval import speedup
from draftsmith.eval.report.plan import plan_lines, size
from draftsmith.eval.speedup import Hardware
from draftsmith.files import sha256_file, write_json
from draftsmith.heads.costs import head_costs
from draftsmith.heads.registry import family_names
from draftsmith.heads.shapes import load_shapes
from draftsmith.plan import PlanSettings, check_against, parse_bytes, plan
from draftsmith.run_config import resolve
from draftsmith.train import estimate as training
from draftsmith.train.estimate import Rows, TrainMemory
from draftsmith.train.optimizer import orthogonalise

QWEN = load_shapes("Qwen3-8B")
ROUND = Hardware("round", bf16=1e12, fp32=1e11, bandwidth=1e10, memory=1e11)


def test_shapes_of_qwen3_8b():
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 12288
    assert QWEN.linear == 36 * layer
    assert QWEN.params == 8_190_735_360 - 36 * 2 * 128  # the hub's count, without the norms of queries and keys
    assert QWEN.kv_bytes(2) == 144 * 1024
    assert QWEN.flops(100) == 2 * (36 * layer + 151936 * 4096) + 4 * 36 * 4096 * 100


def test_a_folder_gives_what_the_short_name_gives(tmp_path):
    folder = tmp_path / "Qwen3-8B"
    config = {
        "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936, "tie_word_embeddings": False,
        "rope_theta": 1000000,
    }  # fmt: skip
    write_json(folder / "config.json", config)
    assert load_shapes(str(folder)) == QWEN
    write_json(folder / "config.json", {"text_config": {**config, "num_experts": 128}})
    with pytest.raises(DraftsmithError, match="num_experts = 128"):
        load_shapes(str(folder))
    with pytest.raises(DraftsmithError, match=r"neither one of .*Qwen3-8B"):
        load_shapes("Qwen/Qwen3-8B")


def test_costs_of_eagle3_for_qwen3_8b():
    costs = head_costs(meta_head("eagle3", QWEN, 32000))
    fusion, layer = 3 * 4096**2, 8192 * (4096 + 2048) + 4096**2 + 3 * 4096 * 12288
    assert costs.params == fusion + layer + 32000 * 4096 + 4 * 4096
    assert (costs.first, costs.step, costs.kv) == (fusion, layer + 32000 * 4096, 2 * 8 * 128)


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_activations_are_what_autograd_keeps(name, dtype):
    head = real_head(name, SMALL, 256)
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    supervised = int(head.supervised_rows(packed)[0].sum())
    width = 4 if dtype == torch.float32 else 2
    planned = training.activation_bytes(head, Rows(192, supervised), width)
    if width == 2:  # autocast's copies of the weights, which a plan counts as `weights`
        planned += 2 * sum(p.numel() for p in head.parameters())
    assert planned == pytest.approx(kept_bytes(head, packed, parts(SMALL), dtype), rel=0.2)


@pytest.mark.parametrize("name", TRAINED)
def test_training_operations_are_what_torch_counts(name):
    head = real_head(name, SMALL, 256)
    packed = batch(head, SMALL, documents=3, length=64, prompt=20)
    supervised = int(head.supervised_rows(packed)[0].sum())
    with FlopCounterMode(display=False) as counter:
        torch.stack([s.num for s in head.losses(packed, parts(SMALL))]).sum().backward()
    counted = counter.get_total_flops()
    if any(n.startswith("lm_head") for n, _ in head.named_parameters()):
        counted += head.config.steps * 2 * supervised * 256 * SMALL.hidden  # addmm_ in place isn't counted by torch
    assert head_costs(head).train_flops(supervised / 192, 32) * 192 == pytest.approx(counted, rel=0.15)


def test_operations_of_an_update_are_what_torch_counts():
    head = real_head("eagle3", SMALL, 256)
    matrices = [p.detach() for n, p in head.named_parameters() if p.ndim == 2 and "lm_head" not in n]
    with FlopCounterMode(display=False) as counter:
        orthogonalise(matrices)
    assert training.update_flops(head) == counter.get_total_flops()


def test_every_family_is_planned():
    assert sorted(training._KEPT) == family_names()


def test_memory_by_zero_stage():
    memory = TrainMemory(
        parts=1000, weights=80, masters=160, gradients=240, moments=320, teacher=5, activations=20, working=7,
        update=40, saving=0, target=2000,
    )  # fmt: skip
    assert memory.total(0, 8) == 3000 + 80 + 160 + 240 + 320 + 40
    assert memory.total(1, 8) == 3000 + 80 + 20 + 240 + 40 + 40
    assert memory.total(2, 8) == 3000 + 80 + 20 + 30 + 40 + 40
    assert memory.total(3, 8) == 3000 + 10 + 20 + 30 + 40 + 40
    assert dataclasses.replace(memory, activations=100).total(3, 8) == 3000 + 100 + 5 + 100 + 7
    head = meta_head("medusa1", QWEN, 32000)
    found = training.train_memory(head, QWEN, Rows(1024, 700), 2)
    blocks, rows = 5 * 4096**2, 5 * 32000 * 4096
    biases = 5 * 4096
    assert found.moments == 4 * blocks + 8 * (rows + biases)  # Muon keeps one number, AdamW two
    assert (found.masters, found.weights, found.teacher) == (4 * (blocks + rows + biases), found.masters / 2, 0)


def test_disk_by_hand():
    corpus = data.assumed_corpus(10, 101, 0.5, 101)
    found = data.disk(corpus, QWEN, 3)
    assert {name: s["row"] for name, s in found.items()} == {
        "bf16": 32 * 1024,
        "int8": 4 * (4096 + 2),
        "bf16+topk": 24 * 1024 + 64 * 6,
        "int8+topk": 3 * (4096 + 2) + 64 * 6,
        "online": 0,
    }
    assert corpus.rows == 1000  # nothing reads the states of a document's last token
    assert found["bf16"]["all"] == pytest.approx(1000 * 32 * 1024, rel=0.001)
    assert found["online"]["all"] == 0


@pytest.mark.parametrize("dtype", ["bf16", "int8"])
@pytest.mark.parametrize("teacher", ["hidden", "topk"])
def test_disk_is_what_a_chunk_takes(tmp_path, dtype, teacher):
    width, tokens, count = SMALL.hidden, 150, 12
    topk = (torch.zeros(tokens - 1, 64, dtype=torch.int32), torch.zeros(tokens - 1, 64, dtype=torch.float16))
    documents = [
        Document(
            id=f"builtin-{i:016x}",
            split="train",
            tokens=torch.zeros(tokens, dtype=torch.int64),
            answer=torch.ones(tokens, dtype=torch.bool),
            features=torch.ones(tokens - 1, 3 * width, dtype=torch.bfloat16),
            last=torch.ones(tokens - 1, width, dtype=torch.bfloat16) if teacher == "hidden" else None,
            source="builtin",
            topk=topk if teacher == "topk" else None,
        )
        for i in range(count)
    ]
    meta = ChunkMeta("f" * 64, (2, 4, 5), width, SMALL.vocab, dtype, teacher, 64 if teacher == "topk" else 0)
    path = tmp_path / "chunk-00000.safetensors"
    write_chunk(path, documents, meta)
    corpus = data.assumed_corpus(count, tokens, 0.5, tokens)
    name = dtype + ("+topk" if teacher == "topk" else "")
    assert data.disk(corpus, SMALL, 3)[name]["all"] == pytest.approx(path.stat().st_size, rel=0.02)


def test_a_pass_is_bound_by_the_longest_of_three():
    def bound(**at: int) -> speedup.Pass:
        return speedup.roofline(5e6, 100, 2e6, ROUND, **at)

    one = bound(batch=1, context=100)
    assert (one.weights, one.keys, one.arithmetic) == (1e-3, 1e-6, 2e-6)  # 10 MB and 10 kB at 10 GB/s, 2 MFLOP at 1 T
    assert (one.bound, one.seconds) == (speedup.WEIGHTS, 1e-3 + 1e-6)
    assert one.intensity == pytest.approx(2e6 / (1e7 + 1e4))
    assert one.free_rows == 500  # 1.001 ms of reading, 2 µs a row
    assert bound(batch=1, context=100, rows=501).bound == speedup.ARITHMETIC
    long = bound(batch=100, context=2000)
    assert (long.bound, long.keys) == (speedup.KEYS, 2e-3)
    assert long.free_rows == 15  # 3 ms of reading, 0.2 ms for a row of all


def test_predicted_speedup():
    alpha, depth = 0.7, 3
    # accepted drafts a: a < K with probability alpha^a (1 - alpha), K with alpha^K; a step emits a + 1 tokens
    law = [alpha**a * (1 - alpha) for a in range(depth)] + [alpha**depth]
    expected = sum(p * (a + 1) for a, p in enumerate(law))
    assert speedup.tokens_a_step(alpha, depth) == pytest.approx(expected)
    assert speedup.predicted_speedup(alpha, depth, 10) == pytest.approx(expected / 1.3)
    assert speedup.predicted_speedup(0.8, 4, 20) == pytest.approx(3.3616 / 1.2)
    assert speedup.predicted_speedup(1.0, 4, 4) == 2.5
    assert speedup.predicted_speedup(0.0, 4, 4) == 0.5  # drafts that are never right only cost
    line = speedup.speedup_table([0.8], [1, 2, 4, 8], 5)[0]
    assert line["best_depth"] == 4
    assert line["best"] == max(line["speedups"])
    with pytest.raises(DraftsmithError, match=r"alpha = 1.2 must be between 0 and 1"):
        speedup.predicted_speedup(1.2, 3, 10)
    with pytest.raises(DraftsmithError, match="r = 0 must be above 0"):
        speedup.predicted_speedup(0.5, 3, 0)


def test_serving_by_hand():
    found = speedup.serving(QWEN, 1e9, 2048, 80e9, devices=1, batch=10, context=1000, tree_rows=5)
    kv, own = 147456, 4096
    parts_ = found["bytes"]
    assert parts_["target"] + parts_["head"] == 2 * QWEN.params + 2e9
    assert (parts_["kv_target"], parts_["kv_head"], parts_["tree"]) == (10_000 * kv, 10_000 * own, 50 * (kv + own))
    assert found["utilization"] == 0.28  # 21.94 GB of 80 GB
    room = 0.95 * 80e9 - 2e9 - 2 * QWEN.params
    assert found["sequences_without_head"] == room // (1000 * kv)
    assert found["sequences"] == (room - 2e9) // (1005 * (kv + own))
    assert speedup.serving(QWEN, 1e9, 2048, 20e9, devices=1, batch=10, context=1000, tree_rows=5)["utilization"] is None
    half = speedup.serving(QWEN, 1e9, 2048, 80e9, devices=2, batch=10, context=1000, tree_rows=5)
    assert half["bytes"]["target"] == QWEN.params


def test_hardware():
    for name in speedup._table():
        found = speedup.load_hardware(name)
        assert found.bf16 >= found.fp32 > 0
        assert found.memory > found.bandwidth / 1000 > 0
    assert not speedup.load_hardware("CPU-2").is_gpu
    assert speedup.load_hardware("H100").bf16 == 989.4e12
    names = {"NVIDIA H100 80GB HBM3": "H100", "NVIDIA H200": "H200", "NVIDIA GH200 480GB": None, "NVIDIA A10": None,
             "NVIDIA H100 PCIe": None, "NVIDIA GeForce RTX 4090": "RTX-4090"}  # fmt: skip
    assert {name: speedup.listed_as(name) for name in names} == names
    here = speedup.load_hardware("here")
    assert 1e9 < here.fp32 < 1e14
    assert 1e8 < here.bandwidth < 1e13
    with pytest.raises(DraftsmithError, match=r"no hardware 'H999'.* H100, "):
        speedup.load_hardware("H999")


def test_plan_of_qwen3_8b_on_eight_h100():
    settings = PlanSettings(
        "Qwen3-8B", conversations=1000, tokens=1001, answer_share=0.5, epochs=2, hardware="H100", gpus=8,
        disk_budget="20GB", gpu_memory="75GiB", tokens_per_s=1000, batch=1, context=1024, alpha=0.75, r=10,
    )  # fmt: skip
    found = json.loads(json.dumps(plan(settings)))
    assert found["hardware"]["memory"] == 75 * 2**30
    assert found["data"]["tokens"] == 1_001_000
    assert found["data"]["supervised"] == pytest.approx((500_500 - 1000) / 1_001_000)
    assert found["disk"]["storages"]["bf16"]["all"] == pytest.approx(32.77e9, rel=0.001)
    assert found["disk"]["choice"] == "int8"  # 16.4 GB: the most exact one within 20 GB
    assert found["hours"]["regenerate"] == pytest.approx(500.5 / 3600)
    assert found["hours"]["steps"] == 245  # ceil(2 epochs x 1,001,000 tokens / (1024 tokens x 8 ranks))
    assert found["decoding"]["bound"] == speedup.WEIGHTS
    assert found["decoding"]["free_rows"] == 286  # (15.136 + 0.151) GB at 3.35 TB/s, 989.4 TFLOP/s, 15.74 GFLOP a row
    assert found["decoding"]["expected"]["best_depth"] == 5
    assert found["decoding"]["expected"]["best"] == pytest.approx((1 - 0.75**6) / 0.25 / 1.5)
    memory = found["memory"]["regenerate"]
    assert memory["bytes"]["kv"] == 64 * 1536 * 147456
    assert memory["fits"]
    assert "choose int8" in "\n".join(plan_lines(found))


def test_heads_that_read_the_last_state_keep_it():
    found = plan(PlanSettings("Qwen3-8B", "medusa1", hardware="H100", disk_budget="15TB"))
    assert "int8+topk" not in found["disk"]["storages"]
    assert plan(PlanSettings("Qwen3-8B", "medusa1", hardware="H100", disk_budget="1MB"))["disk"]["choice"] == "online"


def test_what_a_70b_can_not_do():
    found = plan(PlanSettings("Llama-3.3-70B-Instruct", hardware="H100", gpus=2))
    assert found["model"]["devices_a_copy"] == 4
    assert not found["memory"]["collect"]["fits"]
    assert found["hours"]["regenerate"] is None
    assert found["hours"]["collect"] is None
    assert "impossible: a copy of the target needs 4 devices" in "\n".join(plan_lines(found))
    with_servers = plan(PlanSettings("Llama-3.3-70B-Instruct", hardware="H100", gpus=8, nodes=4))
    assert with_servers["hours"]["regenerate"] > 0
    assert with_servers["hours"]["through_servers"]


def test_plan_of_the_default_target_and_of_a_folder(tmp_path):
    found = plan(PlanSettings(hardware="CPU-2"))
    assert found["head"]["draft_vocab"] == 4096  # its model file says so
    assert found["serving"] is None
    assert found["data"]["documents"] == 8000
    assert found["memory"]["regenerate"]["bytes"]["kv"] == 64 * 512 * 46080
    write_json(tmp_path / "config.json", {
        "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4, "intermediate_size": 128,
        "vocab_size": 320,
    })  # fmt: skip
    assert plan(PlanSettings(str(tmp_path), hardware="CPU-2"))["head"]["draft_vocab"] == 320


def test_counts_of_a_data_folder(tmp_path):
    with pytest.raises(DraftsmithError, match="neither features nor prompts"):
        plan(PlanSettings(data=tmp_path, hardware="CPU-2"))
    prompts = {"conversations": 100, "documents": 0, "tokens": 5000, "supervised_tokens": 0}
    write_json(tmp_path / "prompts" / "manifest.json", {"record": prompts})
    found = plan(PlanSettings(data=tmp_path, hardware="CPU-2"))["data"]
    assert (found["documents"], found["tokens"], found["answer_tokens"]) == (100, 5000 + 12800, 12800)
    prompts |= {"documents": 120, "supervised_tokens": 3000}
    write_json(tmp_path / "prompts" / "manifest.json", {"record": prompts})
    found = plan(PlanSettings(data=tmp_path, hardware="CPU-2"))["data"]
    assert (found["documents"], found["tokens"], found["answer_tokens"]) == (120, 5000, 3000)
    write_json(
        tmp_path / "features" / "manifest.json", {"record": {"documents": 90, "tokens": 9000, "answer_tokens": 7000}}
    )
    assert plan(PlanSettings(data=tmp_path, hardware="CPU-2"))["data"]["answer_tokens"] == 7000


def test_bytes_as_people_write_them():
    assert parse_bytes("500GB", "x") == 5e11
    assert parse_bytes("1.5 TiB", "x") == 1.5 * 2**40
    assert parse_bytes("12", "x") == 12
    assert size(32 * 1024) == "32.8 kB"
    assert size(21.3e12) == "21.3 TB"
    with pytest.raises(DraftsmithError, match="disk_budget = 'much'"):
        parse_bytes("much", "disk_budget")


MEASURED = {
    "medusa1": {
        "documents": 128, "tokens": 20824, "answer_tokens": 13584, "bytes": 95_477_848, "longest": 285,
        "settings": {"minutes": 1.24, "token_budget": 512},
        "train": {"step": 49, "tokens": 23247, "val_documents": 6, "peak_rss_bytes": 2_166_837_248,
                  "train_seconds": 49.486},
        "answers": {"peak_rss_bytes": 3_465_981_952, "decode_seconds": 82.698},
    },
    "eagle3": {
        "documents": 2432, "tokens": 391_484, "answer_tokens": 256_050, "bytes": 1_794_908_284, "longest": 399,
        "settings": {"minutes": 26.6, "token_budget": 512},
        "train": {"step": 1694, "tokens": 808_959, "val_documents": 48, "peak_rss_bytes": 4_533_497_856,
                  "train_seconds": 1930.463},
        "answers": {"peak_rss_bytes": 3_859_976_192, "decode_seconds": 1566.762},
    },
}  # fmt: skip
"""Figures of two runs with the default target on two quiet cores: two minutes, and `make train MINUTES=60`."""


def finished_run(folder: Path, head: str = "medusa1", **changed: float) -> Path:
    """Manifests of a run that was measured; `changed` replaces some figures."""
    features, run = folder / "smollm2-135m" / "data" / "builtin" / "features", folder / "smollm2-135m" / head
    real = MEASURED[head]
    write_json(features / "index.json", {"chunks": 1})
    counts = {name: real[name] for name in ("documents", "tokens", "answer_tokens", "bytes")}
    record = counts | {name: changed[name] for name in counts if name in changed}
    identity = {"layer_ids": [2, 15, 27], "dtype": "bf16", "teacher": "hidden"}
    write_json(features / "manifest.json", {"identity": identity, "record": record})
    answers = real["answers"] | {name: changed[name] for name in real["answers"] if name in changed}
    write_json(features.parent / "answers" / "manifest.json", {"identity": {"slots": 64}, "record": answers})
    config = meta_head(head, load_shapes("smollm2-135m"), 4096).config.to_dict()
    identity = {"features": sha256_file(features / "index.json"), "train": real["settings"],
                "head": config | {"trained_length": real["longest"]}}  # fmt: skip
    record = real["train"] | ({"peak_rss_bytes": changed["train_rss"]} if "train_rss" in changed else {})
    write_json(run / "train" / "manifest.json", {"identity": identity, "record": record})
    return run


@pytest.mark.parametrize("head", list(MEASURED))
def test_predictions_hold_for_a_run_that_was_measured(tmp_path, head):
    lines = {line["what"]: line for line in check_against(finished_run(tmp_path, head), hardware="CPU-2")}
    assert set(lines) == {
        "disk: features", "memory: train", "time: train", "memory: regenerate", "time: regenerate",
    }  # fmt: skip
    assert all(line["within"] for line in lines.values()), lines
    assert lines["disk: features"]["ratio"] == pytest.approx(1, abs=0.001)


def test_predictions_that_miss_are_named(tmp_path):
    run = finished_run(tmp_path, bytes=99_000_000, train_rss=9e9, decode_seconds=20.0)
    missed = {line["what"] for line in check_against(run, hardware="CPU-2") if not line["within"]}
    assert missed == {"disk: features", "memory: train", "time: regenerate"}
    write_json(tmp_path / "smollm2-135m" / "data" / "builtin" / "features" / "index.json", {"chunks": 2})
    with pytest.raises(DraftsmithError, match="holds no features with digest"):
        check_against(run, hardware="CPU-2")
    with pytest.raises(DraftsmithError, match="is not finished"):
        check_against(tmp_path / "smollm2-135m" / "eagle3", hardware="CPU-2")


def test_of_a_gpu_only_disk_and_time_are_checked(tmp_path):
    lines = check_against(finished_run(tmp_path), hardware="H100")
    assert {line["what"] for line in lines} == {"disk: features", "time: train", "time: regenerate"}


def test_an_online_run_has_nothing_to_check(tmp_path):
    file = finished_run(tmp_path) / "train" / "manifest.json"
    found = json.loads(file.read_text())
    found["identity"]["mode"] = "online"
    write_json(file, found)
    with pytest.raises(DraftsmithError, match="was trained online"):
        check_against(file.parent.parent, hardware="CPU-2")


def test_decoded_validation_is_planned():
    settings = PlanSettings(model="Qwen3-8B", hardware="H100")
    found = plan(settings)["memory"]["train"]
    assert found["bytes"]["validation_target"] == 2 * QWEN.params
    assert found["zero0"] - found["without_decoding"] == pytest.approx(2 * QWEN.params)  # K/V stay below a step's needs
    none = resolve("train", {"model": "Qwen3-8B"}, None, ["train.decode_documents=0"])
    assert plan(settings, none)["memory"]["train"]["zero0"] == pytest.approx(found["without_decoding"])


def test_the_command_checks_a_run(tmp_path, capfd):
    run = finished_run(tmp_path, bytes=99_000_000)
    options = ["plan", "--check", str(run), "--hardware", "CPU-2"]
    assert CliRunner().invoke(cli.app, options).exit_code == 0
    (disk,) = [line for line in capfd.readouterr().out.splitlines() if line.startswith("disk: features")]
    assert "99.0 MB" in disk
    assert disk.endswith("OUTSIDE 2%")
    assert CliRunner().invoke(cli.app, [*options, "--json"]).exit_code == 0
    assert json.loads(capfd.readouterr().out) == check_against(run, hardware="CPU-2")
    for more in (["--batch", "2"], ["train.steps=3"], ["--recipe", "builtin"]):
        refused = CliRunner().invoke(cli.app, [*options, *more])
        assert refused.exit_code != 0
        assert "takes all it needs" in str(refused.exception or refused.output)
