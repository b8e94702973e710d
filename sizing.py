"""Before a run starts: what it is going to need, and whose answers fit into its time.

Answers of the target itself are worth about a tenth of the accepted length, but they are decoded token by token.
"""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import Any

from .data_recipes import estimate
from .data_recipes.candidates import Answers
from .data_recipes.layout import FEATURES, PROMPTS
from .errors import DraftsmithError
from .eval.report.plan import plan_lines, size
from .manifest import MANIFEST, PLAN
from .plan import MEANS, OTHERS, PlanSettings, expected_corpus, plan
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
        found = plan(_settings(run), run.config, _computed(run))
    except DraftsmithError as error:
        say(f"no plan: {error}")
        return None
    for line in plan_lines(found)[:2]:
        say(line)
    collect, memory = run.config.collect, found["memory"]
    form = estimate.storage(collect.dtype, collect.teacher)
    stored = found["disk"]["storages"].get(form, found["disk"]["storages"][collect.dtype])
    say(
        f"needs     {stored['row'] / 1e3:,.1f} kB of disk a token ({size(stored['all'])} for all); of each device "
        f"{size(memory['regenerate']['all'])} of memory to answer, {size(memory['train']['zero0'])} to train "
        "('draftsmith plan' says more)"
    )
    device = found["hardware"]["memory"]
    for stage, needed in (("regenerate", memory["regenerate"]["all"]), ("train", memory["train"]["zero0"])):
        if needed > device:
            say(f"WARNING: {stage} is planned to take {size(needed)} of a device that has {size(device)}")
    return found


def _computed(run: Run) -> dict[str, Any]:
    """What the target's own modules compute, where the head starts from them; other heads are planned by their file."""
    from .heads.formats.native_mtp import native_options
    from .train.warm import NATIVE

    return native_options(_target_folder(run)) if run.config.head_init == NATIVE else {}


def choose_mode(run: Run, minutes: float, planned: dict[str, Any] | None) -> bool:
    """Decide whether the target runs in training, and say why; returns `Run.online`.

    Args:
        minutes: for answers, which limit how many documents there will be.
        planned: what `announce` returned; without a plan the features are estimated from the documents alone.
    """
    from .train.online import choose_mode as choose
    from .train.online import mode_begun

    c, missing = run.config, 0.0
    if c.train.mode == "auto" and not (run.data / FEATURES / MANIFEST).exists():
        missing = _bytes_without_plan(run) if planned is None else _bytes_of_features(run, minutes, planned)
    free = shutil.disk_usage(run.config.runs).free
    mode, sentence = choose(c.train.mode, c.head_options.family, missing, free, mode_begun(run.training))
    say(sentence)
    return mode == "online"


def _bytes_of_features(run: Run, minutes: float, planned: dict[str, Any]) -> float:
    """Of the documents that the time allows."""
    c, data, rate = run.config, planned["data"], planned["hours"]["tokens_per_s"]
    name = estimate.storage(c.collect.dtype, c.collect.teacher)
    stored = planned["disk"]["storages"].get(name, planned["disk"]["storages"][c.collect.dtype])
    whole: float = stored["all"]
    if run.answers == "dataset" or rate is None or c.regenerate.servers:  # servers' rate is not this machine's
        return whole
    return whole * min(1.0, rate * 60 * minutes / data["answer_tokens"])


def _bytes_without_plan(run: Run) -> float:
    """Of all documents: counted where they are prepared, else as many as the recipe has, of a usual length."""
    from .heads.loading import config_value

    c = run.config
    hidden = config_value(run.reached.location, run.hub_revision, "hidden_size")
    if not isinstance(hidden, int):
        raise DraftsmithError(
            f"{_target_folder(run) / 'config.json'} has no hidden_size: whether its states fit on the disk is unknown, "
            "say train.mode=offline or online"
        )
    prepared = (run.data / PROMPTS / MANIFEST).exists()
    given = PlanSettings(data=run.data) if prepared else PlanSettings(conversations=_conversations(run))
    corpus = expected_corpus(given, c.recipe, c.regenerate.max_new_tokens, c.prepare.max_tokens)
    aux, form = len(run.layer_ids), estimate.storage(c.collect.dtype, c.collect.teacher)
    stored = estimate.features_bytes(corpus, hidden, aux, c.collect.topk)[form]
    say(
        f"features are about {corpus.tokens:,} tokens × {stored['row'] / 1e3:,.1f} kB ({corpus.counted}; {aux} aux "
        f"layers and the last one, hidden size {hidden:,})"
    )
    return stored["all"]


def _conversations(run: Run) -> int | None:
    """How many the recipe has, at most as many as plans assume; None where the plan knows better."""
    from .data_recipes.sources import HubDataset, find_source

    if run.config.recipe in MEANS:
        return None
    recipe, most, found = recipe_of(run.config), OTHERS[0], 0
    for spec in recipe.sources:
        source, limit = find_source(spec.source, spec.revision), min(spec.limit or most, most)
        on_hub = isinstance(source, HubDataset)
        found += limit if on_hub else sum(1 for _ in itertools.islice(source.records(recipe.seed, None), limit))
    return max(1, min(found, most))


def whose_answers(run: Run, minutes: float, planned: dict[str, Any] | None) -> Answers:
    """Decide between "target" and "dataset" where the configuration says auto, and say why.

    A data folder that has the target's answers goes on with them. Servers answer in time; prompts without answers,
    records in which nobody asks anything, and times in which the target gives `ENOUGH_TOKENS`, leave no choice.

    Args:
        minutes: for answers.
        planned: what `announce` returned.
    """
    config = run.config
    if config.answers != "auto":
        return config.answers
    if (run.data / PROMPTS / PLAN).exists() and run.answers == "target":
        return "target"
    asks, answers = _first_records(run)
    if answers and not asks:
        say("the data's records are text or tokens, without a question that the target could answer: they are learned")
        return "dataset"
    if config.regenerate.servers or not answers:
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
    from .train.launch import visible_devices

    c = run.config
    model = c.model if c.model in model_names() else str(_target_folder(run))
    return PlanSettings(
        model=model, head=c.head, gpus=c.gpus or visible_devices(), nodes=c.nnodes, topk=c.collect.topk,
        conversations=_conversations(run),
    )  # fmt: skip


def _target_folder(run: Run) -> Path:
    """Folder of the target's files."""
    from .heads.target import resolve_folder

    return resolve_folder(run.reached.location, run.hub_revision)


def _first_records(run: Run) -> tuple[bool, bool]:
    """Whether the first records of the recipe's files ask something, and whether any has answers to train on.

    Datasets on the hub are taken to have both: they are not asked before their stage.
    """
    from .data_recipes.conversation import Malformed
    from .data_recipes.normalise import NormaliseSettings, normalise
    from .data_recipes.shapes import parse_record
    from .data_recipes.sources import HubDataset, find_source

    recipe = recipe_of(run.config)
    settings, asks, answers = NormaliseSettings(media=recipe.filters.media), False, False
    for spec in recipe.sources:
        source = find_source(spec.source, spec.revision)
        if isinstance(source, HubDataset):
            return True, True
        for _, value in itertools.islice(source.records(recipe.seed, None), _PEEK):
            if isinstance(value, Malformed):
                continue
            try:
                found = normalise(parse_record(value), settings)
            except Malformed:
                continue
            asks = asks or bool(found.messages)
            own = found.text is not None or any(found.mask or [])
            answers = answers or own or any(m["role"] == "assistant" for m in found.messages)
    return asks, answers
