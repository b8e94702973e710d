"""Starting the processes that train: torchrun's command and environment, signals, Slurm's tasks."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from draftsmith.errors import DraftsmithError


def test_torchrun_commands() -> None:
    from draftsmith.train.launch import torchrun_command

    one = torchrun_command("draftsmith.cli", ["train", "--json"], processes=8)
    assert one[1:] == ["-m", "torch.distributed.run", "--nproc-per-node", "8", "--standalone",
                       "-m", "draftsmith.cli", "train", "--json"]  # fmt: skip
    two = torchrun_command("draftsmith.cli", [], processes=8, nnodes=2, node_rank=1, master="node0:1234")
    assert two[5:13] == ["--nnodes", "2", "--node-rank", "1", "--master-addr", "node0", "--master-port", "1234"]
    with pytest.raises(DraftsmithError, match="needs MASTER=host"):
        torchrun_command("m", [], processes=8, nnodes=2)
    with pytest.raises(DraftsmithError, match="NODE_RANK=2 must be between 0 and 1"):
        torchrun_command("m", [], processes=8, nnodes=2, node_rank=2, master="a")


def test_slurm_tasks_that_know_nothing_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train.launch import refuse_lonely_tasks

    for name in ("SLURM_NTASKS", "SLURM_PROCID", "RANK"):
        monkeypatch.delenv(name, raising=False)
    refuse_lonely_tasks(1)
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_PROCID", "3")
    with pytest.raises(DraftsmithError, match=r"SLURM_NTASKS=8: .* scripts/slurm\.sh"):
        refuse_lonely_tasks(1)
    refuse_lonely_tasks(8)  # one on each machine
    monkeypatch.setenv("RANK", "3")
    refuse_lonely_tasks(1)


def test_threads_of_processes_on_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    from draftsmith.train.launch import torchrun_environment

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert torchrun_environment(2)["OMP_NUM_THREADS"] == "4"
    assert torchrun_environment(16)["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert torchrun_environment(2)["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize(("number", "passed"), [("SIGTERM", 15), ("SIGINT", 2), ("SIGHUP", 15)])
def test_a_signal_reaches_the_processes_and_they_are_waited_for(number: str, passed: int) -> None:
    import os
    import signal
    import threading

    from draftsmith.train.interrupt import run_passing_signals

    child = (
        "import os, signal, sys, time\n"
        "def end(number, _): time.sleep(0.5); sys.exit(number)\n"
        "for n in (2, 15): signal.signal(n, end)\n"
        "os.kill(os.getppid(), int(sys.argv[1]))\n"
        "time.sleep(20)\n"
    )
    before = signal.getsignal(signal.SIGTERM)
    asked = getattr(signal, number)
    assert run_passing_signals([sys.executable, "-c", child, str(int(asked))], os.environ) == (passed, asked)
    assert signal.getsignal(signal.SIGTERM) is before
    found: list[Any] = []
    ended = [sys.executable, "-c", "raise SystemExit(3)"]
    thread = threading.Thread(target=lambda: found.append(run_passing_signals(ended, os.environ)))
    thread.start()
    thread.join()
    assert found == [(3, None)]
