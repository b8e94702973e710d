"""The command line: one command that does everything, and one for each stage.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from .errors import DraftsmithError

app = typer.Typer(
    name="draftsmith",
    help="Train, measure and ship the draft heads of speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

# What an option takes, and its default. Every command has the options of _COMMON and those that its row below names.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "overrides": (
        Annotated[list[str] | None, typer.Argument(help="KEY=VALUE, the same as --set.", metavar="[KEY=VALUE]...")],
        None,
    ),
    "model": (
        Annotated[str | None, typer.Option(help="Target: a short name, a hub id or a folder.  [smollm2-135m]")],
        None,
    ),
    "head": (Annotated[str | None, typer.Option(help="Kind of draft head.  [eagle3]")], None),
    "recipe": (Annotated[str | None, typer.Option(help="Where prompts come from.  [the target's own]")], None),
    "data": (
        Annotated[Path | None, typer.Option(help="File or folder of your own conversations, instead of a recipe.")],
        None,
    ),
    "minutes": (Annotated[float | None, typer.Option(min=0.01, help="Time budget.")], None),
    "gpus": (Annotated[int | None, typer.Option(min=1, help="Devices on this machine.  [all visible]")], None),
    "nnodes": (Annotated[int | None, typer.Option("--nnodes", min=1, help="Machines in all.  [1]")], None),
    "node_rank": (Annotated[int | None, typer.Option(min=0, help="Number of this machine, from 0.  [0]")], None),
    "master": (Annotated[str | None, typer.Option(help="Host of machine 0; needed with several machines.")], None),
    "run": (Annotated[str | None, typer.Option(help="Name of the run, to keep several heads of one kind.")], None),
    "runs": (Annotated[Path | None, typer.Option(help="Folder that holds all runs.  [runs]")], None),
    "config": (Annotated[Path | None, typer.Option(help="YAML file with any part of the configuration.")], None),
    "set_": (
        Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. train.token_budget=2048; may repeat.")],
        None,
    ),
    "dry_run": (
        Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration as YAML and stop.")],
        False,
    ),
    "json_": (
        Annotated[bool, typer.Option("--json", help="Print the result as JSON; standard output then holds it alone.")],
        False,
    ),
}
_COMMON = {"overrides", "model", "head", "recipe", "data", "runs", "config", "set_", "dry_run", "json_"}
_DEVICES = {"gpus", "nnodes", "node_rank", "master"}
_COMMANDS: dict[str, tuple[str, set[str]]] = {
    "run": (
        "Do everything: prompts, answers, features, vocabulary, training, measurement, report. Goes on where it was.",
        {"minutes", "run", *_DEVICES},
    ),
    "prepare": ("Turn a recipe or your own data into prompts for the target.", set()),
    "regenerate": ("Let the target answer the prompts, and keep its states on the way.", {"minutes"}),
    "collect": (
        "Compute the target's states for answers that have none yet, and count the tokens of the draft vocabulary.",
        set(),
    ),
    "train": (
        "Train the head on collected features; here --minutes is the time of training alone.",
        {"minutes", "run", *_DEVICES},
    ),
    "eval": (
        "Measure a trained head: acceptance, speed-up over plain decoding, output check (80 prompts × 128 tokens).",
        {"run"},
    ),
}


def _add_command(name: str, text: str, more: set[str]) -> None:
    """Register a command; typer reads its options from the signature that is set here."""

    def call(**values: Any) -> None:
        _execute(name, values)

    chosen = {option: entry for option, entry in _OPTIONS.items() if option in _COMMON | more}
    call.__doc__ = text
    call.__annotations__ = {option: kind for option, (kind, _) in chosen.items()}
    signature = inspect.Signature(
        [
            inspect.Parameter(option, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=kind)
            for option, (kind, default) in chosen.items()
        ]
    )
    setattr(call, "__signature__", signature)  # noqa: B010 - no attribute that the type checker knows
    app.command(name)(call)


for _name, (_text, _more) in _COMMANDS.items():
    _add_command(_name, _text, _more)


def _execute(command: str, values: dict[str, Any]) -> None:
    """Resolve the configuration, run the command, print its result."""
    from .run_config import resolve, to_yaml

    as_json, dry_run = values.pop("json_"), values.pop("dry_run")
    file, overrides = values.pop("config"), [*(values.pop("overrides") or []), *(values.pop("set_") or [])]
    flags = {name: value for name, value in values.items() if value is not None}
    config = resolve(command, flags, file, overrides)
    if dry_run:
        sys.stdout.write(to_yaml(config))
        return
    from .pipeline import COMMANDS

    try:
        with stdout_as_stderr():
            result = COMMANDS[command](config)
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run the same command again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
    else:
        _show(command, result)


def _show(command: str, result: dict[str, Any]) -> None:
    """Print a result for people: the report's table, or a stage's figures."""
    if "summary" in result:
        from .eval.report.terminal import print_summary

        print_summary(result)
        print(f"report: {result['report']}\n  page: {result['page']}")
        if command == "run":
            print("more answers and more training accept more: a larger MINUTES goes on with these answers")
        return
    from .progress import clock

    record = result["record"]
    print(f"{command}: done in {clock(record['seconds'])}, {result['folder']}")
    for name, value in record.items():
        if isinstance(value, int | float):
            print(f"  {name.replace('_', ' ')}: {value:,}")


@contextlib.contextmanager
def stdout_as_stderr() -> Iterator[None]:
    """Send whatever anyone prints meanwhile (libraries, child processes) to standard error."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interrupt one line and 130."""
    try:
        app()
    except DraftsmithError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
