"""One typed configuration of a run.

Defaults < the head's YAML < the model's own defaults < --config YAML < flags < dotted overrides.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeGuard

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .data_recipes.recipe import SUFFIX, load_recipe, recipe_from_path, recipe_state
from .errors import DraftsmithError
from .heads.resolve import HUB_RECIPE, model_entry, model_names, resolve_target
from .train.settings import CHAINS, HeadSettings, TrainSettings, load_head_recipe

DEFAULT_MODEL, DEFAULT_HEAD, DEFAULT_MINUTES = "smollm2-135m", "eagle3", 15.0
RUN_EVAL = {"prompts": 20, "max_new_tokens": 64}
"""Held-out prompts and tokens that `run` measures on; the `eval` command takes the full set."""


EVAL_MINUTES, EVAL_SHARE = 5.0, 0.35
"""What measuring takes on the default target, and the most that it may take of a small budget."""
SETUP_SHARE = 0.03
"""Loading, prompts, features, vocabulary."""
ANSWER_SHARE = 0.5
"""Part of the rest that goes to answers; training gets what is left."""


@dataclass(frozen=True)
class Shares:
    """How a run's minutes are divided."""

    total: float
    regenerate: float
    train: float
    evaluate: float

    def train_minutes(self, spent: float) -> float:
        """Minutes of training after `spent` minutes of other work: what is left, and at least half the plan."""
        return max(self.total - spent - self.evaluate, self.train / 2)


def plan_minutes(total: float) -> Shares:
    """Divide `total` minutes."""
    evaluate = min(EVAL_MINUTES, EVAL_SHARE * total)
    rest = total * (1 - SETUP_SHARE) - evaluate
    return Shares(total, ANSWER_SHARE * rest, (1 - ANSWER_SHARE) * rest, evaluate)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class PrepareSection(_Strict):
    """See data_recipes.prepare.PrepareSettings."""

    max_prompt_tokens: int = Field(default=1024, ge=1)
    max_tokens: int = Field(default=4096, ge=8)
    val_every: int = Field(default=25, ge=2)
    malformed_cap: float = Field(default=0.1, ge=0, le=1, strict=False)
    chunk: int = Field(default=128, ge=1)
    plain_text: bool = False


class RegenerateSection(_Strict):
    """See data_recipes.regenerate.RegenerateSettings."""

    max_new_tokens: int = Field(default=256, ge=1)
    slots: int = Field(default=64, ge=1)
    turns: int = Field(default=1, ge=0)
    temperatures: list[float] = Field(default=[0.0], min_length=1, strict=False)
    seed: int = 0
    servers: list[str] = []
    concurrency: int = Field(default=64, ge=1)
    server_timeout_s: float = Field(default=600.0, gt=0, strict=False)


class CollectSection(_Strict):
    """See data_recipes.collect.CollectSettings; the layers come from the head."""

    token_budget: int = Field(default=4096, ge=1)
    dtype: Literal["bf16", "int8"] = "bf16"
    teacher: Literal["hidden", "topk"] = "hidden"
    topk: int = Field(default=64, ge=1)


class EvalSection(_Strict):
    """See eval.harness.EvalSettings."""

    bench: list[str] = Field(default=["builtin"], min_length=1)
    bench_dir: str | None = None
    temperatures: list[Annotated[float, Field(ge=0)]] = Field(default=[0.0], min_length=1, strict=False)
    prompts: int = Field(default=80, ge=1)
    max_new_tokens: int = Field(default=128, ge=1)
    tuning_prompts: int = Field(default=20, ge=1)
    tuning_new_tokens: int = Field(default=32, ge=1)
    timed_prompts: int = Field(default=4, ge=1)
    timed_new_tokens: int = Field(default=20, ge=1)
    trees: list[str] = Field(default=CHAINS, min_length=1)
    """By default what the head's file names under `decode`."""


class RunConfig(_Strict):
    """Everything that a command needs to know."""

    model: str = DEFAULT_MODEL
    head: str = DEFAULT_HEAD
    weights_of: str | None = None
    """The head that is trained, where `head` is another way to decode it; follows from the head's file."""
    head_options: HeadSettings
    head_init: str | None = None
    """A checkpoint that the head starts from: a folder, a hub id, or "native"; see `train.warm.read_start`."""
    recipe: str
    """A name of `configs/recipes/`, the path of an own .yaml, or the data's own name."""
    recipe_state: str | None = None
    """See `recipe.recipe_state`; follows from the recipe."""
    data: Path | None = Field(default=None, strict=False)
    """File or folder of conversations, or whatever else `sources.find_source` finds."""
    answers: Literal["auto", "target", "dataset"] = "auto"
    """Whose answers the head is trained on: the target's own, those that the conversations came with, or what the time
    of a run allows."""
    template_kwargs: dict[str, Any] = {}
    """What the chat template is given beside the messages, e.g. {enable_thinking: false}."""
    minutes: float | None = Field(default=None, gt=0, strict=False)
    run: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*$")
    runs: Path = Field(default=Path("runs"), strict=False)
    gpus: int | None = Field(default=None, ge=1)
    nnodes: int = Field(default=1, ge=1)
    node_rank: int = Field(default=0, ge=0)
    master: str | None = None
    push: str | None = None
    """me/Name: where `run` pushes the finished head; decides nothing of what it is."""
    prepare: PrepareSection = PrepareSection()
    regenerate: RegenerateSection = RegenerateSection()
    collect: CollectSection = CollectSection()
    train: TrainSettings
    eval: EvalSection = EvalSection()

    def tree(self) -> dict[str, Any]:
        """Plain values in the form that `--config` reads back, and the recipe's state."""
        values = self.model_dump(mode="json")
        values.pop("weights_of")
        values["head"] = {"name": values["head"], **values.pop("head_options")}
        if self.data is not None:
            values.pop("recipe")  # the data's own name: it follows from the path
        return values


