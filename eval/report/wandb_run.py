"""A run of Weights & Biases: whether it is wanted, how it starts, and what is said when it ends."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from ...files import write_text
from ...progress import say

WANDB_ID, PROJECT = "wandb-id.txt", "draftsmith"
_KEY = "WANDB_API_KEY"


def is_wanted(setting: bool | None) -> bool:
    """Whether to use it: what the setting says, or, where it says nothing, whether there is a key."""
    return bool(os.environ.get(_KEY)) if setting is None else setting


def start_run(folder: Path, name: str, config: dict[str, Any], **more: Any) -> Any | None:
    """Start the run of a folder, or go on with it: its id is kept there.

    Without a key it runs offline, and WANDB_MODE is respected.

    Args:
        name: what the run is called.
        config: what is noted with it.
        more: further arguments of `wandb.init`.

    Returns:
        The run; None where it is switched off, and where it could not start: that is said, and no reason to fail.
    """
    if os.environ.get("WANDB_MODE") == "disabled":
        return None
    if not os.environ.get(_KEY):
        os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")  # it is said here what it would say
    os.environ.setdefault("WANDB_CONSOLE", "off")
    try:
        import wandb

        return wandb.init(
            project=PROJECT, id=_run_id(folder), resume="allow", name=name, dir=str(folder), config=config, **more
        )
    except Exception as error:  # figures on a web page are no reason to lose a run
        say(f"Weights & Biases is left out: {without_key(str(error))}")
        return None


def end_run(run: Any) -> None:
    """Finish a run; says how to upload one that ran offline, and what went wrong: that is no reason to fail."""
    try:
        run.finish()
    except Exception as error:
        say(f"Weights & Biases: the run is not finished there: {without_key(str(error))}")
    else:
        if run.offline:
            say(f"Weights & Biases ran offline; to upload: wandb sync {run.sync_dir}")


def without_key(text: str) -> str:
    """A message that may be shown."""
    key = os.environ.get(_KEY)
    return text.replace(key, "<key>") if key else text


def _run_id(folder: Path) -> str:
    path = folder / WANDB_ID
    if not path.exists():
        write_text(path, secrets.token_hex(4) + "\n")
    return path.read_text(encoding="utf-8").strip()
