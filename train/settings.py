"""What a head's YAML file says: the head's own options and how it is trained."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import resources
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ..errors import DraftsmithError

DEFAULT_EPOCHS = 10
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

    def vocab_size_for(self, target_vocab: int) -> int:
        """Draft vocabulary size for a target with `target_vocab` tokens."""
        default = 32000 if target_vocab >= 100_000 else 8192
        return min(self.draft_vocab_size or default, target_vocab)


class TrainSettings(_Strict):
    """How a head is trained; see the comments in configs/heads/eagle3.yaml."""

    epochs: int | None = Field(default=None, ge=1)
    steps: int | None = Field(default=None, ge=1)
    minutes: float | None = Field(default=None, gt=0)
    token_budget: int = Field(default=1024, ge=8)
    accumulation: int = Field(default=1, ge=1)
    max_length: int = Field(default=2048, ge=4)
    lr_matrix: float = Field(default=4e-3, gt=0)
    lr_other: float = Field(default=5e-4, gt=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    betas: list[float] = Field(default=[0.9, 0.95], min_length=2, max_length=2)
    weight_decay: float = Field(default=0.01, ge=0)
    warmup: int = Field(default=20, ge=0)
    schedule: Literal["cosine", "wsd"] = "cosine"
    clip: float = Field(default=1.0, gt=0)
    seed: int = 0
    validate_every: int | None = Field(default=None, ge=1)
    validate_documents: int = Field(default=48, ge=1)
    validate_depth: int = Field(default=4, ge=1)
    save_every: int | None = Field(default=None, ge=1)
    log_every: int = Field(default=10, ge=1)
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _some_limit(cls, values: Any) -> Any:
        if isinstance(values, dict) and all(values.get(key) is None for key in ("epochs", "steps", "minutes")):
            return {**values, "epochs": DEFAULT_EPOCHS}
        return values

    def validation_interval(self, total_steps: int) -> int:
        """Steps between two validations."""
        return self.validate_every or max(1, min(500, total_steps // 4))


class HeadRecipe(_Strict):
    """A head's YAML file."""

    head: HeadSettings
    train: TrainSettings


def head_names() -> list[str]:
    """Heads that have a YAML file."""
    return sorted(f.name.removesuffix(".yaml") for f in _folder().iterdir() if f.name.endswith(".yaml"))


def load_head_recipe(name: str, overrides: Mapping[str, Any] | None = None) -> HeadRecipe:
    """Read configs/heads/<name>.yaml and lay overrides over it.

    Args:
        name: a head's short name.
        overrides: nested mappings, dotted keys or both, e.g. {"train.token_budget": 2048}.

    Raises:
        DraftsmithError: no such head, unknown key or wrong value.
    """
    import yaml

    if name not in head_names():
        raise DraftsmithError(f"unknown head {name!r}; there are: {', '.join(head_names())}")
    values: dict[str, Any] = yaml.safe_load((_folder() / f"{name}.yaml").read_text(encoding="utf-8"))
    for key, value in (overrides or {}).items():
        _lay_over(values, key.split("."), value)
    try:
        return HeadRecipe.model_validate(_numbers(values))
    except ValidationError as error:
        raise DraftsmithError(_explain(error, name)) from error


def _folder() -> Any:
    return resources.files(__package__.partition(".")[0]) / "configs" / "heads"


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
        groups: dict[str, type[_Strict]] = {"head": HeadSettings, "train": TrainSettings}
        group = groups.get(str(first["loc"][0]), HeadRecipe)
        return f"{place}: there is no such setting for head {name!r}; there are: {', '.join(group.model_fields)}"
    return f"{place} = {first['input']!r} for head {name!r}: {first['msg'][0].lower()}{first['msg'][1:]}"
