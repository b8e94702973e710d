"""Which checkpoint a folder stands for, and what its run knows of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import DraftsmithError
from ...files import read_json, sha256_file
from ...manifest import MANIFEST
from ..checkpoint import CONFIG, WEIGHTS
from ..named import head_names, weights_of
from .files import hub_id

_BEST = Path("train", "checkpoints", "best")
_REPORT = "report.json"
_TRAINING = ("step", "tokens", "train_seconds", "vocabulary_coverage", "head_init")
"""What of a training's record goes along with an export."""
_NATIVE = "native"
"""What a training notes that began from the target's own MTP modules."""


@dataclass(frozen=True)
class Source:
    """A trained head.

    Attributes:
        checkpoint: its folder. run: the run's, None where the checkpoint lies in none.
        head: name in configs/heads/, None where only its family is known.
    """

    checkpoint: Path
    run: Path | None
    head: str | None

    @property
    def name(self) -> str | None:
        """model/head[@run], by which the run is found again below a folder of runs."""
        return None if self.run is None else f"{self.run.parent.name}/{self.run.name}"

    @property
    def weights_sha256(self) -> str:
        """Of the checkpoint's weights."""
        return sha256_file(self.checkpoint / WEIGHTS)

    @property
    def training(self) -> dict[str, Any] | None:
        """What the finished training noted; None while it goes on, or where the checkpoint lies in no run.

        Raises:
            DraftsmithError: the training's manifest is damaged.
        """
        path = self.checkpoint.parents[1] / MANIFEST
        if self.run is None or not path.is_file():
            return None
        values = read_json(path)
        record = values.get("record") if isinstance(values, dict) else None
        if not isinstance(record, dict):
            raise DraftsmithError(f"{path} holds no record of a training: delete it and run the training again")
        kept = {name: record[name] for name in _TRAINING if name in record}
        if isinstance(start := kept.get("head_init"), dict):
            kept["head_init"] = public_start(start)
        return kept

    @property
    def report(self) -> dict[str, Any] | None:
        """Summary of the run's report; None where there is none on these very weights."""
        path = None if self.run is None else self.run / _REPORT
        values = read_json(path) if path is not None and path.is_file() else None
        if not isinstance(values, dict) or values.get("head_sha256") != self.weights_sha256:
            return None
        summary = values.get("summary")
        return summary if isinstance(summary, dict) else None

    def provenance(self) -> dict[str, Any]:
        """Where the head comes from, for `draftsmith.json`: no paths of this machine."""
        return {
            "run": self.name,
            "weights_sha256": self.weights_sha256,
            "training": self.training,
            "report": self.report,
        }


def public_start(start: dict[str, Any]) -> dict[str, Any]:
    """What a training began from, without the place of a folder, whether or not that is still there.

    The target's own modules and a hub id, which has its revision behind "@", say nothing of a machine.
    """
    source = str(start.get("source"))
    is_public = source == _NATIVE or ((hub := hub_id(source)) is not None and hub[1] is not None)
    return {name: value for name, value in start.items() if name != "source" or is_public}


def find_source(place: Path) -> Source:
    """The checkpoint that a run's folder, or a checkpoint's own, stands for.

    Raises:
        DraftsmithError: there is none.
    """
    folder = place.expanduser().resolve()
    if (folder / CONFIG).is_file():
        inside = folder.parts[-3:-1] == _BEST.parts[:2]
        run = folder.parents[2] if inside else None
        return Source(folder, run, None if run is None else _head_of(run))
    head, at, run_name = folder.name.partition("@")
    checkpoint = folder.with_name(weights_of(head) + at + run_name) / _BEST
    if not (checkpoint / CONFIG).is_file():
        what = "holds no trained head" if folder.is_dir() else "isn't there"
        raise DraftsmithError(
            f"{place} {what}: give the folder of a run, runs/<model>/<head>, or a checkpoint such as "
            "…/checkpoints/best; 'draftsmith run' trains one"
        )
    return Source(checkpoint, folder, _head_of(folder))


def _head_of(run: Path) -> str | None:
    name = run.name.partition("@")[0]
    return name if name in head_names() else None


__all__ = ["Source", "find_source", "public_start"]
