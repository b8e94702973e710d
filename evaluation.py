"""The stage that measures a head, and where its report goes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import DraftsmithError
from .eval.report import PAGE, REPORT
from .files import read_json, sha256_file, write_json
from .manifest import Stage
from .progress import say
from .run import Run
from .run_config import RunConfig
from .stages import stage_records

if TYPE_CHECKING:
    from .heads.base import DraftHead
    from .heads.target import Target

EVAL_VERSION = 4
_WEIGHTS = "model.safetensors"
_DECODED = ("vocab.safetensors", "tree.json", "adapter_config.json", "adapter_model.safetensors")
"""Files beside a head's weights that decide how it is decoded."""


@dataclass(frozen=True)
class Measured:
    """A finished evaluation.

    Attributes:
        stage: of its measurements.
        folder: where report and page are shown.
    """

    stage: Stage
    folder: Path


@dataclass(frozen=True)
class _Subject:
    """A head that is measured.

    Attributes:
        checkpoint: folder of its weights.
        folder: where report and page go.
        weights: hash of the weights.
        files: hashes of what else decides how it is decoded.
        load: reads it for its target.
        own: the run's own head, to which belong its configuration's trees and what its stages noted.
    """

    checkpoint: Path
    folder: Path
    weights: str
    files: dict[str, str]
    load: Callable[[Target], DraftHead]
    own: bool


def check_trees(config: RunConfig) -> None:
    """Refuse trees that can't be read, or that are asked for and deeper than the head drafts, before any work is done.

    Raises:
        DraftsmithError: names the tree.
    """
    from .eval.decoder.trees import refuse_deeper, written
    from .eval.harness import EvalSettings
    from .heads.costs import planned_depth

    EvalSettings(**config.eval.model_dump())
    if not _own_trees(config):
        head = config.head_options
        refuse_deeper(written(config.eval.trees), planned_depth(head.family, head.steps, head.options))


def check_benchmarks(config: RunConfig) -> None:
    """Refuse, before a run's work, benchmarks that its end could not read.

    Raises:
        DraftsmithError: one can't be had, or two can't be told apart.
    """
    from .eval.harness import EvalSettings, load_benchmarks

    load_benchmarks(EvalSettings(**config.eval.model_dump()))


def evaluate(run: Run, out: Path | None = None, show: bool = False) -> Measured:
    """Measure the best checkpoint of a run and write the report.

    Args:
        out: where report and page go; None: the run's folder.
        show: put this very evaluation there, though a fuller one of the same weights may be shown.
    """
    from .eval.trained import BEST
    from .heads.checkpoint import load_head

    checkpoint = run.training / BEST
    if not (checkpoint / _WEIGHTS).exists():
        raise DraftsmithError(
            f"{run.training} holds no trained head: run 'draftsmith train' with the same options first"
        )
    files = {
        str(path.relative_to(checkpoint)): sha256_file(path)
        for path in sorted(checkpoint.rglob("*"))
        if path.name in _DECODED
    }
    weights = sha256_file(checkpoint / _WEIGHTS)
    folder = run.folder if out is None else out
    return _evaluate(run, _Subject(checkpoint, folder, weights, files, lambda _: load_head(checkpoint), True), show)


def evaluate_place(run: Run, place: str, out: Path | None = None) -> Measured:
    """Measure the head that lies in a folder or on the hub, in any layout that can be read.

    Args:
        run: of the target; which head its configuration names doesn't matter.
        place: see `eval.given_head.find_head`; the folder of a run of this target means that run.
        out: where report and page go; None: runs/<model>/<folder's name>-<digest>.
    """
    from .eval.given_head import find_head
    from .heads.formats.load import load_any
    from .heads.named import head_names

    home = run.folder.parent
    given = find_head(home, place, run.config.run)
    for remark in given.remarks:
        say(f"{given.name} {remark}: it is measured as it is")
    kind, _, name = given.name.partition("@")
    if kind in head_names() and given.folder.resolve() == (home / given.name).resolve():
        return evaluate(Run(_for_kind(run.config, kind, name or None)), out, show=True)
    file, folder = given.checkpoint / _WEIGHTS, given.folder if out is None else out
    weights = sha256_file(file) if file.is_file() else given.digest
    return _evaluate(
        run,
        _Subject(
            given.checkpoint, folder, weights, {"": given.digest}, lambda t: load_any(given.checkpoint, t), False
        ),
        show=True,
    )  # fmt: skip


def _for_kind(config: RunConfig, kind: str, run: str | None) -> RunConfig:
    """The configuration of another head, measured alike."""
    from .train.settings import load_head_recipe

    recipe = load_head_recipe(kind)
    trees = recipe.decode.trees if _own_trees(config) else config.eval.trees
    return config.model_copy(
        update={
            "head": kind, "run": run, "weights_of": recipe.weights_of, "head_options": recipe.head,
            "eval": config.eval.model_copy(update={"trees": trees}),
        }
    )  # fmt: skip


