"""What an evaluation has measured so far, kept on disk: one that was killed goes on from there."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import explain_os_errors
from .decoder.loop import Result, StepLog
from .metrics import Acceptance
from .tune import PassCosts, StepCost, Tuning


class Journal:
    """Finished measurements by key; each is on disk before the next one starts.

    Attributes:
        path: a file of JSON lines that only grows; None keeps everything in memory.
        sessions: processes that opened it, this one included.
    """

    def __init__(self, path: Path | None = None, sessions: int = 1, values: Mapping[str, Any] | None = None) -> None:
        self.path, self.sessions = path, sessions
        self._values: dict[str, Any] = dict(values or {})

    @classmethod
    def read(cls, path: Path) -> Journal:
        """Read what earlier processes left, where this one may have nothing to add.

        Raises:
            DraftsmithError: a line is damaged that is not the last one. The last one may be torn: it is dropped then.
        """
        with explain_os_errors(path):
            records = _read(path)
        values = {record["key"]: record["value"] for record in records if "key" in record}
        return cls(path, len(records) - sum("key" in record for record in records), values)

    @classmethod
    def open(cls, path: Path) -> Journal:
        """Read what earlier processes left, and note that this one goes on with it; raises as `read` does."""
        journal = cls.read(path)
        journal.sessions += 1
        journal._append({"session": journal.sessions})
        return journal

    def get(self, key: str) -> Any:
        """The value that was put under `key`; None where there is none."""
        return self._values.get(key)

    def put(self, key: str, value: Any) -> None:
        """Keep a value of plain JSON types, other than None, for good."""
        self._append({"key": key, "value": value})
        self._values[key] = value

    def _append(self, record: dict[str, Any]) -> None:
        if self.path is None:
            return
        line = json.dumps(record, allow_nan=False) + "\n"
        with explain_os_errors(self.path), open(self.path, "ab") as file:
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())


def _read(path: Path) -> list[dict[str, Any]]:
    """Records of a journal; a torn last line, whose process was killed while writing it, is cut off the file."""
    if not path.exists():
        return []
    records: list[dict[str, Any]] = []
    size = 0
    lines = path.read_bytes().splitlines(keepends=True)
    for number, line in enumerate(lines, 1):
        record = _record(line)
        if record is not None:
            records.append(record)
            size += len(line)
        elif number == len(lines):
            os.truncate(path, size)
        else:
            raise DraftsmithError(f"{path} is damaged in line {number}; delete it and run again")
    return records


def _record(line: bytes) -> dict[str, Any] | None:
    """Parse one line; None where it is not whole."""
    try:
        record = json.loads(line)
    except ValueError:
        return None
    whole = line.endswith(b"\n") and isinstance(record, dict) and set(record) in ({"session"}, {"key", "value"})
    return record if whole else None


def result_to_dict(result: Result) -> dict[str, Any]:
    """Plain JSON values of an answer; recorded states are left out."""
    return {
        "id": result.id,
        "prompt": result.prompt,
        "tokens": result.tokens,
        "finish": result.finish,
        "steps": [[s.drafted, s.accepted, s.emitted] for s in result.steps],
        "seconds": result.seconds,
        "lossy": result.lossy,
    }


def result_from_dict(values: Mapping[str, Any]) -> Result:
    """Undo `result_to_dict`."""
    return Result(
        id=values["id"],
        prompt=values["prompt"],
        tokens=values["tokens"],
        finish=values["finish"],
        steps=[StepLog(*counts) for counts in values["steps"]],
        seconds=values["seconds"],
        lossy=values["lossy"],
    )


def tuning_to_dict(tuning: Tuning) -> dict[str, Any]:
    """Plain JSON values of how the tree was chosen."""
    return dataclasses.asdict(tuning)


def tuning_from_dict(values: Mapping[str, Any]) -> Tuning:
    """Undo `tuning_to_dict`."""
    return Tuning(
        tree=values["tree"],
        costs=PassCosts({way: StepCost(**cost) for way, cost in values["costs"]["ways"].items()}),
        acceptance={tree: Acceptance(**figures) for tree, figures in values["acceptance"].items()},
        table=values["table"],
        n_prompts=values["n_prompts"],
    )
