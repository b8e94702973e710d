"""Several machines: the launchers in scripts/, with stand-ins for ssh and Slurm, and two real ones on this machine."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from test_pipeline import SMALL

from draftsmith import stages
from draftsmith.run_config import resolve

SCRIPTS = Path(__file__).parent.parent / "scripts"


def program(folder: Path, name: str, text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
    (folder / name).chmod(0o755)


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **more}


@pytest.fixture
def place(tmp_path):
    """A folder whose draftsmith says what it was asked, and whose ssh runs the command here."""
    program(tmp_path / ".venv" / "bin", "draftsmith", 'echo "asked: $*"')
    program(tmp_path / "bin", "ssh", 'echo "on $3"; exec bash -c "$4"')
    return tmp_path


def hosts(place: Path, text: str, *arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    (place / "hostfile").write_text(text)
    command = [sys.executable, str(SCRIPTS / "hosts.py"), "hostfile", *arguments]
    return subprocess.run(
        command, cwd=place, env=environment(place / "bin", **more), capture_output=True, text=True, check=False
    )


def test_every_host_gets_its_number(place):
    done = hosts(place, "# ours\nnode-a slots=8\nme@node-b slots=4\n", "run", "--model", "a b")
    assert done.returncode == 0
    assert "node-a: asked: run --model a b --nnodes 2 --node-rank 0 --master node-a --gpus 8" in done.stdout
    assert "me@node-b: asked: run --model a b --nnodes 2 --node-rank 1 --master node-a --gpus 4" in done.stdout
    assert "me@node-b: on me@node-b" in done.stdout


def test_one_host_that_fails_stops_the_others(place):
    program(place / ".venv" / "bin", "draftsmith", '[[ "$*" == *"--node-rank 1"* ]] && exit 7; exec sleep 60')
    assert hosts(place, "a\nb\nc\n", "run").returncode == 7


def test_a_bad_hostfile_is_named(place):
    assert "hostfile:2: 'b c d' is no host" in hosts(place, "a\nb c d\n", "run").stderr
    assert "names no host" in hosts(place, "\n", "run").stderr


def test_slurm_gives_every_machine_its_number(place):
    program(place / "bin", "scontrol", "echo first; echo second")
    program(place / "bin", "srun", 'shift; for i in 0 1; do SLURM_NODEID=$i "$@"; done')
    given = {"SLURM_JOB_NODELIST": "x", "SLURM_NNODES": "2", "SLURM_SUBMIT_DIR": str(place)}
    done = subprocess.run(
        ["bash", str(SCRIPTS / "slurm.sh"), "run", "--model", "a b"], cwd=place, text=True, check=True,
        env=environment(place / "bin", **given), capture_output=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [
        f"asked: run --model a b --nnodes 2 --node-rank {i} --master first" for i in range(2)
    ]
    refused = subprocess.run(["bash", str(SCRIPTS / "slurm.sh")], capture_output=True, text=True, check=False)
    assert refused.returncode == 2
    assert "no Slurm job" in refused.stderr


@pytest.mark.parametrize("progress", [True, False])
def test_a_data_stage_whose_process_died_goes_on_where_it_got_to(tiny_folder, tmp_path, monkeypatch, progress):
    (tmp_path / "asks.jsonl").write_text('{"prompt": "a"}\n')
    flags = {"model": str(tiny_folder), "data": tmp_path / "asks.jsonl", "runs": tmp_path / "runs"}
    run = stages.Run(resolve("regenerate", flags, None, ["gpus=2"]))
    folder, started = run.data / "answers", []
    folder.mkdir(parents=True)

    def torchrun(line, environment):
        started.append(line)
        if len(started) == 2 and progress:
            (folder / "manifest.json").write_text('{"identity": {}}')
            return 0, None
        if progress:
            (folder / "chunk-00000.jsonl").write_text("")
        return 1, None

    monkeypatch.setattr("draftsmith.train.interrupt.run_passing_signals", torchrun)
    if progress:
        assert stages.regenerate(run, None).folder == folder
    else:
        with pytest.raises(SystemExit):
            stages.regenerate(run, None)
    assert len(started) == (2 if progress else 1), "what fails at once would fail again"


def test_two_machines_share_a_run(tiny_folder, tmp_path):
    """Both "machines" are this one: they share prompts, answers, features and training through the runs folder."""
    prompts = tmp_path / "asks.jsonl"
    prompts.write_text("".join(json.dumps(f"write about the ship and the number {i}") + "\n" for i in range(24)))
    program(tmp_path / ".venv" / "bin", "draftsmith", f'exec {sys.executable} -m draftsmith.cli "$@"')
    program(tmp_path / "bin", "ssh", 'exec bash -c "$4"')
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    options = ["--model", str(tiny_folder), "--data", str(prompts), "--minutes", "1", "train.steps=4", *SMALL[:3],
               *SMALL[6:]]  # fmt: skip
    done = hosts(
        tmp_path, "one slots=1\ntwo slots=1\n", "run", *options, MASTER=f"127.0.0.1:{port}", OMP_NUM_THREADS="1"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    data = next((tmp_path / "runs").glob("*/data/*"))
    assert {path.name for path in (data / "answers").glob("times-*.json")} == {"times-0.json", "times-1.json"}
    assert list((tmp_path / "runs").glob("*/eagle3/report.json"))