def _evaluate(run: Run, subject: _Subject, show: bool) -> Measured:
    """Measure, or go on, or find everything measured; then show it."""
    from .eval.harness import EvalSettings, load_benchmarks
    from .eval.journal import Journal
    from .eval.trained import adapter_of

    config = run.config
    wanted = EvalSettings(**config.eval.model_dump(), template_kwargs=config.template_kwargs)
    benchmarks = load_benchmarks(wanted)
    folder = subject.folder / "eval" / eval_name(config)
    identity = {
        "head": subject.weights,
        "files": subject.files,
        "settings": config.eval.model_dump(exclude={"bench_dir", "bench"}),
        "benchmarks": [[benchmark.name, benchmark.sha256] for benchmark in benchmarks],
        "template_kwargs": config.template_kwargs,
        "fingerprint": run.info.fingerprint,
    }
    stage = Stage.open(folder, "eval", EVAL_VERSION, identity)
    if stage.manifest is None or not (folder / REPORT).exists():
        from .eval.harness import evaluate as measure

        adapter = adapter_of(subject.checkpoint)
        target = run.load_target() if adapter is None else run.load_tuned(adapter)
        head = subject.load(target)
        wanted = EvalSettings(**_settings(config, subject, head), template_kwargs=config.template_kwargs)
        journal = Journal.open(folder / "journal.jsonl")
        report = measure(target, head, wanted, journal, subject.checkpoint, benchmarks)
        rendered = {"template_kwargs": config.template_kwargs}
        write_json(folder / REPORT, {**report, **rendered, "head_sha256": subject.weights})
        stage.finish()
        show = True
    if show or not _published(subject):
        stages = stage_records(run, folder) if subject.own else {"eval": (stage.manifest or {})["record"]}
        shown = {name: _public_record(record) for name, record in stages.items()}
        _publish(run, {**read_json(folder / REPORT), "stages": shown}, subject.folder)
    return Measured(stage, subject.folder)


def _public_record(record: dict[str, Any]) -> dict[str, Any]:
    """What a stage noted, without places on this machine: a report may be published."""
    from .heads.formats.run_source import public_start

    kept = {name: value for name, value in record.items() if name != "report"}  # where older evaluations wrote it
    if isinstance(start := kept.get("head_init"), dict):
        kept["head_init"] = public_start(start)
    return kept


def _settings(config: RunConfig, subject: _Subject, head: DraftHead) -> dict[str, Any]:
    return config.eval.model_dump() | {"trees": _trees_for(config, subject, head)}


def _own_trees(config: RunConfig) -> bool:
    """Whether the trees are those of the head's file."""
    from .train.settings import load_head_recipe

    return config.eval.trees == load_head_recipe(config.head).decode.trees


def _trees_for(config: RunConfig, subject: _Subject, head: DraftHead) -> list[str]:
    """The trees to try: those that were asked for, else those of the head's file that it can be decoded with."""
    from .eval.decoder.trees import OwnTree, deeper, written
    from .heads.checkpoint import TREE
    from .train.settings import CHAINS, load_head_recipe

    if not _own_trees(config):
        return config.eval.trees
    kind = config.head if subject.own else _kind(head.config.family)
    trees = CHAINS if kind is None else load_head_recipe(kind).decode.trees
    left_out = deeper(written(trees), head.most_depth)
    if left_out:
        drafts = f"{head.most_depth} token{'s' * (head.most_depth != 1)}"
        say(f"left out: {', '.join(left_out)}; the head drafts {drafts}")
    if not subject.own and not (subject.checkpoint / TREE).exists():
        unmeasured = [text for text in trees if OwnTree.parse(text) is not None]
        if unmeasured:
            say(f"left out: {', '.join(unmeasured)}; the head came without accuracies that such trees are made from")
        left_out += unmeasured
    return [tree for tree in trees if tree not in left_out]


def _kind(family: str) -> str | None:
    """The first head of configs/heads with weights of a family; None where none is named there."""
    from .heads.named import head_file, head_names

    return next((name for name in head_names() if head_file(name).get("head", {}).get("family") == family), None)


def eval_name(config: RunConfig) -> str:
    """Folder of the evaluation with these settings, in that of all evaluations of a head."""
    settings = config.eval
    parts = [f"{settings.prompts}x{settings.max_new_tokens}"]
    if settings.bench != ["builtin"]:
        parts += [re.sub(r"[^\w.]+", "-", Path(name).name) for name in settings.bench]
    return "-".join([*parts, *(f"t{t:g}" for t in sorted(set(settings.temperatures)) if t > 0)])


def eval_folder(run: Run) -> Path:
    """Where the evaluation of a run with these settings lies."""
    return run.folder / "eval" / eval_name(run.config)


def _published(subject: _Subject) -> bool:
    """Whether the folder shows a report on this head; a fuller one that `eval` made counts, too."""
    shown = [subject.folder / REPORT, subject.folder / PAGE]
    return all(path.exists() for path in shown) and read_json(shown[0])["head_sha256"] == subject.weights


def _publish(run: Run, report: dict[str, Any], folder: Path) -> None:
    """Put a report into the folder where it is shown, with the page, and on Weights & Biases if asked."""
    from .eval.report.page import refresh_page
    from .eval.report.wandb_report import upload_report

    write_json(folder / REPORT, report)
    refresh_page(folder)
    wanted = run.config.train.wandb
    upload_report(folder, None if wanted == "auto" else wanted)
