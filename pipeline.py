"""The stages in a row, and the commands of single ones: configuration in, plain JSON values out.

This module knows in which order the stages come and how a time budget is shared. A finished run says so at once,
without loading any library.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import evaluation, stages
from .errors import DraftsmithError
from .eval.report import PAGE, REPORT
from .files import read_json, sha256_file, sha256_json, write_json
from .manifest import MANIFEST, Stage
from .progress import clock, progress_bar, say
from .run import Run
from .run_config import RunConfig, Shares, plan_minutes

DONE, READY = "run.json", "ready.json"
_POLL_S = 5.0


def run_all(config: RunConfig) -> dict[str, Any]:
    """Command `run`: every stage that is not done yet, within the time budget; returns the report.

    A run that is finished is recognised from small files alone, without loading any library.
    """
    run = Run(config)
    if finished(run):
        say(f"everything is done: {run.folder}")
        return _result(run.folder)
    assert config.minutes is not None
    from .data_recipes.regenerate import answer_seconds

    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise DraftsmithError("'draftsmith run' starts its own processes: call it without torchrun, with --gpus N")
    if config.node_rank > 0:
        return _join(run)
    from .sizing import announce, choose_mode, whose_answers

    evaluation.check_trees(config)
    evaluation.check_benchmarks(config)
    run.check_start()
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
    trained = stages.has_weights(run)  # then only measuring is left
    (run.folder / READY).unlink(missing_ok=True)
    if not trained:
        with _failure_is_said(run):
            do("prepare", lambda: stages.prepare(run))
    following = [] if trained else _data_stages(run)
    for number, (name, work) in enumerate(following):
        _say_ready(run, following, number)
        do(name, functools.partial(work, shares))
    _say_ready(run, following, len(following))
    do("train", lambda: stages.train(run, _train_budget(run, shares, before)))
    do("eval", lambda: evaluation.evaluate(run).stage)
    write_json(
        run.folder / DONE,
        {"key": run_key(run), "stages": _digests(stages.stage_folders(run, evaluation.eval_folder(run)))},
    )
    say("spent: " + ", ".join(f"{name} {clock(seconds)}" for name, seconds in spent.items()))
    return _result(run.folder)


_DataStage = tuple[str, Callable[[Shares], Stage]]


def _data_stages(run: Run) -> list[_DataStage]:
    """What follows `prepare`, in order, with what it takes of the time."""
    if run.answers == "dataset":
        return [("collect", lambda shares: stages.collect(run, shares.regenerate))]
    return [
        ("regenerate", lambda shares: stages.regenerate(run, shares.regenerate)),
        ("collect", lambda _: stages.collect(run)),
    ]


def _say_ready(run: Run, following: list[_DataStage], done: int) -> None:
    """Tell the other machines that prompts are there, which stages they are to share, and how many are done."""
    alone = [] if not run.config.regenerate.servers else ["regenerate"]
    alone += ["collect"] if run.online else []
    names = [name for name, _ in following]
    write_json(run.folder / READY, {
        "key": run_key(run), "answers": run.answers, "online": run.online, "head_init": run.head_init,
        "shared": [name for name in names if name not in alone], "stages": names, "done": names[:done],
    })  # fmt: skip


@contextlib.contextmanager
def _failure_is_said(run: Run) -> Iterator[None]:
    """Tell the other machines why nothing more will come."""
    try:
        yield
    except BaseException as error:
        write_json(run.folder / READY, {"key": run_key(run), "failed": str(error) or type(error).__name__})
        raise


def _join(run: Run) -> dict[str, Any]:
    """On machines after the first: wait for the prompts that machine 0 makes in the shared folder, then do a share."""
    assert run.config.minutes is not None
    ready = _wait_for_machine_0(run, lambda said: True)
    run.answers, run.online, run.head_init = ready["answers"], ready["online"], ready["head_init"]
    shares = plan_minutes(run.config.minutes)
    for number, (name, work) in enumerate(_data_stages(run)):
        if name in ready["shared"]:
            _wait_for_machine_0(run, functools.partial(_has_done, number))
            work(shares)
    _wait_for_machine_0(run, lambda said: said["stages"] == said["done"])
    stage = stages.train(run, None)
    return {"stage": "train", "folder": str(stage.folder), **(stage.manifest or {})}


def _wait_for_machine_0(run: Run, enough: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """Wait until machine 0 has said what is `enough`; returns what it said.

    Raises:
        DraftsmithError: it failed.
    """
    with progress_bar("waiting for machine 0", unit="seconds") as bar:
        while (said := _said(run)) is None or "failed" in said or not enough(said):
            if said is not None and "failed" in said:
                raise DraftsmithError(f"machine 0 stopped: {said['failed']}")
            if said is None and (run.folder / READY).exists():
                bar.note("it runs with another configuration, other data or other code than this one")
            time.sleep(_POLL_S)
            bar.advance(_POLL_S)
    return said


def _has_done(count: int, said: dict[str, Any]) -> bool:
    return len(said["done"]) >= count


def _said(run: Run) -> dict[str, Any] | None:
    """What machine 0 said of this very configuration."""
    path = run.folder / READY
    said: dict[str, Any] | None = read_json(path) if path.exists() else None
    return said if said is not None and said["key"] == run_key(run) else None


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
    folders = stages.stage_folders(run, evaluation.eval_folder(run))
    if not all(path.exists() for path in [*needed, *(f / MANIFEST for f in folders.values())]):
        return False
    done = read_json(run.folder / DONE)
    return bool(done["key"] == run_key(run) and done["stages"] == _digests(folders))


def _digests(folders: dict[str, Path]) -> dict[str, str]:
    return {name: sha256_json(read_json(folder / MANIFEST)["identity"]) for name, folder in folders.items()}


def run_key(run: Run) -> str:
    """Hash of all that a run depends on and that is cheap to read: configuration, target, data files, this code."""
    tree = {k: v for k, v in run.config.tree().items() if k not in _NO_MATTER}
    source = dataclasses.asdict(run.source)
    init = None if run.config.head_init is None else Path(run.config.head_init)  # a hub id is no path that exists
    roots = [run.config.data, init, *(Path(name).expanduser() for name in run.config.eval.bench)]
    files = [f for root in roots if root for f in [root, *sorted(root.rglob("*"))] if f.is_file()]
    package = Path(__file__).parent
    code = [package / name for name in _FILES] + [f for d in _FOLDERS for f in sorted((package / d).rglob("*.py"))]
    return sha256_json({
        "config": tree,
        "source": source,
        "files": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        "code": [sha256_file(f) for f in code],
    })  # fmt: skip


_NO_MATTER = ("runs", "gpus", "nnodes", "node_rank", "master", "push")
"""Settings that say where a run lies, what does its work and where its head goes, not what comes out."""
_FILES = (
    "evaluation.py",
    "files.py",
    "manifest.py",
    "pipeline.py",
    "run.py",
    "run_config.py",
    "sizing.py",
    "stages.py",
)
_FOLDERS = ("heads", "data_recipes", "eval", "train")


def _result(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = read_json(folder / REPORT)
    return {**report, "report": str(folder / REPORT), "page": str(folder / PAGE)}


_FOR_HEAD = ("regenerate", "collect", "train")
"""Commands that work for one head: the first of their processes looks at what it starts from, unless the process that
started them has looked."""


def _stage_command(name: str, work: Callable[[Run], Stage]) -> Callable[[RunConfig], dict[str, Any]]:
    def command(config: RunConfig) -> dict[str, Any]:
        run = Run(config)
        if name in _FOR_HEAD and stages.launched_ranks()[0] == 0 and stages.COMMAND_VARIABLE not in os.environ:
            run.check_start()
        with stages.measured(name):
            stage = work(run)
        if stage.manifest is None:  # rank 0 finishes it, this one has done its part
            return {"stage": name, "folder": str(stage.folder), "record": {"seconds": 0.0}}
        return {"stage": name, "folder": str(stage.folder), **stage.manifest}

    return command


def _eval_command(config: RunConfig, place: str | None = None, out: Path | None = None) -> dict[str, Any]:
    """Measure, and show this very evaluation, though another one of the head may have been shown before.

    Args:
        place: folder or hub id of a head that is measured instead of the configuration's.
        out: where the result goes.
    """
    if place is None:
        evaluation.check_trees(config)
    run = Run(config)
    with stages.measured("eval"):
        if place is None:
            found = evaluation.evaluate(run, out, show=True)
        else:
            found = evaluation.evaluate_place(run, place, out)
    return _result(found.folder)


def _run_and_push(config: RunConfig) -> dict[str, Any]:
    """Command `run`; then, where that is asked for, the push of its head, by the first machine alone."""
    if config.push is None or config.node_rank > 0:
        return run_all(config)
    from .push import check_asked, push_run

    check_asked(config.push, config.head)
    result = run_all(config)
    return {**result, "push": push_run(Path(result["report"]).parent, config.push, config.model)}


COMMANDS: dict[str, Callable[..., dict[str, Any]]] = {
    "run": _run_and_push,
    "prepare": _stage_command("prepare", stages.prepare),
    "regenerate": _stage_command("regenerate", lambda run: stages.regenerate(run, run.config.minutes)),
    "collect": _stage_command("collect", lambda run: stages.collect(run, run.config.minutes)),
    "train": _stage_command("train", lambda run: stages.train(run, None)),
    "eval": _eval_command,
}
"""What the command line calls: configuration in (and, of `eval`, where the head and the result lie), plain JSON values
out."""
