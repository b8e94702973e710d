"""The command line: one command that does everything, and one for each stage.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
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

Model = Annotated[str | None, typer.Option(help="Target: a short name, a hub id or a folder.  [smollm2-135m]")]
Head = Annotated[str | None, typer.Option(help="Kind of draft head.  [eagle3]")]
Recipe = Annotated[str | None, typer.Option(help="Where prompts come from.  [the target's own]")]
Data = Annotated[Path | None, typer.Option(help="File or folder of your own conversations, instead of a recipe.")]
Runs = Annotated[Path | None, typer.Option(help="Folder that holds all runs.  [runs]")]
Run = Annotated[str | None, typer.Option(help="Name of the run, to keep several heads of one kind.")]
Minutes = Annotated[float | None, typer.Option(min=0.01, help="Time budget.")]
Gpus = Annotated[int | None, typer.Option(min=1, help="Devices on this machine.  [all visible]")]
NNodes = Annotated[int | None, typer.Option("--nnodes", min=1, help="Machines in all.  [1]")]
NodeRank = Annotated[int | None, typer.Option(min=0, help="Number of this machine, from 0.  [0]")]
Master = Annotated[str | None, typer.Option(help="Host of machine 0.  [127.0.0.1]")]
Config = Annotated[Path | None, typer.Option(help="YAML file with any part of the configuration.")]
Set = Annotated[list[str] | None, typer.Option("--set", help="KEY=VALUE, e.g. train.token_budget=2048; may repeat.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="KEY=VALUE, the same as --set.", metavar="[KEY=VALUE]...")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the resolved configuration as YAML and stop.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON; standard output then holds it alone.")]


@app.command("run")
def run(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    minutes: Minutes = None,
    gpus: Gpus = None,
    nnodes: NNodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    run: Run = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Do everything: prompts, answers, features, vocabulary, training, measurement, report. Goes on where it was."""
    _execute("run", locals())


@app.command("prepare")
def prepare(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Turn a recipe or your own data into prompts for the target."""
    _execute("prepare", locals())


@app.command("regenerate")
def regenerate(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    minutes: Minutes = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Let the target answer the prompts, and keep its states on the way."""
    _execute("regenerate", locals())


@app.command("collect")
def collect(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Compute the target's states for answers that have none yet, and count the tokens of the draft vocabulary."""
    _execute("collect", locals())


@app.command("train")
def train(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    minutes: Minutes = None,
    gpus: Gpus = None,
    nnodes: NNodes = None,
    node_rank: NodeRank = None,
    master: Master = None,
    run: Run = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Train the head on collected features; here --minutes is the time of training alone."""
    _execute("train", locals())


@app.command("eval")
def evaluate(
    overrides: Overrides = None,
    model: Model = None,
    head: Head = None,
    recipe: Recipe = None,
    data: Data = None,
    run: Run = None,
    runs: Runs = None,
    config: Config = None,
    set_: Set = None,
    dry_run: DryRun = False,
    json_: Json = False,
) -> None:
    """Measure a trained head: acceptance, speed-up over plain decoding, output check (80 prompts × 128 tokens)."""
    _execute("eval", locals())


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
