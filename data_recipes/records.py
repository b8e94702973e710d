"""Reading files of records as a stream: JSON, JSON lines and Parquet, the text ones gzipped too, or folders of them."""

from __future__ import annotations

import contextlib
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO, cast

from ..errors import DraftsmithError
from .conversation import Malformed

Record = tuple[str, Any]
"""Where a record stands ("file:line") and its parsed JSON, or the `Malformed` that reading it gave."""

_BLOCK = 1 << 20
_UNDECIDED = 10  # the longest piece of JSON that is faulty only because its end is missing is `-Infinity`
_SPACE = re.compile(r"[ \t\n\r]*")
_decode = json.JSONDecoder().raw_decode


class TableRow(dict[str, Any]):
    """A record that comes from typed columns: its objects have None for every key that only other rows have."""


def record_files(path: Path) -> list[Path]:
    """Return the file itself, or all of a folder's files that can be read, sorted by path.

    Raises:
        DraftsmithError: nothing there, or nothing that can be read.
    """
    if path.is_dir():
        found = [f for f in path.rglob("*") if f.is_file() and f.name.endswith(SUFFIXES)]
        if not found:
            raise DraftsmithError(f"{path} holds no file that ends in {', '.join(SUFFIXES)}")
        return sorted(found, key=lambda f: f.relative_to(path).as_posix())
    if not path.is_file():
        raise DraftsmithError(f"{path} does not exist")
    if not path.name.endswith(SUFFIXES):
        raise DraftsmithError(f"{path} can't be read: a file of conversations ends in {', '.join(SUFFIXES)}")
    return [path]


def read_records(path: Path, name: str) -> Iterator[Record]:
    """Yield (`name:line`, record) of one file; of Parquet the line is the number of the row, from 1.

    A JSON file holds a list of records, or one record, or one after the other; a list of messages is one record.
    Memory holds the longest record twice, and never the file.

    Raises:
        DraftsmithError: the file as a whole can't be read (broken gzip, a JSON list that breaks off, not UTF-8).
    """
    reader = next(read for suffix, read in _READERS.items() if path.name.removesuffix(".gz").endswith(suffix))
    with _explained(path), _opened(path) as file:
        yield from reader(file, name, path)


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError as error:
        raise DraftsmithError(f"{path} is not UTF-8 ({error.reason}): convert the file") from error
    except (OSError, EOFError, zlib.error) as error:
        reason = " ".join(str(error).split())
        raise DraftsmithError(f"{path} can't be read ({reason}): it is cut off or not what its name says") from error


def _opened(path: Path) -> BinaryIO:
    return cast(BinaryIO, gzip.open(path, "rb")) if path.name.endswith(".gz") else open(path, "rb")


def _lines(file: BinaryIO, name: str, path: Path) -> Iterator[Record]:
    for number, line in enumerate(file, 1):
        if number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        value: Any
        try:
            value = json.loads(line.decode("utf-8"))
        except UnicodeDecodeError:
            value = Malformed("a line that is not UTF-8")
        except (ValueError, RecursionError):  # a ValueError alone: a number of thousands of digits
            value = Malformed("a line that is not JSON")
        yield f"{name}:{number}", value


def _rows(file: BinaryIO, name: str, path: Path) -> Iterator[Record]:
    from pyarrow import ArrowException
    from pyarrow.parquet import ParquetFile

    number = 0
    try:
        for batch in ParquetFile(file).iter_batches(batch_size=256):
            for row in batch.to_pylist():
                number += 1
                yield f"{name}:{number}", TableRow(row)
    except ArrowException as error:
        raise OSError(str(error)) from error


def _values(file: BinaryIO, name: str, path: Path) -> Iterator[Record]:
    text = _Text(io.TextIOWrapper(file, encoding="utf-8-sig", newline="\n"), path)
    alone = True
    while first := text.peek():
        start = f"{name}:{text.line()}"
        if first != "[":
            yield start, text.value()
        else:
            messages: list[Record] = []
            is_conversation = True
            for line, value in text.elements():
                is_conversation = is_conversation and _is_message(value)
                messages.append((f"{name}:{line}", value))
                if not is_conversation:
                    yield from messages
                    messages.clear()
            if not is_conversation and text.peek():
                raise text.broken("something stands behind the list of records")
            if messages or (is_conversation and (not alone or text.peek())):
                yield start, [value for _, value in messages]
        alone = False


def _is_message(value: Any) -> bool:
    return isinstance(value, dict) and ({"role", "content"} <= value.keys() or {"from", "value"} <= value.keys())


class _Text:
    """A JSON text of any length, of which the part from the value that is being read on is held."""

    def __init__(self, file: TextIO, path: Path) -> None:
        self.file, self.path = file, path
        self.text, self.at = "", 0
        self._line, self._counted = 1, 0  # lines before `_counted`

    def line(self, at: int | None = None) -> int:
        """The line of a place in the held text, by default of the next character."""
        at = self.at if at is None else at
        self._line += self.text.count("\n", self._counted, at)
        self._counted = at
        return self._line

    def peek(self) -> str:
        """Skip white space and return the next character; "" at the end."""
        while True:
            match = _SPACE.match(self.text, self.at)
            self.at = match.end() if match else self.at
            if self.at < len(self.text):
                return self.text[self.at]
            if not self._grow():
                return ""

    def value(self) -> Any:
        """Read one value."""
        while True:
            try:
                value, end = _decode(self.text, self.at)
            except json.JSONDecodeError as error:
                undecided = error.msg.startswith("Unterminated") or error.pos >= len(self.text) - _UNDECIDED
                if undecided and self._grow():
                    continue
                raise self.broken(error.msg, error.pos) from error
            except (ValueError, RecursionError) as error:
                raise self.broken(str(error)) from error
            if end >= len(self.text) - 2 and self._grow():  # a number may go on; so far it may have ended in `e-`
                continue
            self.at = end
            return value

    def elements(self) -> Iterator[tuple[int, Any]]:
        """Read the list that starts here: (line, value) of each element."""
        self.at += 1
        while self.peek() != "]":
            line = self.line()
            yield line, self.value()
            if self.peek() == ",":
                self.at += 1
            elif self.peek() != "]":
                raise self.broken("Expecting ',' or ']'")
        self.at += 1

    def broken(self, reason: str, at: int | None = None) -> DraftsmithError:
        """The error of a text that is no JSON at a place, by default the next character."""
        return DraftsmithError(f"{self.path}:{self.line(at)} is not valid JSON ({reason}): mend the file")

    def _grow(self) -> bool:
        """Read on, as much again as is held, so that a long value is decoded a few times only."""
        more = self.file.read(max(_BLOCK, len(self.text) - self.at))
        if more:
            self.line()
            self.text, self.at, self._counted = self.text[self.at :] + more, 0, 0
        return bool(more)


_Reader = Callable[[BinaryIO, str, Path], Iterator[Record]]
_READERS: dict[str, _Reader] = {".json": _values, ".jsonl": _lines, ".ndjson": _lines, ".parquet": _rows}
SUFFIXES = (*_READERS, *(f"{suffix}.gz" for suffix, read in _READERS.items() if read is not _rows))
