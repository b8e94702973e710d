"""What a user sees of an evaluation: a table in the terminal and one self-contained page."""

from __future__ import annotations

REPORT, PAGE, LOAD, TUNE = "report.json", "report.html", "load.json", "tune.json"
