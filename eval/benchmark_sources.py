"""Where the questions of a benchmark are: an explicit path, a file in BENCH_DIR, a dataset on the hub, or built in.

`configs/benchmarks.yaml` is the registry. Nothing that belongs to others is part of the project.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import yaml

from ..data_recipes.records import SUFFIXES, Record, TableRow, read_records, record_files
from ..data_recipes.sources import HUB, HubDataset
from ..errors import DraftsmithError
from .questions import Form

BUILTIN = "builtin"
BENCH_DIR = "BENCH_DIR"
"""The environment variable that names the folder of benchmark files."""
_OWN_ROWS = 1000
"""Rows that are read of a dataset that isn't in the registry; some have millions."""


@dataclass(frozen=True)
class Hub:
    """A dataset on the hub.

    Attributes:
        dataset, config, split, revision: as the hub calls them; the newest commit without a revision.
        rows: read only so many; None: all.
    """

    dataset: str
    split: str
    config: str | None = None
    revision: str | None = None
    rows: int | None = None

    @property
    def source(self) -> str:
        """The dataset as `HubDataset.parse` reads it."""
        return f"{HUB}{self.dataset}:{self.config or ''}:{self.split}"


@dataclass(frozen=True)
class Entry:
    """What the registry says of a benchmark.

    Attributes:
        about: what is asked, in a few words.
        licence: of the questions, as their publishers state it.
        form: how a record is read.
        files: names to look for in BENCH_DIR, the first one first.
        origin: where these files are published.
        hub: where it is on the hub; None: not there.
        split: which of the project's own prompts it is; None: it isn't.
    """

    about: str
    licence: str
    form: Form
    files: tuple[str, ...] = ()
    origin: str = ""
    hub: Hub | None = None
    split: Literal["heldout", "tuning"] | None = None


@dataclass(frozen=True)
class Found:
    """Questions as they were found, not read yet; see `benchmarks.Benchmark` for `source` and `licence`."""

    name: str
    source: str
    licence: str | None
    form: Form
    records: Iterable[Record] = ()
    split: Literal["heldout", "tuning"] | None = None


@functools.cache
def registry() -> dict[str, Entry]:
    """The benchmarks of `configs/benchmarks.yaml` by name."""
    file = resources.files(__package__.partition(".")[0]) / "configs" / "benchmarks.yaml"
    return {name: _entry(values) for name, values in yaml.safe_load(file.read_text("utf-8")).items()}


def benchmark_names() -> list[str]:
    """The names that `load_benchmark` knows, as the registry lists them."""
    return list(registry())


def find_benchmark(name_or_path: str, bench_dir: Path | None = None) -> Found:
    """Find a benchmark's questions; see `benchmarks.load_benchmark`.

    A file or folder that is called like a benchmark is meant only where its path says so (`./gsm8k`).

    Raises:
        DraftsmithError: there is no such benchmark, or it can't be had here.
    """
    folder = _bench_dir(bench_dir)
    path = _home(Path(name_or_path), f"the benchmark {name_or_path!r}")
    name = _registered(name_or_path)
    if _is_there(path) and (name is None or path.name != name_or_path):
        return _own(path, name_or_path)
    if name is not None:
        return _listed(name, registry()[name], folder)
    if name_or_path.startswith(HUB):
        return _on_hub(name_or_path)
    if folder is not None and _is_there(folder / path):
        return _own(folder / path, name_or_path)
    raise DraftsmithError(
        f"there is no benchmark {name_or_path!r}: give one of {', '.join(benchmark_names())}, a file or folder of "
        f"{', '.join(SUFFIXES)}, or {HUB}<dataset>[:<config>[:<split>]]"
    )


def _entry(values: dict[str, Any]) -> Entry:
    form = Form(tuple(values.pop("ask", ())), values.pop("category", ""), values.pop("language", ""))
    hub = values.pop("hub", None)
    return Entry(form=form, hub=Hub(**hub) if hub else None, files=tuple(values.pop("files", ())), **values)


