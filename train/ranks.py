"""The processes that train together: one alone without any launcher, or those that torchrun started."""

from __future__ import annotations

import contextlib
import io
import os
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .build_lock import prepare_extensions

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """This process among `world` others, and the device it computes on."""

    rank: int
    world: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process writes files and talks to the user."""
        return self.rank == 0

    def all_sum(self, x: Tensor) -> Tensor:
        """Sum a tensor over the ranks, in place; returns it."""
        if self.world > 1:
            torch.distributed.all_reduce(x)
        return x

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value on every rank."""
        box = [value]
        if self.world > 1:
            torch.distributed.broadcast_object_list(box, src=0)
        return box[0]

    def gather(self, value: list[Any]) -> list[Any]:
        """Concatenate the lists of all ranks."""
        if self.world == 1:
            return value
        found: list[Any] = [None] * self.world
        torch.distributed.all_gather_object(found, value)
        return [x for part in found for x in part]

    def barrier(self) -> None:
        """Wait for all ranks."""
        if self.world > 1:
            torch.distributed.barrier()


def under_launcher() -> bool:
    """Whether torchrun (or another launcher) started this process."""
    return all(v in os.environ for v in _VARIABLES)


@contextlib.contextmanager
def process_group() -> Iterator[Ranks]:
    """Join the process group through DeepSpeed: gloo on CPUs, nccl on CUDA. Nested uses share the outer group.

    Without a launcher a group of one is made on a free port; the environment is left as it was.
    """
    cuda = torch.cuda.is_available()
    if torch.distributed.is_initialized():
        yield _this_rank(cuda)
        return
    deepspeed = import_deepspeed()
    before = {v: os.environ.get(v) for v in _VARIABLES}
    if not under_launcher():
        alone = ("0", "1", "0", "127.0.0.1", _free_port())
        os.environ.update(zip(_VARIABLES, alone, strict=True))
    try:
        if cuda:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        with quietly():
            deepspeed.init_distributed("nccl" if cuda else "gloo", auto_mpi_discovery=False, verbose=False)
        yield _this_rank(cuda)
    finally:
        if torch.distributed.is_initialized():
            deepspeed.comm.destroy_process_group()  # torch's own would leave DeepSpeed with groups that are gone
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """Hold back what DeepSpeed prints, and show it on standard error if the body fails.

    Standard output may be a JSON result's alone.
    """
    held = io.StringIO()
    try:
        with contextlib.redirect_stdout(held):
            yield
    except BaseException:
        sys.stderr.write(held.getvalue())
        raise


def import_deepspeed() -> Any:
    """Import DeepSpeed with its extensions' folder set and its build locks looked after."""
    prepare_extensions()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    with contextlib.redirect_stdout(sys.stderr):  # its logger keeps the stream that it finds here
        import deepspeed

    return deepspeed


def _this_rank(cuda: bool) -> Ranks:
    device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
    return Ranks(torch.distributed.get_rank(), torch.distributed.get_world_size(), device)


def _free_port() -> str:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return str(s.getsockname()[1])
