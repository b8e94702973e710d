"""Checkpoints: tensors by parameter name and plain JSON, so that any number of ranks resumes them.

checkpoints/step-000120/   model.safetensors, head.json, vocab.safetensors, optimizer.safetensors, state.json
checkpoints/best/          the head alone, as it was at the best validation, and validation.json
"""

from __future__ import annotations

import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import atomic_path, read_json, write_json
from ..heads.base import DraftHead
from ..heads.checkpoint import CONFIG, WEIGHTS, load_weights, save_head
from .optimizer import MuonAdamW

KEEP = 2
OPTIMIZER, STATE, VALIDATION = "optimizer.safetensors", "state.json", "validation.json"
_HEADER_ROOM = 1 << 20


@dataclass
class RunState:
    """Where a run stands; with the tensors, all that the next step depends on.

    Random numbers are drawn from (seed, step, rank), so no generator state is kept.

    Attributes:
        step: optimizer steps taken, left-out ones included.
        epoch, index: position of the next batch in the plan.
        total_steps: length of the run; None while the pilot of a time-limited run measures it.
        updates: steps that changed the weights.
        skipped: steps left out because something wasn't finite.
        tokens: rows seen. seconds: spent, over all restarts.
        best_step, best_tau_walk: of the best validation so far.
    """

    step: int = 0
    epoch: int = 0
    index: int = 0
    total_steps: int | None = None
    updates: int = 0
    skipped: int = 0
    tokens: int = 0
    seconds: float = 0.0
    best_step: int | None = None
    best_tau_walk: float | None = None


def save_checkpoint(root: Path, head: DraftHead, optimizer: MuonAdamW, state: RunState) -> Path:
    """Write checkpoints/step-N whole or not at all, then drop all but the newest `KEEP`; returns its folder."""
    from safetensors.torch import save_file

    folder = root / f"step-{state.step:06d}"
    with atomic_path(folder) as temporary:
        temporary.mkdir()
        save_head(head, temporary)
        save_file({n: t.cpu().contiguous() for n, t in optimizer.named_state().items()}, temporary / OPTIMIZER)
        write_json(temporary / STATE, asdict(state))
        _check_size(temporary, head)
    for old in step_folders(root)[:-KEEP]:
        shutil.rmtree(old)
    return folder


def save_best(root: Path, head: DraftHead, validation: dict[str, Any]) -> None:
    """Write checkpoints/best: the head alone, with the validation that chose it."""
    with atomic_path(root / "best") as temporary:
        temporary.mkdir()
        save_head(head, temporary)
        write_json(temporary / VALIDATION, validation)
        _check_size(temporary, head)


def step_folders(root: Path) -> list[Path]:
    """Complete step checkpoints, oldest first."""
    return sorted(p for p in root.glob("step-*") if (p / STATE).is_file())


def load_checkpoint(folder: Path, head: DraftHead, optimizer: MuonAdamW) -> RunState:
    """Set head and optimizer to a checkpoint's content, strictly.

    Raises:
        DraftsmithError: another head's checkpoint, or a tensor is missing, foreign, misshapen or damaged.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    if (found := read_json(folder / CONFIG)) != (mine := head.config.to_dict()):
        key = next(k for k in {**found, **mine} if found.get(k) != mine.get(k))
        raise DraftsmithError(
            f"{folder / CONFIG}: {key} is {found.get(key)!r}, this run's is {mine.get(key)!r}: it is another head's "
            "checkpoint; choose another run name with RUN=NAME"
        )
    load_weights(head, folder / WEIGHTS)
    state = RunState(**read_json(folder / STATE))
    try:
        optimizer.load_named_state(load_file(folder / OPTIMIZER), state.updates)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise DraftsmithError(f"{folder / OPTIMIZER} is damaged ({error}): delete {folder} and run again") from error
    return state


def _check_size(folder: Path, head: DraftHead) -> None:
    """A checkpoint that has grown beyond its head has swallowed something of the target's."""
    expected = sum(p.numel() * p.element_size() for p in head.parameters())
    if (found := (folder / WEIGHTS).stat().st_size) > expected + _HEADER_ROOM:
        raise AssertionError(f"{WEIGHTS} has {found} bytes for a head of {expected}: something else was saved with it")
