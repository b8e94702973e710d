"""Reading files of records: formats, places, what is broken, and memory that doesn't grow with the file."""

from __future__ import annotations

import gzip
import json
import random
import tracemalloc

import pyarrow
import pyarrow.parquet
import pytest

from draftsmith.data_recipes import records
from draftsmith.data_recipes.conversation import Malformed
from draftsmith.data_recipes.records import TableRow, read_records, record_files
from draftsmith.data_recipes.shapes import FILLED, parse_record
from draftsmith.errors import DraftsmithError

MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yo"}]


def places(path, name=None):
    return [
        (where, str(value) if isinstance(value, Malformed) else value)
        for where, value in read_records(path, name or path.name)
    ]


def write(folder, name, text):
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_lines(tmp_path):
    path = write(tmp_path, "a.jsonl", b'\xef\xbb\xbf"one"\n\n{"broken\n"\xff"\r\n["x"]\n' + b"9" * 5000 + b"\n[]")
    expected = [
        ("a.jsonl:1", "one"),
        ("a.jsonl:3", "a line that is not JSON"),
        ("a.jsonl:4", "a line that is not UTF-8"),
        ("a.jsonl:5", ["x"]),
        ("a.jsonl:6", "a line that is not JSON"),
        ("a.jsonl:7", []),
    ]
    assert places(path) == expected
    assert places(write(tmp_path, "a.ndjson", path.read_bytes()), "a.jsonl") == expected
    assert places(write(tmp_path, "a.jsonl.gz", gzip.compress(path.read_bytes())), "a.jsonl") == expected


JSON = {
    "a list": (
        '[\n  "one",\n  {"prompt":\n "two"},\n\n "three"\n]',
        [(2, "one"), (3, {"prompt": "two"}), (6, "three")],
    ),
    "one conversation": (json.dumps(MESSAGES, indent=1), [(1, MESSAGES)]),
    "one object": ('\n{"prompt": "x"}\n', [(2, {"prompt": "x"})]),
    "one after the other": ('"one"\n{"a":\n 2}\n', [(1, "one"), (2, {"a": 2})]),
    "conversations one after the other": (
        f"{json.dumps(MESSAGES)}\n[]\n{json.dumps(MESSAGES)}",
        [(1, MESSAGES), (2, []), (3, MESSAGES)],
    ),
    "messages and others": (json.dumps([*MESSAGES, "x", MESSAGES[0]]), [(1, v) for v in (*MESSAGES, "x", MESSAGES[0])]),
    "an empty list": ("[ ]", []),
    "nothing": (" \n", []),
    "numbers": ("[12, -3.5e2,\n true]", [(1, 12), (1, -350.0), (2, True)]),
    "byte-order mark": ("\ufeff[1]", [(1, 1)]),
}


@pytest.mark.parametrize("case", JSON)
def test_json(tmp_path, case):
    text, expected = JSON[case]
    expected = [(f"a.json:{line}", value) for line, value in expected]
    assert places(write(tmp_path, "a.json", text)) == expected
    assert places(write(tmp_path, "a.json.gz", gzip.compress(text.encode())), "a.json") == expected


@pytest.mark.parametrize("block", [1, 2, 7])
def test_json_in_small_blocks(tmp_path, monkeypatch, block):
    """Wherever a block ends, in a number, an escape or a literal, the values are those of the whole text."""
    monkeypatch.setattr(records, "_BLOCK", block)
    draw = random.Random(block)
    pieces = [
        12345,
        -1.5e-7,
        'quo"te\\ \n \u00e9 \U0001f600',
        {"k": [None, True, {"x": ""}]},
        [],
        "",
        float("-inf"),
        False,
    ]
    values = [draw.choice(pieces) for _ in range(60)]
    path = write(tmp_path, "a.json", json.dumps(values, indent=1, ensure_ascii=True))
    assert [value for _, value in read_records(path, "a")] == values
    path = write(tmp_path, "b.json", json.dumps(values, ensure_ascii=False))
    assert [value for _, value in read_records(path, "b")] == values


