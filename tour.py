"""Command `tour`: train every head family for a few minutes on the same answers, then compare them all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import evaluation, stages
from .data_recipes.recipe import Recipe, Tour, load_recipe, recipe_names
from .errors import DraftsmithError
from .progress import clock, say
from .run_config import DEFAULT_MODEL, RunConfig, resolve
from .stages import Run

DEFAULT_RECIPE, RUN = "family-tour", "tour"
"""Its runs have a name, so that heads which were trained for longer stay what `runs/<model>/<head>` shows."""


@dataclass(frozen=True)
class TourSettings:
    """What a tour does; None takes the recipe's.

    Attributes:
        model: target: a short name, a hub id or a folder.
        runs: folder of all runs.
        recipe: a recipe with a section `tour`.
        minutes: training of each head.
        heads: their names.
        gpus: devices on this machine.
        push: me/Name: where the heads are pushed, each to me/Name-HEAD; None pushes none.
        overrides: KEY=VALUE for every head's configuration.
    """

    model: str = DEFAULT_MODEL
    runs: Path = Path("runs")
    recipe: str = DEFAULT_RECIPE
    minutes: float | None = None
    heads: tuple[str, ...] | None = None
    gpus: int | None = None
    push: str | None = None
    overrides: Sequence[str] = ()


def tour(settings: TourSettings) -> dict[str, Any]:
    """Make the shared answers and features, train and measure every head, compare, push; goes on where it was.

    Returns:
        See eval.compare.compare; with `settings.push` also push: {head: {"url"} or {"error"}}.

    Raises:
        DraftsmithError: a recipe without a tour, an unknown head or setting, heads that read different layers.
    """
    plan = _plan(load_recipe(settings.recipe))
    configs = configurations(settings)
    pushed = _pushed(settings.push, [config.head for config in configs])
    evaluation.check_benchmarks(configs[0])  # all heads have the same
    for config in configs:
        evaluation.check_trees(config)
        if config.weights_of not in {other.head for other in configs}:
            stages.has_weights(Run(config))  # weights that were trained otherwise are an error before any work
    minutes = configs[0].train.minutes or 0.0
    say(
        f"{len(configs)} heads for {settings.model}: answers {clock(60 * plan.answer_minutes)}, then training "
        f"{clock(60 * minutes)} for each, measuring and comparing"
    )
    _shared_features([Run(config) for config in configs], plan)
    in_order = sorted(configs, key=lambda config: config.weights_of is not None)  # weights before what takes them
    for number, config in enumerate(in_order, 1):
        run = Run(config)
        with stages.measured(f"{config.head} ({number} of {len(configs)}): train"):
            stages.train(run, None)
        with stages.measured(f"{config.head} ({number} of {len(configs)}): eval"):
            evaluation.evaluate(run)
        run.release_target()
    from .eval.compare import CompareSettings, compare

    names = tuple(f"{config.head}@{RUN}" for config in configs)
    with stages.measured("compare"):
        result = compare(CompareSettings(settings.model, settings.runs, heads=names, **plan.compare.model_dump()))
    if not pushed:
        return result
    folders = {config.head: Run(config).folder for config in configs if config.head in pushed}
    return {**result, "push": _push(folders, pushed, settings.model)}


def _push(folders: Mapping[str, Path], repos: Mapping[str, str], model: str) -> dict[str, dict[str, str]]:
    """Push every head; what goes wrong with one is said and stops no other."""
    from .push import push_run

    found: dict[str, dict[str, str]] = {}
    for head, folder in folders.items():
        try:
            found[head] = {"url": push_run(folder, repos[head], model)["url"]}
        except DraftsmithError as error:
            say(f"push: {head}: {error}")
            found[head] = {"error": str(error)}
    return found


def _pushed(repo: str | None, heads: Sequence[str]) -> dict[str, str]:
    """Where each head will be pushed; those that can't be are named. Raises DraftsmithError where none can be."""
    if repo is None:
        return {}
    from .push import check_asked, engine_for

    found: dict[str, str] = {}
    for head in heads:
        try:
            engine_for(head)
        except DraftsmithError as error:
            say(f"push: {head} stays here: {error}")
        else:
            found[head] = f"{repo}-{head}"
            check_asked(found[head], head)
    if not found:
        raise DraftsmithError(f"none of {', '.join(heads)} can be pushed: leave PUSH (--push) out")
    return found


def _plan(recipe: Recipe) -> Tour:
    if recipe.tour is None:
        others = [name for name in recipe_names() if load_recipe(name).tour is not None]
        raise DraftsmithError(f"the recipe {recipe.name!r} has no section 'tour'; these have: {', '.join(others)}")
    return recipe.tour


def configurations(settings: TourSettings) -> list[RunConfig]:
    """One configuration a head; raises DraftsmithError for whatever can't be resolved."""
    plan = _plan(load_recipe(settings.recipe))
    flags = {"model": settings.model, "runs": settings.runs, "recipe": settings.recipe, "run": RUN}
    if settings.gpus is not None:
        flags["gpus"] = settings.gpus
    limits = [f"train.minutes={settings.minutes or plan.minutes}"]
    limits += [f"eval.{name}={value}" for name, value in plan.eval.items()]
    heads = dict.fromkeys(settings.heads or plan.heads)
    return [resolve("eval", {**flags, "head": head}, None, [*limits, *settings.overrides]) for head in heads]


def _shared_features(runs: Sequence[Run], plan: Tour) -> None:
    """Prompts, answers and features that every head is trained on."""
    first = runs[0]
    for run in runs[1:]:
        if run.layer_ids != first.layer_ids:
            raise DraftsmithError(
                f"{run.config.head} reads layers {list(run.layer_ids)}, {first.config.head} {list(first.layer_ids)}: "
                "heads of a tour share their features, leave head.layer_ids out"
            )
    with stages.measured("prepare"):
        stages.prepare(first)
    with stages.measured("regenerate"):
        stages.regenerate(first, plan.answer_minutes)
    with stages.measured("collect"):
        stages.collect(first)
    first.release_target()
