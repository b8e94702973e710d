"""Checkpoints: tensors by parameter name and plain JSON, so that any number of ranks resumes them.

checkpoints/step-000120/   model.safetensors, head.json, vocab.safetensors, optimizer.safetensors, state.json
checkpoints/best/          the head alone, as it was at the best validation, and validation.json

Where the target is trained, too, each has the folder adapter/ in PEFT's form, and head.json names its hash.
"""

from __future__ import annotations

import dataclasses
import re
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import DraftsmithError
from ..files import atomic_path, read_json, write_json
from ..heads.adapter import FOLDER, Adapter, TunedConfig, adapter_sha256
from ..heads.base import DraftHead
from ..heads.checkpoint import CONFIG, WEIGHTS, load_weights, save_head
from .optimizer import MuonAdamW

KEEP = 2
OPTIMIZER, STATE, VALIDATION = "optimizer.safetensors", "state.json", "validation.json"
_HEADER_ROOM = 1 << 20
_STEP = re.compile(r"step-(\d+)")
_ADAPTER_KEY = "adapter_sha256"  # of a TunedConfig: known only when a checkpoint is written


@dataclass
class RunState:
    """Where a run stands; with the tensors, all that the next step depends on.

    Random numbers are drawn from (seed, epoch, index) of a batch, so no generator state is kept.

    Attributes:
        step: optimizer steps taken, left-out ones included.
        epoch, index: position of the next batch in the plan.
        total_steps: length of the run; None while the pilot of a time-limited run measures it.
        batches_per_step: ranks x accumulation, that the length was counted with; 0 before the first step.
        updates: steps that changed the weights; adapter_updates: those that changed the target's adapter, too.
        skipped: steps left out because something wasn't finite; suspects: by cause, the documents that all of its steps
            have in common.
        tokens: rows seen. seconds: spent, over all restarts.
        best_step, best_tau_walk, best_tau: of the best validation so far; best_tau is None where none is decoded.
        below_best: validations since then that could have been better.
        validation_due: the validation after this step was put off, as the run was asked to stop.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    total_steps: int | None = None
    batches_per_step: int = 0
    updates: int = 0
    adapter_updates: int = 0
    skipped: int = 0
    suspects: list[list[str]] = field(default_factory=list)
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_tau_walk: float | None = None
    best_tau: float | None = None
    below_best: int = 0
    validation_due: bool = False


def save_checkpoint(
    root: Path, head: DraftHead, optimizer: Mapping[str, Tensor], state: RunState, adapter: Adapter | None = None
) -> Path:
    """Write checkpoints/step-N whole or not at all, then drop all but the newest `KEEP`; returns its folder.

    Args:
        optimizer: its `named_state`.
    """
    from safetensors.torch import save_file

    folder = root / f"step-{state.step:06d}"
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        _save(head, adapter, temporary)
        save_file({n: t.cpu().contiguous() for n, t in optimizer.items()}, temporary / OPTIMIZER)
        write_json(temporary / STATE, asdict(state))
        _check_size(temporary, head)
    for old in step_folders(root)[:-KEEP]:
        shutil.rmtree(old)
    return folder


def save_best(root: Path, head: DraftHead, validation: dict[str, Any], adapter: Adapter | None = None) -> None:
    """Write checkpoints/best: the head alone, with the validation that chose it, and its target's adapter."""
    with atomic_path(root / "best") as temporary:
        temporary.mkdir()
        _save(head, adapter, temporary)
        write_json(temporary / VALIDATION, validation)
        _check_size(temporary, head)


def _save(head: DraftHead, adapter: Adapter | None, folder: Path) -> None:
    save_head(head, folder)
    if adapter is not None:
        assert isinstance(head.config, TunedConfig)
        dataclasses.replace(head.config, adapter_sha256=adapter.save(folder / FOLDER)).save(folder / CONFIG)


def step_folders(root: Path) -> list[Path]:
    """Complete step checkpoints, oldest first: by number, a name has seven digits from step 1,000,000 on."""
    found = {int(m[1]): p for p in root.glob("step-*") if (m := _STEP.fullmatch(p.name)) and (p / STATE).is_file()}
    return [found[step] for step in sorted(found)]


def load_checkpoint(folder: Path, head: DraftHead, optimizer: MuonAdamW, adapter: Adapter | None = None) -> RunState:
    """Set head, optimizer and the target's adapter to a checkpoint's content, strictly.

    Raises:
        DraftsmithError: another head's checkpoint or another version's, or a tensor is missing, foreign, misshapen or
            damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    found, mine = read_json(folder / CONFIG), head.config.to_dict()
    written = found.pop(_ADAPTER_KEY, None)
    mine.pop(_ADAPTER_KEY, None)
    if found != mine:
        key = next(k for k in {**found, **mine} if found.get(k) != mine.get(k))
        raise DraftsmithError(
            f"{folder / CONFIG}: {key} is {found.get(key)!r}, this run's is {mine.get(key)!r}: it is another head's "
            "checkpoint; choose another run name with RUN=NAME"
        )
    load_weights(head, folder / WEIGHTS)
    if adapter is not None:
        adapter.load(folder / FOLDER)
        if adapter_sha256(folder / FOLDER) != written:
            raise DraftsmithError(
                f"{folder / FOLDER} is not the adapter that {CONFIG} names: delete {folder} and run again"
            )
    state = _read_state(folder)
    try:
        optimizer.load_named_state(load_file(folder / OPTIMIZER), state.updates, state.adapter_updates)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DraftsmithError(f"{folder / OPTIMIZER} is damaged ({error}): delete {folder} and run again") from error
    return state


def _read_state(folder: Path) -> RunState:
    # a count that is left out would go on from 0: with moments that are there, steps many times too long
    values = read_json(folder / STATE)
    if different := sorted({f.name for f in fields(RunState)} ^ set(values)):
        state = "unknown" if different[0] in values else "missing"
        raise DraftsmithError(
            f"{folder / STATE}: {different[0]} is {state}: another version wrote this checkpoint; train with that one, "
            "or choose another run name with RUN=NAME"
        )
    return RunState(**values)


def _check_size(folder: Path, head: DraftHead) -> None:
    """A checkpoint that has grown beyond its head has swallowed something of the target's."""
    expected = sum(p.numel() * p.element_size() for p in head.parameters())
    if (found := (folder / WEIGHTS).stat().st_size) > expected + _HEADER_ROOM:
        raise AssertionError(f"{WEIGHTS} has {found} bytes for a head of {expected}: something else was saved with it")
