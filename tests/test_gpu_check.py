"""scripts/gpu_check.py: its dry run, what it says without a GPU, and that it notices what is wrong and goes on."""

from __future__ import annotations

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
_SCRIPT = """
import runpy, sys
for name in {absent!r}:
    sys.modules[name] = None
sys.path.insert(0, {scripts!r})
sys.argv = ["gpu_check.py", *{arguments!r}]
runpy.run_path({scripts!r} + "/gpu_check.py", run_name="__main__")
"""


def run_program(program: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=env, timeout=600)


def run_script(*arguments: str, absent: tuple[str, ...] = ABSENT) -> subprocess.CompletedProcess[str]:
    return run_program(_SCRIPT.format(absent=absent, scripts=str(SCRIPTS), arguments=arguments))


needs_triton = pytest.mark.skipif(sys.platform != "linux", reason="Triton is there for Linux only")


@needs_triton
def test_the_dry_run_goes_through_every_section(tmp_path: Path) -> None:
    done = run_script("--dry-run", "--json", str(tmp_path / "out.json"))
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "out.json").read_text())
    assert (found["dry_run"], found["failed"], found["machine"]) == (True, False, "CPU (dry run)")
    assert set(found["versions"]) == {"torch", "transformers", "triton"}
    lines = {f"{x['section']}: {x['what']}": x for x in found["lines"]}
    assert done.stdout.count("\n") == len(lines) + 2  # head and rule
    assert {x["section"] for x in found["lines"]} == {
        "machine", "attention", "verification", "compaction", "models", "speed", "step",
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so() -> None:
    done = run_script()
    assert done.returncode == 2
    assert done.stderr.strip() == (
        "gpu_check: there is no CUDA device; --dry-run walks through the script without one"
    )  # fmt: skip


def test_it_says_how_to_make_the_package_importable() -> None:
    done = run_script("--dry-run", absent=("draftsmith",))
    assert done.returncode == 2
    assert "the package draftsmith can't be found: run `make setup`" in done.stderr
    assert f"ln -s {SCRIPTS.parent} L/draftsmith" in done.stderr


_WRONG = """
import os, sys
os.environ["TRITON_INTERPRET"] = "1"
sys.path.insert(0, {scripts!r})
import gpu_check, gpu_numerics, gpu_speed, gpu_steps
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
attention, verify, keep = gpu_numerics.tree_attention, gpu_numerics.verify, TreeCache.keep
gpu_numerics.tree_attention, gpu_numerics.verify, TreeCache.keep = scaled, shifted, crossed
gpu_steps.check_models = broken
gpu_speed.measure = gpu_steps.measure = lambda report, *args: report.add("speed", "ran", "", "yes")
sys.exit(gpu_check.run(None, True))
"""


@needs_triton
def test_wrong_kernels_and_broken_sections_fail_the_run() -> None:
    done = run_program(_WRONG.format(scripts=str(SCRIPTS)))
    assert done.returncode == 1, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines()]
    states: dict[str, list[str]] = {}
    for section, what, state, _result in rows[2:]:
        states.setdefault(what[:4] if section == "attention" else section, []).append(state)
    for dtype in ("fp32", "bf16"):
        assert states[dtype] == ["FAIL"] * 3 + ["pass"] * 2 + ["FAIL"]  # every case, two controls, the summary
    assert states["fp16"] == ["FAIL"] * 2 + ["pass"]  # a limit that lets everything pass is seen by the controls
    assert set(states["verification"]) == {"FAIL"}
    assert states["compaction"] == ["FAIL"] * 3
    assert ["models", "section", "FAIL", "RuntimeError: no such / thing"] in rows
    assert states["speed"] == ["", ""]  # the run went on


_JUDGE = """
import sys
sys.path.insert(0, {scripts!r})
from gpu_report import Report
from gpu_speed import FULL, Cell, judge

report = Report()
moved = 2 * 8 * 128 * (2 * 8 * (32768 + 16) + 2 * 32 * 16)  # bytes of K and V, queries and outputs
cells = (32768, 1.2, 1.3), (32768, 1.3, 1.4), (32768, 1.2, 1.1), (1024, 9.0, 9.1), (1024, 9.0, "no")
for prefix, ours, flex in cells:
    judge(report, Cell(prefix, 16, 8), FULL, {{"ours": ours, "sdpa": 2.0, "flex": flex}}, moved)
judge(report, Cell(1024, 16, 8), FULL, {{"ours": "can't run", "sdpa": 2.0, "flex": 1.0}}, moved)
for line in report.lines:
    print(line.state, line.result, sep="; ")
"""


@needs_triton
def test_the_aims_are_judged() -> None:
    """Bytes moved in a second at the copy's own speed: a share of 1 / seconds."""
    done = run_program(_JUDGE.format(scripts=str(SCRIPTS)))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == [
        "pass; 1200000.0 us; 83% of a copy; flex 1300000.0 us (1.08x); sdpa 2000000.0 us (1.67x)",
        "FAIL; 1300000.0 us; 77% of a copy; flex 1400000.0 us (1.08x); sdpa 2000000.0 us (1.54x); aim of 80% missed",
        "FAIL; 1200000.0 us; 83% of a copy; flex 1100000.0 us (0.92x); sdpa 2000000.0 us (1.67x); "
        "slower than FlexAttention",
        "pass; 9000000.0 us; 0% of a copy; flex 9100000.0 us (1.01x); sdpa 2000000.0 us (0.22x)",
        "unchecked; 9000000.0 us; 0% of a copy; flex no; sdpa 2000000.0 us (0.22x)",
        "FAIL; can't run",
    ]


_AIMS = """
import sys
sys.path.insert(0, {scripts!r})
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
    print(*(f"{{x.state}}: {{x.result}}" for x in report.lines), report.failed, sep="; ")
print(*(len({{getattr(x, name) for x in every[:6]}}) for name in ("prefix", "nodes", "batch")), len(set(every)))
"""


@needs_triton
def test_an_aim_holds_only_if_every_shape_was_measured() -> None:
    done = run_program(_AIMS.format(scripts=str(SCRIPTS)))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    full, long = "measured in 18 of 18 shapes, missed in 0", "measured in 6 of 6 shapes, missed in 0"
    assert lines[:4] == [
        f"pass: {full}; pass: {long}; False",
        f"unchecked: measured in 17 of 18 shapes, missed in 0; pass: {long}; True",
        "unchecked: measured in 17 of 18 shapes, missed in 0; unchecked: measured in 5 of 6 shapes, missed in 0; True",
        "FAIL: measured in 1 of 18 shapes, missed in 1; FAIL: measured in 6 of 6 shapes, missed in 1; True",
    ]
    assert lines[4] == "3 2 3 18"  # of the first six shapes: all prefixes, trees and batches
