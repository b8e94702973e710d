"""The stages in a row, and the commands of single ones: configuration in, plain JSON values out.

This module knows in which order the stages come and how a time budget is shared. A finished run says so at once,
without loading any library.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from . import stages
from .errors import DraftsmithError
from .files import read_json, sha256_file, sha256_json, write_json
from .manifest import MANIFEST, Stage
from .progress import clock, progress_bar, say
from .run_config import RunConfig, Shares, plan_minutes
from .sizing import announce, choose_mode, whose_answers
from .stages import PAGE, REPORT, Run

DONE, READY = "run.json", "ready.json"


def run_all(config: RunConfig) -> dict[str, Any]:
    """Command `run`: every stage that is not done yet, within the time budget; returns the report.

    A run that is finished is recognised from small files alone, without loading any library.
    """
    run = Run(config)
    if finished(run):
        say(f"everything is done: {run.folder}")
        return _result(run)
    assert config.minutes is not None
    from .data_recipes.regenerate import answer_seconds

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise DraftsmithError("'draftsmith run' starts its own processes: call it without torchrun, with --gpus N")
    if config.node_rank > 0:
        return _join(run)
    stages.check_trees(config)
    shares = plan_minutes(config.minutes)
    planned = announce(run)
    run.answers = whose_answers(run, shares.regenerate, planned)
    run.online = choose_mode(run, shares.regenerate, planned)
    say(
        f"{config.head} for {run.source.name}, {config.minutes:g} min: answers {clock(60 * shares.regenerate)}, "
        f"training {clock(60 * shares.train)}, measuring about {clock(60 * shares.evaluate)}"
    )
    spent: dict[str, float] = {}

    def do(name: str, work: Callable[[], Stage]) -> None:
        started = time.monotonic()
        with stages.measured(name):
            work()
        spent[name] = time.monotonic() - started

    before = min(answer_seconds(run.data) / 60, shares.regenerate)  # answers of a longer run cost this one no more
    if not stages.has_weights(run):  # else only measuring is left
        do("prepare", lambda: stages.prepare(run))
        if run.answers == "target":
            do("regenerate", lambda: stages.regenerate(run, shares.regenerate))
            do("collect", lambda: stages.collect(run))
        else:
            do("collect", lambda: stages.collect(run, shares.regenerate))
    write_json(run.folder / READY, {"key": run_key(run)})
    do("train", lambda: stages.train(run, _train_budget(run, shares, before)))
    do("eval", lambda: stages.evaluate(run))
    write_json(
        run.folder / DONE, {"key": run_key(run), "stages": _digests(stages.stage_folders(run, stages.eval_folder(run)))}
    )
    say("spent: " + ", ".join(f"{name} {clock(seconds)}" for name, seconds in spent.items()))
    return _result(run)


def _join(run: Run) -> dict[str, Any]:
    """On machines after the first: wait for the data that machine 0 makes in the shared folder, then train with it."""
    with progress_bar("waiting for machine 0's features", unit="seconds") as bar:
        while not _is_ready(run):
            time.sleep(5)
            bar.advance(5)
    stage = stages.train(run, None)
    return {"stage": "train", "folder": str(stage.folder), **(stage.manifest or {})}


def _is_ready(run: Run) -> bool:
    """Whether machine 0 has collected the features of this very configuration."""
    ready = run.folder / READY
    return ready.exists() and bool(read_json(ready)["key"] == run_key(run))


def _train_budget(run: Run, shares: Shares, before: float) -> float | None:
    """What is left of the run's minutes; None where the user gave training a limit of its own.

    Args:
        before: minutes of answers that earlier processes made: they are part of the run's budget, too.
    """
    if not stages.limited_by_budget(run.config):
        return None
    return shares.train_minutes(before + run.minutes_since_start())


def finished(run: Run) -> bool:
    """Whether this very configuration was run to its end, by this code, and all results are still there."""
    needed = [run.folder / DONE, run.folder / REPORT, run.folder / PAGE]
    folders = stages.stage_folders(run, stages.eval_folder(run))
    if not all(path.exists() for path in [*needed, *(f / MANIFEST for f in folders.values())]):
        return False
    done = read_json(run.folder / DONE)
    return bool(done["key"] == run_key(run) and done["stages"] == _digests(folders))


def _digests(folders: dict[str, Path]) -> dict[str, str]:
    return {name: sha256_json(read_json(folder / MANIFEST)["identity"]) for name, folder in folders.items()}


def run_key(run: Run) -> str:
    """Hash of all that a run depends on and that is cheap to read: configuration, target, data files, this code."""
    tree = {k: v for k, v in run.config.tree().items() if k not in ("runs", "gpus", "nnodes", "node_rank", "master")}
    source = dataclasses.asdict(run.source)
    data = run.config.data
    files = [] if data is None else [f for f in [data, *sorted(data.rglob("*"))] if f.is_file()]
    package = Path(__file__).parent
    code = [package / name for name in _FILES] + [f for d in _FOLDERS for f in sorted((package / d).rglob("*.py"))]
    return sha256_json({
        "config": tree,
        "source": source,
        "data": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        "code": [sha256_file(f) for f in code],
    })  # fmt: skip


_FILES = ("files.py", "manifest.py", "pipeline.py", "run_config.py", "stages.py")
_FOLDERS = ("heads", "data_recipes", "eval", "train")


def _result(run: Run) -> dict[str, Any]:
    report: dict[str, Any] = read_json(run.folder / REPORT)
    return {**report, "report": str(run.folder / REPORT), "page": str(run.folder / PAGE)}


def _stage_command(name: str, work: Callable[[Run], Stage]) -> Callable[[RunConfig], dict[str, Any]]:
    def command(config: RunConfig) -> dict[str, Any]:
        run = Run(config)
        with stages.measured(name):
            stage = work(run)
        if stage.manifest is None:  # rank 0 finishes it, this one has done its part
            return {"stage": name, "folder": str(stage.folder), "record": {"seconds": 0.0}}
        return {"stage": name, "folder": str(stage.folder), **stage.manifest}

    return command


def _eval_command(config: RunConfig) -> dict[str, Any]:
    stages.check_trees(config)
    run = Run(config)
    with stages.measured("eval"):
        stage = stages.evaluate(run)
    stages.publish(run, stage.folder)
    return _result(run)


COMMANDS: dict[str, Callable[[RunConfig], dict[str, Any]]] = {
    "run": run_all,
    "prepare": _stage_command("prepare", stages.prepare),
    "regenerate": _stage_command("regenerate", lambda run: stages.regenerate(run, run.config.minutes)),
    "collect": _stage_command("collect", lambda run: stages.collect(run, run.config.minutes)),
    "train": _stage_command("train", lambda run: stages.train(run, None)),
    "eval": _eval_command,
}
"""What the command line calls: configuration in, plain JSON values out."""
