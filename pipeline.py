"""The stages in a row: prompts, answers, features, vocabulary, training, measurement, report.

Every stage decides by its own manifest what is left to do; this module knows where things lie, in which order they come
and how a time budget is shared. Nothing heavy is imported before there is work: a finished run says so at once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftsmithError
from .files import probe_writable, read_json, sha256_file, sha256_json, write_json, write_text
from .heads.resolve import TargetSource, require_reachable, resolve_target
from .manifest import MANIFEST, Stage
from .progress import clock, progress_bar, say
from .run_config import RunConfig, Shares, plan_minutes, to_yaml

if TYPE_CHECKING:
    from .data_recipes.layout import TargetInfo
    from .heads.target import Target

EVAL_VERSION = 1
DONE, READY = "run.json", "ready.json"
SECONDS_VARIABLE = "DRAFTSMITH_TRAIN_SECONDS"
"""Hands the time that is left to the processes that train."""
REPORT, PAGE = "report.json", "report.html"


class Run:
    """Where one run lies, and its target, read or loaded once when a stage first asks for it."""

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        probe_writable(config.runs)
        self.source: TargetSource = resolve_target(config.model, notify=say)
        home = config.runs / self.source.name
        self.data = home / "data" / config.recipe
        self.folder = home / (config.head + (f"@{config.run}" if config.run else ""))

    @functools.cached_property
    def reached(self) -> TargetSource:
        """The source, its revision pinned; a hub that can't be reached is an error here."""
        return require_reachable(self.source)

    @functools.cached_property
    def info(self) -> TargetInfo:
        """What identities need of the target, read without loading it."""
        from .data_recipes.layout import TargetInfo

        return TargetInfo.read(self.reached.location, self.reached.revision if not self.source.is_local else None)

    @functools.cached_property
    def layer_ids(self) -> tuple[int, ...]:
        """Aux layers that the head reads."""
        from .heads.config import default_layer_ids
        from .heads.target import resolve_folder

        if self.config.head_options.layer_ids is not None:
            return tuple(self.config.head_options.layer_ids)
        values = read_json(resolve_folder(self.reached.location, self.hub_revision) / "config.json")
        return tuple(default_layer_ids(values.get("text_config", values)["num_hidden_layers"]))

    @property
    def hub_revision(self) -> str | None:
        """Revision that `from_pretrained` understands: none for a local folder."""
        return None if self.source.is_local else self.reached.revision

    def load_target(self) -> Target:
        """Load the target once and keep it for later stages."""
        if "target" not in self.__dict__:
            say(f"loading the target {self.source.name}")
        return self.target

    @functools.cached_property
    def target(self) -> Target:
        """The loaded target."""
        from .heads.target import Target

        target = Target.load(self.reached.location, revision=self.hub_revision)
        target.check_trainable()
        return target

    def release_target(self) -> None:
        """Free the target's memory, on the devices, too, before training takes them."""
        if self.__dict__.pop("target", None) is not None:
            import torch

            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()

    def minutes_since_start(self) -> float:
        """Minutes of this process's work so far."""
        return (time.monotonic() - self.started) / 60


def prepare(run: Run) -> Stage:
    """Recipe or own data to prompts."""
    from .data_recipes.prepare import PrepareSettings
    from .data_recipes.prepare import prepare as stage
    from .data_recipes.recipe import load_recipe, recipe_from_path
    from .heads.target import load_tokenizer

    c = run.config
    settings = PrepareSettings(**c.prepare.model_dump(), max_new_tokens=c.regenerate.max_new_tokens)
    recipe = recipe_from_path(c.data) if c.data is not None else load_recipe(c.recipe)
    return stage(settings, recipe, run.data, run.info, lambda: load_tokenizer(run.reached.location, run.hub_revision))


def regenerate(run: Run, minutes: float | None) -> Stage:
    """Prompts to the target's answers, states recorded on the way."""
    from .data_recipes.regenerate import RegenerateSettings
    from .data_recipes.regenerate import regenerate as stage

    settings = RegenerateSettings(**run.config.regenerate.model_dump())
    return stage(settings, run.data, run.info, run.load_target, minutes, run.layer_ids)


def collect(run: Run) -> Stage:
    """States for answers that have none."""
    from .data_recipes.collect import CollectSettings
    from .data_recipes.collect import collect as stage

    settings = CollectSettings(layer_ids=run.layer_ids, **run.config.collect.model_dump())
    return stage(settings, run.data, run.info, run.load_target)


