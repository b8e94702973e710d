"""The stages of a run before it is measured (`evaluation.py`): prompts, answers, features, vocabulary, training.

Every stage decides by its own manifest what is left to do; this module knows where things lie. Nothing heavy is
imported before there is work.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftsmithError
from .files import read_json, write_text
from .manifest import MANIFEST, PLAN, Stage
from .memory import begin_peak, give_back
from .progress import say
from .run import Run
from .run_config import LIMITS, RunConfig, plan_minutes, to_yaml

if TYPE_CHECKING:
    from .data_recipes.collect import CollectSettings
    from .data_recipes.prepare import PrepareSettings
    from .data_recipes.recipe import Recipe

SECONDS_VARIABLE = "DRAFTSMITH_TRAIN_SECONDS"
"""Hands the time that is left to the processes that train."""
COMMAND_VARIABLE = "DRAFTSMITH_COMMAND"
"""Hands them what the user typed."""
LEFT_VARIABLE = "DRAFTSMITH_LEFT"
"""Names the file by which they say that they left training in order."""


def prepare(run: Run) -> Stage:
    """Recipe or own data to conversations as the target reads them."""
    from .data_recipes.prepare import prepare as stage

    return stage(prepare_settings(run), recipe_of(run.config), run.data, run.info, lambda: load_tokenizer_of(run))


def prepare_settings(run: Run) -> PrepareSettings:
    """Settings of the stage `prepare`."""
    from .data_recipes.prepare import PrepareSettings

    c = run.config
    shared: dict[str, Any] = {"answers": run.answers, "template_kwargs": c.template_kwargs}
    return PrepareSettings(**c.prepare.model_dump(), **shared, max_new_tokens=c.regenerate.max_new_tokens)


def recipe_of(config: RunConfig) -> Recipe:
    """The recipe that a configuration names, or that of its own data."""
    from .data_recipes.recipe import load_recipe, recipe_from_path

    return recipe_from_path(config.data) if config.data is not None else load_recipe(config.recipe)


def load_tokenizer_of(run: Run) -> Any:
    """The target's tokenizer, without its weights."""
    from .heads.target import load_tokenizer

    return load_tokenizer(run.reached.location, run.hub_revision)


def regenerate(run: Run, minutes: float | None) -> Stage:
    """Prompts to the target's answers, states recorded on the way; on all devices, unless servers answer."""
    if _is_shared(run) and not run.config.regenerate.servers:
        return _in_processes(run, "regenerate", run.data / "answers", minutes)
    from .data_recipes.regenerate import RegenerateSettings
    from .data_recipes.regenerate import regenerate as stage

    c = run.config
    settings = RegenerateSettings(**c.regenerate.model_dump(), template_kwargs=c.template_kwargs)
    rank, world = launched_ranks()
    record = None if run.online else collect_settings(run)
    return stage(
        settings, run.data, run.info, run.load_target, minutes, record, rank=rank, world=world,
        load_tokenizer=lambda: load_tokenizer_of(run), model=run.source.hub_id or run.source.name,
    )  # fmt: skip


def collect(run: Run, minutes: float | None = None) -> Stage:
    """States for documents that have none; for online training the documents alone."""
    if run.online:
        return _collect_tokens(run)
    if _is_shared(run):
        return _in_processes(run, "collect", run.features, minutes)
    from .data_recipes.collect import collect as stage

    rank, world = launched_ranks()
    return stage(collect_settings(run), run.data, run.info, run.load_target, rank=rank, world=world, minutes=minutes)


def _collect_tokens(run: Run) -> Stage:
    from .heads.loading import config_value
    from .train.online import collect_tokens

    vocab_size = config_value(run.reached.location, run.hub_revision, "vocab_size")
    return collect_tokens(run.data, run.info, vocab_size, run.answers, launched_ranks()[0])


def collect_settings(run: Run) -> CollectSettings:
    """What is kept of the target's states."""
    from .data_recipes.collect import CollectSettings

    return CollectSettings(layer_ids=run.layer_ids, answers=run.answers, **run.config.collect.model_dump())


