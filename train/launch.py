"""The torchrun command that starts the same command line in several processes."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ..errors import DraftsmithError

DEFAULT_PORT = 29500


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


def visible_devices() -> int:
    """CUDA devices that this process sees; 1 on a machine without."""
    import torch

    return max(torch.cuda.device_count(), 1)