def _bench_dir(given: Path | None) -> Path | None:
    folder = given or (Path(os.environ[BENCH_DIR]) if os.environ.get(BENCH_DIR) else None)
    if folder is None:
        return None
    folder = _home(folder, f"{BENCH_DIR} {folder}")
    if not (_is_there(folder) and folder.is_dir()):
        raise DraftsmithError(f"{BENCH_DIR} {folder} is no folder: name the one that holds the benchmark files")
    return folder


def _home(path: Path, what: str) -> Path:
    """A path with its "~" resolved."""
    try:
        return path.expanduser()
    except RuntimeError as error:
        raise DraftsmithError(f"{what} can't be found: there is no home folder of {path.parts[0]}") from error


def _is_there(path: Path) -> bool:
    try:
        return path.exists()
    except (OSError, ValueError):  # a name that no file can have
        return False


def _registered(name: str) -> str | None:
    """The registry's name for `MT_bench`, `mtbench` and `mt-bench` alike, and for `CNN/DM`."""
    plain = {_letters(known): known for known in registry()}
    return plain.get(_letters(name))


def _letters(name: str) -> str:
    return re.sub("[-_ /]", "", name.lower())


def _own(path: Path, given: str) -> Found:
    files = [(file, file.name if file == path else file.relative_to(path).as_posix()) for file in record_files(path)]
    records = itertools.chain.from_iterable(read_records(file, name) for file, name in files)
    return Found(path.name.split(".")[0] or "own", given, None, Form(), records)


def _listed(name: str, entry: Entry, folder: Path | None) -> Found:
    if entry.split is not None:
        return Found(name, BUILTIN, entry.licence, entry.form, split=entry.split)
    if folder is not None:
        for file in entry.files:
            if (folder / file).is_file():
                return Found(name, file, entry.licence, entry.form, read_records(folder / file, file))
    where = f"none of {', '.join(entry.files)} lies in {BENCH_DIR} ({folder or 'which is not set'})"
    way_out = f"put one of these files ({entry.origin}) into a folder and set {BENCH_DIR} to it, or give a path"
    if entry.hub is None:
        raise DraftsmithError(f"the benchmark {name} can't be had here: {where}: {way_out}")
    try:
        source, records = _hub_records(entry.hub)
    except _Unreachable as reason:
        raise DraftsmithError(
            f"the benchmark {name} can't be had here: {where}, and {entry.hub.source} can't be read from the hub "
            f"({reason}): {way_out}"
        ) from reason
    return Found(name, source, entry.licence, entry.form, records)


def _on_hub(given: str) -> Found:
    dataset = HubDataset.parse(given, None, None)
    try:
        source, records = _hub_records(Hub(dataset.name, dataset.split, dataset.config, rows=_OWN_ROWS))
    except _Unreachable as reason:
        raise DraftsmithError(
            f"{given} can't be read from the hub ({reason}): check its name and the network (HF_ENDPOINT, "
            f"HF_HUB_OFFLINE), or give a file"
        ) from reason
    return Found(dataset.label, source, None, Form(), records)


class _Unreachable(Exception):
    """A dataset on the hub that can't be read; the text is the reason."""


def _hub_records(hub: Hub) -> tuple[str, list[Record]]:
    """Read a dataset: its source with the commit and the rows read, and its records; places count rows from 0."""
    asked = HubDataset(hub.source, hub.dataset, hub.dataset, hub.config, hub.split, hub.revision)
    try:
        commit = asked.pin()
        first = f"[:{hub.rows}]" if hub.rows else ""
        return f"{hub.source}@{commit}{first}", list(_rows(hub, commit))
    except Exception as error:  # the hub, the network, the dataset's own files: dozens of types
        cause = error.__cause__ if isinstance(error, DraftsmithError) and error.__cause__ else error
        raise _Unreachable(" ".join(str(cause).split())[:200] or type(cause).__name__) from error


def _rows(hub: Hub, commit: str) -> Iterator[Record]:
    import datasets

    rows = datasets.load_dataset(hub.dataset, hub.config, split=hub.split, revision=commit, streaming=True)
    for number, row in enumerate(itertools.islice(rows, hub.rows)):
        yield f"{hub.dataset}:{number}", TableRow(row)
