"""Commands that ship a head: export, doctor, push.

Like cli.py it imports nothing heavy before a command runs.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from .console import interruptible, print_json, printed


def serve_check(command: str, values: dict[str, Any]) -> None:
    """Serve the exported head in vLLM; exit status 1 where its counters or outputs don't agree."""
    from .run_config import DEFAULT_HEAD, DEFAULT_MODEL

    as_json, dry = values.pop("json_"), values.pop("dry_run")
    names = {"served_prompts": "prompts", "answer_tokens": "max_new_tokens", "engines_folder": "installed"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None}
    run = given.pop("run", None)
    given = {"model": DEFAULT_MODEL, "head": DEFAULT_HEAD, "runs": Path("runs"), **given}
    given["head"] += f"@{run}" if run else ""
    with interruptible():
        from .eval.serve_check import serve_check as check
        from .eval.served import ServeSettings, result_lines

        settings = ServeSettings(**given)
        result = {} if dry else check(settings)
    if not printed(settings, result, dry=dry, as_json=as_json):
        print("\n".join(result_lines(result)))
    if not dry and not result["passed"]:
        raise typer.Exit(1)


def export(command: str, values: dict[str, Any]) -> None:
    """Write a trained head as an engine loads it; print what is there, and how it is served."""
    with interruptible("; nothing was written"):
        from .heads.formats.export_run import export_run

        done = export_run(
            values["exported_run"], values["engine"],
            out=values["export_out"], dtype=values["export_dtype"], model=values["model"],
        )  # fmt: skip
    if values["json_"]:
        print_json(done.to_dict())
    else:
        print("\n".join(done.lines()))


def doctor(command: str, values: dict[str, Any]) -> None:
    """Diagnose a head's directory; exit status 1 where no engine that it was made for takes it as it is."""
    with interruptible(""):
        from .eval.exported import examine

        found = examine(values["examined"], values["target"], values["runs"] or Path("runs"))
    if values["json_"]:
        print_json(found.to_dict())
    else:
        print("\n".join(found.lines()))
    if not found.ok:
        raise typer.Exit(1)


def push(command: str, values: dict[str, Any]) -> None:
    """Send an exported head to the Hub."""
    names = {"pushed_folder": "folder", "hub_name": "repo", "push_dry_run": "dry_run"}
    given = {names.get(name, name): value for name, value in values.items() if value is not None and name != "json_"}
    with interruptible("; what has arrived is kept: run the same command again to go on"):
        from .push import PushSettings, result_lines
        from .push import push as send

        result = send(PushSettings(**given))
    if values["json_"]:
        print_json(result)
    else:
        print("\n".join(result_lines(result)))


HANDLERS: dict[str, Callable[[str, dict[str, Any]], None]] = {
    "doctor": doctor,
    "export": export,
    "push": push,
    "serve-check": serve_check,
}
"""By command: called with its name and the values of its options."""
