"""The torchrun command that starts the same command line in several processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from ..errors import DraftsmithError

DEFAULT_PORT = 29500
SAVE_SECONDS = 600
"""That processes which were asked to stop may take to save; torchrun's own 30 s are short for a large head."""


def torchrun_command(
    module: str,
    arguments: Sequence[str],
    *,
    processes: int,
    nnodes: int = 1,
    node_rank: int = 0,
    master: str | None = None,
    port: int = DEFAULT_PORT,
) -> list[str]:
    """Build the command line.

    Args:
        module: what each process runs, as `python -m module arguments...`.
        arguments: of that module.
        processes: on this machine, one for each GPU.
        nnodes, node_rank: machines, and which of them this is.
        master: host (or host:port) of machine 0, reachable from all; needed with several machines.
        port: where machine 0 listens, unless `master` says.

    Raises:
        DraftsmithError: numbers that don't fit together.
    """
    if processes < 1 or nnodes < 1:
        raise DraftsmithError(f"GPUS={processes} NNODES={nnodes}: both must be at least 1")
    if not 0 <= node_rank < nnodes:
        raise DraftsmithError(f"NODE_RANK={node_rank} must be between 0 and {nnodes - 1} (NNODES={nnodes})")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    if nnodes == 1:
        command += ["--standalone"]
    else:
        if not master:
            raise DraftsmithError("NNODES > 1 needs MASTER=host, the address of the machine with NODE_RANK=0")
        host, _, given_port = master.partition(":")
        command += ["--nnodes", str(nnodes), "--node-rank", str(node_rank)]
        command += ["--master-addr", host, "--master-port", given_port or str(port)]
    return [*command, "-m", module, *arguments]


def torchrun_environment(processes: int) -> dict[str, str]:
    """This process's environment for torchrun, with what the user hasn't set."""
    import torch

    environment = {"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": str(SAVE_SECONDS), **os.environ}
    if not torch.cuda.is_available():  # torchrun would give each process one thread
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        environment.setdefault("OMP_NUM_THREADS", str(max(1, cores // processes)))
    return environment


def refuse_lonely_tasks(machines: int) -> None:
    """Refuse several Slurm tasks on a machine, none of which knows of the others: all would write the same files.

    Args:
        machines: how many the configuration says there are: so many tasks may be, one on each.

    Raises:
        DraftsmithError: that's how this process was started.
    """
    tasks = int(os.environ.get("SLURM_NTASKS") or 1)
    if "SLURM_PROCID" not in os.environ or "RANK" in os.environ or tasks <= max(1, machines):
        return
    raise DraftsmithError(
        f"SLURM_NTASKS={tasks}: each of these tasks would do the whole run in the same folder: start one task a "
        "machine, which starts a process for each of its GPUs: sbatch --nodes=N scripts/slurm.sh run ..., or "
        "srun --ntasks=1 draftsmith ..."
    )


def visible_devices() -> int:
    """CUDA devices that this process sees; 1 on a machine without."""
    import torch

    return max(torch.cuda.device_count(), 1)