def resolve(command: str, flags: Mapping[str, Any], file: Path | None, overrides: Sequence[str]) -> RunConfig:
    """Build the configuration of a command.

    Args:
        command: decides two defaults: `run` has a time budget and measures on fewer prompts.
        flags: values given on the command line by field name.
        file: a YAML file with any part of the configuration.
        overrides: `KEY=VALUE` with dotted keys; the values are YAML.

    Raises:
        DraftsmithError: unknown names, keys or ill-typed values; says what there is.
    """
    given: dict[str, Any] = {}
    if command == "run":
        given = {"minutes": DEFAULT_MINUTES, "eval": dict(RUN_EVAL)}
    _merge(given, _read(file) if file else {}, str(file))
    _merge(given, _nested(flags), "flags")
    for text in overrides:
        _merge(given, _override(text), text)
    asked = _head_name(given)
    trained = load_head_recipe(asked).weights_of or asked
    values = _model_defaults(str(given.get("model", DEFAULT_MODEL)), trained)
    _merge(values, given, "configuration")
    head = values.pop("head", {})
    options = dict(head) if isinstance(head, Mapping) else {"name": head}
    name = options.pop("name", DEFAULT_HEAD)
    groups = {"head": options, "train": values.pop("train", {})}
    minutes, limits = values.get("minutes"), groups["train"]
    if command in ("run", "train") and _positive(minutes) and isinstance(limits, dict) and not LIMITS & set(limits):
        own = plan_minutes(minutes).train if command == "run" else float(minutes)
        groups["train"] = {**limits, "minutes": round(own, 3)}
    _check_nodes(values)
    if (init := values.get("head_init")) not in (None, "native") and Path(str(init)).expanduser().is_dir():
        values["head_init"] = str(Path(str(init)).expanduser().resolve())  # processes and machines may start elsewhere
    recipe = load_head_recipe(str(name), {k: v for k, v in groups.items() if v})
    if isinstance(measured := values.setdefault("eval", {}), dict):
        measured.setdefault("trees", list(recipe.decode.trees))
    model = str(values.get("model", DEFAULT_MODEL))
    if followed := sorted(_FOLLOWING.keys() & values.keys()):
        raise DraftsmithError(f"{followed[0]} follows from the {_FOLLOWING[followed[0]]}: it can't be set")
    values |= _recipe(values.get("recipe"), values.get("data"), model)
    found = {"head": name, "weights_of": recipe.weights_of, "head_options": recipe.head, "train": recipe.train}
    try:
        return RunConfig.model_validate({**values, **found})
    except ValidationError as error:
        raise DraftsmithError(_explain(error)) from error


_FOLLOWING = {"weights_of": "head", "head_options": "head", "recipe_state": "recipe"}
"""Fields that nobody sets, and what they follow from."""


def _nested(flags: Mapping[str, Any]) -> dict[str, Any]:
    """Flags as a configuration's tree."""
    values = {name: str(value) if isinstance(value, Path) else value for name, value in flags.items()}
    if (servers := values.pop("server", None)) is not None:
        urls = [url.strip() for url in servers.split(",") if url.strip()]
        if not urls:
            raise DraftsmithError(f"server = {servers!r} names no server: write http://host:8000[,http://other:8000]")
        values["regenerate"] = {"servers": urls}
    if (mode := values.pop("mode", None)) is not None:
        values["train"] = {"mode": mode}
    if (benchmarks := values.get("benchmarks")) is not None:
        values["benchmarks"] = [name.strip() for name in benchmarks.split(",") if name.strip()]
    if measured := {field: values.pop(flag) for flag, field in _MEASURED.items() if flag in values}:
        values["eval"] = measured
    return values


LIMITS = {"epochs", "steps", "tokens", "minutes"}
_MEASURED = {
    "benchmarks": "bench", "bench_dir": "bench_dir", "bench_prompts": "prompts", "temperatures": "temperatures",
}  # fmt: skip
"""Flags of an evaluation, and their settings under `eval`."""


def _head_name(given: Mapping[str, Any]) -> str:
    head = given.get("head", DEFAULT_HEAD)
    return str(head.get("name", DEFAULT_HEAD) if isinstance(head, Mapping) else head)


