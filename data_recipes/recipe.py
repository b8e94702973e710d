"""Recipes: which sources the prompts come from, and how they are mixed."""

from __future__ import annotations

import functools
import hashlib
import re
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import DraftsmithError
from ..files import sha256_json
from .records import SUFFIXES
from .sources import BUILTIN, HUB, find_source, source_names

SUFFIX = ".yaml"
"""What a recipe ends in that is no name of `configs/recipes/` but a file of the user's own."""


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
    """Read the recipe called `name`, or the user's own file, a path that ends in .yaml.

    Paths within an own file are relative to it; its name is `recipe_folder`'s, whatever it says itself.

    Raises:
        DraftsmithError: an unknown name, a file that can't be read or is faulty; says what exists.
    """
    if name.endswith(SUFFIX):
        return _own_recipe(Path(name).expanduser().resolve())
    files = _recipe_files()
    if name not in files:
        raise DraftsmithError(
            f"there is no recipe '{name}': give one of {', '.join(sorted(files))}, a file of your own that ends in "
            f"{SUFFIX}, or your own data with DATA=path (--data path)"
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
        return Recipe.model_validate({"name": name, **values})  # it refuses keys that are no text, too
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise DraftsmithError(f"{where}: {key}: {first['msg']} (found {first['input']!r})") from error


def recipe_from_path(path: Path) -> Recipe:
    """Return the recipe of what DATA calls: a user's own file or folder, or any source that has a name or is on a hub.

    What lies there goes before a name. The recipe's name holds 8 hex of the path, or of what the source is called.

    Raises:
        DraftsmithError: nothing is called so.
    """
    called, path = str(path), path.expanduser().resolve()
    if path.exists() and not called.startswith(HUB):
        return Recipe(name=_named_after(path), sources=[SourceSpec(source=str(path))])
    if not _is_called(called):
        raise DraftsmithError(
            f"{path} does not exist: DATA (--data) takes a file or folder of conversations ({', '.join(SUFFIXES)}), "
            f"{HUB}<dataset>[:<config>[:<split>]], or one of {', '.join(sorted([BUILTIN, *source_names()]))}"
        )
    label = re.sub(r"[^\w.-]", "_", find_source(called).label).lstrip(".") or "data"  # a hub's name is any text
    return Recipe(name=f"{label}-{_digest(called)}", sources=[SourceSpec(source=called)])


def recipe_folder(recipe: str) -> str:
    """Name of the folder under `runs/<model>/data/`: a file's stem with 8 hex of its path, or the recipe's own name."""
    return _named_after(Path(recipe).expanduser().resolve()) if recipe.endswith(SUFFIX) else recipe


def recipe_state(recipe: Recipe) -> str:
    """Return a hash of all that decides what the recipe gives and that is cheap to read: itself, sizes, times."""
    paths = [spec.source for spec in recipe.sources if not _is_called(spec.source)] + recipe.filters.keep_out
    roots = [Path(path).expanduser() for path in paths]
    files = [file for root in roots for file in [root, *sorted(root.rglob("*"))] if file.is_file()]
    return sha256_json([recipe.model_dump(), [[str(f), f.stat().st_size, f.stat().st_mtime_ns] for f in files]])


def recipe_of_source(source: str) -> Recipe:
    """Return the recipe of one source alone, called as a recipe calls it (see SourceSpec)."""
    return Recipe(name="source", sources=[SourceSpec(source=source)])


@functools.cache
def _recipe_files() -> dict[str, str]:
    folder = resources.files(__package__.rpartition(".")[0]) / "configs" / "recipes"
    return {f.name.removesuffix(".yaml"): f.read_text("utf-8") for f in folder.iterdir() if f.name.endswith(".yaml")}


def _own_recipe(path: Path) -> Recipe:
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DraftsmithError(
            f"the recipe {path} can't be read ({error.strerror}): give another file, or one of "
            f"{', '.join(recipe_names())}"
        ) from error
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"the recipe {path} is not UTF-8 ({error.reason}): convert the file") from error
    found = parse_recipe(_named_after(path), text, str(path))

    def placed(there: str) -> str:
        return str(path.parent / Path(there).expanduser())

    sources = [s if _is_called(s.source) else s.model_copy(update={"source": placed(s.source)}) for s in found.sources]
    filters = found.filters.model_copy(update={"keep_out": [placed(file) for file in found.filters.keep_out]})
    return found.model_copy(update={"name": _named_after(path), "sources": sources, "filters": filters})


def _is_called(source: str) -> bool:
    """Whether a source is no path: it has a name, or is on the hub."""
    return source.startswith(HUB) or source == BUILTIN or source in source_names()


def _named_after(path: Path) -> str:
    return f"{path.name.split('.')[0] or 'data'}-{_digest(str(path))}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]