def launched_ranks() -> tuple[int, int]:
    """Rank and number of the processes that share a data stage: those that a launcher started, or one alone."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def train(run: Run, minutes: float | None) -> Stage:
    """Fit the head: here, or in as many processes as there are devices.

    Args:
        minutes: what is really left for it; None takes the settings' own limits.
    """
    if has_weights(run):
        say(f"{run.config.weights_of} is trained already: {run.training}")
        return Stage(run.training, read_json(run.training / MANIFEST)["identity"])
    seconds = None if minutes is None else 60 * minutes
    run.release_target()
    give_back()
    if not _is_shared(run):
        record = _train_here(run, seconds)
        if LEFT_VARIABLE in os.environ and os.environ.get("LOCAL_RANK", "0") == "0":
            Path(os.environ[LEFT_VARIABLE]).touch()
        if not record["finished"]:
            raise SystemExit(0)  # stopped by a signal, everything saved and said
        return Stage(run.training, read_json(run.training / MANIFEST)["identity"])
    return _in_processes(run, "train", run.training, run.config.minutes, seconds)


def has_weights(run: Run) -> bool:
    """Whether the head whose weights this one takes is trained already.

    How long it was trained counts only where the configuration says it itself, not where a run's budget decided it;
    neither do answers that were made since.

    Raises:
        DraftsmithError: its training is there, finished or not, by other settings than this configuration's: with these
            it would be set aside, though the user asked for another head.
    """
    if run.config.weights_of is None or not (run.training / PLAN).exists():
        return False
    there = read_json(run.training / PLAN)
    if there["head"]["target_fingerprint"] != run.info.fingerprint:
        return False  # the target has changed: every head of it is trained anew
    from .train.warm import read_start, refuse_other_start

    place, init = (run.reached.location, run.hub_revision), run.head_init
    start = None if init is None else read_start(init, run.training, *place)
    refuse_other_start(f"{run.config.head} takes the weights of {run.config.weights_of}", run.training, start)
    by_budget = LIMITS if limited_by_budget(run.config) else set()
    _refuse_other(run, "train", run.config.train.identity(), there["train"], by_budget)
    if not (run.features / MANIFEST).exists():
        return False  # what the head's config is derived from: asked again once they are there
    from .train.stage import prepare_head

    config, *_ = prepare_head(run.recipe, *place, run.features, run.names, online=run.online, start=start)
    _refuse_other(run, "head", config.to_dict(), there["head"], {"draft_vocab_sha256", "trained_length"})
    return (run.training / MANIFEST).exists()


def _refuse_other(run: Run, group: str, wanted: dict[str, Any], there: dict[str, Any], free: set[str]) -> None:
    """Name the first setting, other than the free ones, by which the weights were not trained that this run takes."""
    for key in [*wanted, *sorted(there.keys() - wanted.keys())]:
        if key not in free and wanted.get(key) != there.get(key):
            option = "options." if key in run.config.head_options.options and group == "head" else ""
            raise DraftsmithError(
                f"{run.config.head} takes the weights of {run.config.weights_of}, and those in {run.training} were "
                f"trained with {group}.{option}{key} = {there.get(key)!r}, not {wanted.get(key)!r}: give RUN=NAME "
                f"(--run NAME) to train others beside them, or leave {group}.{option}{key} as it was"
            )


def limited_by_budget(config: RunConfig) -> bool:
    """Whether the length of training follows from the run's minutes."""
    return config.minutes is not None and config.train.minutes == round(plan_minutes(config.minutes).train, 3)


def _train_here(run: Run, seconds: float | None) -> dict[str, Any]:
    from .train.stage import train_stage

    called, recorded = run.names
    return train_stage(
        run.recipe,
        location=run.reached.location,
        revision=run.hub_revision,
        features=run.features,
        folder=run.training,
        target_id=called,
        recorded_revision=recorded,
        online=run.online,
        head_init=run.head_init,
        resume_command=command_line(),
        budget_seconds=float(os.environ[SECONDS_VARIABLE]) if SECONDS_VARIABLE in os.environ else seconds,
    )


_TRIES = 4
"""A data stage whose process died is started again as long as it gets on: by a death it loses an unfinished chunk."""
_MANIFEST_S = 600.0
"""How long another machine's manifest may take: rank 0 waits for stragglers, and network file systems are slow."""


def _is_shared(run: Run) -> bool:
    """Whether a stage is done by several processes that are still to be started.

    Raises:
        DraftsmithError: Slurm has started several that know nothing of each other.
    """
    from .train.launch import refuse_lonely_tasks, visible_devices

    refuse_lonely_tasks(run.config.nnodes)
    launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    return not launched and (run.config.gpus or visible_devices()) * run.config.nnodes > 1


