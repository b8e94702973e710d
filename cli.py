"""The command line: one command that does everything, and one for each stage.

Nothing heavy is imported before a command runs, so that `--help` answers at once.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, TextIO

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

# What an option takes, and its default. Every command has those that its row in _COMMANDS names.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "prompt": (Annotated[str, typer.Argument(help="What the user says; - reads standard input.")], "-"),
    "bench": (Annotated[str, typer.Argument(help="What to measure: decoder.", metavar="[NAME]")], "decoder"),
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
    "drafter": (
        Annotated[
            str | None,
            typer.Option(help="plain, prompt-lookup, lookahead, draft-model or head (a trained one).  [head]"),
        ],
        None,
    ),
    "draft_model": (
        Annotated[str | None, typer.Option(help="Small model of the same tokenizer, named like --model.")],
        None,
    ),
    "tree": (
        Annotated[
            str | None,
            typer.Option(
                help="chain:4, static:0,1,0.0, dynamic:10x6x60, or own:16, the tree measured for the head.  [a head's: "
                "the one its report chose; else chain:4]"
            ),
        ],
        None,
    ),
    "heads": (
        Annotated[str | None, typer.Option(help="Names of heads (HEAD or HEAD@RUN), with commas between.  [all]")],
        None,
    ),
    "prompts": (Annotated[int | None, typer.Option(min=1, help="Held-out prompts.  [8]")], None),
    "answer_tokens": (
        Annotated[int | None, typer.Option("--max-new-tokens", min=1, help="Longest answer.  [64]")],
        None,
    ),
    "with_union": (
        Annotated[
            bool, typer.Option("--with-prompt-lookup", help="Also join looked-up drafts to the fastest head's trees.")
        ],
        False,
    ),
    "train_minutes": (
        Annotated[float | None, typer.Option("--minutes", min=0.01, help="Training of each.  [4]")],
        None,
    ),
    "with_prompt_lookup": (
        Annotated[bool, typer.Option("--with-prompt-lookup", help="Add what Prompt Lookup finds to every tree.")],
        False,
    ),
    "temperature": (Annotated[float | None, typer.Option(min=0, help="0 = greedy.  [0]")], None),
    "top_k": (Annotated[int | None, typer.Option(min=0, help="Keep the k most likely tokens.  [all]")], None),
    "top_p": (Annotated[float | None, typer.Option(min=0, max=1, help="Keep this mass of tokens.  [1]")], None),
    "min_p": (
        Annotated[float | None, typer.Option(min=0, max=1, help="Keep tokens so likely, × the best.  [0]")],
        None,
    ),
    "repetition_penalty": (Annotated[float | None, typer.Option(help="Of tokens already there.  [1 = none]")], None),
    "seed": (Annotated[int | None, typer.Option(help="Of the draws.  [0]")], None),
    "max_new_tokens": (Annotated[int | None, typer.Option(min=1, help="Longest answer.  [256, or what fits]")], None),
    "stop_token": (Annotated[list[str] | None, typer.Option(help="Text of a token that ends it; may repeat.")], None),
    "typical": (
        Annotated[bool, typer.Option("--typical", help="LOSSY: accept drafts that are merely typical of the target.")],
        False,
    ),
    "raw": (Annotated[bool, typer.Option("--raw", help="Continue the prompt itself, without a chat template.")], False),
    "json_": (
        Annotated[bool, typer.Option("--json", help="Print the result as JSON; standard output then holds it alone.")],
        False,
    ),
}
_STAGE = {"overrides", "model", "head", "recipe", "data", "runs", "config", "set_", "dry_run", "json_"}
_DEVICES = {"gpus", "nnodes", "node_rank", "master"}
_SAMPLING = {"temperature", "top_k", "top_p", "min_p", "repetition_penalty", "seed"}
_COMMANDS: dict[str, tuple[str, set[str]]] = {
    "run": (
        "Do everything: prompts, answers, features, vocabulary, training, measurement, report. Goes on where it was.",
        {"minutes", "run", *_DEVICES, *_STAGE},
    ),
    "prepare": ("Turn a recipe or your own data into prompts for the target.", _STAGE),
    "regenerate": ("Let the target answer the prompts, and keep its states on the way.", {"minutes", *_STAGE}),
    "collect": (
        "Compute the target's states for answers that have none yet, and count the tokens of the draft vocabulary.",
        _STAGE,
    ),
    "train": (
        "Train the head on collected features; here --minutes is the time of training alone.",
        {"minutes", "run", *_DEVICES, *_STAGE},
    ),
    "eval": (
        "Measure a trained head: acceptance, speed-up over plain decoding, output check (80 prompts × 128 tokens).",
        {"run", *_STAGE},
    ),
    "generate": (
        "Answer a prompt with any drafting scheme, streamed; what the target says stays the same, it comes faster.",
        {"prompt", "model", "drafter", "head", "run", "runs", "draft_model", "tree", "with_prompt_lookup", *_SAMPLING,
         "max_new_tokens", "stop_token", "typical", "raw", "json_"},
    ),
    "compare": (
        "Decode the same prompts with every trained head and every scheme without training, in turns: one table.",
        {"model", "runs", "heads", "prompts", "answer_tokens", "draft_model", "with_union", "json_"},
    ),
    "tour": (
        "Train every head family for a few minutes on the same answers, then compare them. Goes on where it was.",
        {"overrides", "model", "recipe", "train_minutes", "heads", "gpus", "runs", "set_", "json_"},
    ),
    "bench": (
        "Measure the decoder against transformers.generate, in turns; writes RUNS/bench/NAME.json.",
        {"bench", "overrides", "model", "runs", "json_"},
    ),
}  # fmt: skip


def _add_command(name: str, text: str, options: set[str]) -> None:
    """Register a command; typer reads its options from the signature that is set here."""

    def call(**values: Any) -> None:
        _OWN.get(name, _execute)(name, values)

    chosen = {option: entry for option, entry in _OPTIONS.items() if option in options}
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


for _name, (_text, _options) in _COMMANDS.items():
    _add_command(_name, _text, _options)


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


def _generate(command: str, values: dict[str, Any]) -> None:
    """Decode one answer: its text on standard output as it comes, the figures on standard error."""
    from .run_config import DEFAULT_HEAD, DEFAULT_MODEL

    as_json, text = values.pop("json_"), values.pop("prompt")
    given = {name: value for name, value in values.items() if value is not None}
    sampling = {name: given.pop(name) for name in _SAMPLING & set(given)}
    settings = {"model": DEFAULT_MODEL, "drafter": "head", "runs": Path("runs"), **given}
    if settings["drafter"] == "head":
        settings.setdefault("head", DEFAULT_HEAD)
    try:
        settings["prompt"] = _read_stdin() if text == "-" else text
        with stdout_as_stderr() as out:
            from .eval.decoder.sampling import Sampling
            from .eval.generate import GenerateSettings, closing_line, generate
            from .progress import say

            show = functools.partial(print, end="", file=out, flush=True)
            answer = generate(GenerateSettings(**settings, sampling=Sampling(**sampling)), None if as_json else show)
            if not as_json:
                show("\n")
            say(closing_line(answer))
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write(json.dumps(answer, indent=2, ensure_ascii=False) + "\n")


def _compare(command: str, values: dict[str, Any]) -> None:
    """Compare what is there."""
    from .run_config import DEFAULT_MODEL

    names = {"answer_tokens": "max_new_tokens", "with_union": "with_prompt_lookup"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None and name != "json_"}
    if "heads" in given:
        given["heads"] = _names(given["heads"])

    def work() -> dict[str, Any]:
        from .eval.compare import CompareSettings, compare

        return compare(CompareSettings(**{"model": DEFAULT_MODEL, "runs": Path("runs"), **given}))

    _show_comparison(work, values["json_"])


def _tour(command: str, values: dict[str, Any]) -> None:
    """Train all heads, then compare them."""
    overrides = [*(values.pop("overrides") or []), *(values.pop("set_") or [])]
    names = {"train_minutes": "minutes"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None and name != "json_"}
    if "heads" in given:
        given["heads"] = _names(given["heads"])

    def work() -> dict[str, Any]:
        from .tour import TourSettings, tour

        return tour(TourSettings(**given, overrides=overrides))

    _show_comparison(work, values["json_"])


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise DraftsmithError(f"--heads {text!r} names no head: write e.g. --heads eagle3,medusa1")
    return names


def _show_comparison(work: Callable[[], dict[str, Any]], as_json: bool) -> None:
    try:
        with stdout_as_stderr():
            result = work()
    except KeyboardInterrupt:
        print("interrupted; what was finished is kept: run the same command again to go on", file=sys.stderr)
        raise typer.Exit(130) from None
    if as_json:
        sys.stdout.write(json.dumps(result, indent=2, ensure_ascii=False) + "\n")
        return
    from .eval.report.comparison import print_comparison

    print_comparison(result)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"standard input is not UTF-8 text: {error}") from None


def _bench(command: str, values: dict[str, Any]) -> None:
    """Run a benchmark, write its figures, print them."""
    from .run_config import DEFAULT_MODEL

    with stdout_as_stderr():
        from .eval.bench import run_bench

        path, result = run_bench(
            values["bench"], values["model"] or DEFAULT_MODEL, values["runs"] or Path("runs"), values["overrides"] or []
        )
    if values["json_"]:
        sys.stdout.write(json.dumps(result, indent=2) + "\n")
        return
    for name, figure in result["figures"].items():
        print(f"{name:34} {figure['median']:7.3f}  [{figure['low']:.3f}, {figure['high']:.3f}]")
    print(f"{result['spread']}\nwritten: {path}")


# Commands that no configuration of a run stands behind.
_OWN = {"generate": _generate, "compare": _compare, "tour": _tour, "bench": _bench}


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


def main() -> None:
    """Entry point: a user's mistake is one line and exit code 2, an interrupt one line and 130."""
    try:
        app()
    except DraftsmithError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