def train(run: Run, minutes: float | None) -> Stage:
    """Fit the head: here, or in as many processes as there are devices.

    Args:
        minutes: what is really left for it; None takes the settings' own limits.
    """
    from .train.launch import visible_devices
    from .train.ranks import under_launcher

    processes = run.config.gpus or visible_devices()
    seconds = None if minutes is None else 60 * minutes
    run.release_target()
    if under_launcher() or processes * run.config.nnodes == 1:
        record = _train_here(run, seconds)
        if not record["finished"]:
            raise SystemExit(record["exit_code"])  # stopped by a signal, everything saved and said
    else:
        _train_in_processes(run, processes, seconds)
    return Stage(run.folder / "train", read_json(run.folder / "train" / MANIFEST)["identity"])


def _train_here(run: Run, seconds: float | None) -> dict[str, Any]:
    from .train.settings import HeadRecipe
    from .train.stage import train_stage

    return train_stage(
        HeadRecipe(head=run.config.head_options, train=run.config.train),
        location=run.reached.location,
        revision=run.hub_revision,
        features=run.data / "features",
        folder=run.folder / "train",
        target_id=run.source.hub_id or run.source.name,
        recorded_revision=run.reached.revision,
        budget_seconds=float(os.environ[SECONDS_VARIABLE]) if SECONDS_VARIABLE in os.environ else seconds,
    )


def _train_in_processes(run: Run, processes: int, seconds: float | None) -> None:
    """Start this command line's `train` under torchrun, with the very same configuration."""
    from .train.launch import torchrun_command

    c = run.config
    file = run.folder / (f"config.node{c.node_rank}.yaml" if c.nnodes > 1 else "config.yaml")
    write_text(file, to_yaml(c))
    command = torchrun_command(
        "draftsmith.cli", ["train", "--config", str(file)],
        processes=processes, nnodes=c.nnodes, node_rank=c.node_rank, master=c.master,
    )  # fmt: skip
    environment = dict(os.environ)
    if seconds is not None:
        environment[SECONDS_VARIABLE] = str(seconds)
    code = subprocess.run(command, env=environment, stdout=sys.stderr, check=False).returncode
    if code or not (run.folder / "train" / MANIFEST).exists():
        say("training did not finish; what was saved is kept: run the same command again to go on")
        raise SystemExit(code)


def evaluate(run: Run) -> Stage:
    """Measure the best checkpoint and write the report."""
    settings = run.config.eval
    checkpoint = run.folder / "train" / "checkpoints" / "best"
    if not (checkpoint / "model.safetensors").exists():
        raise DraftsmithError(f"{run.folder} holds no trained head: run 'draftsmith train' with the same options first")
    folder = run.folder / "eval" / f"{settings.prompts}x{settings.max_new_tokens}"
    weights = sha256_file(checkpoint / "model.safetensors")
    identity = {
        "head": weights,
        "vocabulary": sha256_file(checkpoint / "vocab.safetensors"),
        "settings": settings.model_dump(),
        "fingerprint": run.info.fingerprint,
    }
    stage = Stage.open(folder, "eval", EVAL_VERSION, identity)
    if stage.manifest is None or not (folder / REPORT).exists():
        from .eval.harness import EvalSettings
        from .eval.harness import evaluate as measure
        from .eval.journal import Journal
        from .heads.checkpoint import load_head

        target, head = run.load_target(), load_head(checkpoint)
        journal = Journal.open(folder / "journal.jsonl")
        report = measure(target, head, EvalSettings(**settings.model_dump()), journal)
        write_json(folder / REPORT, {**report, "head_sha256": weights})
        stage.finish(report=str(folder / REPORT))
        publish(run, folder)
    elif not _published(run, weights):
        publish(run, folder)
    return stage


def _published(run: Run, weights: str) -> bool:
    """Whether the run's folder shows a report on this head; a fuller one that `eval` made counts, too."""
    shown = [run.folder / REPORT, run.folder / PAGE]
    return all(path.exists() for path in shown) and read_json(shown[0])["head_sha256"] == weights


def publish(run: Run, folder: Path) -> None:
    """Put this evaluation's report into the run's folder, with the page that shows it."""
    from .eval.report.page import write_page

    report = read_json(folder / REPORT)
    write_json(run.folder / REPORT, report)
    write_page(run.folder / PAGE, report, _curve(run.folder / "train" / "metrics.jsonl"), stage_records(run, folder))


