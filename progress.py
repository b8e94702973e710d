"""Progress of long work on standard error: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

QUIET_VARIABLE = "DRAFTSMITH_QUIET"
PLAIN_INTERVAL = 10.0
"""Seconds between two lines where standard error is no terminal."""


def quiet() -> bool:
    """Whether the user asked for silence with `DRAFTSMITH_QUIET=1`."""
    return os.environ.get(QUIET_VARIABLE, "") not in ("", "0")


def say(line: str) -> None:
    """Print one line of news on standard error, unless silence is asked for."""
    if not quiet():
        print(line, file=sys.stderr, flush=True)


class Progress:
    """What the body of `progress_bar` holds: it counts, and shows nothing."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        self.name, self.total, self.unit = name, total, unit
        self.done = 0.0  # a resumed stage sets it: only what is advanced here makes the rate
        self.counted = 0.0
        self.text = ""
        self.started = time.monotonic()

    def advance(self, n: float = 1) -> None:
        """Count `n` more units."""
        self.done += n
        self.counted += n
        self._show()

    def note(self, text: str) -> None:
        """Set the short text behind the bar, e.g. `loss 2.31`."""
        self.text = text
        self._show()

    def expect(self, total: float) -> None:
        """Correct the number of units in all."""
        self.total = total
        self._show()

    def rate(self) -> float:
        """Units a second so far."""
        return self.counted / max(time.monotonic() - self.started, 1e-9)

    def line(self) -> str:
        """The state in one line: name, share, rate, time left, note."""
        rate = self.rate()
        parts = [f"{self.name}: {self.done:,.0f}" + (f"/{self.total:,.0f}" if self.total else "") + f" {self.unit}"]
        parts.append(f"{rate:,.1f} {self.unit}/s")
        if self.total and rate > 0:
            parts.append(f"{clock((self.total - self.done) / rate)} left")
        return ", ".join(parts + [self.text] * bool(self.text))

    def _show(self) -> None:
        """Nothing to show."""

    def close(self) -> None:
        """Leave the last state on the screen."""


class _Lines(Progress):
    """One line every `PLAIN_INTERVAL` seconds, for logs."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        super().__init__(name, total, unit)
        self._shown = self.started

    def _show(self) -> None:
        now = time.monotonic()
        if now - self._shown >= PLAIN_INTERVAL:
            self._shown = now
            print(self.line(), file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._shown > self.started:
            print(self.line(), file=sys.stderr, flush=True)


class _Bar(Progress):
    """A rich bar for a terminal."""

    def __init__(self, name: str, total: float | None, unit: str) -> None:
        super().__init__(name, total, unit)
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        columns: list[Any] = [TextColumn("{task.description:<12}"), BarColumn(), TextColumn("{task.fields[state]}")]
        columns += [TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("{task.fields[note]}")]
        self._rich = RichProgress(*columns, console=Console(stderr=True))
        self._rich.start()
        self._task = self._rich.add_task(name, total=total, state="", note="")

    def _show(self) -> None:
        state = f"{self.done:,.0f} {self.unit}, {self.rate():,.1f}/s"
        self._rich.update(self._task, completed=self.done, total=self.total, state=state, note=self.text)

    def close(self) -> None:
        self._rich.stop()


@contextlib.contextmanager
def progress_bar(name: str, total: float | None = None, unit: str = "steps") -> Iterator[Progress]:
    """Show the progress of the body on standard error.

    Args:
        name: what runs, e.g. the stage's name.
        total: units in all; None where the end is not known.
        unit: what is counted, in the plural.

    Yields:
        A `Progress` with `.advance(n)` and `.note(text)`. With `DRAFTSMITH_QUIET=1` it shows nothing.
    """
    kind = Progress if quiet() else _Bar if sys.stderr.isatty() else _Lines
    bar = kind(name, total, unit)
    try:
        yield bar
    finally:
        bar.close()


def clock(seconds: float) -> str:
    """Seconds as people write them: 42 s, 3:05 min, 1:02:03 h."""
    whole = round(seconds)
    if whole < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(whole, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"
