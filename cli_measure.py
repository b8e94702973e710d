"""Commands that measure and have no stage of their own: answers, comparisons, benchmarks.

Like cli.py it imports nothing heavy before a command runs.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import typer

from .console import interruptible, print_json, print_settings, printed, stdout_as_stderr
from .errors import DraftsmithError
from .options import SAMPLING

_NO_READER = 141
"""Exit status of a program whose reader is gone, as shells tell it: 128 + SIGPIPE."""


def generate(command: str, values: dict[str, Any]) -> None:
    """Decode one answer: its text on standard output as it comes, the figures on standard error."""
    from .run_config import DEFAULT_HEAD, DEFAULT_MODEL

    as_json, text, colour, dry = (values.pop(name) for name in ("json_", "prompt", "color", "dry_run"))
    if as_json and colour:
        raise DraftsmithError("--json prints no text as it comes, so --color changes nothing: leave one of them out")
    given = {name: value for name, value in values.items() if value is not None}
    _read_template_args(given)
    sampling = {name: given.pop(name) for name in SAMPLING & set(given)}
    if "any_head" in given:
        given["head"] = given.pop("any_head")
    settings = {"model": DEFAULT_MODEL, "drafter": "head", "runs": Path("runs"), **given}
    if settings["drafter"] == "head":
        settings.setdefault("head", DEFAULT_HEAD)
    try:
        settings["prompt"] = _read_stdin() if text == "-" and not dry else text
        with stdout_as_stderr() as out:
            from .eval.decoder.sampling import Sampling
            from .eval.generate import GenerateSettings
            from .eval.generate import generate as answer_prompt

            asked = GenerateSettings(**settings, sampling=Sampling(**sampling))
            if dry:
                asked.check()
            else:
                answer = answer_prompt(asked, *((None, _say_figures) if as_json else _streaming(out, colour)))
                if answer["plain"] is not None:
                    _say_plain(answer["plain"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # nobody reads on, as behind `| head`
        raise typer.Exit(_NO_READER) from None
    if dry:
        print_settings(asked)
    elif as_json:
        print_json(answer)


def _streaming(out: TextIO, asked: bool | None) -> tuple[Callable[..., None], Callable[..., None]]:
    """What takes the pieces of an answer, and what ends it."""
    from .eval.stream import paint, wants_colour

    show = functools.partial(print, end="", file=out, flush=True)
    colour = wants_colour(asked, out)

    def finished(answer: dict[str, Any]) -> None:
        show("\n")
        _say_figures(answer, wants_colour(asked, sys.stderr))

    return (lambda text, origin: show(paint(text, origin) if colour else text)), finished


def _say_figures(answer: dict[str, Any], colour: bool = False) -> None:
    from .eval.generate import closing_line
    from .eval.stream import legend
    from .progress import say

    say(closing_line(answer))
    say(legend(answer["origins"], colour))


def _say_plain(plain: dict[str, Any]) -> None:
    from .eval.generate import plain_line
    from .progress import say

    say(plain_line(plain))


def load(command: str, values: dict[str, Any]) -> None:
    """Measure a head under load."""
    from .run_config import DEFAULT_HEAD, DEFAULT_MODEL

    as_json, dry = values.pop("json_"), values.pop("dry_run")
    names = {"any_head": "head", "load_prompts": "prompts", "answer_tokens": "max_new_tokens"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    _read_template_args(given)
    if "replay" in given and (more := sorted({"batches", "benchmarks", "bench_dir", "prompts"} & set(given))):
        flag = {"benchmarks": "bench", "bench_dir": "bench-dir"}.get(more[0], more[0])
        raise DraftsmithError(f"--replay {given['replay']} brings its own requests: leave --{flag} out, or --replay")
    if "concurrency" in given and "replay" not in given:
        raise DraftsmithError(f"--concurrency {given['concurrency']} goes with --replay FILE; --batches needs no file")
    if "batches" in given:
        given["batches"] = _whole_numbers(given["batches"])
    if "benchmarks" in given:
        given["benchmarks"] = _names(given["benchmarks"], "--bench", "benchmark", "mt-bench,gsm8k")
    part = "replay" if "replay" in given else "batches"
    with interruptible():
        from .eval.load import LoadSettings
        from .eval.load import load as measure

        settings = LoadSettings(**{"model": DEFAULT_MODEL, "head": DEFAULT_HEAD, "runs": Path("runs"), **given})
        result = {} if dry else measure(settings)
    if printed(settings, result, dry=dry, as_json=as_json):
        return
    from .eval.report.load_table import print_load

    print_load(result, part)


def _read_template_args(given: dict[str, Any]) -> None:
    """Turn NAME=VALUE texts into what the chat template is given."""
    if "template_args" in given:
        from .run_config import template_args

        given["template_kwargs"] = template_args(given.pop("template_args"))


def _whole_numbers(text: str) -> tuple[int, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() for part in parts):
        raise DraftsmithError(f"--batches {text!r}: write whole numbers with commas between, e.g. 1,2,4,8")
    return tuple(int(part) for part in parts)


def tune(command: str, values: dict[str, Any]) -> None:
    """Choose a head's settings."""
    from .run_config import DEFAULT_HEAD, DEFAULT_MODEL

    as_json, dry = values.pop("json_"), values.pop("dry_run")
    names = {
        "any_head": "head", "load_prompts": "prompts", "answer_tokens": "max_new_tokens",
        "tune_temperatures": "temperatures",
    }  # fmt: skip
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    _read_template_args(given)
    if "batches" in given:
        given["batches"] = _whole_numbers(given["batches"])
    if "temperatures" in given:
        given["temperatures"] = _temperatures(given["temperatures"])
    if "benchmarks" in given:
        given["benchmarks"] = _names(given["benchmarks"], "--bench", "benchmark", "mt-bench,gsm8k")
    if "trees" in given:
        given["trees"] = tuple(dict.fromkeys(given["trees"]))
    with interruptible():
        from .eval.tuning import TuneSettings
        from .eval.tuning import tune as measure

        settings = TuneSettings(**{"model": DEFAULT_MODEL, "head": DEFAULT_HEAD, "runs": Path("runs"), **given})
        result = {} if dry else measure(settings)
    if printed(settings, result, dry=dry, as_json=as_json):
        return
    from .eval.report.tuning import print_tuning

    print_tuning(result)