def _curve(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def stage_folders(run: Run, evaluation: Path) -> dict[str, Path]:
    """Folder of each stage, in their order."""
    return {
        "prepare": run.data / "prompts",
        "regenerate": run.data / "answers",
        "collect": run.data / "features",
        "train": run.folder / "train",
        "eval": evaluation,
    }


def stage_records(run: Run, evaluation: Path) -> dict[str, dict[str, Any]]:
    """What each finished stage noted."""
    folders = stage_folders(run, evaluation)
    return {n: read_json(f / MANIFEST)["record"] for n, f in folders.items() if (f / MANIFEST).exists()}


@contextlib.contextmanager
def measured(name: str) -> Iterator[None]:
    """Say what begins, and give the stage a peak memory of its own."""
    say(f"── {name}")
    # Linux forgets the process's peak, so that each stage's manifest holds that stage's own; elsewhere it only grows.
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    yield


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
    shares = plan_minutes(config.minutes)
    say(
        f"{config.head} for {run.source.name}, {config.minutes:g} min: answers {clock(60 * shares.regenerate)}, "
        f"training {clock(60 * shares.train)}, measuring about {clock(60 * shares.evaluate)}"
    )
    stages: dict[str, Stage] = {}
    spent: dict[str, float] = {}

    def do(name: str, work: Callable[[], Stage]) -> None:
        started = time.monotonic()
        with measured(name):
            stages[name] = work()
        spent[name] = time.monotonic() - started

    before = min(answer_seconds(run.data) / 60, shares.regenerate)  # answers of a longer run cost this one no more
    do("prepare", lambda: prepare(run))
    do("regenerate", lambda: regenerate(run, shares.regenerate))
    do("collect", lambda: collect(run))
    write_json(run.folder / READY, {"key": run_key(run)})
    do("train", lambda: train(run, _train_budget(run, shares, before)))
    do("eval", lambda: evaluate(run))
    write_json(run.folder / DONE, {"key": run_key(run), "stages": {n: s.digest for n, s in stages.items()}})
    say("spent: " + ", ".join(f"{name} {clock(seconds)}" for name, seconds in spent.items()))
    return _result(run)


def _join(run: Run) -> dict[str, Any]:
    """On machines after the first: wait for the data that machine 0 makes in the shared folder, then train with it."""
    with progress_bar("waiting for machine 0's features", unit="seconds") as bar:
        while not _is_ready(run):
            time.sleep(5)
            bar.advance(5)
    stage = train(run, None)
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
    if run.config.train.minutes != round(shares.train, 3):
        return None
    return shares.train_minutes(before + run.minutes_since_start())


def finished(run: Run) -> bool:
    """Whether this very configuration was run to its end, by this code, and all results are still there."""
    evaluation = run.folder / "eval" / f"{run.config.eval.prompts}x{run.config.eval.max_new_tokens}"
    needed = [run.folder / DONE, run.folder / REPORT, run.folder / PAGE]
    folders = stage_folders(run, evaluation)
    if not all(path.exists() for path in [*needed, *(f / MANIFEST for f in folders.values())]):
        return False
    done = read_json(run.folder / DONE)
    digests = {name: sha256_json(read_json(f / MANIFEST)["identity"]) for name, f in folders.items()}
    return bool(done["key"] == run_key(run) and done["stages"] == digests)


def run_key(run: Run) -> str:
    """Hash of all that a run depends on and that is cheap to read: configuration, target, data files, this code."""
    tree = {k: v for k, v in run.config.tree().items() if k not in ("runs", "gpus", "nnodes", "node_rank", "master")}
    source = dataclasses.asdict(run.source)
    data = run.config.data
    files = [] if data is None else [f for f in [data, *sorted(data.rglob("*"))] if f.is_file()]
    package = Path(__file__).parent
    code = [package / "pipeline.py", *(f for d in _CODE for f in sorted((package / d).rglob("*.py")))]
    return sha256_json({
        "config": tree,
        "source": source,
        "data": [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files],
        "code": [sha256_file(f) for f in code],
    })  # fmt: skip


_CODE = ("heads", "data_recipes", "eval", "train")


def _result(run: Run) -> dict[str, Any]:
    report: dict[str, Any] = read_json(run.folder / REPORT)
    return {**report, "report": str(run.folder / REPORT), "page": str(run.folder / PAGE)}


def _stage_command(name: str, work: Callable[[Run], Stage]) -> Callable[[RunConfig], dict[str, Any]]:
    def command(config: RunConfig) -> dict[str, Any]:
        run = Run(config)
        with measured(name):
            stage = work(run)
        assert stage.manifest is not None
        return {"stage": name, "folder": str(stage.folder), **stage.manifest}

    return command


def _eval_command(config: RunConfig) -> dict[str, Any]:
    run = Run(config)
    with measured("eval"):
        stage = evaluate(run)
    publish(run, stage.folder)
    return _result(run)


COMMANDS: dict[str, Callable[[RunConfig], dict[str, Any]]] = {
    "run": run_all,
    "prepare": _stage_command("prepare", prepare),
    "regenerate": _stage_command("regenerate", lambda run: regenerate(run, run.config.minutes)),
    "collect": _stage_command("collect", collect),
    "train": _stage_command("train", lambda run: train(run, None)),
    "eval": _eval_command,
}
"""What the command line calls: configuration in, plain JSON values out."""
