"""Where prompts come from: the built-in ones, files of conversations, datasets on the hub."""

from __future__ import annotations

import collections
import functools
import gzip
import hashlib
import json
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..errors import DraftsmithError
from ..files import sha256_file, sha256_json
from ..heads.resolve import _hub_answers
from . import builtin
from .conversation import Malformed, Prompt, first_prompt, parse_conversation
from .recipe import SourceSpec

_SUFFIXES = (".json", ".jsonl", ".json.gz", ".jsonl.gz")
_EXAMPLES = 3
_SHUFFLE_ROWS = 10_000
_SPACE = re.compile(r"\s*")
_COMMA = re.compile(r"\s*,?\s*")

Record = tuple[str, Any]
"""Where a record stands ("file:line") and its parsed JSON, or the `Malformed` that reading it gave."""


class Census:
    """Counts of records read and of those that gave no prompt, by reason, with a few places each."""

    def __init__(self) -> None:
        self.read = 0
        self.revision: str | None = None  # the commit of a dataset on the hub
        self.malformed: collections.Counter[str] = collections.Counter()
        self.examples: dict[str, list[str]] = {}

    def refuse(self, where: str, reason: str) -> None:
        """Count one record that gave no prompt."""
        self.malformed[reason] += 1
        places = self.examples.setdefault(reason, [])
        if len(places) < _EXAMPLES:
            places.append(where)

    def check(self, source: str, cap: float) -> None:
        """Raise a `DraftsmithError` where more than the share `cap` of the records is malformed."""
        bad = self.malformed.total()
        if bad > cap * self.read:
            raise DraftsmithError(
                f"{source}: {bad} of {self.read} records are malformed, more than the cap of {cap:.0%} "
                f"({'; '.join(self.lines())}): mend them, or raise prepare.malformed_cap"
            )

    def lines(self) -> list[str]:
        """One text a reason, the commonest first, e.g. `12 × no user turn (a.jsonl:3, a.jsonl:9, …)`."""
        return [
            f"{count} × {reason} ({', '.join(self.examples[reason])}{', …' if count > _EXAMPLES else ''})"
            for reason, count in self.malformed.most_common()
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form for a manifest's record."""
        reasons = {r: {"count": n, "examples": self.examples[r]} for r, n in sorted(self.malformed.items())}
        return {"records": self.read, "revision": self.revision, "malformed": reasons}


def source_identity(spec: SourceSpec) -> dict[str, Any]:
    """Return what names a source's content: hashes of local files and built-in prompts, the pinned commit of a dataset.

    Paths of files count relative to the folder given, so that a moved folder is the same source.
    """
    if spec.source == "builtin":
        return {"kind": "builtin", "sha256": sha256_json([[p.id, p.category, p.text] for p in _builtin()])}
    if spec.source.startswith("hf:"):
        return {"kind": "hf", "dataset": spec.source, "revision": spec.revision}
    root = Path(spec.source)
    return {
        "kind": "files",
        "label": _label(root),
        "sha256": {_relative(f, root): sha256_file(f) for f in conversation_files(root)},
    }


def open_source(spec: SourceSpec, seed: int, census: Census, cap: float) -> Iterator[Prompt]:
    """Yield a source's prompts in their order; records that give none are counted in `census`.

    Built-in prompts keep their own (balanced) order; files are shuffled as a whole by `seed`, datasets on the hub in a
    window of 10,000 rows.

    Raises:
        DraftsmithError: nothing there, unreadable files, a hub that can't be reached, too many malformed records.
    """
    if spec.source == "builtin":
        for prompt in _builtin():
            census.read += 1
            yield Prompt(prompt.id, prompt.category, [{"role": "user", "content": prompt.text}])
    elif spec.source.startswith("hf:"):
        label = spec.source.removeprefix("hf:").partition(":")[0].rpartition("/")[2]
        yield from _prompts(_hub_records(spec, seed, census), label, census)
        census.check(spec.source, cap)
    else:
        root = Path(spec.source)
        records = [record for file in conversation_files(root) for record in read_records(file, _relative(file, root))]
        prompts = list(_prompts(iter(records), _label(root), census))
        census.check(spec.source, cap)
        if not census.read:
            raise DraftsmithError(f"{spec.source} holds no record: give JSON or JSONL with conversations or prompts")
        random.Random(f"draftsmith/{seed}").shuffle(prompts)
        yield from prompts


def conversation_files(path: Path) -> list[Path]:
    """Return the file itself, or a folder's JSON and JSONL files (gzipped too), sorted by path."""
    if path.is_dir():
        found = [f for f in path.rglob("*") if f.is_file() and f.name.endswith(_SUFFIXES)]
        if not found:
            raise DraftsmithError(f"{path} holds no file that ends in {', '.join(_SUFFIXES)}")
        return sorted(found, key=lambda f: f.relative_to(path).as_posix())
    if not path.is_file():
        raise DraftsmithError(f"{path} does not exist: a source is builtin, hf:<dataset>, or a file or folder")
    if not path.name.endswith(_SUFFIXES):
        raise DraftsmithError(f"{path} can't be read: a file of conversations ends in {', '.join(_SUFFIXES)}")
    return [path]


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Yield (`name:line`, record) of a JSON or JSONL file; a line that is no JSON yields a `Malformed` in its place.

    Raises:
        DraftsmithError: the file as a whole can't be read (broken gzip, a JSON list that breaks off, not UTF-8).
    """
    try:
        raw = path.read_bytes()
        if path.name.endswith(".gz"):
            raw = gzip.decompress(raw)
    except (OSError, EOFError) as error:
        raise DraftsmithError(f"{path} can't be read ({error}): it is cut off or not what its name says") from error
    if path.name.removesuffix(".gz").endswith(".jsonl"):
        yield from _lines(raw, name)
        return
    try:
        text = raw.decode("utf-8-sig")
        whole = json.loads(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data":  # one value a line under a .json name
            yield from _lines(raw, name)
            return
        raise DraftsmithError(f"{path}:{error.lineno} is not valid JSON ({error.msg}): mend the file") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise DraftsmithError(f"{path} is not UTF-8 JSON ({error}): convert the file") from error
    if isinstance(whole, list) and not _is_conversation(whole):
        yield from ((f"{name}:{line}", value) for line, value in _elements(text))
    else:
        yield f"{name}:1", whole


def _lines(raw: bytes, name: str) -> Iterator[Record]:
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if not line.strip():
            continue
        value: Any
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            value = Malformed("a line that is not UTF-8")
        except (json.JSONDecodeError, RecursionError):
            value = Malformed("a line that is not JSON")
        yield f"{name}:{number}", value


def _elements(text: str) -> Iterator[tuple[int, Any]]:
    """Yield (line, value) of the elements of a JSON list that is known to be valid."""
    decode = json.JSONDecoder().raw_decode
    at = _after(_SPACE, text, text.index("[") + 1)
    line, counted = 1, 0
    while text[at] != "]":
        line, counted = line + text.count("\n", counted, at), at
        value, at = decode(text, at)
        yield line, value
        at = _after(_COMMA, text, at)


def _after(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    return found.end() if found else at


def _is_conversation(items: list[Any]) -> bool:
    def is_message(item: Any) -> bool:
        return isinstance(item, dict) and ({"role", "content"} <= item.keys() or {"from", "value"} <= item.keys())

    return bool(items) and all(map(is_message, items))


def _prompts(records: Iterator[Record], label: str, census: Census) -> Iterator[Prompt]:
    for where, record in records:
        census.read += 1
        try:
            if isinstance(record, Malformed):
                raise record
            messages = first_prompt(parse_conversation(record))
        except Malformed as reason:
            census.refuse(where, str(reason))
            continue
        category = record.get("category") if isinstance(record, dict) else None
        digest = hashlib.sha256(json.dumps(messages).encode()).hexdigest()[:12]
        yield Prompt(f"{label}-{digest}", category if isinstance(category, str) and category else label, messages)


def _hub_records(spec: SourceSpec, seed: int, census: Census) -> Iterator[Record]:
    """Stream a dataset of the hub; whatever goes wrong on the way is one line that names the dataset."""
    name, config, split = [*spec.source.removeprefix("hf:").split(":"), "", ""][:3]
    if not name:
        raise DraftsmithError(f"{spec.source}: no dataset is named; it reads hf:<dataset>[:<config>[:<split>]]")
    try:
        if not _hub_answers():  # without this the hub's client retries for half a minute
            raise ConnectionError("no answer")
        import datasets
        from huggingface_hub import HfApi

        census.revision = HfApi().dataset_info(name, revision=spec.revision).sha
        rows = datasets.load_dataset(
            name, config or None, split=split or "train", revision=census.revision, streaming=True
        ).shuffle(seed=seed, buffer_size=_SHUFFLE_ROWS)
        for number, row in enumerate(rows):
            yield f"{name}:{number}", row
    except Exception as error:  # the hub, the network, the dataset's own files: dozens of types
        reason = " ".join(str(error).split())[:200] or type(error).__name__
        raise DraftsmithError(
            f"the dataset {spec.source} can't be read from the hub ({reason}): check its name and the network "
            f"(HF_ENDPOINT, HF_HUB_OFFLINE), or use RECIPE=builtin, or your own data with DATA=path"
        ) from error


def _label(root: Path) -> str:
    return root.name.split(".")[0] or "data"


@functools.cache
def _builtin() -> list[builtin.Prompt]:
    return builtin.builtin_prompts("train")


def _relative(file: Path, root: Path) -> str:
    return file.name if file == root else file.relative_to(root).as_posix()
