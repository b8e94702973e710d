"""Where the frozen target of online training lies: on the device, or on the host, a layer at a time on the device.

A layer's weights then cross the bus once for all rows of a pass, while its arithmetic grows with the rows: the more
tokens a packed batch has, the less that costs. Every process holds its own copy; no target is divided over devices.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..errors import DraftsmithError
from ..heads.architecture import layers_and_norm, text_decoder
from ..heads.base import DraftHead
from ..heads.linear import can_pack
from ..heads.loading import quantisation
from ..heads.target import Target, load_model, load_tokenizer, resolve_folder
from ..progress import say
from .estimate import Rows, activation_bytes, loss_bytes

Place = Literal["device", "host"]
_PARAMETER_BYTES = 24
"""Of a head's parameter: fp32 weight, gradient and two moments, and what a checkpoint's writing holds."""
_USABLE = 0.95
"""Of free memory: the rest is lost between blocks."""


def load_online_target(
    location: str,
    revision: str | None,
    dtype: torch.dtype,
    device: torch.device,
    training: float,
) -> Target:
    """Load the frozen target where it fits and say where that is.

    Args:
        location, revision: folder or hub id.
        dtype: the run's.
        device: that the head is trained on.
        training: bytes that training takes there, see `training_bytes`.

    Raises:
        DraftsmithError: it fits nowhere, can't be loaded, or can't be trained for.
    """
    quantised, folder = quantisation(location, revision), resolve_folder(location, revision)
    packed = 2 if can_pack(device, dtype) and not quantised else 1  # packed layers' plain form stays with the process
    needed = float(packed * (stored_bytes(folder) if quantised else weight_count(folder) * dtype.itemsize))
    host = host_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    free = host if device.type == "cpu" else float(torch.cuda.mem_get_info(device)[0])
    place = choose_place(needed, training, free, host, device, location)
    if place == "device":
        target = Target.load(location, revision=revision, dtype=dtype, device=str(device))
    else:
        if quantised:
            raise DraftsmithError(
                f"the target {location} ({quantised}) doesn't fit on {device} beside training, and quantised layers "
                "can't be copied there one after the other: use train.mode=offline, a smaller train.token_budget, or "
                "the model as it was before"
            )
        model = load_model(location, revision, dtype)
        layers, _ = layers_and_norm(text_decoder(model), model.config.get_text_config().num_hidden_layers)
        stream_layers(model.requires_grad_(False), layers, device)
        target = Target(model, load_tokenizer(location, revision), location, revision)
    target.check_trainable()
    where = f"on {device}" if place == "device" else f"in the host's memory, its layers one after the other on {device}"
    say(f"online: the target runs in every step, {needed / 1e9:,.1f} GB {where}")
    return target


def choose_place(
    needed: float, training: float, free: float, host: float, device: torch.device, location: str
) -> Place:
    """Decide by bytes.

    Args:
        needed: of the target. training: of all else on the device.
        free: of the device; host: of the host, this process's share.
        device: what computes; location: of the target.

    Raises:
        DraftsmithError: neither holds it.
    """
    if needed + training <= _USABLE * free and needed <= host:
        return "device"
    if training <= _USABLE * free and needed <= _USABLE * host and device.type != "cpu":
        return "host"
    raise DraftsmithError(
        f"the target {location} needs {needed / 1e9:,.1f} GB and training {training / 1e9:,.1f} GB; {device} has "
        f"{free / 1e9:,.1f} GB free, the host {host / 1e9:,.1f} GB a process, and no target is divided over devices: "
        "use train.mode=offline, a smaller train.token_budget, fewer processes on a machine, or one with more memory"
    )


def training_bytes(head: DraftHead, token_budget: int, dtype: torch.dtype) -> float:
    """Most bytes that training takes beside target and libraries, were all rows of a batch supervised.

    A document that is longer than the budget is a batch of its own.
    """
    c = head.config
    total = max(token_budget, c.trained_length)
    rows = Rows(total, total)
    states = (len(c.layer_ids) + 1) * c.hidden_size * dtype.itemsize
    parameters = sum(p.numel() for p in head.parameters())
    kept = activation_bytes(head, rows, dtype.itemsize) + sum(loss_bytes(head, rows, dtype.itemsize))
    return kept + total * states + _PARAMETER_BYTES * parameters


def stream_layers(model: nn.Module, layers: nn.ModuleList | Sequence[nn.Module], device: torch.device) -> None:
    """Keep decoder layers where they are and compute them on `device`: each is copied there for as long as it runs.

    Everything else of the model moves to `device`. The model must be frozen: what is written to a copy is lost.

    Args:
        model: on the host; changed in place.
        layers: of it, those that run one after the other.
    """
    inside = {id(x) for layer in layers for x in _tensors(layer)}
    for x in _tensors(model):
        if id(x) not in inside:
            x.data = x.data.to(device)
    for layer in layers:
        _stream(layer, device)


def _stream(layer: nn.Module, device: torch.device) -> None:
    tensors = _tensors(layer)
    kept = [x.data.pin_memory() if device.type == "cuda" else x.data for x in tensors]

    def fetch(*_: Any) -> None:
        with torch.inference_mode(False):  # a normal tensor can't take an inference tensor's data
            for x, there in zip(tensors, kept, strict=True):
                x.data = there.to(device, non_blocking=True, copy=True)

    def drop(*_: Any) -> None:
        for x, there in zip(tensors, kept, strict=True):
            x.data = there

    drop()
    layer.register_forward_pre_hook(fetch)
    layer.register_forward_hook(drop, always_call=True)  # a failed pass frees the layer, too


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def weight_count(folder: Path) -> int:
    """Numbers in a checkpoint's safetensors files, from their headers."""
    return sum(math.prod(x["shape"]) for x in _stored(folder))


def stored_bytes(folder: Path) -> int:
    """Bytes of the tensors in a checkpoint's safetensors files, from their headers."""
    return sum(x["data_offsets"][1] - x["data_offsets"][0] for x in _stored(folder))


def _stored(folder: Path) -> Iterator[dict[str, Any]]:
    """What the headers say of each tensor."""
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        yield from (x for name, x in header.items() if name != "__metadata__")


def host_bytes() -> int:
    """Bytes of the host's memory that programs can still take; all of it where the system doesn't say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
