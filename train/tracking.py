"""Where figures go: metrics.jsonl always, Weights & Biases when asked for."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..data_recipes.store import FeatureStore
from ..eval.report.wandb_run import WANDB_ID, end_run, is_wanted, start_run
from ..files import read_json, write_text
from ..heads.base import DraftHead
from ..manifest import MANIFEST
from .settings import TrainSettings

METRICS = "metrics.jsonl"


class Tracker:
    """Appends one JSON object a line to `folder/metrics.jsonl`.

    A run that goes on after an interruption is the same W&B run: its id is kept in the folder. What W&B has of steps
    that are taken again stays, as they give the same figures; so its steps never go backwards.

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
        lines = _whole_lines(self.path)
        write_text(self.path, "".join(text for text, values in lines if values["step"] <= step))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed in close()
        wanted = is_wanted(wandb)
        self._sent: dict[str, int] = {}
        """The last step, by kind, that W&B has."""
        if wanted and (folder / WANDB_ID).exists():
            self._sent = {values["kind"]: values["step"] for _, values in lines}
        self._run = start_run(folder, "/".join(folder.parts[-3:]), config or {}) if wanted else None

    def log(self, kind: str, step: int, values: dict[str, Any]) -> None:
        """Write figures of one kind ("train" or "validation") after `step` steps; what isn't finite becomes null."""
        values = {key: _plain(value) for key, value in values.items()}
        self._file.write(json.dumps({"kind": kind, "step": step, **values}, allow_nan=False) + "\n")
        self._file.flush()
        if self._run is not None and step > self._sent.get(kind, -1):
            self._run.log(_flat(kind, values), step=step)

    def close(self) -> None:
        """Close the file and the W&B run; says how to upload one that ran offline."""
        self._file.close()
        if self._run is not None:
            end_run(self._run)


def describe_run(settings: TrainSettings, head: DraftHead, store: FeatureStore, world: int) -> dict[str, Any]:
    """What W&B notes of a run: settings, the head's config, and of the data totals and its manifest's identity."""
    manifest = store.folder / MANIFEST
    data = {"digest": store.digest, "teacher": store.meta.teacher, "sources": store.sources, **store.totals()}
    if manifest.exists():
        data["manifest"] = read_json(manifest)["identity"]
    return {"train": settings.model_dump(), "head": head.config.to_dict(), "data": data, "world": world}


def _whole_lines(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The lines with what they hold, up to the first that isn't whole: the last one of a killed run."""
    found: list[tuple[str, dict[str, Any]]] = []
    if path.exists():
        for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
            try:
                values = json.loads(line)
                found.append((line, {"kind": values["kind"], "step": values["step"]}))
            except (ValueError, KeyError):
                break
    return found


def _plain(value: Any) -> Any:
    """A value that JSON has."""
    if isinstance(value, list):
        return [_plain(x) for x in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(kind: str, values: dict[str, Any]) -> dict[str, float]:
    flat: dict[str, float] = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat |= {f"{kind}/{key}_{i}": x for i, x in enumerate(value) if x is not None}
        elif isinstance(value, int | float):
            flat[f"{kind}/{key}"] = value
    return flat
