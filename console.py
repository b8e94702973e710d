"""Standard output for results alone."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO

import typer

KEPT = "; what was finished is kept: run the same command again to go on"


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[TextIO]:
    """Send whatever anyone prints meanwhile (libraries, child processes) to standard error.

    Yields:
        What still writes to standard output.
    """
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as kept:
        os.dup2(2, 1)
        try:
            yield kept
        finally:
            sys.stdout.flush()
            os.dup2(kept.fileno(), 1)


@contextlib.contextmanager
def interruptible(so: str = KEPT) -> Iterator[TextIO]:
    """The same; an interrupt is one line, "interrupted" and what that means, and exit status 130."""
    try:
        with stdout_as_stderr() as out:
            yield out
    except KeyboardInterrupt:
        print(f"interrupted{so}", file=sys.stderr)
        raise typer.Exit(130) from None


def printed(settings: Any, result: Any, *, dry: bool, as_json: bool) -> bool:
    """Print the settings of a dry run, or a result for programs; say whether it was either."""
    if dry:
        print_settings(settings)
    elif as_json:
        print_json(result)
    return dry or as_json


def print_settings(settings: Any) -> None:
    """Print what a command would do, as YAML."""
    import yaml

    values = json.loads(json.dumps(dataclasses.asdict(settings), default=str))
    sys.stdout.write(yaml.safe_dump(values, sort_keys=False, allow_unicode=True))


def print_json(result: Any) -> None:
    """Print a result for programs."""
    sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
