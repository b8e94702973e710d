"""scripts/gpu_check.py: its dry run, what it says without a GPU, and that it notices what is wrong and goes on."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
# A machine for measuring has torch, transformers, safetensors and Triton.
ABSENT = ("deepspeed", "datasets", "wandb", "pydantic", "typer", "rich", "peft", "gguf")
_BEGINNING = """
import contextlib, io, json, runpy, sys, traceback
for name in {absent!r}:
    sys.modules[name] = None
sys.path.insert(0, {scripts!r})
"""
# Programs in one process, which imports what they share once; prints exit status and output of each.
_IN_TURN = """
found = {{}}
for name, program in {programs!r}.items():
    with contextlib.redirect_stdout(io.StringIO()) as out:
        try:
            exec(program, {{}})
            status = 0
        except SystemExit as ended:
            status = ended.code
        except Exception:
            status = traceback.format_exc()
    found[name] = [status, out.getvalue()]
print(json.dumps(found))
"""
_SCRIPT = """
import runpy, sys
sys.argv = [{name!r}, *{arguments!r}]
runpy.run_path({path!r}, run_name="__main__")
"""


def script(name: str, *arguments: str) -> str:
    """A program that calls a script."""
    return _SCRIPT.format(name=name, path=str(SCRIPTS / name), arguments=arguments)


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    """Run it where only the modules of a machine for measuring are."""
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    program = _BEGINNING.format(absent=ABSENT, scripts=str(SCRIPTS)) + program
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=600)


needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What the programs of this file printed; "json": the file that the dry run wrote."""
    file = tmp_path_factory.mktemp("gpu") / "out.json"
    programs = {
        "dry run": script("gpu_check.py", "--dry-run", "--json", str(file)),
        "judge": _JUDGE, "aims": _AIMS, "training": _TRAINING, "wrong": _WRONG,
    }  # fmt: skip
    done = run_program(_IN_TURN.format(programs=programs))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    statuses = {name: status for name, (status, _) in found.items()}
    assert statuses == {**dict.fromkeys(programs, 0), "wrong": 1}, done.stderr
    return {name: out for name, (_, out) in found.items()} | {"json": file.read_text()}


@needs_triton
def test_the_dry_run_goes_through_every_section(outputs: dict[str, str]) -> None:
    found = json.loads(outputs["json"])
    assert (found["dry_run"], found["failed"], found["machine"]) == (True, False, "CPU (dry run)")
    assert set(found["versions"]) == {"torch", "transformers", "triton"}
    lines = {f"{x['section']}: {x['what']}": x for x in found["lines"]}
    assert outputs["dry run"].count("\n") == len(lines) + 2  # head and rule
    assert {x["section"] for x in found["lines"]} == {
        "machine", "attention", "verification", "compaction", "models", "speed", "step", "training",
    }  # fmt: skip
    for dtype in ("fp32", "fp16", "bf16"):
        assert lines[f"attention: {dtype}, 3 of 3 cases"]["state"] == "pass"
        for mistake in ("a lost block of keys", "a wrong ancestor bit"):
            assert lines[f"attention: {dtype} control: {mistake}"]["state"] == "pass"
        assert lines[f"compaction: {dtype}"]["state"] == "pass"
    laws = [x["what"].split(",")[0] for x in found["lines"] if x["section"] == "verification"]
    assert set(laws) == {"greedy", "match", "ratio test"}
    answers = [x for what, x in lines.items() if what.startswith("models: qwen3 ") and "Drafter" in what]
    assert len(answers) == 4
    assert all(x["state"] == "pass" for x in answers)
    (cell,) = [x for what, x in lines.items() if what.startswith("speed: prefix") and what.endswith("B 1")]
    assert cell["figures"]["flex"] == "needs CUDA"
    assert cell["figures"]["ours_us"] > 0
    aims = [x for what, x in lines.items() if what.startswith("speed: aim")]
    assert [(x["state"], x["result"]) for x in aims] == [("skipped", "needs CUDA")] * 2
    steps = [x for x in found["lines"] if x["section"] == "step"]
    assert [x["result"] for x in steps if x["what"].endswith("graph")] == ["needs CUDA"] * 2
    assert all(x["figures"]["ratio"] > 0 for x in steps if x["what"].endswith("launched"))
    training = [x for x in found["lines"] if x["section"] == "training"]
    assert [(x["what"], x["state"]) for x in training] == [
        ("gradients of 13 weights, float32", "pass"),
        ("gradients of 13 weights, bfloat16", "pass"),
        ("small eagle3, 0.1 M, T 64, 3 steps, 96 tokens", ""),
        ("time of this section", "pass"),
    ]
    figures = training[2]["figures"]
    assert (figures["mfu"], figures["peak_gib"], figures["updates"]) == (None, None, 2)
    assert figures["tokens_per_s"] > 0
    assert 0 < figures["optimizer_share"] < 1


