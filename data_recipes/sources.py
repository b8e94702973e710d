"""Where conversations come from: the built-in prompts, files, datasets on the hub, and those that have a name."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import yaml

from ..errors import DraftsmithError
from ..files import sha256_file, sha256_json
from ..heads.resolve import _hub_answers
from .builtin import builtin_prompts
from .records import SUFFIXES, Record, TableRow, read_records, record_files

BUILTIN, HUB = "builtin", "hf:"
_WINDOW = 10_000


class Source(Protocol):
    """One source of records."""

    @property
    def label(self) -> str:
        """A short name, for ids and counts."""

    def identity(self) -> dict[str, Any]:
        """Return what names the content: hashes of files and built-in prompts, the asked-for commit of a dataset."""

    def pin(self) -> str | None:
        """Return the commit to read, so that a resumed stage reads the same; None where hashes say it."""

    def records(self, seed: int, commit: str | None) -> Iterator[Record]:
        """Yield the records in an order that depends on `seed` alone.

        Raises:
            DraftsmithError: unreadable files, a hub that can't be reached.
        """


def find_source(source: str, revision: str | None = None) -> Source:
    """Find a source by what a recipe calls it; a name goes before a file that is called the same.

    Raises:
        DraftsmithError: there is none; the message lists what exists.
    """
    named = source_names().get(source)
    if named is not None or source.startswith(HUB):
        return HubDataset.parse(named or source, source if named else None, revision)
    if revision is not None:
        raise DraftsmithError(f"the source {source!r} has no revision {revision!r}: only datasets on the hub have any")
    if source == BUILTIN:
        return Builtin()
    path = Path(source).expanduser()
    if not path.exists():
        raise DraftsmithError(
            f"the source {source!r} does not exist: give {BUILTIN}, one of {', '.join(sorted(source_names()))}, "
            f"{HUB}<dataset>[:<config>[:<split>]], or a file or folder of {', '.join(SUFFIXES)}"
        )
    return Files(path)


@functools.cache
def source_names() -> dict[str, str]:
    """The sources that `configs/sources.yaml` gives a name."""
    file = resources.files(__package__.rpartition(".")[0]) / "configs" / "sources.yaml"
    names: dict[str, str] = yaml.safe_load(file.read_text("utf-8"))
    return names


@dataclass(frozen=True)
class Builtin:
    """The project's own prompts, in their own order, of which any first part is a balanced sample."""

    label: str = BUILTIN

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {"kind": "builtin", "sha256": sha256_json([record for _, record in self.records(0, None)])}

    def pin(self) -> None:
        """Return None: hashes name the content."""

    def records(self, seed: int, commit: str | None) -> Iterator[Record]:
        """Yield all training prompts; the seed changes nothing."""
        for prompt in builtin_prompts("train"):
            yield prompt.id, {"prompt": prompt.text, "category": prompt.category}


@dataclass(frozen=True)
class Files:
    """A file, or a folder of them. A folder that moves stays the same source."""

    root: Path

    @property
    def label(self) -> str:
        """The name up to its first dot."""
        return self.root.name.split(".")[0] or "data"

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {"kind": "files", "sha256": {name: sha256_file(file) for file, name in self._files()}}

    def pin(self) -> None:
        """Return None: hashes name the content."""

    def records(self, seed: int, commit: str | None) -> Iterator[Record]:
        """See `Source`."""
        return shuffled((record for file, name in self._files() for record in read_records(file, name)), seed)

    def _files(self) -> list[tuple[Path, str]]:
        """The files, and what places in them are called by."""
        return [
            (file, file.name if file == self.root else file.relative_to(self.root).as_posix())
            for file in record_files(self.root)
        ]


@dataclass(frozen=True)
class HubDataset:
    """A dataset on the hub, streamed.

    Attributes:
        source: hf:<dataset>[:<config>[:<split>]].
        asked: the commit, branch or tag that the recipe asks for; None is the newest.
    """

    source: str
    label: str
    name: str
    config: str | None
    split: str
    asked: str | None

    @classmethod
    def parse(cls, source: str, label: str | None, asked: str | None) -> HubDataset:
        """Read hf:<dataset>[:<config>[:<split>]]; the label is by default the dataset's own name.

        Raises:
            DraftsmithError: it doesn't read so.
        """
        name, config, split, *rest = [*source.removeprefix(HUB).split(":"), "", ""]
        if not name or any(rest):
            raise DraftsmithError(f"{source}: a dataset on the hub reads {HUB}<dataset>[:<config>[:<split>]]")
        return cls(source, label or name.rpartition("/")[2], name, config or None, split or "train", asked)

    def identity(self) -> dict[str, Any]:
        """See `Source`."""
        return {"kind": "hf", "dataset": self.source, "revision": self.asked}

    def pin(self) -> str:
        """Ask the hub for the commit.

        Raises:
            DraftsmithError: it can't be reached, or has no such dataset.
        """
        with self._explained():
            if not _hub_answers():  # without this the hub's client retries for half a minute
                raise ConnectionError("no answer")
            from huggingface_hub import HfApi

            return str(HfApi().dataset_info(self.name, revision=self.asked).sha)

    def records(self, seed: int, commit: str | None) -> Iterator[Record]:
        """See `Source`; places are the numbers of rows from 0, as the dataset's page shows them."""
        return shuffled(self._rows(commit), seed)

    def _rows(self, commit: str | None) -> Iterator[Record]:
        with self._explained():
            import datasets

            rows = datasets.load_dataset(self.name, self.config, split=self.split, revision=commit, streaming=True)
            for number, row in enumerate(rows):
                yield f"{self.name}:{number}", TableRow(row)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        """Make whatever goes wrong one line that names the dataset."""
        try:
            yield
        except Exception as error:  # the hub, the network, the dataset's own files: dozens of types
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise DraftsmithError(
                f"the dataset {self.source} can't be read from the hub ({reason}): check its name and the network "
                f"(HF_ENDPOINT, HF_HUB_OFFLINE), or use RECIPE=builtin, or your own data with DATA=path"
            ) from error


def shuffled(records: Iterator[Record], seed: int, window: int = _WINDOW) -> Iterator[Record]:
    """Yield the records in a random order that `seed` decides; no more than `window` are held."""
    draw = random.Random(f"draftsmith/{seed}")
    held: list[Record] = []
    for record in records:
        if len(held) < window:
            held.append(record)
            continue
        place = draw.randrange(window)
        yield held[place]
        held[place] = record
    draw.shuffle(held)
    yield from held


def unique_names(sources: Sequence[Source]) -> list[str]:
    """Return the sources' labels, with "-2", "-3", … behind those that come again."""
    names: list[str] = []
    for source in sources:
        again = (f"{source.label}-{n}" for n in range(2, len(sources) + 1))
        names.append(source.label if source.label not in names else next(name for name in again if name not in names))
    return names