def _model_defaults(model: str, head: str) -> dict[str, Any]:
    """Settings that a short name's own file suggests, e.g. for a target that is trained on a CPU.

    `defaults` are for any head, `head_defaults` for the one that they are listed under.
    """
    entry = copy.deepcopy(model_entry(model)) if model in model_names() else {}
    values: dict[str, Any] = entry.get("defaults", {})
    _merge(values, entry.get("head_defaults", {}).get(head, {}), f"configs/models/{model}.yaml")
    return values


def _positive(minutes: Any) -> TypeGuard[float]:
    """Whether the schema will take it."""
    return isinstance(minutes, int | float) and minutes > 0


def _check_nodes(values: dict[str, Any]) -> None:
    """Refuse machine numbers that would leave every machine waiting for another."""
    nnodes, rank = values.get("nnodes", 1), values.get("node_rank", 0)
    if not (isinstance(nnodes, int) and isinstance(rank, int)):
        return  # the schema says what is wrong
    if not 0 <= rank < max(nnodes, 1):
        raise DraftsmithError(f"node_rank = {rank} must be between 0 and {nnodes - 1} (nnodes = {nnodes})")
    if nnodes > 1 and not values.get("master"):
        raise DraftsmithError(f"nnodes = {nnodes} needs master, the host of the machine with node_rank 0 (MASTER=host)")


def to_yaml(config: RunConfig) -> str:
    """The configuration as YAML that `--config` reads back."""
    values = config.tree()
    values.pop("recipe_state")
    return yaml.safe_dump(values, sort_keys=False, allow_unicode=True)


def _recipe(recipe: Any, data: Any, model: str) -> dict[str, str]:
    """The recipe, checked, and its state; also checks MODEL, whose own recipe is the default. Fetches nothing."""
    default = model_entry(model).get("recipe", HUB_RECIPE) if model in model_names() else None
    if default is None:
        default = resolve_target(model).default_recipe
    if data is not None:
        if recipe is not None:
            raise DraftsmithError(f"recipe {recipe!r} and data {data!r} exclude each other: give one of them")
        return {"recipe": recipe_from_path(Path(str(data))).name}
    name = str(recipe or default)
    if name.endswith(SUFFIX):
        name = str(Path(name).expanduser().resolve())  # processes and machines may start elsewhere
    return {"recipe": name, "recipe_state": recipe_state(load_recipe(name))}


def _read(path: Path) -> dict[str, Any]:
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftsmithError(f"the configuration {path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise DraftsmithError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(values, dict):
        raise DraftsmithError(f"{path}: a mapping of settings is expected, not {type(values).__name__}")
    return values


def template_args(texts: Sequence[str]) -> dict[str, Any]:
    """Variables of the chat template from `NAME=VALUE`; the same as `template_kwargs` holds.

    Values are YAML, but for what JSON has no form of: a date, as some templates want one, stays a text.
    """
    values: dict[str, Any] = {}
    for text in texts:
        name, sign, raw = text.partition("=")
        if not sign or not name.isidentifier():
            raise DraftsmithError(f"--template-arg {text!r}: write NAME=VALUE, e.g. enable_thinking=false")
        value = _override(text)[name]
        try:
            json.dumps(value)
        except TypeError:
            value = raw
        values[name] = value
    return values


def _override(text: str) -> dict[str, Any]:
    key, sign, raw = text.partition("=")
    if not sign or not re.fullmatch(r"\w+(\.\w+)*", key):
        raise DraftsmithError(f"{text!r} is not an override: write KEY=VALUE, e.g. train.token_budget=2048")
    try:
        value = yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise DraftsmithError(f"the value of {text!r} is not valid YAML: {error}") from error
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(values: dict[str, Any], more: Mapping[str, Any], where: str) -> None:
    """Lay `more` over `values`; groups are merged. `head` may be a name or a group with a `name`."""
    for key, value in more.items():
        there = values.get(key)
        if key == "head" and (isinstance(there, Mapping) or isinstance(value, Mapping)):
            there, value = ({"name": v} if isinstance(v, str) else v for v in (there or {}, value))
        if isinstance(there, Mapping) and isinstance(value, Mapping):
            inner = dict(there)
            _merge(inner, value, where)
            values[key] = inner
        elif isinstance(there, Mapping):
            raise DraftsmithError(f"{where}: {key} is a group of settings, not a value: write {key}.NAME=…")
        else:
            values[key] = dict(value) if isinstance(value, Mapping) else value


def _explain(error: ValidationError) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] != "extra_forbidden":
        return f"{place} = {first['input']!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
    group: Any = RunConfig
    for part in first["loc"][:-1]:
        group = group.model_fields[str(part)].annotation
    names = [name for name in group.model_fields if name not in _FOLLOWING]
    close = difflib.get_close_matches(str(first["loc"][-1]), names, n=1)
    hint = f" (did you mean {close[0]}?)" if close else ""
    return f"there is no setting '{place}'{hint}; there are: {', '.join(names)}"
