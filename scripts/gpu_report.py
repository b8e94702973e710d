"""What `gpu_check.py` found: lines of one table, kept as JSON, too; a section that fails doesn't end the run.

And what both it and `gpu_train.py` need before anything else.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASS, FAIL, INFO, SKIPPED = "pass", "FAIL", "", "skipped"
UNCHECKED = "unchecked"
"""An aim that nothing was measured for: it is not held, nor missed."""


@dataclass(frozen=True)
class Line:
    """One line of the table: which section, what was looked at, how it came out, and the figures behind it."""

    section: str
    what: str
    state: str
    result: str
    figures: dict[str, float | int | str | None] = field(default_factory=dict)


class Report:
    """Collects lines and says them as they come."""

    def __init__(self) -> None:
        self.lines: list[Line] = []
        self.seconds: dict[str, float] = {}
        self.started = time.monotonic()

    def add(self, section: str, what: str, state: str, result: str, **figures: float | int | str | None) -> None:
        """Note a line."""
        self.lines.append(Line(section, what, state, result, figures))
        print(f"{section}: {what}: {f'{state} ' if state else ''}{result}", file=sys.stderr, flush=True)

    def check(self, section: str, what: str, holds: bool, result: str, **figures: float | int | str | None) -> None:
        """Note whether something holds."""
        self.add(section, what, PASS if holds else FAIL, result, **figures)

    @contextlib.contextmanager
    def section(self, name: str, what: str = "") -> Iterator[None]:
        """Turn an exception in the body into a failed line."""
        started = time.monotonic()
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            said = str(error).strip().splitlines()
            self.add(name, what or "section", FAIL, f"{type(error).__name__}: {said[0] if said else '?'}")
        if not what:
            self.seconds[name] = round(time.monotonic() - started, 1)

    @property
    def failed(self) -> bool:
        """Whether any line failed, or is an aim that was not checked."""
        return any(line.state in (FAIL, UNCHECKED) for line in self.lines)

    def table(self) -> str:
        """All lines as a Markdown table."""
        rows = [("section", "what", "", "result"), *((x.section, x.what, x.state, x.result) for x in self.lines)]
        cells = [[cell.replace("|", "/") for cell in row] for row in rows]
        widths = [max(len(row[i]) for row in cells) for i in range(4)]
        lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in cells]
        lines.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
        return "\n".join(lines)

    def save(self, path: Path, **about: object) -> None:
        """Write everything as JSON."""
        found = {
            **about,
            "seconds": {**self.seconds, "all": round(time.monotonic() - self.started, 1)},
            "failed": self.failed,
            "lines": [asdict(line) for line in self.lines],
        }
        path.write_text(json.dumps(found, indent=1) + "\n")


def missing(program: str, dry_run: bool) -> int | None:
    """Say what a program lacks here, a GPU or the package; returns its exit status, None where nothing is missing."""
    import torch

    if not dry_run and not torch.cuda.is_available():
        print(f"{program}: there is no CUDA device; --dry-run walks through the script without one", file=sys.stderr)
        return 2
    try:
        import draftsmith  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "draftsmith":
            raise
        root = Path(__file__).resolve().parent.parent
        print(
            f"{program}: the package draftsmith can't be found: run `make setup` and use .venv/bin/python, or "
            f"`mkdir -p L && ln -s {root} L/draftsmith` and set PYTHONPATH=L",
            file=sys.stderr,
        )
        return 2
    return None