def _temperatures(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise DraftsmithError(f"--temperatures {text!r}: write numbers with commas between, e.g. 0,0.7,1") from None


def compare(command: str, values: dict[str, Any]) -> None:
    """Compare what is there."""
    from .run_config import DEFAULT_MODEL

    as_json, dry = values.pop("json_"), values.pop("dry_run")
    names = {"answer_tokens": "max_new_tokens", "with_union": "with_prompt_lookup", "load_prompts": "prompts"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    _read_template_args(given)
    if "heads" in given:
        given["heads"] = _names(given["heads"])
    if "benchmarks" in given:
        given["benchmarks"] = _names(given["benchmarks"], "--bench", "benchmark", "mt-bench,gsm8k")

    with interruptible():
        from .eval.compare import CompareSettings
        from .eval.compare import compare as measure

        settings = CompareSettings(**{"model": DEFAULT_MODEL, "runs": Path("runs"), **given})
        result = {} if dry else measure(settings)
    if not printed(settings, result, dry=dry, as_json=as_json):
        _show_comparison(result)


def tour(command: str, values: dict[str, Any]) -> None:
    """Train all heads, then compare them."""
    overrides = [*(values.pop("overrides") or []), *(values.pop("set_") or [])]
    as_json, dry = values.pop("json_"), values.pop("dry_run")
    names = {"train_minutes": "minutes"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    if "heads" in given:
        given["heads"] = _names(given["heads"])

    with interruptible():
        from .run_config import to_yaml
        from .tour import TourSettings, configurations
        from .tour import tour as train_all

        settings = TourSettings(**given, overrides=overrides)
        resolved = [to_yaml(config) for config in configurations(settings)] if dry else []
        result = {} if dry else train_all(settings)
    if dry:
        print("---\n".join(resolved), end="")
        return
    if as_json:
        print_json(result)
    else:
        _show_comparison(result)
    if any("error" in one for one in result.get("push", {}).values()):
        raise typer.Exit(1)


def _names(text: str, flag: str = "--heads", what: str = "head", like: str = "eagle3,medusa1") -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise DraftsmithError(f"{flag} {text!r} names no {what}: write e.g. {flag} {like}")
    return names


def _show_comparison(result: dict[str, Any]) -> None:
    from .eval.report.comparison import print_comparison

    print_comparison(result)


def _read_stdin() -> str:
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n")
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"standard input is not UTF-8 text: {error}") from None


def bench(command: str, values: dict[str, Any]) -> None:
    """Run a benchmark, write its figures, print them."""
    from .run_config import DEFAULT_MODEL

    with stdout_as_stderr():
        from .eval.bench import BENCHES, bench_settings, figure_line, run_bench
        from .train.bench_train import TRAIN_BENCH

        benches, overrides = {**BENCHES, "train": TRAIN_BENCH}, values["overrides"] or []
        settings = bench_settings(values["bench"], overrides, benches)
        if not values["dry_run"]:
            given = (values["model"] or DEFAULT_MODEL, values["runs"] or Path("runs"), overrides)
            path, result = run_bench(values["bench"], *given, benches)
    if values["dry_run"]:
        print_settings(settings)
        return
    if values["json_"]:
        print_json(result)
        return
    for name, figure in result["figures"].items():
        print(figure_line(name, figure))
        for part, share in figure.get("where", {}).items():
            print(f"    {part:30} {share:10.1%}")
    print(f"{result['spread']}\nwritten: {path}")


HANDLERS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "generate": generate,
    "load": load,
    "tune": tune,
    "compare": compare,
    "tour": tour,
    "bench": bench,
}
"""By command: called with its name and the values of its options."""
