"""`make setup`: what it refuses in one line, and that it does nothing the second time."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """The files that setup reads, in an empty folder."""
    for name in ("pyproject.toml", "constraints.txt", "scripts/setup.py", "train/build_lock.py", "Makefile"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


@pytest.fixture
def setup(checkout: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location("draftsmith_setup", checkout / "scripts" / "setup.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run_setup(checkout: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "scripts" / "setup.py")]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables})


def test_missing_compiler_is_one_line(checkout, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "CXX"}
    empty = tmp_path / "empty"
    empty.mkdir()
    done = subprocess.run(
        [sys.executable, str(checkout / "scripts" / "setup.py")],
        capture_output=True,
        text=True,
        env={**environment, "PATH": str(empty)},
    )
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "there is no C++ compiler 'g++'" in done.stderr
    assert "apt install g++" in done.stderr
    assert not (checkout / ".venv").exists()


def test_old_python_is_refused(setup, monkeypatch):
    monkeypatch.setattr(sys, "version_info", (3, 10, 4, "final", 0))
    with pytest.raises(setup.SetupError, match=r"this is Python 3\.10\.4 .*3\.11 or newer"):
        setup.check_python()


def test_second_setup_does_nothing(checkout, setup):
    setup.PYTHON.parent.mkdir(parents=True)
    setup.PYTHON.symlink_to(sys.executable)
    setup.STAMP.write_text(json.dumps(setup.wanted()))
    before = time.monotonic()
    done = run_setup(checkout, PATH="")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - before < 2
    (checkout / "constraints.txt").write_text("torch==0.0\n")
    assert not setup.is_ready()


def test_failing_step_is_one_line_with_a_log(setup):
    setup.VENV.mkdir()
    with pytest.raises(setup.SetupError, match=r"installing failed: ERROR: no such package \(all it said: .*log\)"):
        setup.run(
            [sys.executable, "-c", "print('x'); print('ERROR: no such package'); raise SystemExit(1)"], "installing"
        )
    assert (setup.VENV / "setup-error.log").read_text() == "x\nERROR: no such package\n"


def test_without_device_the_cpu_build_is_taken_where_offered(setup, monkeypatch, capsys):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(setup, "pip", lambda *arguments, what: asked.append(arguments))
    monkeypatch.setattr(setup, "describe_torch", lambda cpu_only: "described")
    monkeypatch.setattr(sys, "platform", "linux")
    version = setup.pinned("torch")
    for nvidia, index in [(False, True), (False, False), (True, True)]:
        asked.clear()
        monkeypatch.setattr(setup, "has_nvidia", lambda nvidia=nvidia: nvidia)
        monkeypatch.setattr(setup, "answers", lambda url, index=index: index)
        setup.install()
        cpu = [a for a in asked if a[0] == f"torch=={version}+cpu"]
        assert bool(cpu) == (index and not nvidia)
        assert asked[-2:] == [(f"torch=={version}",), ("--editable", ".[dev]")]
    assert "CPU build: there is no NVIDIA device" in capsys.readouterr().out


def test_constraints_name_every_direct_dependency_once():
    lines = [x for x in (ROOT / "constraints.txt").read_text().splitlines() if x and not x.startswith("#")]
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in lines), "exact versions, no local builds"
    names = [re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower() for line in lines]
    assert len(names) == len(set(names))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for requirement in project["dependencies"] + project["optional-dependencies"]["dev"]:
        found = re.match(r"[\w.-]+", requirement)
        assert found is not None
        assert re.sub(r"[-_.]+", "-", found[0]).lower() in names, requirement


# make


def make(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    ours = ["MODEL", "HEAD", "RUN", "RECIPE", "DATA", "MINUTES", "GPUS", "NNODES", "NODE_RANK", "MASTER", "PUSH"]
    ours += ["MAKEFLAGS", "MAKELEVEL"]
    clean = {k: v for k, v in os.environ.items() if k not in ours}
    return subprocess.run(["make", *arguments], cwd=cwd, capture_output=True, text=True, env=clean)


def test_plain_make_is_help():
    done = make()
    assert done.returncode == 0
    for word in ("train", "test", "MODEL", "MINUTES", "smollm2-135m"):
        assert word in done.stdout


def test_train_passes_only_what_is_set():
    done = make("-n", "train", "MODEL=Qwen3-8B", "NODE_RANK=0", "DATA=a b.jsonl")
    command = done.stdout.splitlines()[-1].split("/bin/")[-1]
    assert " ".join(command.split()) == 'draftsmith run --model "Qwen3-8B" --data "a b.jsonl" --node-rank "0"'
    assert make("-n", "train").stdout.splitlines()[-1].rstrip().endswith("draftsmith run")


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        (["train", "PUSH=me/x"], 'draftsmith run --push "me/x"'),
        (["tour", "PUSH=me/x"], 'draftsmith tour --push "me/x"'),
        (["push", "DIR=a b", "PUSH=me/x"], 'draftsmith push "a b" "me/x"'),
        (["push", "DIR=d", "PUSH=me/x", "PUBLIC=1", "DRY_RUN=1", "LICENSE=mit"],
         'draftsmith push "d" "me/x" --public --dry-run --license "mit"'),
    ],
)  # fmt: skip
def test_what_is_pushed_is_passed_on(arguments, command):
    done = make("-n", *arguments)
    line = done.stdout.replace("\\\n", " ").splitlines()[-1].split("/bin/")[-1]
    assert " ".join(line.split()) == command
