"""Trained heads, where their runs left them: `runs/<model>/<head>[@<run>]/`."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import read_json, sha256_file
from ..heads import adapter
from ..heads.checkpoint import WEIGHTS
from ..heads.named import weights_of
from ..manifest import MANIFEST
from .report import REPORT

TRAIN, BEST = "train", Path("checkpoints", "best")


@dataclass(frozen=True)
class Trained:
    """One trained head, and how it is decoded.

    Attributes:
        name: its folder's: the head's, with "@" and the run's behind it where the run has one.
        folder: of its run: reports lie there.
        train: folder of the training that made its weights: its own, or that of the head whose weights it has.
    """

    name: str
    folder: Path
    train: Path

    @property
    def checkpoint(self) -> Path:
        """Folder of the best weights."""
        return self.train / BEST

    @property
    def adapter(self) -> Path | None:
        """Folder of the adapter that was trained with the head: such a head wants the target with it merged in."""
        return adapter_of(self.checkpoint)

    @property
    def record(self) -> dict[str, Any] | None:
        """What its training noted; None while that is not finished."""
        path = self.train / MANIFEST
        return dict(read_json(path)["record"]) if path.exists() else None

    @functools.cached_property
    def weights_sha256(self) -> str:
        """Of the best weights."""
        return sha256_file(self.checkpoint / WEIGHTS)

    @functools.cached_property
    def report(self) -> dict[str, Any]:
        """The latest report, if it is on these very weights; else empty."""
        report = self._latest
        return report if report.get("head_sha256") == self.weights_sha256 else {}

    @property
    def tree(self) -> str | None:
        """Text of the tree that the report on these weights chose; None where there is no such report."""
        text = self.report.get("summary", {}).get("setting", {}).get("tree")
        return None if text is None else str(text)

    @property
    def template_kwargs(self) -> dict[str, Any] | None:
        """What the chat template was given for the report on these weights; None where no such report says it."""
        found: dict[str, Any] | None = self.report.get("template_kwargs")
        return found

    def remarks(self) -> list[str]:
        """What a user should know before the head is decoded: training that isn't finished, a report on other weights.

        Each is a sentence's end, for a line that names the head.
        """
        stale = bool(self._latest) and not self.report
        return [
            *(["is not trained to its end"] if self.record is None else []),
            *(["has a report on other weights than these, whose tree is not taken"] if stale else []),
        ]

    @property
    def _latest(self) -> dict[str, Any]:
        path = self.folder / REPORT
        return dict(read_json(path)) if path.exists() else {}


def adapter_of(checkpoint: Path) -> Path | None:
    """The adapter beside a head's weights, None where its target is the model itself."""
    folder = checkpoint / adapter.FOLDER
    return folder if (folder / adapter.CONFIG).is_file() else None


def trained_head(home: Path, name: str) -> Trained:
    """The head of a run's folder below `home` = runs/<model>; raises DraftsmithError where there is none.

    Args:
        name: of the folder: head or head@run.
    """
    found = trained_at(home, name)
    if not (found.checkpoint / WEIGHTS).is_file():
        others = ", ".join(other.name for other in trained_heads(home))
        raise DraftsmithError(
            f"{found.checkpoint} holds no trained head ({'there are: ' + others if others else 'there is none'} in "
            f"{home}): train one with 'draftsmith run'"
        )
    return found


def trained_heads(home: Path) -> list[Trained]:
    """All heads below `home` = runs/<model>, by name: those with weights, and ways to decode these with a report."""
    weights = {path.parents[len(BEST.parts) + 1].name for path in home.glob(f"*/{TRAIN}/{BEST}/{WEIGHTS}")}
    reports = {path.parent.name for path in home.glob(f"*/{REPORT}")}
    found = [trained_at(home, name) for name in sorted(weights | reports)]
    return [head for head in found if head.train.parent.name in weights]


def trained_at(home: Path, name: str) -> Trained:
    """What a run's folder below `home` = runs/<model> stands for, whether anything is there or not."""
    head, at, run = name.partition("@")
    return Trained(name, home / name, home / (weights_of(head) + at + run) / TRAIN)
