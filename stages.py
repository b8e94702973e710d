"""The stages of a run: prompts, answers, features, vocabulary and training, measurement and report.

Every stage decides by its own manifest what is left to do; this module knows where things lie. Nothing heavy is
imported before there is work.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftsmithError
from .eval.report import PAGE, REPORT
from .files import probe_writable, read_json, sha256_file, write_json, write_text
from .heads.resolve import TargetSource, require_reachable, resolve_target
from .manifest import MANIFEST, PLAN, Stage
from .progress import say
from .run_config import LIMITS, RunConfig, plan_minutes, to_yaml

if TYPE_CHECKING:
    from .data_recipes.layout import TargetInfo
    from .heads.target import Target

EVAL_VERSION = 2
SECONDS_VARIABLE = "DRAFTSMITH_TRAIN_SECONDS"
"""Hands the time that is left to the processes that train."""


class Run:
    """Where one run lies, and its target, read or loaded once when a stage first asks for it.

    Attributes:
        data: folder of prompts, answers and features, which all heads of a target share.
        folder: of the head: its evaluations and reports.
        training: of the stage that trains it; another head's where that one's weights are only decoded another way.
    """

    def __init__(self, config: RunConfig) -> None:
        self.config = config
        self.started = time.monotonic()
        probe_writable(config.runs)
        self.source: TargetSource = resolve_target(config.model, notify=say)
        home = config.runs / self.source.name
        self.data = home / "data" / config.recipe
        run = f"@{config.run}" if config.run else ""
        self.folder = home / (config.head + run)
        self.training = home / ((config.weights_of or config.head) + run) / "train"

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

    def load_tuned(self, adapter: Path) -> Target:
        """Load the target with an adapter merged into its weights, in place of the plain one."""
        from .heads.target import Target

        self.release_target()
        say(f"loading the target {self.source.name} as it was tuned with the head")
        return Target.load(self.reached.location, revision=self.hub_revision, adapter=adapter)

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

    if has_weights(run):
        say(f"{run.config.weights_of} is trained already: {run.training}")
        return Stage(run.training, read_json(run.training / MANIFEST)["identity"])
    processes = run.config.gpus or visible_devices()
    seconds = None if minutes is None else 60 * minutes
    run.release_target()
    if under_launcher() or processes * run.config.nnodes == 1:
        record = _train_here(run, seconds)
        if not record["finished"]:
            raise SystemExit(record["exit_code"])  # stopped by a signal, everything saved and said
    else:
        _train_in_processes(run, processes, seconds)
    return Stage(run.training, read_json(run.training / MANIFEST)["identity"])


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
    by_budget = LIMITS if limited_by_budget(run.config) else set()
    _refuse_other(run, "train", run.config.train.model_dump(), there["train"], by_budget)
    if not (run.data / "features" / MANIFEST).exists():
        return False  # what the head's config is derived from: asked again once they are there
    from .train.settings import HeadRecipe
    from .train.stage import prepare_head

    recipe = HeadRecipe(head=run.config.head_options, train=run.config.train)
    names = (run.source.hub_id or run.source.name, run.reached.revision)
    config, *_ = prepare_head(recipe, run.reached.location, run.hub_revision, run.data / "features", names)
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
    from .train.settings import HeadRecipe
    from .train.stage import train_stage

    return train_stage(
        HeadRecipe(head=run.config.head_options, train=run.config.train),
        location=run.reached.location,
        revision=run.hub_revision,
        features=run.data / "features",
        folder=run.training,
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
    if code or not (run.training / MANIFEST).exists():
        say("training did not finish; what was saved is kept: run the same command again to go on")
        raise SystemExit(code)


def check_trees(config: RunConfig) -> None:
    """Refuse trees that can't be read before any work is done; raises DraftsmithError."""
    from .eval.harness import EvalSettings

    EvalSettings(**config.eval.model_dump())


def eval_folder(run: Run) -> Path:
    """Where the evaluation with these settings lies."""
    return run.folder / "eval" / f"{run.config.eval.prompts}x{run.config.eval.max_new_tokens}"


def evaluate(run: Run) -> Stage:
    """Measure the best checkpoint and write the report."""
    from .eval.trained import BEST, adapter_of

    settings = run.config.eval
    checkpoint = run.training / BEST
    if not (checkpoint / "model.safetensors").exists():
        raise DraftsmithError(
            f"{run.training} holds no trained head: run 'draftsmith train' with the same options first"
        )
    folder, adapter = eval_folder(run), adapter_of(checkpoint)
    weights = sha256_file(checkpoint / "model.safetensors")
    identity = {
        "head": weights,
        "files": {
            str(path.relative_to(checkpoint)): sha256_file(path)
            for path in sorted(checkpoint.rglob("*"))
            if path.name in _DECODED
        },
        "settings": settings.model_dump(),
        "fingerprint": run.info.fingerprint,
    }
    stage = Stage.open(folder, "eval", EVAL_VERSION, identity)
    if stage.manifest is None or not (folder / REPORT).exists():
        from .eval.harness import EvalSettings
        from .eval.harness import evaluate as measure
        from .eval.journal import Journal
        from .heads.checkpoint import load_head

        wanted = EvalSettings(**settings.model_dump())
        target, head = run.load_target() if adapter is None else run.load_tuned(adapter), load_head(checkpoint)
        journal = Journal.open(folder / "journal.jsonl")
        report = measure(target, head, wanted, journal, checkpoint)
        write_json(folder / REPORT, {**report, "head_sha256": weights})
        stage.finish(report=str(folder / REPORT))
        publish(run, folder)
    elif not _published(run, weights):
        publish(run, folder)
    return stage


_DECODED = ("vocab.safetensors", "tree.json", "adapter_config.json", "adapter_model.safetensors")
"""Files beside a head's weights that decide how it is decoded."""


def _published(run: Run, weights: str) -> bool:
    """Whether the run's folder shows a report on this head; a fuller one that `eval` made counts, too."""
    shown = [run.folder / REPORT, run.folder / PAGE]
    return all(path.exists() for path in shown) and read_json(shown[0])["head_sha256"] == weights


def publish(run: Run, folder: Path) -> None:
    """Put this evaluation's report into the run's folder, with the page that shows it."""
    from .eval.report.page import write_page

    report = read_json(folder / REPORT)
    write_json(run.folder / REPORT, report)
    write_page(run.folder / PAGE, report, _curve(run.training / "metrics.jsonl"), stage_records(run, folder))


def _curve(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def stage_folders(run: Run, evaluation: Path) -> dict[str, Path]:
    """Folder of each stage, in their order."""
    return {
        "prepare": run.data / "prompts",
        "regenerate": run.data / "answers",
        "collect": run.data / "features",
        "train": run.training,
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
