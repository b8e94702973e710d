"""Export of a run's head: its target and the depth of its drafts are the run's own."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ...errors import DraftsmithError
from ...progress import say
from ..checkpoint import CONFIG
from ..config import HeadConfig, load_config
from ..loading import resolve_folder
from ..resolve import model_names, require_reachable, resolve_target
from .export import Exported, default_folder, export_head
from .run_source import Source, find_source


def export_run(
    place: Path, engine: str, *, out: Path | None = None, dtype: str | None = None, model: str | None = None
) -> Exported:
    """Export the best checkpoint of a run, or a checkpoint.

    Args:
        place: runs/<model>/<head>[@<run>], or a checkpoint's folder.
        engine, dtype: see `export_head`.
        out: None writes to <run>/export/<engine>.
        model: the target; None takes what the folder above the run is called.

    Raises:
        DraftsmithError: nothing trained there, an unknown target, or whatever `export_head` refuses.
    """
    source = find_source(place)
    folder = default_folder(source.checkpoint if source.run is None else source.run, engine) if out is None else out
    target = _target(source, load_config(source.checkpoint / CONFIG), model)
    if source.run is not None and source.training is None:
        say(f"{source.name} is not trained to its end: its best checkpoint so far is exported")
    return export_head(
        place, folder, engine, head=source.head, dtype=dtype, target=target, depth=_chain(source.report or {})
    )


def _target(source: Source, config: HeadConfig, model: str | None) -> Path:
    """Folder of the target; of a hub model at the revision that the head was trained for."""
    name = model
    if name is None and source.run is not None:
        above = source.run.parent.name
        name = above if above in model_names() else above.replace("--", "/")
    try:
        found = resolve_target(name or "", notify=say)
    except DraftsmithError as error:
        if model is not None:
            raise
        raise DraftsmithError(
            f"which model {source.run or source.checkpoint} drafts for isn't told by the folder above it: give it with "
            "--model, or push's --target"
        ) from error
    if not found.is_local and found.revision is None:
        found = dataclasses.replace(found, revision=config.target_revision)
    reached = require_reachable(found)
    return resolve_folder(reached.location, None if reached.is_local else reached.revision)


def _chain(report: dict[str, Any]) -> int | None:
    """K of the chain that the report's summary found best; None where that was a tree, or there is none."""
    kind, _, depth = str(report.get("setting", {}).get("tree", "")).partition(":")
    return int(depth) if kind == "chain" and depth.isdigit() else None


__all__ = ["export_run"]
