"""The time budget of a stage that works chunk by chunk: what its chunks took, and how many more fit."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..files import read_json, write_json


class Budget:
    """Seconds spent by chunk, kept on disk, so that the budget holds across killed runs; and the budget itself.

    Every rank writes a file of its own and reads those of all.

    Args:
        folder: of the stage.
        minutes: what the stage may take on every rank, earlier calls included; None = no limit.
        missing: names of the chunks that are not there: what was noted of them earlier counts no more.
        rank: whose chunks are noted here.
    """

    def __init__(self, folder: Path, minutes: float | None, missing: Collection[str], rank: int = 0) -> None:
        self.path, self.minutes = _path(folder, rank), minutes
        self.by_file: dict[Path, dict[str, dict[str, Any]]] = {self.path: {}}
        for path in sorted(folder.glob("times-*.json")):
            self.by_file[path] = {name: chunk for name, chunk in read_json(path).items() if name not in missing}
        self.before = self.seconds
        self.started = time.monotonic()

    @property
    def chunks(self) -> Iterator[dict[str, Any]]:
        """What was noted of each chunk, whichever rank made it: units, seconds and the other counts."""
        return (chunk for chunks in self.by_file.values() for chunk in chunks.values())

    @property
    def seconds(self) -> float:
        """Wall time so far: ranks work at the same time, so it is that of the busiest."""
        return max(sum(c["seconds"] for c in chunks.values()) for chunks in self.by_file.values())

    def add(self, name: str, units: int, seconds: float, **counts: int | Mapping[str, int]) -> None:
        """Note a finished chunk: `units` of work (answers, tokens) in `seconds`, and what else is worth counting."""
        self.by_file[self.path][name] = {"units": units, "seconds": round(seconds, 3), **counts}
        write_json(self.path, self.by_file[self.path])

    def total(self, count: str) -> int:
        """The sum over all chunks of a number that was noted beside them."""
        return sum(chunk.get(count, 0) for chunk in self.chunks)

    def tally(self, count: str) -> dict[str, int]:
        """The sums over all chunks of numbers that were noted by kind, the largest first."""
        kinds = sum((Counter(chunk.get(count, {})) for chunk in self.chunks), Counter[str]())
        return dict(kinds.most_common())

    def room_for(self, units: int) -> bool:
        """Whether so many more units fit the budget, at the rate measured so far; yes where nothing is measured."""
        return self.minutes is None or not self._measured or self._units_left() >= units

    def expected(self, chunk: int, most: int) -> int | None:
        """Of `most` units in chunks of `chunk`, those that fit the budget; None while nothing is measured."""
        if self.minutes is None:
            return most
        return min(most, max(0, int(self._units_left())) // max(chunk, 1) * chunk) if self._measured else None

    @property
    def is_spent(self) -> bool:
        """Whether the time is over, whatever was measured."""
        return self.minutes is not None and self._spent >= 60 * self.minutes

    @property
    def _measured(self) -> int:
        return sum(chunk["units"] for chunk in self.chunks)

    def _units_left(self) -> float:
        assert self.minutes is not None
        each = max(sum(c["seconds"] for c in self.chunks), 1e-3) / self._measured
        return (60 * self.minutes - self._spent) / each

    @property
    def _spent(self) -> float:
        return self.before + time.monotonic() - self.started  # loading the target included


def spent_seconds(folder: Path) -> float:
    """Seconds that the chunks of a stage took, over all calls that made them; 0 where there are none."""
    return Budget(folder, None, ()).seconds


def _path(folder: Path, rank: int) -> Path:
    return folder / f"times-{rank}.json"
