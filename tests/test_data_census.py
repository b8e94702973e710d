"""Counts of what became of records: by reason, over chunks, and against the cap."""

from __future__ import annotations

import json

import pytest

from draftsmith.data_recipes.census import Census
from draftsmith.errors import DraftsmithError


def test_census_counts_by_reason_and_survives_a_manifest():
    census = Census()
    census.read, census.revision = 50, "abc"
    for i in range(4):
        census.refuse(f"a.jsonl:{i}", "no user turn")
        census.leave_out(f"b.jsonl:{i}", "duplicate")
    census.refuse("c.jsonl:1", "a line that is not JSON")
    census.change("a.jsonl:9", "turns of one role merged")
    for _ in range(41):
        census.keep()
    assert census.lines() == [
        "malformed: 4 × no user turn (a.jsonl:0, a.jsonl:1, a.jsonl:2, …)",
        "malformed: 1 × a line that is not JSON (c.jsonl:1)",
        "left out: 4 × duplicate (b.jsonl:0, b.jsonl:1, b.jsonl:2, …)",
        "changed: 1 × turns of one role merged (a.jsonl:9)",
    ]
    kept = census.to_dict()
    assert (kept["records"], kept["kept"], kept["revision"]) == (50, 41, "abc")
    assert list(kept["malformed"]) == ["a line that is not JSON", "no user turn"]
    assert kept["left_out"] == {"duplicate": {"count": 4, "examples": ["b.jsonl:0", "b.jsonl:1", "b.jsonl:2"]}}
    assert Census.from_dict(json.loads(json.dumps(kept))).to_dict() == kept


def test_census_of_chunks_adds_up():
    whole, total = Census(), Census()
    for chunk in range(3):
        part = Census()
        for i in range(2):
            for census in (whole, part):
                census.read += 1
                census.refuse(f"a.jsonl:{chunk}{i}", "no user turn")
                census.change(f"a.jsonl:{chunk}{i}", "merged")
                census.keep()
        total.merge(Census.from_dict(part.to_dict()))
    assert total.to_dict() == whole.to_dict()
    assert total.malformed["no user turn"].examples == ["a.jsonl:00", "a.jsonl:01", "a.jsonl:10"]
    one, other = Census(), Census()
    one.revision, other.revision = "abc", "def"
    with pytest.raises(DraftsmithError, match="commit def can't be added to those of abc"):
        one.merge(other)


def test_only_malformed_records_count_against_the_cap():
    census = Census()
    census.read = 10
    for i in range(9):
        census.leave_out(f"a:{i}", "duplicate")
    census.refuse("a:9", "no user turn")
    census.check("mine", 0.1)
    census.refuse("a:10", "no user turn")
    with pytest.raises(
        DraftsmithError, match=r"mine: 2 of 10 records are malformed, more than the cap of 10%.*a:9, a:10"
    ):
        census.check("mine", 0.1)


def test_census_is_bounded_where_every_record_is_wrong_in_its_own_way():
    census = Census()
    for i in range(1000):
        census.refuse(f"a:{i}", f"unknown role {i}")
    assert len(census.malformed) == 101
    assert census.malformed["other reasons"].count == 900
