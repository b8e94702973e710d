"""What a head's YAML file says: the head's own options and how it is trained."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import DraftsmithError
from ..heads.named import head_file, head_names

DEFAULT_EPOCHS = 10
DECODE_SLOTS = 8
"""Held-out prompts that are decoded at a time in the middle of training."""
LIMITS = ("epochs", "steps", "tokens", "minutes")
_FLOAT = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-3 as text


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class HeadSettings(_Strict):
    """Options of the head itself; its shapes come from the target."""

    family: str
    layer_ids: list[int] | None = None
    steps: int = Field(ge=1, le=16)
    step_decay: float = Field(gt=0, le=1)
    draft_vocab_size: int | None = Field(default=None, ge=1)
    options: dict[str, bool | int | float | str | list[float]] = {}
    """The family's own; those that its YAML file names."""

    def vocab_size_for(self, target_vocab: int) -> int:
        """Draft vocabulary size for a target with `target_vocab` tokens."""
        default = 32000 if target_vocab >= 100_000 else 8192
        return min(self.draft_vocab_size or default, target_vocab)


class TrainSettings(_Strict):
    """How a head is trained; see the comments in configs/heads/eagle3.yaml."""

    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    tokens: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    token_budget: int = Field(default=1024, ge=8)
    accumulation: int = Field(default=1, ge=1)
    max_length: int = Field(default=2048, ge=4)
    optimizer: Literal["muon", "adamw"] = "muon"
    lr_matrix: float = Field(default=4e-3, gt=0)
    lr_other: float = Field(default=5e-4, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: int = Field(default=20, ge=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    clip: float = Field(default=1.0, gt=0)
    objective: dict[Literal["soft_ce", "ce", "tv", "lk"], Annotated[float, Field(ge=0)]] = {}
    """Laid over the family's own; see `heads.objectives`."""
    seed: int = 0
    validate_every: int | None = Field(default=None, ge=1)
    validate_documents: int = Field(default=48, ge=1)
    validate_depth: int = Field(default=4, ge=1)
    decode_documents: int = Field(default=8, ge=0)
    decode_tokens: int = Field(default=48, ge=2)
    decode_every: Annotated[int, Field(ge=1)] | Literal["auto"] | None = "auto"
    patience: int | None = Field(default=None, ge=1)
    save_every: int | None = Field(default=None, ge=1)
    log_every: int = Field(default=10, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    deepspeed: str = "auto"
    mode: Literal["auto", "offline", "online"] = "auto"
    checkpointing: bool = False
    wandb: bool | Literal["auto"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _some_limit(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(key) is None for key in LIMITS):
            return {**values, "epochs": DEFAULT_EPOCHS}
        return values

    @model_validator(mode="after")
    def _patience_needs_tau(self) -> Self:
        if self.patience is not None and not self.best_by_tau:
            raise DraftsmithError(
                f"train.patience = {self.patience} waits for decoded taus in the middle of the run: set "
                "train.decode_documents above 0 and train.decode_every to auto or a number, too"
            )
        return self

    @property
    def best_by_tau(self) -> bool:
        """Whether the best checkpoint is chosen by decoded tau; else by tau_walk."""
        return self.decode_documents > 0 and self.decode_every is not None

    def identity(self) -> dict[str, Any]:
        """The settings that decide what is trained: not where or in which memory, nor where figures go; nor from where
        states come, which the stage says."""
        return self.model_dump(exclude={"deepspeed", "mode", "checkpointing", "wandb"})

    def validation_interval(self, total_steps: int) -> int:
        """Steps between two validations; the last one is at the end, rounding makes none just before it."""
        return self.validate_every or min(500, math.ceil(total_steps / 4))


CHAINS = ["chain:1", "chain:2", "chain:3", "chain:4"]
"""Trees that an evaluation tries where a head's file names none."""


class DecodeSettings(_Strict):
    """How a head is decoded."""

    trees: list[str] = Field(default=CHAINS, min_length=1)
    """Candidates of an evaluation, as `eval.decoder.trees.shape_for` reads them."""


class HeadRecipe(_Strict):
    """A head's YAML file.

    Attributes:
        head, train: of the head whose weights these are.
        weights_of: that head, where this one is another way to decode it; its file then has no `head` and `train`.
        decode: of this head.
    """

    head: HeadSettings
    train: TrainSettings = Field(default_factory=lambda: TrainSettings.model_validate({}))
    weights_of: str | None = None
    decode: DecodeSettings = DecodeSettings()


def load_head_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> HeadRecipe:
    """Read configs/heads/<name>.yaml and lay overrides over it.

    Args:
        name: a head's short name.
        overrides: nested mappings, dotted keys or both, e.g. {"train.token_budget": 2048}. Where the head has another's
            weights, they are laid over that one's settings.

    Raises:
        DraftsmithError: no such head, unknown key or wrong value; weights of a head that is unknown or has none itself.
    """
    values = _file(name)
    options = dict(values["head"].get("options", {}))
    for key, value in (overrides or {}).items():
        _lay_over(values, key.split("."), value)
    _check_options(name, options, values["head"].get("options", {}))
    try:
        return HeadRecipe.model_validate(_numbers(values))
    except ValidationError as error:
        raise DraftsmithError(_explain(error, name)) from error


def _file(name: str) -> dict[str, Any]:
    """A head's file, `head` and `train` filled in from the head whose weights it has."""
    values = head_file(name)
    origin = values.get("weights_of")
    if origin is None:
        return values
    if own := sorted({"head", "train"} & set(values)):
        raise DraftsmithError(
            f"configs/heads/{name}.yaml has weights_of: {origin} and {own[0]}: what trains comes from {origin}, leave "
            f"{own[0]} out"
        )
    if origin not in head_names():
        raise DraftsmithError(
            f"configs/heads/{name}.yaml: weights_of names the unknown head {origin!r}; there are: "
            f"{', '.join(head_names())}"
        )
    there = head_file(origin)
    if there.get("weights_of") is not None:
        raise DraftsmithError(
            f"configs/heads/{name}.yaml: weights_of names {origin!r}, which has no weights of its own "
            f"(weights_of: {there['weights_of']}): name the head that is trained"
        )
    return {**values, "head": there["head"], "train": there.get("train", {})}


def _lay_over(values: dict[str, Any], path: list[str], value: Any) -> None:
    for key in path[:-1]:
        inner = values.setdefault(key, {})
        if not isinstance(inner, dict):
            raise DraftsmithError(f"{'.'.join(path)}: {key} is a value, not a group of settings")
        values = inner
    if isinstance(value, Mapping):
        for key, inner_value in value.items():
            _lay_over(values.setdefault(path[-1], {}), str(key).split("."), inner_value)
    else:
        values[path[-1]] = value


def _check_options(name: str, known: Mapping[str, Any], given: Any) -> None:
    """Refuse options that the head's own file doesn't have, or of another kind than there."""
    if not isinstance(given, Mapping):
        raise DraftsmithError(f"head.options of head {name!r} is a group of settings, not {given!r}")
    for key, value in given.items():
        if key not in known:
            there = f"there are: {', '.join(known)}" if known else "it has none"
            raise DraftsmithError(f"head.options.{key}: there is no such option of head {name!r}; {there}")
        numbers = isinstance(known[key], float) and isinstance(value, int) and not isinstance(value, bool)
        if type(value) is not type(known[key]) and not numbers:
            raise DraftsmithError(
                f"head.options.{key} = {value!r} of head {name!r}: a {type(known[key]).__name__} is expected"
            )


def _numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _numbers(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_numbers(v) for v in value]
    return float(value) if isinstance(value, str) and _FLOAT.fullmatch(value) else value


def _explain(error: ValidationError, name: str) -> str:
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        groups: dict[str, type[_Strict]] = {"head": HeadSettings, "train": TrainSettings, "decode": DecodeSettings}
        group = groups.get(str(first["loc"][0]), HeadRecipe)
        return f"{place}: there is no such setting for head {name!r}; there are: {', '.join(group.model_fields)}"
    return f"{place} = {first['input']!r} for head {name!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
