"""The command line: one command that does everything, and one for each stage.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from . import cli_measure, cli_ship
from .console import interruptible, print_json, stdout_as_stderr
from .errors import DraftsmithError
from .options import COMMANDS, OPTIONS

if TYPE_CHECKING:
    from .run_config import RunConfig

app = typer.Typer(
    name="draftsmith",
    help="Train, measure and ship the draft heads of speculative decoding.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _add_command(name: str, text: str, options: set[str]) -> None:
    """Register a command; typer reads its options from the signature that is set here."""

    def call(**values: Any) -> None:
        _OWN.get(name, _execute)(name, values)

    chosen = {option: entry for option, entry in OPTIONS.items() if option in options}
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


for _name, (_text, _options) in COMMANDS.items():
    _add_command(_name, _text, _options)


def _execute(command: str, values: dict[str, Any]) -> None:
    """Resolve the configuration, run the command, print its result."""
    as_json, config = values.pop("json_"), _configuration(command, values)
    if config is None:
        return
    _show(command, _result(command, config), as_json)


def _result(command: str, config: RunConfig, **more: Any) -> dict[str, Any]:
    """Run a command of the pipeline.

    Args:
        more: what `eval` takes beside its configuration.
    """
    from .pipeline import COMMANDS as STAGES

    with interruptible():
        return STAGES[command](config, **more)


def _eval(command: str, values: dict[str, Any]) -> None:
    """Measure a trained head; with --against, exit 1 if it has become worse than an earlier report says."""
    head, out, path, as_json = (values.pop(name) for name in ("any_head", "out", "against", "json_"))
    more: dict[str, Any] = {} if out is None else {"out": out}
    if head is not None:
        if _is_place(head):
            more["place"] = head
        else:
            values["head"] = head
    config = _configuration(command, values)
    if config is None:
        return
    earlier = None
    if path is not None:
        from .eval.against import read_earlier

        earlier = read_earlier(path)
    result = _result(command, config, **more)
    if earlier is None:
        _show(command, result, as_json)
    else:
        _judge(result, earlier, path, as_json)


def _is_place(head: str) -> bool:
    """Whether --head means a folder or a hub id, not the kind of a head."""
    from .heads.named import head_names

    if head in head_names():
        return False
    from .eval.given_head import is_place

    return is_place(head)


def _judge(result: dict[str, Any], earlier: dict[str, Any], path: Path, as_json: bool) -> None:
    """Print a report and how it compares with an earlier one; exit 1 where it is worse."""
    from .eval.against import against

    try:
        found = against(result, earlier, str(path))
    except DraftsmithError:
        _show("eval", result, as_json)  # what was measured is not lost
        raise
    _show("eval", {**result, "against": found.to_dict()}, as_json)
    if not as_json:
        print("\n".join(found.lines()))
    if found.worse:
        raise typer.Exit(1)


def _prepare(command: str, values: dict[str, Any]) -> None:
    """The stage; or, with --report or --show, a look at what it would make of a source."""
    source, as_report, samples = (values.pop(name) for name in ("source", "report", "show"))
    given = [name for name in ("data", "recipe") if values.get(name) is not None]
    if source is not None and given:
        raise DraftsmithError(f"--source {source} and --{given[0]} {values[given[0]]}: look at one of them")
    if samples is not None and values["json_"]:
        raise DraftsmithError(
            f"--show {samples} prints for people: leave --json out, or take --report --json for the counts alone"
        )
    if not as_report and samples is None:
        if source is not None:
            raise DraftsmithError(f"--source {source} is for looking: add --report or --show N; --data uses a file")
        _execute(command, values)
        return
    as_json = values.pop("json_")
    config = _configuration(command, values, answers=None if source is None else "dataset")
    if config is None:
        return
    with stdout_as_stderr() as out:
        from rich.console import Console

        from . import inspection
        from .data_recipes.review import print_report

        console = Console(file=out, force_terminal=out.isatty())
        if as_report:
            found = inspection.report(config, source)
            if as_json:
                out.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
            else:
                print_report(found, console)
        if samples is not None:
            inspection.show(config, source, samples, console)


def _collect(command: str, values: dict[str, Any]) -> None:
    """The stage; or, with --verify, a look at every byte of it."""
    if not values.pop("verify"):
        _execute(command, values)
        return
    as_json, config = values.pop("json_"), _configuration(command, values)
    if config is None:
        return
    with stdout_as_stderr():
        from .inspection import verify

        folder = str(verify(config))
    print(
        json.dumps({"features": folder, "verified": True}) if as_json else f"{folder}: every byte is as it was written"
    )


def _vocab(command: str, values: dict[str, Any]) -> None:
    """Coverage of draft vocabularies."""
    size, as_json = values.pop("size"), values.pop("json_")
    config = _configuration(command, values)
    if config is None:
        return
    with stdout_as_stderr():
        from .inspection import vocabulary

        found = vocabulary(config, size)
    if as_json:
        print_json(found)
        return
    from .data_recipes.vocabulary import coverage_lines

    for table in found["vocabularies"]:
        print("\n".join(coverage_lines(table)))
    print(f"{found['head']} takes {found['size_of_head']:,}; head.draft_vocab_size=N takes another")


def _plan(command: str, values: dict[str, Any]) -> None:
    """What a run needs before it starts."""
    from .run_config import resolve

    as_json, file, overrides = values.pop("json_"), values.pop("config"), values.pop("overrides") or []
    names = {"planned_gpus": "gpus", "counted": "data"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    recipe, run = given.pop("recipe", None), given.pop("check", None)
    if run is not None:
        _plan_check(run, as_json, {**given, **dict.fromkeys(overrides)}, file or recipe)
        return
    with stdout_as_stderr() as out:
        from .eval.report.plan import print_plan
        from .plan import PlanSettings, plan

        config = None
        if file or overrides or recipe:
            flags = {name: given[name] for name in ("model", "head") if name in given}
            config = resolve("train", flags | ({"recipe": recipe} if recipe else {}), file, overrides)
            given |= {"model": config.model, "head": config.head}
        found = plan(PlanSettings(**given), config)
        if as_json:
            out.write(json.dumps(found, indent=2, ensure_ascii=False) + "\n")
            return
    print_plan(found)


def _plan_check(run: Path, as_json: bool, given: dict[str, Any], config: Any) -> None:
    """What a finished run's plan would have said, beside what it measured."""
    if config or (more := sorted(set(given) - {"model", "hardware"})):
        raise DraftsmithError(
            f"plan --check {run} takes all it needs from the run's manifests; beside it only --model (where the folder "
            f"above isn't its name) and --hardware can be given, not {'a recipe or config' if config else more[0]}"
        )
    with stdout_as_stderr() as out:
        from .eval.report.plan import check_lines
        from .plan import check_against

        lines = check_against(run, given.get("model"), given.get("hardware"))
        out.write((json.dumps(lines, indent=2) if as_json else "\n".join(check_lines(lines))) + "\n")


def _configuration(command: str, values: dict[str, Any], answers: str | None = None) -> RunConfig | None:
    """The configuration of a command; None where --dry-run only wanted it printed.

    Args:
        answers: whose they are where nothing says so; None leaves that to the command.
    """
    from .run_config import resolve, to_yaml

    dry_run, file = values.pop("dry_run"), values.pop("config")
    overrides = [*(values.pop("overrides") or []), *(values.pop("set_") or [])]
    config = resolve(command, {name: value for name, value in values.items() if value is not None}, file, overrides)
    if answers is not None and config.answers == "auto":
        config = config.model_copy(update={"answers": answers})
    if dry_run:
        sys.stdout.write(to_yaml(config))
        return None
    return config


# Commands that no configuration of a run stands behind.
_OWN: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "prepare": _prepare,
    "collect": _collect,
    "eval": _eval,
    "vocab": _vocab,
    "plan": _plan,
    **cli_measure.HANDLERS,
    **cli_ship.HANDLERS,
}


def _show(command: str, result: dict[str, Any], as_json: bool) -> None:
    """Print a result: for programs, or for people the report's table or a stage's figures."""
    if as_json:
        print_json(result)
        return
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


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interrupt one line and 130."""
    try:
        app()
    except DraftsmithError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