def _in_processes(run: Run, command: str, folder: Path, minutes: float | None, seconds: float | None = None) -> Stage:
    """Start this program's `command` under torchrun, with the very same configuration; returns its stage.

    Args:
        folder: of the stage.
        minutes: the configuration's, for this command.
        seconds: what is left of the time for training.
    """
    from .train.interrupt import run_passing_signals
    from .train.launch import torchrun_command, torchrun_environment, visible_devices

    run.release_target()  # before other processes take the devices' memory
    c = run.config
    mode = c.train.model_copy(update={"mode": "online" if run.online else "offline"})
    same = c.model_copy(update={"answers": run.answers, "train": mode, "minutes": minutes, "head_init": run.head_init})
    file = run.folder / (f"{command}.node{c.node_rank}.yaml" if c.nnodes > 1 else f"{command}.yaml")
    write_text(file, to_yaml(same))
    processes = c.gpus or visible_devices()
    line = torchrun_command(
        "draftsmith.cli", [command, "--config", str(file)], processes=processes,
        nnodes=c.nnodes, node_rank=c.node_rank, master=c.master,
    )  # fmt: skip
    left = file.with_suffix(".left")
    left.unlink(missing_ok=True)
    environment = torchrun_environment(processes)
    environment |= {COMMAND_VARIABLE: command_line(), LEFT_VARIABLE: str(left)}
    if seconds is not None:
        environment[SECONDS_VARIABLE] = str(seconds)
    for attempt in range(_TRIES):
        before = len(list(folder.glob("chunk-*")))
        code, asked = run_passing_signals(line, environment)
        gets_on = command != "train" and len(list(folder.glob("chunk-*"))) > before
        if not code or asked is not None or left.exists() or not gets_on or attempt + 1 == _TRIES:
            break
        say(f"{command}: a process died; what was finished is kept, all are started again")
    if not code and c.node_rank > 0:
        _wait_for_manifest(folder)
    done, in_order = (folder / MANIFEST).exists(), left.exists()
    left.unlink(missing_ok=True)
    if in_order and (asked is not None or not done):
        raise SystemExit(0)  # asked to stop, here or on another machine: everything saved and said
    if code or asked is not None or not done:
        say(f"{command} did not finish; what was saved is kept; to go on: {command_line()}")
        raise SystemExit(128 + asked if asked is not None else code if code > 0 else 128 - code if code else 1)
    return Stage(folder, read_json(folder / MANIFEST)["identity"])


def _wait_for_manifest(folder: Path) -> None:
    """Wait until machine 0 has finished a stage whose work is done here."""
    until = time.monotonic() + _MANIFEST_S
    while not (folder / MANIFEST).exists() and time.monotonic() < until:
        time.sleep(1)


def command_line() -> str:
    """What the user typed, to be typed again to go on."""
    if COMMAND_VARIABLE in os.environ:
        return os.environ[COMMAND_VARIABLE]
    if Path(sys.argv[0]).name not in ("draftsmith", "cli.py"):
        return "the same command again"
    typed = shlex.join(["draftsmith", *sys.argv[1:]])
    return f"{typed} (or the same make command)" if "MAKELEVEL" in os.environ else typed


def stage_folders(run: Run, evaluation: Path) -> dict[str, Path]:
    """Folder of each stage that this run goes through, in their order."""
    folders = {
        "prepare": run.data / "prompts",
        "regenerate": run.data / "answers",
        "collect": run.features,
        "train": run.training,
        "eval": evaluation,
    }
    if run.answers == "dataset":
        del folders["regenerate"]
    return folders


def stage_records(run: Run, evaluation: Path) -> dict[str, dict[str, Any]]:
    """What each finished stage noted."""
    folders = stage_folders(run, evaluation)
    return {n: read_json(f / MANIFEST)["record"] for n, f in folders.items() if (f / MANIFEST).exists()}


@contextlib.contextmanager
def measured(name: str) -> Iterator[None]:
    """Say what begins, and give the stage a peak memory of its own."""
    say(f"── {name}")
    begin_peak()  # the target of the stage before is gone, its pages aren't yet
    yield