BROKEN = {
    "cut.json": ('[\n "one",\n {"pro', r"cut\.json:3 is not valid JSON \(Unterminated"),
    "open.json": ('[\n "one",\n', r"open\.json:3 is not valid JSON"),
    "comma.json": ('[\n "one"\n "two"]', r"comma\.json:3 is not valid JSON \(Expecting ',' or"),
    "element.json": ('[\n {"a": 1},\n {"a": 1,\n  b: 2},\n "x"]', r"element\.json:4 is not valid JSON"),
    "behind.json": ('["one"]\n["two"]', r"behind\.json:2 is not valid JSON \(something stands behind"),
    "words.json": ("hello", r"words\.json:1 is not valid JSON"),
    "deep.json": ("[" * 200_000, r"deep\.json:1 is not valid JSON"),
    "latin.json": (b'["caf\xe9"]', r"latin\.json is not UTF-8"),
    "cut.jsonl.gz": (gzip.compress(b"x" * 100)[:20], r"cut\.jsonl\.gz can't be read"),
    "plain.jsonl.gz": (b'"x"\n', r"plain\.jsonl\.gz can't be read"),
    "flipped.json.gz": (gzip.compress(b'["x"]')[:-6] + b"\0\0\0\0\0\0", r"flipped\.json\.gz can't be read"),
    "none.parquet": (b"PAR1", r"none\.parquet can't be read"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_named(tmp_path, name):
    content, reason = BROKEN[name]
    with pytest.raises(DraftsmithError, match=reason) as caught:
        list(read_records(write(tmp_path, name, content), name))
    assert "\n" not in str(caught.value)


def test_parquet(tmp_path):
    path = tmp_path / "a.parquet"
    rows = [{"messages": MESSAGES, "n": i} for i in range(600)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100)
    assert places(path) == [(f"a.parquet:{i}", row) for i, row in enumerate(rows, 1)]


def test_what_columns_put_into_tools_and_calls_goes(tmp_path):
    """Parquet has one form for all rows: each object gets every key that any row's has."""

    def record(arguments, properties):
        call = {"name": "f", "arguments": arguments}
        messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
        return {"messages": messages, "tools": [{"name": "f", "parameters": {"properties": properties}}]}

    rows = [record({"a": 1}, {"a": {"type": "n"}}), record({"b": {"c": [2]}}, {"b": {"type": "n", "enum": ["x"]}})]
    rows += [{"messages": MESSAGES, "tools": None}, record({"a": 1, "b": {"c": []}}, {"a": {"type": "n"}})]
    rows[3]["tools"] = None
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    filled = [row for _, row in read_records(path, "a")]
    assert filled[0]["messages"][1]["tool_calls"][0]["arguments"] == {"a": 1, "b": None}
    read = [parse_record(row) for row in filled]
    own = [parse_record(row) for row in rows]
    assert [(c.messages, c.tools) for c in read] == [(c.messages, c.tools) for c in own]
    assert [c.changes for c in read] == [(FILLED,), (FILLED,), (), ()]
    as_text = TableRow(record('{"a": null}', {}))
    assert parse_record(as_text).messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}
    assert parse_record(as_text).changes == ()
    in_file = record({"a": None}, {})
    assert parse_record(in_file).messages[1]["tool_calls"][0]["function"]["arguments"] == {"a": None}


def test_folders(tmp_path):
    (tmp_path / "sub").mkdir()
    for name in ("sub/b.ndjson", "a.json", "c.parquet", "notes.txt", "sub/a.json.gz"):
        write(tmp_path, name, "")
    found = [f.relative_to(tmp_path).as_posix() for f in record_files(tmp_path)]
    assert found == ["a.json", "c.parquet", "sub/a.json.gz", "sub/b.ndjson"]
    (tmp_path / "empty").mkdir()
    for path, reason in (
        ("empty", "holds no file that ends in .json, "),
        ("notes.txt", "can't be read: a file of conversations ends in .json, "),
        ("none.json", "none.json does not exist"),
    ):
        with pytest.raises(DraftsmithError, match=reason):
            record_files(tmp_path / path)


def test_a_large_list_is_never_held(tmp_path):
    element = json.dumps({"prompt": "words " * 400})
    path = write(tmp_path, "large.json", "[" + ",\n".join([element] * 8000) + "]")
    assert path.stat().st_size > 19_000_000
    tracemalloc.start()
    try:
        assert sum(1 for _ in read_records(path, "large")) == 8000
        assert tracemalloc.get_traced_memory()[1] < 8_000_000
    finally:
        tracemalloc.stop()
