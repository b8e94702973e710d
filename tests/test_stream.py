"""Text of an answer while it grows: whole characters, each in the colour of the token that completes it."""

from __future__ import annotations

import io
from typing import Any

import pytest
from decoder_checks import random_head
from tiny import make_tiny_tokenizer

from draftsmith.eval.decoder.drafters import make_drafter
from draftsmith.eval.decoder.drafters.draft_model import DraftModelDrafter
from draftsmith.eval.decoder.drafters.prompt_lookup import PromptLookupDrafter
from draftsmith.eval.decoder.drafters.union import UnionDrafter
from draftsmith.eval.decoder.loop import Request
from draftsmith.eval.decoder.search import Chain, Dynamic
from draftsmith.eval.generate import _streamed
from draftsmith.eval.samples import Origin, origins, pieces
from draftsmith.eval.stream import TextStream, count_origins, legend, paint, wants_colour

EMOJI = "naïve 東京 🙂\n  the quick brown fox"


def test_streamed_pieces_are_whole_characters_of_the_token_that_completes_them() -> None:
    tokenizer = make_tiny_tokenizer()
    ids = [*tokenizer.encode(EMOJI, add_special_tokens=False), tokenizer.eos_token_id]
    found: list[tuple[str, Origin]] = []
    stream = TextStream(tokenizer, lambda text, origin: found.append((text, origin)))
    for place, token in enumerate(ids):
        stream.feed(token, ("drafted", place))
    stream.end()
    assert "".join(text for text, _ in found) == stream.text == EMOJI
    assert not any("\ufffd" in text for text, _ in found)
    assert len(tokenizer.encode("🙂", add_special_tokens=False)) == 4
    assert dict(found)["🙂"] == ("drafted", len(tokenizer.encode("naïve 東京 🙂", add_special_tokens=False)) - 1)


def test_a_character_that_never_ends_is_shown_as_broken() -> None:
    tokenizer = make_tiny_tokenizer()
    found: list[tuple[str, Origin]] = []
    stream = TextStream(tokenizer, lambda text, origin: found.append((text, origin)))
    for token in tokenizer.encode("🙂", add_special_tokens=False)[:2]:
        stream.feed(token, ("bonus", 3))
    assert found == []
    stream.end()
    assert found == [("\ufffd", ("bonus", 3))]


def test_the_stream_knows_how_each_token_came(tiny_target: Any) -> None:
    """As the finished answer's log tells it, whatever drafts."""
    text = "the lazy dog and the lazy dog and the lazy dog and the"
    request = Request("r", tiny_target.tokenizer(text).input_ids, 40)
    head = make_drafter(random_head(tiny_target), tiny_target.parts(), Dynamic(3, 2, 6))
    right = DraftModelDrafter(tiny_target, tiny_target, Chain(3))
    found: list[dict[str, Any]] = []
    kinds = set()

    def write(text: str, origin: Origin) -> None:
        found.append({"text": text, "kind": origin[0], "depth": origin[1]})

    for drafter in (right, PromptLookupDrafter(), UnionDrafter(head, PromptLookupDrafter())):
        found.clear()
        told, result = _streamed(tiny_target, drafter, request, write, None)
        assert found == pieces(tiny_target.tokenizer, result)
        assert told == "".join(piece["text"] for piece in found)
        kinds |= {kind for kind, _ in origins(result)}
    assert kinds == {"plain", "drafted", "corrected", "bonus"}


def test_colours() -> None:
    assert paint("a", ("plain", 0)) == "a"
    assert paint("a", ("drafted", 1)) == "\x1b[32ma\x1b[0m"
    assert paint("a", ("drafted", 4)) == paint("a", ("drafted", 9)) == "\x1b[35ma\x1b[0m"
    assert paint("\n a b", ("bonus", 2)) == "\n \x1b[1ma b\x1b[0m"  # no underlined blanks
    assert paint(" ", ("corrected", 2)) == " "
    assert paint("a", ("corrected", 2)) == "\x1b[4;33ma\x1b[0m"
    assert paint("a", ("bonus", 2)) == "\x1b[1ma\x1b[0m"
    counts = count_origins([("plain", 0), ("drafted", 1), ("drafted", 2), ("bonus", 3), ("drafted", 1), ("bonus", 2)])
    assert counts == {"drafted": [2, 1], "corrected": 0, "bonus": 2, "plain": 1}
    assert legend(counts, False) == "drafted 3 (at depth 1: 2, 2: 1), corrected 0, bonus 2, plain 1"
    assert "\x1b[32m1: 2\x1b[0m" in legend(counts, True)
    assert legend(count_origins([("plain", 0)]), False) == "drafted 0, corrected 0, bonus 0, plain 1"


@pytest.mark.parametrize(
    ("asked", "tty", "environment", "want"),
    [
        (None, True, {}, True),
        (None, False, {}, False),
        (None, True, {"NO_COLOR": "1"}, False),
        (None, True, {"TERM": "dumb"}, False),
        (True, False, {"NO_COLOR": "1"}, True),
        (False, True, {}, False),
    ],
)
def test_when_text_is_coloured(
    asked: bool | None, tty: bool, environment: dict[str, str], want: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("NO_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    stream = io.StringIO()
    monkeypatch.setattr(stream, "isatty", lambda: tty)
    assert wants_colour(asked, stream) is want