@pytest.mark.parametrize("program", ["gpu_check", "gpu_train"])
def test_it_says_what_is_missing(
    program: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("TRITON_INTERPRET", "")  # what a dry run sets is taken back
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    given = ["--target", "nowhere", "--out", str(tmp_path / "out")] if program == "gpu_train" else []
    main = importlib.import_module(program).main
    monkeypatch.setattr("sys.argv", [program, *given])
    assert main() == 2
    assert capsys.readouterr().err.strip() == (
        f"{program}: there is no CUDA device; --dry-run walks through the script without one"
    )
    monkeypatch.setitem(sys.modules, "draftsmith", None)
    monkeypatch.setattr("sys.argv", [program, *given, "--dry-run"])
    assert main() == 2
    said = capsys.readouterr().err
    assert f"{program}: the package draftsmith can't be found: run `make setup`" in said
    assert f"ln -s {SCRIPTS.parent} L/draftsmith" in said
    assert not (tmp_path / "out").exists()


_WRONG = """
import sys
import gpu_check, gpu_numerics, gpu_speed, gpu_steps, gpu_training
from draftsmith.eval.decoder.cache import TreeCache

def scaled(*args, **kwargs):
    return 1.05 * attention(*args, **kwargs)

def shifted(tree, logits, draws):
    verdict = verify(tree, logits, draws)
    if gpu_numerics.kernels.usable(logits.device):
        verdict.bonus = verdict.bonus + 1
    return verdict

def crossed(cache, count, path, n_rows, host_rows):
    keep(cache, count, path.flip(0) if cache.kernels else path, n_rows, host_rows)

def broken(*args):
    raise RuntimeError("no such | thing\\nand more")

gpu_numerics.LIMITS[gpu_numerics.torch.float16] = 10.0
gpu_numerics.TINY_CASES = gpu_numerics.TINY_CASES[:2]
attention, verify, keep = gpu_numerics.tree_attention, gpu_numerics.verify, TreeCache.keep
gpu_numerics.tree_attention, gpu_numerics.verify, TreeCache.keep = scaled, shifted, crossed
gpu_steps.check_models = broken
for module in (gpu_speed, gpu_steps, gpu_training):
    module.measure = lambda report, *args: report.add("speed", "ran", "", "yes")
sys.exit(gpu_check.run(None, True))
"""


@needs_triton
def test_wrong_kernels_and_broken_sections_fail_the_run(outputs: dict[str, str]) -> None:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in outputs["wrong"].splitlines()]
    states: dict[str, list[str]] = {}
    for section, what, state, _result in rows[2:]:
        states.setdefault(what[:4] if section == "attention" else section, []).append(state)
    for dtype in ("fp32", "bf16"):
        assert states[dtype] == ["FAIL"] * 2 + ["pass"] * 2 + ["FAIL"]  # every case, two controls, the summary
    assert states["fp16"] == ["FAIL"] * 2 + ["pass"]  # a limit that lets everything pass is seen by the controls
    assert set(states["verification"]) == {"FAIL"}
    assert states["compaction"] == ["FAIL"] * 3
    assert ["models", "section", "FAIL", "RuntimeError: no such / thing"] in rows
    assert states["speed"] == [""] * 3  # the run went on


_TRAINING = """
import gpu_training
import torch
from gpu_report import Report

def scaled(head, parts, batch):
    found = gradients(head, parts, batch)
    if parts.embed.dtype == torch.bfloat16:
        found["fc.weight"] *= 2.0
    return found

def broken(*args):
    batch = make_batch(*args)
    batch.features[40] = float("nan")
    return batch

gradients, make_batch = gpu_training.gradients, gpu_training.make_batch
gpu_training.gradients = scaled
report, cpu = Report(), torch.device("cpu")
gpu_training.check_gradients(report, cpu)
gpu_training.make_batch = broken
gpu_training.time_steps(report, cpu, gpu_training.TINY)
gpu_training.gradients, gpu_training.make_batch = gradients, make_batch
for line in report.lines:
    print(line.state, line.what, line.result, sep="; ")
load = gpu_training.full()
costs = gpu_training.head_costs(gpu_training.planned_head(
    load.shapes, "eagle3", layer_ids=[2, 18, 33], steps=load.steps, draft_vocab_size=load.draft_vocab))
print(load.tokens, load.steps, load.draft_vocab, costs.params, costs.train_flops(1.0, 0.0))
"""


