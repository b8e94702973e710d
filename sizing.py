"""Before a run starts: what it is going to need, and whose answers fit into its time.

Answers of the target itself are worth about a tenth of the accepted length, but they are decoded token by token.
"""

from __future__ import annotations

import itertools
import shutil
from typing import Any

from .data_recipes.candidates import Answers
from .data_recipes.layout import PROMPTS
from .errors import DraftsmithError
from .eval.report.plan import plan_lines
from .manifest import MANIFEST, PLAN
from .plan import PlanSettings, plan
from .progress import clock, say
from .stages import Run, recipe_of

ENOUGH_TOKENS = 100_000
"""Own answers that a head can be trained on; where the time allows fewer, the data set's answers are better."""
_PEEK = 50


def announce(run: Run) -> dict[str, Any] | None:
    """Say what the run needs, in the first lines of a plan; returns the plan.

    None where no plan can be made (plans count dense targets only): that stops no run.
    """
    try:
        found = plan(_settings(run))
    except DraftsmithError as error:
        say(f"no plan: {error}")
        return None
    for line in plan_lines(found)[:2]:
        say(line)
    disk, memory = found["disk"]["storages"]["bf16"]["row"], found["memory"]
    say(
        f"features {disk / 1e3:,.1f} kB a token; memory of a device: {memory['regenerate']['all'] / 1e9:,.1f} GB to "
        f"answer, {memory['train']['zero0'] / 1e9:,.1f} GB to train ('draftsmith plan' says more)"
    )
    return found


def choose_mode(run: Run, minutes: float, planned: dict[str, Any] | None) -> bool:
    """Decide whether the target runs in training, and say why; returns `Run.online`.

    Args:
        minutes: for answers, which limit how many documents there will be.
        planned: what `announce` returned; without a plan the features are stored.
    """
    from .train.online import choose_mode as choose
    from .train.online import mode_begun

    c = run.config
    if planned is None and c.train.mode == "auto":
        return run.online
    missing = (
        0.0 if planned is None or (run.features / MANIFEST).exists() else _bytes_of_features(run, minutes, planned)
    )
    free = shutil.disk_usage(run.config.runs).free
    mode, sentence = choose(c.train.mode, c.head_options.family, missing, free, mode_begun(run.training))
    say(sentence)
    return mode == "online"


def _bytes_of_features(run: Run, minutes: float, planned: dict[str, Any]) -> float:
    """Of the documents that the time allows."""
    c, data, rate = run.config, planned["data"], planned["hours"]["tokens_per_s"]
    name = c.collect.dtype + ("+topk" if c.collect.teacher == "topk" else "")
    stored = planned["disk"]["storages"].get(name, planned["disk"]["storages"][c.collect.dtype])
    whole: float = stored["all"]
    if run.answers == "dataset" or rate is None:
        return whole
    return whole * min(1.0, rate * 60 * minutes / data["answer_tokens"])


def whose_answers(run: Run, minutes: float, planned: dict[str, Any] | None) -> Answers:
    """Decide between "target" and "dataset" where the configuration says auto, and say why.

    What an earlier run with the same data decided stays. Servers answer in time; prompts without answers, and times in
    which the target gives `ENOUGH_TOKENS`, leave no choice.

    Args:
        minutes: for answers.
        planned: what `announce` returned.
    """
    config = run.config
    if config.answers != "auto":
        return config.answers
    if (run.data / PROMPTS / PLAN).exists():
        return run.answers
    if config.regenerate.servers or not _has_answers(run):
        return "target"
    rate = planned["hours"]["tokens_per_s"] if planned else None
    if rate is None or rate * 60 * minutes >= ENOUGH_TOKENS:
        return "target"
    say(
        f"WARNING: in {clock(60 * minutes)} {run.source.name} gives about {rate * 60 * minutes:,.0f} tokens of answers "
        f"({rate:,.0f} a second), too few to train on: the data set's own answers are taken. Heads trained on them "
        f"accept about 10 % less: give MINUTES={_enough_minutes(config.minutes, minutes, rate):.0f}, SERVER=url, or "
        "ANSWERS=target"
    )
    return "dataset"


def _enough_minutes(total: float | None, minutes: float, rate: float) -> float:
    return (total or minutes) * ENOUGH_TOKENS / (rate * 60 * minutes) + 1


def _settings(run: Run) -> PlanSettings:
    from .heads.resolve import model_names
    from .heads.target import resolve_folder

    c = run.config
    model = c.model if c.model in model_names() else str(resolve_folder(run.reached.location, run.hub_revision))
    return PlanSettings(model=model, head=c.head, gpus=c.gpus or 1, nodes=c.nnodes)


def _has_answers(run: Run) -> bool:
    """Whether the first conversations of the recipe's files come with answers; datasets on the hub do."""
    from .data_recipes.candidates import Mixture
    from .data_recipes.sources import HUB

    recipe = recipe_of(run.config)
    local = [spec for spec in recipe.sources if not spec.source.startswith(HUB)]
    if len(local) < len(recipe.sources):
        return True
    mixture = Mixture(recipe, "target")
    first = itertools.islice(mixture.candidates({}, cap=None), _PEEK)
    return any(m["role"] == "assistant" for found in first for m in found.conversation.messages)
