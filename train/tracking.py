"""Where figures go: metrics.jsonl always, Weights & Biases when asked for."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ..files import write_text
from ..progress import say

METRICS = "metrics.jsonl"


class Tracker:
    """Appends one JSON object a line to `folder/metrics.jsonl`.

    Args:
        folder: the run's folder.
        step: where the run goes on; lines of later steps, which will be taken again, are dropped.
        wandb: True or False; None means: when WANDB_API_KEY is set. Without a key it runs offline, and WANDB_MODE is
            respected.
        config: what is noted with the W&B run.
    """

    def __init__(
        self, folder: Path, step: int, wandb: bool | None = None, config: dict[str, Any] | None = None
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.path = folder / METRICS
        write_text(self.path, "".join(_lines_up_to(self.path, step)))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        wanted = bool(os.environ.get("WANDB_API_KEY")) if wandb is None else wandb
        self._run = _start_wandb(folder, config or {}) if wanted else None

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write figures of one kind ("train" or "validation") after `step` steps."""
        self._file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()
        if self._run is not None:
            self._run.log(_flat(kind, values), step=step)

    def close(self) -> None:
        """Close the file and the W&B run."""
        self._file.close()
        if self._run is not None:
            self._run.finish()


def _lines_up_to(path: Path, step: int) -> list[str]:
    kept = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                if json.loads(line)["step"] > step:
                    break
            except (ValueError, KeyError):
                break  # the last line of a killed run
            kept.append(line)
    return kept


def _start_wandb(folder: Path, config: dict[str, Any]) -> Any:
    if os.environ.get("WANDB_MODE") == "disabled":
        return None
    if not os.environ.get("WANDB_API_KEY"):
        os.environ.setdefault("WANDB_MODE", "offline")
    try:
        import wandb

        return wandb.init(project="draftsmith", name="/".join(folder.parts[-3:]), dir=str(folder), config=config)
    except Exception as error:  # figures on a web page are no reason to lose a training run
        say(f"Weights & Biases is left out: {error}")
        return None


def _flat(kind: str, values: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{key}_{i}": x for i, x in enumerate(value) if x is not None}
        elif isinstance(value, int | float):
            flat[f"{kind}/{key}"] = value
    return flat