@needs_triton
def test_wrong_gradients_and_losses_that_are_not_finite_fail(outputs: dict[str, str]) -> None:
    """Last line by hand: the head of Qwen3-8B, and 6 operations a weight and pass, 2 a number of the teacher's rows."""
    lines = outputs["training"].splitlines()
    assert lines[0].startswith("pass; gradients of 13 weights, float32; error ")
    assert lines[1].startswith("FAIL; gradients of 13 weights, bfloat16; error ")
    assert lines[1].endswith(" (fc.weight)")
    assert lines[2] == "FAIL; update 1; not finite: loss nan, left out"
    h, kv, wide, rows = 4096, 1024, 12_288, 32_000
    fc, qkv, rest = 3 * h * h, 2 * h * (h + 2 * kv), h * h + 3 * h * wide + rows * h
    flops = 6.0 * (fc + qkv + 7 * (qkv + rest) - qkv) + 2.0 * rows * h
    assert lines[3] == f"4096 7 32000 {fc + qkv + rest + 4 * h} {flops}"


_JUDGE = """
from gpu_report import Report
from gpu_speed import FULL, Cell, judge

report = Report()
moved = 2 * 8 * 128 * (2 * 8 * (32768 + 16) + 2 * 32 * 16)  # bytes of K and V, queries and outputs
cells = (32768, 1.2, 1.3), (32768, 1.3, 1.4), (32768, 1.2, 1.1), (1024, 9.0, 9.1), (1024, 9.0, "no")
for prefix, ours, flex in cells:
    judge(report, Cell(prefix, 16, 8), FULL, {"ours": ours, "sdpa": 2.0, "flex": flex}, moved)
judge(report, Cell(1024, 16, 8), FULL, {"ours": "can't run", "sdpa": 2.0, "flex": 1.0}, moved)
for line in report.lines:
    print(line.state, line.result, sep="; ")
"""


@needs_triton
def test_the_aims_are_judged(outputs: dict[str, str]) -> None:
    """Bytes moved in a second at the copy's own speed: a share of 1 / seconds."""
    assert outputs["judge"].splitlines() == [
        "pass; 1200000.0 us; 83% of a copy; flex 1300000.0 us (1.08x); sdpa 2000000.0 us (1.67x)",
        "FAIL; 1300000.0 us; 77% of a copy; flex 1400000.0 us (1.08x); sdpa 2000000.0 us (1.54x); aim of 80% missed",
        "FAIL; 1200000.0 us; 83% of a copy; flex 1100000.0 us (0.92x); sdpa 2000000.0 us (1.67x); "
        "slower than FlexAttention",
        "pass; 9000000.0 us; 0% of a copy; flex 9100000.0 us (1.01x); sdpa 2000000.0 us (0.22x)",
        "unchecked; 9000000.0 us; 0% of a copy; flex no; sdpa 2000000.0 us (0.22x)",
        "FAIL; can't run",
    ]


_AIMS = """
from gpu_report import Report
from gpu_speed import FULL, Outcome, cells, judge_aims

every = cells(FULL)
met = [Outcome(cell, 0.9 if cell.prefix > 20_000 else 0.1, 1.0) for cell in every]
for outcomes in (
    met,
    [Outcome(x.cell, x.share, x.flex if i else None) for i, x in enumerate(met)],
    [x for x in met if str(x.cell) != "prefix 32768 N 64 B 32"],
    [Outcome(x.cell, x.share - 0.2 * (i == 2), 0.99 if i == 5 else None) for i, x in enumerate(met)],
):
    report = Report()
    judge_aims(report, FULL, outcomes)
    print(*(f"{x.state}: {x.result}" for x in report.lines), report.failed, sep="; ")
print(*(len({getattr(x, name) for x in every[:6]}) for name in ("prefix", "nodes", "batch")), len(set(every)))
"""


@needs_triton
def test_an_aim_holds_only_if_every_shape_was_measured(outputs: dict[str, str]) -> None:
    lines = outputs["aims"].splitlines()
    full, long = "measured in 18 of 18 shapes, missed in 0", "measured in 6 of 6 shapes, missed in 0"
    assert lines[:4] == [
        f"pass: {full}; pass: {long}; False",
        f"unchecked: measured in 17 of 18 shapes, missed in 0; pass: {long}; True",
        "unchecked: measured in 17 of 18 shapes, missed in 0; unchecked: measured in 5 of 6 shapes, missed in 0; True",
        "FAIL: measured in 1 of 18 shapes, missed in 1; FAIL: measured in 6 of 6 shapes, missed in 1; True",
    ]
    assert lines[4] == "3 2 3 18"  # of the first six shapes: all prefixes, trees and batches
