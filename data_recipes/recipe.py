"""Recipes: which sources the prompts come from, and how they are mixed."""

from __future__ import annotations

import functools
import hashlib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import DraftsmithError
from .records import SUFFIXES


class SourceSpec(BaseModel):
    """One source of a recipe."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    source: str = Field(min_length=1)
    """`builtin`, a name of `configs/sources.yaml`, `hf:<dataset>[:<config>[:<split>]]`, or a file or folder."""
    revision: str | None = None
    """Commit of a dataset on the hub; None takes the newest and notes it in the manifest's record."""
    weight: float = Field(default=1.0, gt=0, strict=False)
    """Share of the mixture, against the other sources' weights."""
    limit: int | None = Field(default=None, ge=1)
    """At most so many conversations of this source."""


class Filters(BaseModel):
    """Which conversations are kept. What a user asks again word for word is always a duplicate."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    near_duplicates: float | None = Field(default=0.8, gt=0, le=1, strict=False)
    """Jaccard similarity of what users ask, in 5-word shingles, from which on it is a duplicate; null: equal only."""
    media: Literal["refuse", "text"] = "refuse"
    """Conversations with images, audio or video: refused (counted as malformed), or their text is kept."""
    keep_out: list[str] = []
    """Files or folders of evaluation prompts, beside the built-in ones; conversations that hold one are left out."""


class TourComparison(BaseModel):
    """What the comparison at the end of a tour decodes, see eval.compare.CompareSettings."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    prompts: int = Field(default=8, ge=1)
    max_new_tokens: int = Field(default=64, ge=1)


class Tour(BaseModel):
    """Heads that are trained on this recipe's answers one after the other, for a few minutes each."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    heads: list[str] = Field(min_length=1)
    answer_minutes: float = Field(gt=0, strict=False)
    """Time for the answers and features that all heads share."""
    minutes: float = Field(gt=0, strict=False)
    """Training of each head."""
    eval: dict[str, Any] = {}
    """Settings of each head's evaluation, as under `eval` of a run's configuration."""
    compare: TourComparison = TourComparison()


class Recipe(BaseModel):
    """A named mixture of sources; the name is the folder under `runs/<model>/data/`."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    seed: int = 0
    """Seeds the order of records within files and datasets."""
    sources: list[SourceSpec] = Field(min_length=1)
    filters: Filters = Filters()
    tour: Tour | None = None
    """What `draftsmith tour` does with these prompts; other commands don't read it."""


def recipe_names() -> list[str]:
    """Return the names that `configs/recipes/` defines, sorted."""
    return sorted(_recipe_files())


def load_recipe(name: str) -> Recipe:
    """Read the recipe called `name`; an unknown name or a faulty file is a `DraftsmithError` that says what exists."""
    files = _recipe_files()
    if name not in files:
        raise DraftsmithError(
            f"there is no recipe '{name}': give one of {', '.join(sorted(files))}, or your own data with DATA=path "
            f"(--data path)"
        )
    return parse_recipe(name, files[name], f"configs/recipes/{name}.yaml")


def parse_recipe(name: str, text: str, where: str) -> Recipe:
    """Build a recipe from YAML text, strictly; `where` names the file in errors."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise DraftsmithError(f"{where} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise DraftsmithError(f"{where}: a mapping with 'sources' is expected")
    try:
        return Recipe(**{"name": name, **values})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DraftsmithError(f"{where}: {key}: {first['msg']} (found {first['input']!r})") from error


def recipe_from_path(path: Path) -> Recipe:
    """Return the recipe of a user's own file or folder of conversations; its name holds 8 hex of the path."""
    path = path.expanduser().resolve()
    if not path.exists():
        raise DraftsmithError(
            f"{path} does not exist: DATA (--data) takes a file or folder of conversations ({', '.join(SUFFIXES)})"
        )
    stem = path.name.split(".")[0] or "data"
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:8]
    return Recipe(name=f"{stem}-{digest}", sources=[SourceSpec(source=str(path))])


def recipe_of_source(source: str) -> Recipe:
    """Return the recipe of one source alone, called as a recipe calls it (see SourceSpec)."""
    return Recipe(name="source", sources=[SourceSpec(source=source)])


@functools.cache
def _recipe_files() -> dict[str, str]:
    folder = resources.files(__package__.rpartition(".")[0]) / "configs" / "recipes"
    return {f.name.removesuffix(".yaml"): f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".yaml")}
